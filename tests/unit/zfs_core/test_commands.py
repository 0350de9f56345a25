"""Test the commands that zfs_core runs on OpenZFS, and how it handles their failures. A fake `zfs` answers them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zfs_core
from zfs_core import capabilities, exceptions, process
from zfs_core.capabilities import make_openzfs_capabilities
from zfs_core.listing import find_types

InstallFakeZfs = Callable[[str], Callable[[], list[str]]]


@pytest.fixture
def install_fake_zfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallFakeZfs:
    """Return a function that installs a script as `zfs`. That function returns one that lists the commands so far."""
    log, program = tmp_path / "log", tmp_path / "zfs"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(capabilities, "_capabilities", make_openzfs_capabilities((2, 3)))

    def install_script(script: str) -> Callable[[], list[str]]:
        program.write_text(f'#!/bin/sh\necho "$*" >>{log}\n{script}\n')
        program.chmod(0o755)
        log.write_text("")
        return lambda: log.read_text().splitlines()

    return install_script


# -- destroying snapshots ---------------------------------------------------------------------------------------------

_CLONE_SCRIPT = """
case $* in
    "get "*" userrefs "*)
        shift 5
        for name; do printf '%s\\t0\\n' "$name"; done ;;
    "list "*"-t filesystem "*) printf 'tank\\t-\\ntank/a\\t-\\n' ;;
    "list "*) printf 'tank\\t-\\ntank/a\\t-\\ntank/volume\\ttank/a@2\\n' ;;
esac
"""


def test_no_snapshot_is_destroyed_if_a_volume_is_a_clone_of_one(install_fake_zfs: InstallFakeZfs) -> None:
    list_commands = install_fake_zfs(_CLONE_SCRIPT)
    with pytest.raises(exceptions.SnapshotDestructionFailure) as error_info:
        zfs_core.lzc_destroy_snaps(["tank/a@1", "tank/a@2", "tank/a@3"], False)
    (error,) = error_info.value.errors
    assert isinstance(error, exceptions.SnapshotIsCloned)
    assert (error.name, error.related) == ("tank/a@2", ("tank/volume",))
    assert [command.split()[0] for command in list_commands()] == ["get", "list"], "one command for all snapshots"
    assert zfs_core.list_clones("tank/a@2") == ["tank/volume"]


# Snapshots named "held" are held. Those named "just-held" are held after they have been looked up once.
_HOLDS_SCRIPT = """
here=$(dirname "$0")
case $* in
    "get "*" userrefs "*)
        shift 5
        for name; do
            case $name in
                *@held) count=1 ;;
                *@just-held) [ -e "$here/looked" ] && count=1 || count=0 ;;
                *) count=0 ;;
            esac
            printf '%s\\t%s\\n' "$name" $count
        done
        touch "$here/looked" ;;
    "list "*) printf 'tank\\t-\\n' ;;
    *missing*) echo "could not find any snapshots to destroy; check snapshot names." >&2; exit 1 ;;
    "destroy "*just-held*) echo "cannot destroy snapshot tank/b@just-held: it's being held." >&2; exit 1 ;;
    "destroy -d tank/c@1,2") echo "cannot destroy snapshots: I/O error" >&2; exit 1 ;;
esac
"""


def _destroy_snapshots(names: list[str], defer: bool = False) -> list[exceptions.ZFSError]:
    try:
        zfs_core.lzc_destroy_snaps(names, defer)
    except exceptions.SnapshotDestructionFailure as failure:
        return list(failure.errors)
    return []


def test_the_snapshots_of_a_filesystem_are_destroyed_with_one_command(install_fake_zfs: InstallFakeZfs) -> None:
    list_commands = install_fake_zfs(_HOLDS_SCRIPT)
    assert _destroy_snapshots(["tank/a@1", "tank/a@2", "tank/a@1"]) == []
    assert [command for command in list_commands() if command.startswith("destroy ")] == ["destroy tank/a@1,2"]
    assert _destroy_snapshots([f"tank/c@{number}" for number in range(500)]) == []
    destroy_commands = [command for command in list_commands()[3:] if command.startswith("destroy ")]
    assert [command.count(",") + 1 for command in destroy_commands] == [400, 100]
    assert len(list_commands()) == 3 + 5, "holds and clones are looked up together"
    assert not any(command.startswith("program") for command in list_commands())


_PROGRAM_SCRIPT = """
case $* in
    "program "*refused*) echo '{"return": "refused"}' ;;
    "program "*denied*) printf 'Channel program execution failed:\\nPermission denied.\\n' >&2; exit 1 ;;
    "program "*) echo '{"return": "destroyed"}' ;;
    "get "*) printf 'tank/a@1\\t0\\n' ;;
    "list "*) printf 'tank\\t-\\n' ;;
