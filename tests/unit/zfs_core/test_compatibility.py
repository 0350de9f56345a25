"""Test, without ZFS, that zfs_core is compatible with libzfs_core: names, values and exceptions."""

from __future__ import annotations

import ast
import errno
import os
import re
import tempfile
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zfs_core
from zfs_core import capabilities, exceptions, options, pools, property_values, receive
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES, make_openzfs_capabilities
from zfs_core.causes import Cause
from zfs_core.outcome import Outcome


@pytest.fixture(autouse=True)
def _openzfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda argv, **_: pytest.fail(f"ran {argv}"))
    monkeypatch.setattr(capabilities, "_capabilities", make_openzfs_capabilities((2, 3)))


def _get_error(function: Callable[..., object], *args: object) -> exceptions.ZFSError:
    with pytest.raises(exceptions.ZFSError) as caught:
        function(*args)
    return caught.value


def _get_single_error(function: Callable[..., object], *args: object) -> exceptions.ZFSError:
    error = _get_error(function, *args)
    assert isinstance(error, exceptions.MultipleOperationsFailure) and len(error.errors) == 1
    return error.errors[0]


@pytest.mark.parametrize("name", ["tank/a!b", b"tank/a!b"])
def test_the_name_in_an_exception_has_the_type_that_the_caller_passed(name: str | bytes) -> None:
    assert _get_error(zfs_core.lzc_destroy, name).name == name
    assert str(_get_error(zfs_core.lzc_destroy, name)).endswith("'tank/a!b'")
    snapshot = name + ("@x" if isinstance(name, str) else b"@x")  # type: ignore[operator]
    assert _get_single_error(zfs_core.lzc_hold, {snapshot: "tag"}).name == snapshot


_LONG_NAME = "n" * 256


@pytest.mark.parametrize(
    ("snaps", "error_class", "names"),
    [
        (["tank@a&b"], exceptions.NameInvalid, ["tank@a&b"]),
        (["tank@a&b", "tank/x@ok"], exceptions.NameInvalid, [None]),
        ([f"tank@{_LONG_NAME}", "tank/x@ok"], exceptions.NameTooLong, [None]),
        (
            [f"tank/a@{_LONG_NAME[:250]}", f"tank/b@{_LONG_NAME[:250]}", "tank@ok"],
            exceptions.NameTooLong,
            [f"tank/a@{_LONG_NAME[:250]}", f"tank/b@{_LONG_NAME[:250]}"],
        ),
        (["tank@a", "tank@b"], exceptions.DuplicateSnapshots, [None]),
        (["tank@a", "pool@a"], exceptions.PoolsDiffer, [None]),
    ],
)
def test_snapshot_failures_name_what_libzfs_core_names(
    snaps: list[str], error_class: type[Exception], names: list[str | None]
) -> None:
    failure = _get_error(zfs_core.lzc_snapshot, snaps)
    assert isinstance(failure, exceptions.SnapshotFailure)
    assert [type(error) for error in failure.errors] == [error_class] * len(names)
    assert [error.name for error in failure.errors] == names


def test_only_user_properties_can_be_set_on_a_snapshot() -> None:
    error = _get_single_error(zfs_core.lzc_snapshot, ["tank@a"], {"atime": "off"})
    assert isinstance(error, exceptions.PropertyInvalid) and error.name == "tank@a"


