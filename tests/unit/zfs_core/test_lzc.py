"""The program `lzc`: arguments, check mode, output and exit codes. A fake `zfs` answers from a list of names."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from zfs_core import capabilities, exceptions
from zfs_core.cli.build import build
from zfs_core.cli.failures import CommandError, Kind, describe
from zfs_core.cli.main import main
from zfs_core.cli.parser import make_parser
from zfs_core.cli.properties import has_value
from zfs_core.cli.removal import order_for_removal
from zfs_core.exceptions import MultipleOperationsFailure, ZFSError, ZFSGenericError
from zfs_core.parse import Property

from tests.support.session import REPOSITORY

# Prints the type of existing datasets, and records all commands.
_FAKE_ZFS = """\
#!/bin/sh
here=$(dirname "$0")
echo "$*" >>"$here/commands"
for name; do :; done
case $1 in
    version) echo zfs-2.3.0 ;;
    get)
        case $* in
            "get -H -o name,value type "*)
                shift 5
                for each; do grep -qx "$each" "$here/names" && printf '%s\\tfilesystem\\n' "$each"; done
                exit 0 ;;
        esac
        grep -qx "$name" "$here/names" || { echo "cannot open '$name': dataset does not exist" >&2; exit 1; }
        case $* in
            "get -H -o value type "*) echo filesystem ;;
            *quota*) printf '%s\\tquota\\t10737418240\\tlocal\\n' "$name" ;;
            *type*) printf '%s\\ttype\\tfilesystem\\t-\\n' "$name" ;;
            *origin*) printf '%s\\torigin\\ttank/a@one\\t-\\n' "$name" ;;
        esac ;;
    list) grep -x "$name[^@]*" "$here/names" ;;
    holds) printf '%s\\tkeep\\tThu Nov 26 12:00 2026\\n' "$name" ;;
    send)
        printf stream
        case $name in *@damaged) echo "cannot send '$name': I/O error" >&2; exit 1 ;; esac ;;
    snapshot) echo "cannot create snapshot '$name': out of space" >&2; exit 1 ;;
    *) echo "permission denied" >&2; exit 1 ;;
esac
"""
PAGE_PATH = REPOSITORY / "docs" / "lzc.md"
_NAMES = ("tank", "tank/a", "tank/a@one", "tank/a@damaged", "tank/b", "tank/clone")
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run_lzc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `lzc` with a fake `zfs`, and returns the exit code and the result."""
    (tmp_path / "zfs").write_text(_FAKE_ZFS)
    (tmp_path / "zfs").chmod(0o755)
    (tmp_path / "names").write_text("\n".join(_NAMES) + "\n")
    (tmp_path / "commands").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(capabilities, "_capabilities", None)

    def run_with_arguments(*argv: str) -> tuple[int, dict[str, Any]]:
        status = main(argv)
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        return status, json.loads(lines[0])

    return run_with_arguments