esac
"""


@pytest.mark.parametrize(("defer", "mode"), [(False, "now"), (True, "defer")])
def test_the_snapshots_of_several_filesystems_are_destroyed_with_programs(
    install_fake_zfs: InstallFakeZfs, defer: bool, mode: str
) -> None:
    list_commands = install_fake_zfs(_PROGRAM_SCRIPT)
    assert _destroy_snapshots([f"tank/{number}@1" for number in range(500)], defer) == []
    programs = [command.split() for command in list_commands()]
    assert [words[words.index("-") + 1] for words in programs] == [mode, mode]
    assert [len(words[words.index("-") + 2 :]) for words in programs] == [400, 100]


@pytest.mark.parametrize("reason", ["refused", "denied"])
def test_commands_take_over_if_a_program_does_not_destroy_the_snapshots(
    install_fake_zfs: InstallFakeZfs, reason: str
) -> None:
    list_commands = install_fake_zfs(_PROGRAM_SCRIPT)
    assert _destroy_snapshots(["tank/a@1", f"tank/b@{reason}", "tank/a@2"], True) == []
    program, *commands = list_commands()
    assert program.startswith("program ")
    assert commands == ["destroy -d tank/a@1,2", f"destroy -d tank/b@{reason}"]


def test_a_list_with_a_snapshot_in_use_is_not_destroyed(install_fake_zfs: InstallFakeZfs) -> None:
    list_commands = install_fake_zfs(_HOLDS_SCRIPT)
    (error,) = _destroy_snapshots(["tank/a@1", "tank/a@held"])
    assert isinstance(error, exceptions.SnapshotIsHeld) and error.name == "tank/a@held"
    assert not any(command.startswith("destroy") for command in list_commands())


def test_a_snapshot_held_in_the_meantime_is_named_and_stops_the_removal(
    install_fake_zfs: InstallFakeZfs,
) -> None:
    list_commands = install_fake_zfs(_HOLDS_SCRIPT)
    (error,) = _destroy_snapshots(["tank/b@1", "tank/b@just-held", "tank/c@1", "tank/c@2"])
    assert isinstance(error, exceptions.SnapshotIsHeld) and error.name == "tank/b@just-held"
    assert "it's being held" in error.details
    assert [command for command in list_commands() if command.startswith("destroy")] == ["destroy tank/b@1,just-held"]


def test_missing_snapshots_are_skipped_and_a_missing_pool_is_reported(install_fake_zfs: InstallFakeZfs) -> None:
    install_fake_zfs(_HOLDS_SCRIPT)
    assert _destroy_snapshots(["tank/missing@1", "tank/missing@2"]) == []
    install_fake_zfs("case $* in *) echo \"cannot open 'tank': dataset does not exist\" >&2; exit 1 ;; esac")
    errors = _destroy_snapshots(["tank/a@1", "tank/a@2"], defer=True)
    assert [(type(error), error.name) for error in errors] == [
        (exceptions.PoolNotFound, name) for name in ("tank/a@1", "tank/a@2")
    ]


def test_snapshots_are_removed_one_by_one_if_their_joint_deferred_removal_fails(
    install_fake_zfs: InstallFakeZfs,
) -> None:
    list_commands = install_fake_zfs(_HOLDS_SCRIPT)
    assert _destroy_snapshots(["tank/c@1", "tank/c@2"], defer=True) == []
    assert list_commands() == ["destroy -d tank/c@1,2", "destroy -d tank/c@1", "destroy -d tank/c@2"]


# -- exceptions for messages of the command ---------------------------------------------------------------------------


def _call_with_stream(function: Callable[..., object], *args: object) -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    try:
        function(*args[:1], read_fd, *args[1:])
    finally:
        os.close(read_fd)


# The messages are those of OpenZFS's lib/libzfs; tests/unit/zfs_core/test_parse.py names their sources.
@pytest.mark.parametrize(
    ("message", "call", "error_class", "name"),
    [
        (
            "cannot set property for 'tank/a': pool and or dataset must be upgraded to set this property or value",
            lambda: zfs_core.lzc_set_prop("tank/a", "compression", "zstd"),
            exceptions.PropertyNotSupported,
            "tank/a",
        ),
        (
            "cannot create 'tank/b': pool must be upgraded to set this property or value",
            lambda: zfs_core.lzc_create("tank/b", props={"compression": "zstd"}),
            exceptions.PropertyNotSupported,
            "tank/b",
        ),
        (
            "cannot receive resume stream: kernel modules must be upgraded to receive this stream.",
            lambda: _call_with_stream(zfs_core.lzc_receive_resumable, "tank/b@x"),
            exceptions.StreamFeatureInvalid,
            None,
        ),
        (
            "cannot receive new filesystem stream: incompatible embedded data stream feature with encrypted receive.",
            lambda: _call_with_stream(zfs_core.lzc_receive, "tank/b@x"),
            exceptions.StreamFeatureIncompatible,
            None,
        ),
        (
            "cannot receive new filesystem stream: pool must be upgraded to receive this stream.",
            lambda: _call_with_stream(zfs_core.lzc_receive, "tank/b@x"),
            exceptions.StreamFeatureNotSupported,
            None,
        ),
        (
            "cannot receive new filesystem stream: I/O error",
            lambda: _call_with_stream(zfs_core.lzc_receive, "tank/b@x"),
            exceptions.StreamIOError,
            None,
        ),
        (
            "cannot inherit compression for 'tank/a': I/O error",
            lambda: zfs_core.lzc_inherit_prop("tank/a", "compression"),
            exceptions.ZIOError,
            "tank/a",
        ),
    ],
)
def test_messages_of_openzfs_become_the_exceptions_of_libzfs_core(
    install_fake_zfs: InstallFakeZfs,
    message: str,
    call: Callable[[], object],
    error_class: type[exceptions.ZFSError],
    name: str | None,
) -> None:
    install_fake_zfs(f'case $1 in get | list) ;; *) echo "{message}" >&2; exit 1 ;; esac')
    with pytest.raises(exceptions.ZFSError) as error_info:
        call()
    error = error_info.value
    assert (type(error), error.name, error.details) == (error_class, name, message)
    if error_class in (exceptions.ZIOError, exceptions.StreamIOError):
        assert error.errno == errno.EIO


def test_a_received_property_that_the_pool_does_not_support_is_named(install_fake_zfs: InstallFakeZfs) -> None:
    message = (
        "cannot receive compression property on tank/b: pool and or dataset must be upgraded to set this property or "
        "value"
    )
    install_fake_zfs(f'case $1 in receive) echo "{message}" >&2; exit 1 ;; esac')
    with pytest.raises(exceptions.ReceivePropertyFailure) as error_info:
        _call_with_stream(zfs_core.lzc_receive, "tank/b@x")
    assert [(type(error), error.name) for error in error_info.value.errors] == [
        (exceptions.PropertyNotSupported, "compression")
    ]


_RELEASE_SCRIPT = """
case $* in
    release*tank/a@1) echo "cannot release 'x' from 'tank/a@1': no such tag on this dataset" >&2; exit 1 ;;
    release*tank/a@2) echo "cannot release 'x' from 'tank/a@2': I/O error" >&2; exit 1 ;;