def test_a_snapshot_that_cannot_exist_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would take "%" and "," for a range and a list of snapshots, and destroy these."""
    monkeypatch.setattr("zfs_core.snapshots.run", lambda *args, **_: pytest.fail(f"ran zfs {args}"))
    for name in ("tank@a%c", "tank@a,b", "tank@a$b", f"tank/{_LONG_NAME[:240]}@{_LONG_NAME[:20]}", "tank/a"):
        zfs_core.lzc_destroy_snaps([name], False)
        zfs_core.lzc_destroy_snaps([name], True)
    error = _get_single_error(zfs_core.lzc_destroy_snaps, [f"tank@{_LONG_NAME}"], False)
    assert isinstance(error, exceptions.NameTooLong)


@pytest.mark.parametrize(
    ("bookmarks", "error_class"),
    [
        ({"tank/a#b!": "tank/a@s"}, exceptions.BookmarkNameInvalid),
        ({"tank/a@b": "tank/a@s"}, exceptions.NameInvalid),
        ({"tank/a#b": "tank/a"}, exceptions.BookmarkSourceInvalid),
        ({f"tank/a#{_LONG_NAME}": "tank/a@s"}, exceptions.NameTooLong),
    ],
)
def test_bookmark_failures_have_the_types_of_libzfs_core(
    bookmarks: dict[str, str], error_class: type[Exception]
) -> None:
    assert isinstance(_get_single_error(zfs_core.lzc_bookmark, bookmarks), error_class)


@pytest.mark.parametrize(
    ("args", "error_class", "name"),
    [
        (("tank/a@s", "tank/a"), exceptions.NameInvalid, "tank/a"),
        (("tank/a#b", None), exceptions.NameInvalid, "tank/a#b"),
        (("tank/a@s!", "tank/a@t"), exceptions.NameInvalid, "tank/a@s!"),
        (("tank/a@s", "pool/a@s"), exceptions.PoolsDiffer, "tank/a@s"),
        ((f"tank/a@{_LONG_NAME}", None), exceptions.NameTooLong, f"tank/a@{_LONG_NAME}"),
    ],
)
def test_names_of_streams_are_validated(args: tuple[str, str | None], error_class: type[Exception], name: str) -> None:
    for error in (_get_error(zfs_core.lzc_send, *args, 1), _get_error(zfs_core.lzc_send_space, *args)):
        assert isinstance(error, error_class) and error.name == name


def test_descriptors_of_streams_are_validated() -> None:
    with tempfile.NamedTemporaryFile() as file:
        read_only_fd, write_only_fd = os.open(file.name, os.O_RDONLY), os.open(file.name, os.O_WRONLY)
    try:
        for fd in (-2, 1 << 40, read_only_fd):
            error = _get_error(zfs_core.lzc_send, "tank@a", None, fd)
            assert isinstance(error, exceptions.StreamIOError) and error.errno == errno.EBADF
        for fd in (-2, 1 << 40, write_only_fd):
            error = _get_error(zfs_core.lzc_receive, "tank@a", fd)
            assert isinstance(error, exceptions.StreamIOError) and error.errno == errno.EBADF
        for fd in (-2, 1 << 40, read_only_fd):
            assert isinstance(_get_error(zfs_core.lzc_hold, {"tank@a": "t"}, fd), exceptions.BadHoldCleanupFD)
    finally:
        os.close(read_only_fd)
        os.close(write_only_fd)


def test_a_header_that_is_read_first_is_passed_on_with_the_rest() -> None:
    """A file is read by the command itself. The rest of a pipe is copied after the header."""
    header, rest = bytes(312), os.urandom(3 << 20)

    def read_stream(request: Any) -> tuple[bytes, int]:
        data = b""
        with receive._open_stream(request) as (fd, count):
            while piece := os.read(fd, 1 << 20):
                data += piece
        return data, count()

    with tempfile.TemporaryFile() as file:
        file.write(header + rest)
        file.seek(312)
        request = receive._Request("tank@a", file.fileno(), False, None, 1.0, begin_data=header)
        assert read_stream(request) == (header + rest, 312 + len(rest))
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"rest")
    os.close(write_fd)
    request = receive._Request("tank@a", read_fd, False, None, 1.0, begin_data=header)
    assert read_stream(request) == (header + b"rest", 4)
    os.close(read_fd)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_stalled_stream_leaves_nothing_behind(is_full: bool) -> None:
    """Either the source sends nothing more, or the command reads nothing and cannot be killed."""
    header = bytes(4 << 20) if is_full else bytes(312)
    fds_before = _list_fds()
    source_fd, sender_fd = os.pipe()
    request = receive._Request("tank@a", source_fd, False, None, 1.0, begin_data=header)
    inherited_fd = -1
    try:
        with receive._open_stream(request) as (fd, _):
            inherited_fd = os.dup(fd)  # as the command inherits it
            assert os.read(inherited_fd, 312) == bytes(312)
            (thread,) = (each for each in threading.enumerate() if isinstance(each, receive._Copier))
        assert not thread.is_alive()
    finally:
        for each in (source_fd, sender_fd, inherited_fd):
            os.close(each)
    assert _list_fds() <= fds_before


def _list_fds() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("atime", 0, "atime=off"),
        ("atime", True, "atime=on"),
        ("compression", 1, "compression=on"),
        ("encryption", zfs_core.zio_encrypt.ZIO_CRYPT_AES_256_CCM, "encryption=aes-256-ccm"),
        ("recordsize", 4096, "recordsize=4096"),
        ("recordsize", "128k", "recordsize=128k"),
        (b"mountpoint", b"none", "mountpoint=none"),
        (b"user:x", b"128k", "user:x=128k"),
    ],
)
def test_values_are_formatted_as_in_libzfs_core(name: str, value: Any, text: str) -> None:
    assert options.format_property_assignment(name, value) == text


@pytest.mark.parametrize(("name", "value"), [("atime", 20), ("exec", 255), (b"recordsize", b"128k"), (b"BOGUS", 0)])
def test_values_that_libzfs_core_refuses_are_refused(name: str, value: Any) -> None:
    with pytest.raises(exceptions.PropertyInvalid):
        options.format_property_assignment(name, value)


def test_words_and_indexes_of_properties_match() -> None:
    for prop, indexes in property_values.INDEXES.items():
        assert len(set(indexes.values())) == len(indexes), prop
        for word, index in indexes.items():
            assert property_values.find_word(prop, index) == word
            assert property_values.find_number(prop, word) == index
    assert property_values.find_number("mountpoint", "7") == "7" and property_values.find_number("used", "7") == 7


@pytest.mark.parametrize(
    ("text", "error_class"),
    [
        ("Timed out.", exceptions.ZCPTimeout),
        ("Memory limit exhausted.", exceptions.ZCPSpaceError),
        ("Return value too large.", exceptions.ZCPMemoryError),
        ("Invalid instruction or memory limit.", exceptions.ZCPLimitInvalid),
        ("[string \"channel program\"]:2: syntax error near ':'", exceptions.ZCPSyntaxError),
        ("assertion failed!; stack traceback:; [C]: in function 'assert'", exceptions.ZCPRuntimeError),
        ("dataset does not exist; stack traceback:; x", exceptions.ZCPRuntimeError),
    ],
)
def test_channel_program_failures_have_libzfs_core_types(text: str, error_class: type[Exception]) -> None:
    outcome = Outcome("", f"Channel program execution failed:; {text}", Cause.OTHER)
    error = pools._make_program_error(outcome, "tank")
    assert type(error) is error_class
    if error_class in (exceptions.ZCPSyntaxError, exceptions.ZCPRuntimeError):
        assert error.details == text


def test_the_package_is_typed_and_knows_nothing_of_sandboxes() -> None:
    package = Path(zfs_core.__file__).parent
    assert (package / "py.typed").is_file()
    settings = tomllib.loads((package.parent.parent / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["package-data"]["zfs_core"] == ["py.typed"]
    for path in package.rglob("*.py"):
        # The word is allowed in the sentence that says so, and as the name of a property of ZFS.
        text = path.read_text().replace("This package knows nothing about sandboxes.", "").replace('"jailed"', "")
        assert not re.search("sandbox|gateway|jail", text, re.IGNORECASE), path


def test_each_exception_is_raised_or_says_why_not() -> None:
    package = Path(zfs_core.__file__).parent
    names: set[str] = set()
    for path in package.glob("*.py"):
        if path.name != "exceptions.py":
            tree = ast.parse(path.read_text())
            names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    classes = [each for each in vars(exceptions).values() if isinstance(each, type)]
    unused_classes = [each for each in classes if each.__module__ == exceptions.__name__ and each.__name__ not in names]
    assert unused_classes == [exceptions.BookmarkNotFound]
    assert all((each.__doc__ or "").startswith("Never raised") for each in unused_classes)


def test_functions_that_zfs_fuse_lacks_raise_not_implemented(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [getattr(zfs_core, name) for name in zfs_core.__all__ if name.startswith("lzc_")]
    assert [function.__name__ for function in functions if not zfs_core.is_supported(function)] == ["lzc_list"]
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    calls: dict[str, tuple[Any, ...]] = {
        "lzc_bookmark": ({},),
        "lzc_get_bookmarks": ("tank",),
        "lzc_destroy_bookmarks": ([],),
        "lzc_snaprange_space": ("tank@a", "tank@b"),
        "lzc_send_space": ("tank@a",),
        "lzc_send_resume": ("tank@a", None, 1),
        "lzc_receive_resumable": ("tank@a", 0),
        "lzc_receive_with_cmdprops": ("tank@a", 0, b""),
        "lzc_receive_with_heal": ("tank@a", 0, b""),
        "lzc_sync": ("tank",),
        "lzc_reopen": ("tank",),
        "lzc_pool_checkpoint": ("tank",),
        "lzc_pool_checkpoint_discard": ("tank",),
        "lzc_channel_program": ("tank", "return 1"),
        "lzc_channel_program_nosync": ("tank", "return 1"),
        "lzc_load_key": ("tank/a", False, b""),
        "lzc_unload_key": ("tank/a",),
        "lzc_change_key": ("tank/a", "inherit"),
        "lzc_list": ("tank", {}),
    }
    unsupported_functions = [function for function in functions if not zfs_core.is_supported(function)]
    assert sorted({function.__name__ for function in unsupported_functions}) == sorted(calls)
    for function in unsupported_functions:
        with pytest.raises(NotImplementedError):
            function(*calls[function.__name__])
    with pytest.raises(ValueError, match="is not a function of libzfs_core"):
        zfs_core.is_supported(zfs_core.get_props)