@pytest.fixture
def list_commands(tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that lists the subcommands of `zfs` that have run."""
    return lambda: [line.split()[0] for line in (tmp_path / "commands").read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("fly tank/a", "invalid choice: 'fly'"),
        ("snapshot tank/a", "'tank/a' is not a valid name for a snapshot: use FILESYSTEM@SNAPSHOT"),
        ("snapshot tank/a@-x", "use FILESYSTEM@SNAPSHOT"),
        ("create tank/.x", "use POOL/NAME/…"),
        ("create dozer", "is the name of a pool"),
        ("create tank/x --volume much", "use a number with a unit"),
        ("create tank/x --set quota", "use PROPERTY=VALUE"),
        ("create tank/x --set Quota=1", "use a native property"),
        (f"create tank/{'x' * 300}", "is too long: use at most 255 bytes"),
        ("hold -- tank/a@one", "required: TAG"),
        (f"hold {'t' * 256} tank/a@one", "is too long: use at most 255 bytes"),
        ("get all tank/a", "name the properties"),
        ("list tank --type disk", "use one or more of filesystem, volume, snapshot, bookmark"),
        ("list tank --depth -1", "use 0 or a positive number"),
        ("list tank --depth x", "use 0 or a positive number"),
        ("set quota=1G", "at least one PROPERTY=VALUE and one name"),
        ("set tank/a", "at least one PROPERTY=VALUE and one name"),
        ("snapshot tank/a@x dozer/a@x --assume tank/a@one", "--assume is for predictions"),
        ("snapshot tank/a@x tank/a@y", "pass only one snapshot of 'tank/a'"),
        ("clone tank/a@one dozer/x", "clone within one pool"),
        ("rename tank/a tank/a", "is the current name"),
        ("bookmark tank/a@one tank/b#one", "use tank/a#BOOKMARK"),
        ("bookmark tank/a@one tank/a@two", "use FILESYSTEM#BOOKMARK"),
        ("send --resume-token 1-2-3 -- cat", "is not a resume token"),
        ("destroy tank/a tank/a@one", "with separate commands"),
        ("destroy tank/a --defer", "only for snapshots"),
        ("destroy tank", "Use zpool destroy"),
        ("snapshot tank/a@x -- cat", "takes no command after --"),
        ("send tank/a@one --", "the command after -- is missing"),
        ("send tank/a@one --file x -- cat", "either --file or a command"),
        ("send tank/a@one --if-absent -- cat", "--if-absent applies only to a file"),
        ("send -- cat", "pass the snapshot to send"),
        ("send tank/a@one --resume-token t -- cat", "identifies the snapshot to send"),
        ("send tank/a@one --timeout 0 -- cat", "use a positive number of seconds"),
        ("send tank/a@one -- /no/such/program", "check the command after --"),
        ("receive tank/a", "or add --resumable"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(run_lzc: Run, line: str, sentence: str) -> None:
    status, result = run_lzc(*line.split())
    assert (status, result["error"]["kind"], result["changed"]) == (2, "invalid", False), result
    assert sentence in result["error"]["message"]


@pytest.mark.parametrize(
    ("line", "changes", "unchanged_names"),
    [
        ("snapshot tank/a@one tank/b@one --if-absent", [("snapshot", "tank/b@one")], ["tank/a@one"]),
        ("snapshot tank@two --recursive", [("snapshot", f"{n}@two") for n in _NAMES if "@" not in n], []),
        ("create tank/x/y --parents", [("create", "tank/x"), ("create", "tank/x/y")], []),
        ("create tank/a --if-absent", [], ["tank/a"]),
        ("clone tank/a@one tank/x", [("clone", "tank/x")], []),
        ("clone tank/a@one tank/clone --if-absent", [], ["tank/clone"]),
        ("clone tank/a@new tank/x --assume tank/a@new", [("clone", "tank/x")], []),
        ("rename tank/gone tank/b --if-present", [], ["tank/b"]),
        ("rename tank/a tank/x", [("rename", "tank/x")], []),
        ("promote tank/clone", [("promote", "tank/clone")], []),
        ("bookmark tank/a@one tank/a#one", [("bookmark", "tank/a#one")], []),
        ("hold keep tank/a@one --if-absent", [], ["tank/a@one"]),
        ("hold other tank/a@one", [("hold", "tank/a@one")], []),
        ("hold keep tank/a@new --assume tank/a@new", [("hold", "tank/a@new")], []),
        ("release keep tank/a@one", [("release", "tank/a@one")], []),
        ("release keep tank/a@gone --if-present", [], ["tank/a@gone"]),
        ("destroy tank/gone tank/gone2 --if-present", [], ["tank/gone", "tank/gone2"]),
        ("set quota=20G tank/a", [("set", "tank/a")], []),
        ("set quota=10G tank/a", [], ["tank/a quota"]),
        ("inherit quota tank/a", [("inherit", "tank/a")], []),
        ("send tank/a@one -- cat", [("send", "tank/a@one")], []),
        ("receive tank/a@one --if-absent", [], ["tank/a@one"]),
        ("receive tank/b@one --file /etc/hostname", [("receive", "tank/b@one")], []),
    ],
)
def test_check_mode_predicts_and_changes_nothing(
    run_lzc: Run,
    list_commands: Callable[[], list[str]],
    line: str,
    changes: list[tuple[str, str]],
    unchanged_names: list[str],
) -> None:
    status, result = run_lzc("--check", *line.split())
    assert (status, result["changed"], result["check"]) == (0, bool(changes), True), result
    assert [(change["action"], change["name"]) for change in result["changes"]] == changes
    assert result["unchanged"] == unchanged_names
    assert set(list_commands()) <= {"version", "get", "list", "holds"}
    # The option may also follow the subcommand.
    assert run_lzc(*line.split(), "--check") == (status, result) if "--" not in line.split() else True


@pytest.mark.parametrize(
    ("line", "status", "sentence"),
    [
        ("snapshot tank/a@one", 4, "pass --if-absent"),
        ("create tank/a", 4, "pass --if-absent"),
        ("create tank/a --if-absent --volume 1G", 4, "is a filesystem, not a volume"),
        ("clone tank/a@one tank/clone", 4, "pass --if-absent"),
        ("rename tank/a tank/b", 4, "choose another name"),
        ("hold keep tank/a@one", 4, "hold 'keep' already exists"),
        ("receive tank/a@one", 4, "pass --if-absent"),
        ("snapshot tank/gone@x", 3, "not found: 'tank/gone'"),
        ("create tank/x/y", 3, "create it with lzc create --parents"),
        ("create dozer/x --parents", 3, "the pool 'dozer' does not exist"),
        ("destroy tank/gone", 3, "pass --if-present"),
        ("release other tank/a@one", 3, "hold 'other' not found"),
        ("exists tank/a tank/gone --require", 3, "not found: 'tank/gone'"),
        ("send tank/gone@x -- cat", 3, "not found"),
        ("receive tank/x/y@a", 3, "the parent of 'tank/x/y' does not exist"),
    ],
)
def test_failures_are_predicted_in_check_mode(run_lzc: Run, line: str, status: int, sentence: str) -> None:
    for argv in (["--check", *line.split()], line.split()):
        actual_status, result = run_lzc(*argv)
        assert actual_status == status, result
        assert sentence in result["error"]["message"]


def test_a_failure_of_zfs_has_its_exit_code_and_reports_no_change(run_lzc: Run) -> None:
    status, result = run_lzc("snapshot", "tank/b@one")
    assert (status, result["changed"], result["error"]["kind"]) == (6, False, "no_space")
    assert "'tank/b@one'" in result["error"]["message"] and "free some space" in result["error"]["message"]


def test_queries_report_no_change(run_lzc: Run) -> None:
    assert run_lzc("exists", "tank/a", "tank/x") == (0, {"changed": False, "exists": False, "missing": ["tank/x"]})
    assert run_lzc("get", "quota", "tank/a")[1]["properties"] == {
        "tank/a": {"quota": {"value": "10737418240", "source": "local"}}
    }
    assert list(run_lzc("holds", "tank/a@one")[1]["holds"]["tank/a@one"]) == ["keep"]


def test_a_stream_goes_to_a_command_or_a_file(run_lzc: Run, tmp_path: Path) -> None:
    status, result = run_lzc(
        "send", "tank/a@one", "--", "sh", "-c", f"cat >{tmp_path}/copy; echo '{{\"changed\": true}}'"
    )
    assert (status, result["receiver"]) == (0, {"changed": True})
    assert (tmp_path / "copy").read_text() == "stream"
    file = tmp_path / "file"
    assert run_lzc("send", "tank/a@one", "--file", str(file))[0] == 0
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("stream", 0o600)
    assert run_lzc("send", "tank/a@one", "--file", str(file))[0] == 4
    assert run_lzc("send", "tank/a@one", "--file", str(file), "--if-absent")[1]["unchanged"] == [str(file)]
    status, result = run_lzc("send", "tank/a@damaged", "--file", f"{tmp_path}/damaged")
    assert (status, result["changed"]) == (1, False)
    assert not list(tmp_path.glob("damaged*")), "an incomplete file must not remain"


def test_the_failure_of_a_receiver_is_reported(run_lzc: Run) -> None:
    error = json.dumps({"changed": False, "error": {"kind": "stream", "message": "does not fit"}})
    status, result = run_lzc("send", "tank/a@one", "--", "sh", "-c", f"echo '{error}'; exit 7")
    assert (status, result["error"]["message"]) == (7, "the receiver failed: does not fit")
    status, result = run_lzc("send", "tank/a@one", "--", "sh", "-c", "cat >/dev/null; echo no route >&2; exit 255")
    assert (status, result["error"]["message"]) == (1, "'sh' exited with code 255: no route")
    assert not result["changed"]


def test_the_result_does_not_mix_with_a_stream(run_lzc: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "tank/a@one"]) == 0
    captured_output = capfd.readouterr()
    assert captured_output.out == "stream"
    assert json.loads(captured_output.err) == {"changed": False}


def test_a_failed_system_call_is_reported_as_json(run_lzc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/var/run/zfs")

    monkeypatch.setattr("zfs_core.run.wait_for_releases", fail)
    status, result = run_lzc("exists", "tank/a")
    assert (status, result["error"]["kind"], result["changed"]) == (1, "failed", False)
    assert result["error"]["message"].startswith("'/var/run/zfs' failed: Too many open files: check ")


def test_a_closed_standard_output_has_an_exit_code_and_no_traceback(tmp_path: Path) -> None:
    program = tmp_path / "lzc"
    program.write_bytes(build("/usr/bin/python3"))
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    argv = ["/usr/bin/python3", "-I", "-S", str(program), "snapshot", "tank/a"]
    result = subprocess.run(argv, stdout=write_fd, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    os.close(write_fd)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "lzc: the result cannot be written: Broken pipe")
    assert "Traceback" not in result.stderr


def test_a_closed_standard_error_does_not_change_the_result(tmp_path: Path) -> None:
    program = tmp_path / "lzc"
    program.write_bytes(build("/usr/bin/python3"))
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    argv = ["/usr/bin/python3", "-I", "-S", str(program), "destroy", "tank"]
    result = subprocess.run(argv, stdout=subprocess.PIPE, stderr=write_fd, text=True, timeout=30, check=False)
    os.close(write_fd)
    assert (result.returncode, json.loads(result.stdout)["error"]["kind"]) == (2, "invalid")


# -- exit codes -------------------------------------------------------------------------------------------------------

_CLASSES = [
    value
    for value in vars(exceptions).values()
    if inspect.isclass(value) and issubclass(value, ZFSError) and value not in (ZFSError, ZFSGenericError)
]


@pytest.mark.parametrize("error_class", [each for each in _CLASSES if not issubclass(each, MultipleOperationsFailure)])
def test_each_exception_has_a_message(error_class: type[ZFSError]) -> None:
    failure = describe(error_class.__new__(error_class).with_details("the words of zfs"))
    assert "the words of zfs" in failure.message
    if issubclass(error_class, exceptions.DatasetExists | exceptions.HoldExists):
        assert failure.kind is Kind.EXISTS


def test_several_failures_are_combined_into_one_of_the_first_kind() -> None:
    held_error = exceptions.SnapshotIsHeld("tank/a@x")
    cloned_error = exceptions.SnapshotIsCloned("tank/a@y").with_details("", ["tank/c"])
    failure = describe(exceptions.SnapshotDestructionFailure([held_error, cloned_error]))
    assert (failure.kind, failure.related) == (Kind.IN_USE, ("tank/c",))
    assert "'tank/a@x': it is held" in failure.message and "'tank/a@y': it has clones" in failure.message


def test_exit_codes_are_unique_and_documented() -> None:
    assert len({kind.exit_code for kind in Kind}) == len(Kind)
    page = PAGE_PATH.read_text()
    for kind in Kind:
        assert f"| {kind.exit_code} | `{kind.word}` | {kind.meaning} |" in page


# -- comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prop", "actual_value", "source", "desired_value", "are_equal"),
    [
        ("quota", "off", "local", "off", True),
        ("quota", "off", "default", "off", False),
        ("quota", "off", "inherited from tank", "off", False),
        ("quota", "10737418240", "local", "10G", True),
        ("quota", "10737418240", "local", "10GiB", True),
        ("quota", "1610612736", "received", "1.5g", True),
        ("quota", "0", "local", "none", True),
        ("quota", "10737418240", "local", "11G", False),
        ("quota", "10737418240", "local", "none", False),
        ("snapshot_limit", "18446744073709551615", "local", "none", True),
        ("atime", "on", "local", "off", False),
        ("acltype", "posix", "local", "posixacl", True),
        ("acltype", "posixacl", "local", "posix", True),
        ("acltype", "off", "local", "noacl", True),
        ("acltype", "off", "local", "disabled", True),
        ("acltype", "posix", "local", "nfsv4", False),
        ("aclinherit", "restricted", "local", "secure", True),
        ("aclmode", "restricted", "local", "secure", False),
    ],
)
def test_values_are_compared_as_zfs_stores_them(
    prop: str, actual_value: str, source: str, desired_value: str, are_equal: bool
) -> None:
    assert has_value(Property("tank/a", prop, actual_value, source), desired_value) is are_equal


def test_user_properties_are_compared_as_text() -> None:
    assert not has_value(Property("tank/a", "backup:size", "1024", "local"), "1K")


def test_clones_and_children_are_destroyed_before_what_they_depend_on() -> None:
    origins = {"t/a": "-", "t/a/b": "t/a/c@s", "t/a/c": "-", "t/a/c/d": "-"}
    order = order_for_removal(list(origins), origins)
    assert sorted(order) == sorted(origins)
    assert order.index("t/a/b") < order.index("t/a/c") > order.index("t/a/c/d")
    assert order[-1] == "t/a"
    with pytest.raises(CommandError, match="promote"):
        order_for_removal(["t/a", "t/a/b"], {"t/a": "t/a/b@s", "t/a/b": "-"})


# -- the executable file ----------------------------------------------------------------------------------------------


def test_the_executable_has_the_same_bytes_on_each_machine(tmp_path: Path) -> None:
    script = REPOSITORY / "gateway" / "src" / "zfs_core" / "cli" / "build.py"
    contents = []
    for number, (time_zone, umask) in enumerate((("UTC", 0o022), ("Asia/Tokyo", 0o077))):
        output = tmp_path / str(number)
        argv = [sys.executable, str(script), str(output)]
        subprocess.run(argv, env={"TZ": time_zone}, umask=umask, timeout=30, check=True)
        contents.append(output.read_bytes())
    assert contents[0] == contents[1] == build("/usr/bin/env python3")
    with zipfile.ZipFile(BytesIO(contents[0])) as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}


def test_the_executable_needs_only_the_standard_library(tmp_path: Path) -> None:
    program = tmp_path / "lzc"
    program.write_bytes(build("/usr/bin/python3"))
    argv = ["/usr/bin/python3", "-I", "-S", str(program), "snapshot", "tank/a"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, json.loads(result.stdout)["error"]["kind"]) == (2, "invalid")
    assert result.stderr.startswith("lzc: ")


# -- documentation ----------------------------------------------------------------------------------------------------


def _get_subcommands() -> dict[str, Any]:
    (choices,) = (each.choices for each in make_parser()._actions if isinstance(each.choices, dict))
    return choices


def test_the_page_lists_each_command_with_its_options() -> None:
    rows = dict(re.findall(r"^\| `(\w+) [^`]*` \|.*\| (.*?)\|$", PAGE_PATH.read_text(), re.MULTILINE))
    common_options = {"--help", "--check", "--assume"}
    for name, parser in _get_subcommands().items():
        options = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
        assert set(re.findall(r"--[\w-]+", rows.pop(name))) == options - common_options, name
    assert not rows


def test_commands_on_the_page_are_valid() -> None:
    lines = re.findall(r"^lzc (.*)$", PAGE_PATH.read_text(), re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        make_parser().parse_args(shlex.split(line.partition(" -- ")[0]))


# -- playbooks --------------------------------------------------------------------------------------------------------


def test_names_that_contain_the_date_are_computed_once_in_a_run() -> None:
    """Ansible evaluates a variable at each use, so around midnight, two tasks could use different names."""
    found_names = set()
    for path in (REPOSITORY / "playbooks" / "lzc").glob("*.yml"):
        (play,) = yaml.safe_load(path.read_text())
        dated_names = {name for name, value in play.get("vars", {}).items() if "now(" in str(value)}
        if dated_names:
            facts = play["tasks"][0].get("ansible.builtin.set_fact", {})
            assert facts == {name: f"{{{{ {name} }}}}" for name in dated_names}, path
        found_names |= dated_names
    assert found_names