esac
"""


def test_missing_holds_are_named_only_if_another_release_fails(install_fake_zfs: InstallFakeZfs) -> None:
    install_fake_zfs(_RELEASE_SCRIPT)
    assert zfs_core.lzc_release({"tank/a@1": ["x"]}) == ["tank/a@1#x"]
    with pytest.raises(exceptions.HoldReleaseFailure) as error_info:
        zfs_core.lzc_release({"tank/a@1": ["x"], "tank/a@2": ["x"]})
    assert [(type(error), error.name) for error in error_info.value.errors] == [
        (exceptions.ZIOError, "tank/a@2"),
        (exceptions.HoldNotFound, "tank/a@1#x"),
    ]


# -- arguments that the caller chooses --------------------------------------------------------------------------------

# Parses options as GNU getopt does, which also finds them after other arguments. Returns the parameters.
_GETOPT_SCRIPT = """
shift
options=$(getopt -o nt:m:j -- "$@") || { echo "invalid option" >&2; exit 2; }
eval set -- "$options"
while [ "$1" != -- ]; do
    case $1 in -t | -m) shift ;; -n) echo nosync >&2; exit 1 ;; esac
    shift
done
shift 3
printf '{"return": "%s"}' "$*"
"""


def test_channel_program_parameters_are_not_parsed_as_options(install_fake_zfs: InstallFakeZfs) -> None:
    install_fake_zfs(_GETOPT_SCRIPT)
    params = ["-n", "-t", "1", "--help", "", "x"]
    assert zfs_core.lzc_channel_program("tank", "return 1", params=params) == "-n -t 1 --help  x"


@pytest.mark.parametrize("param", ["a\0b", "\ud800", b"a\0b"])
def test_a_parameter_that_cannot_be_an_argument_is_refused(
    install_fake_zfs: InstallFakeZfs, param: str | bytes
) -> None:
    list_commands = install_fake_zfs("")
    with pytest.raises(exceptions.ZFSGenericError) as error_info:
        zfs_core.lzc_channel_program("tank", "return 1", params=[param])  # type: ignore[list-item]
    assert error_info.value.errno == errno.EINVAL and "NUL" in str(error_info.value)
    assert list_commands() == []


@pytest.mark.parametrize("name", ["./a", "-r", "tank/a\0", "tank/\udcff", "tank/a\n"])
def test_a_name_that_the_command_would_misinterpret_is_refused(install_fake_zfs: InstallFakeZfs, name: str) -> None:
    list_commands = install_fake_zfs("")
    assert not zfs_core.lzc_exists(name)
    with pytest.raises(exceptions.NameInvalid):
        zfs_core.lzc_get_props(name)
    assert list_commands() == []


def test_an_unquoted_name_does_not_affect_the_exception_type(
    install_fake_zfs: InstallFakeZfs,
) -> None:
    install_fake_zfs('echo "cannot destroy snapshot tank/dev/zfs@out of space: dataset is busy" >&2; exit 1')
    with pytest.raises(exceptions.SnapshotDestructionFailure) as error_info:
        zfs_core.lzc_destroy_snaps(["tank/dev/zfs@out of space"], False)
    assert isinstance(error_info.value.errors[0], exceptions.SnapshotIsHeld)


# -- commands that cannot be started ----------------------------------------------------------------------------------

_MANY_NAMES = [f"tank/{number:0240}" for number in range(10_000)]


def test_many_names_are_looked_up_with_several_commands(install_fake_zfs: InstallFakeZfs) -> None:
    list_commands = install_fake_zfs('shift 5; for name; do printf "%s\\tfilesystem\\n" "$name"; done')
    assert find_types(_MANY_NAMES) == dict.fromkeys(_MANY_NAMES, "filesystem")
    assert len(list_commands()) == 25


def test_more_snapshots_than_fit_into_a_command_fail_with_a_clear_message(install_fake_zfs: InstallFakeZfs) -> None:
    list_commands = install_fake_zfs("")
    with pytest.raises(exceptions.SnapshotFailure) as error_info:
        zfs_core.lzc_snapshot([f"{name}@a" for name in _MANY_NAMES])
    (error,) = error_info.value.errors
    assert error.errno == errno.E2BIG and error.name is None
    assert "Failed to create 10000 snapshots at the same instant" in str(error)
    assert list_commands() == []


def test_a_command_that_may_not_be_executed_is_named(
    install_fake_zfs: InstallFakeZfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "zfs")

    monkeypatch.setattr("subprocess.Popen", fail)
    for call in (lambda: zfs_core.lzc_exists("tank"), lambda: process.read_first_bytes("send", "tank@a", count=1)):
        with pytest.raises(
            exceptions.ZFSGenericError, match=r"`zfs (get|send)` could not be started: Permission"
        ) as error_info:
            call()
        assert error_info.value.errno == errno.EACCES
