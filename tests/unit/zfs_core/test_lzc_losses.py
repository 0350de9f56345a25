"""The data losses that `lzc` prevents, and the changes it reports. A fake `zfs` keeps its datasets in memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import zfs_core.run
from zfs_core import capabilities
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES, make_openzfs_capabilities
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.main import main
from zfs_core.exceptions import PropertyInvalid, ZFSGenericError
from zfs_core.outcome import Outcome
from zfs_core.process import _make_outcome

_POPEN = subprocess.Popen
Run = Callable[..., tuple[int, dict[str, Any]]]


def _get_filesystem(name: str) -> str:
    return name.partition("@")[0].partition("#")[0]


class _Failure(Exception):
    """A failed command, with its error message and its earlier output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.message, self.output = message, output


class FakeZfs:
    """Responds to the commands of `lzc` like OpenZFS, as far as these tests need it."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, str]] = {}
        self.commands: list[tuple[str, ...]] = []
        self.messages_by_command: dict[str, str] = {}
        """Error messages of `zfs`, by command line that fails."""
        self.hooks_by_command: dict[str, Callable[[], object]] = {}
        """Functions to run before a command, by command line."""
        self.received_stream = b""
        self.stream_bytes = 0
        self.can_run_programs = False

    def add(self, *names: str, **props: str) -> None:
        for name in names:
            number = str(len(self.objects) + 1)
            kind = "snapshot" if "@" in name else "bookmark" if "#" in name else "filesystem"
            defaults = {"type": kind, "guid": number, "createtxg": number, "userrefs": "0", "origin": "-"}
            self.objects[name] = defaults | {"defer_destroy": "off"} | props

    def execute(
        self,
        args: tuple[str, ...],
        seconds: float | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        name: str | None = None,
        program: str = "zfs",
    ) -> Outcome:
        self.commands.append(args)
        self.hooks_by_command.get(" ".join(args), lambda: None)()
        try:
            if message := self.messages_by_command.get(" ".join(args)):
                raise _Failure(message)
            output = getattr(self, f"_{args[0]}")(list(args[1:]), stdin)
            if stdout is not None:
                with os.fdopen(stdout, "wb", closefd=False) as file:
                    file.write(output.encode() + bytes(self.stream_bytes))
        except _Failure as failure:
            return _make_outcome(args, 1, failure.output.encode(), failure.message.encode(), name)
        return _make_outcome(args, 0, output.encode(), b"", name)

    def list_changing_commands(self) -> list[str]:
        """Return the commands that can change something."""
        queries = ("get", "list", "holds", "inherit pyzfs:sync")
        return [line for line in map(" ".join, self.commands) if not line.startswith(queries)]

    def _require(self, name: str) -> dict[str, str]:
        if name not in self.objects:
            raise _Failure(f"cannot open '{name}': dataset does not exist")
        return self.objects[name]

    def _get(self, args: list[str], stdin: int | None) -> str:
        position = args.index("-o") + 1
        columns, props, names = args[position].split(","), args[position + 1].split(","), args[position + 2 :]
        if "-r" in args:
            names = [each for each in self.objects for name in names if each.startswith(name)]
        output = ""
        missing_names = [name for name in names if name not in self.objects]
        for name in names:
            for prop in props if name not in missing_names else ():
                item = self.objects[name]
                source = item.get(f"{prop} source", "-")
                row = {"name": name, "property": prop, "value": item.get(prop, "-"), "source": source}
                output += "\t".join(row[column] for column in columns) + "\n"
        if missing_names:
            raise _Failure(f"cannot open '{missing_names[0]}': dataset does not exist", output)
        return output

    def _list(self, args: list[str], stdin: int | None) -> str:
        root, types = args[-1], args[args.index("-t") + 1].split(",")
        columns = args[args.index("-o") + 1].split(",")
        self._require(root)
        names = [
            name
            for name, item in self.objects.items()
            if item["type"] in types
            and (_get_filesystem(name) == root or ("-r" in args and name.startswith(f"{root}/")))
        ]
        return "".join("\t".join({"name": n, **self.objects[n]}[c] for c in columns) + "\n" for n in names)

    def _program(self, args: list[str], stdin: int | None) -> str:
        """Run the program that destroys snapshots, if the test allows programs."""
        if not self.can_run_programs:
            raise _Failure("Channel program execution failed:\nPermission denied.")
        mode, *names = args[args.index("-") + 1 :]
        try:
            for name in names:
                self._destroy(["-d", name] if mode == "defer" else [name], stdin)
        except _Failure:
            return json.dumps({"return": "refused"})
        return json.dumps({"return": "destroyed"})

    def _destroy(self, args: list[str], stdin: int | None) -> str:
        if "," in args[-1]:
            filesystem, _, short_names = args[-1].partition("@")
            for short_name in short_names.split(","):
                self._destroy([*args[:-1], f"{filesystem}@{short_name}"], stdin)
            return ""
        name = args[-1]
        is_cloned = any(each["origin"] == name for each in self.objects.values())
        if "-d" in args and (self._require(name)["userrefs"] != "0" or is_cloned):
            self.objects[name]["defer_destroy"] = "on"
            return ""
        item = self._require(name)
        if item["userrefs"] != "0":
            raise _Failure(
                f"cannot destroy snapshot {name}: it's being held. Run 'zfs holds -r {name}' to see holders."
            )
        if any(each["origin"] == name for each in self.objects.values()):
            raise _Failure(f"cannot destroy '{name}': snapshot has dependent clones")
        if any(each != name and _get_filesystem(each) == name and "@" in each for each in self.objects):
            raise _Failure(f"cannot destroy '{name}': filesystem has children")
        for each in [each for each in self.objects if each == name or each.startswith(f"{name}#")]:
            del self.objects[each]
        return ""

    def _create(self, args: list[str], stdin: int | None) -> str:
        if args[-1] in self.objects:
            raise _Failure(f"cannot create '{args[-1]}': dataset already exists")
        self.add(args[-1])
        return ""

    _snapshot = _create

    def _set(self, args: list[str], stdin: int | None) -> str:
        return ""

    def _unmount(self, args: list[str], stdin: int | None) -> str:
        return ""

    def _inherit(self, args: list[str], stdin: int | None) -> str:
        return ""

    def _rollback(self, args: list[str], stdin: int | None) -> str:
        txg = int(self._require(args[-1])["createtxg"])
        if any(
            name.startswith((f"{_get_filesystem(args[-1])}@", f"{_get_filesystem(args[-1])}#"))
            and int(item["createtxg"]) > txg
            for name, item in self.objects.items()
        ):
            raise _Failure(f"cannot rollback to '{args[-1]}': more recent snapshots or bookmarks exist")
        return ""

    def _send(self, args: list[str], stdin: int | None) -> str:
        self._require(args[-1])
        return f"stream of {args[-1]}"

    def _receive(self, args: list[str], stdin: int | None) -> str:
        assert stdin is not None
        with os.fdopen(stdin, "rb", closefd=False) as file:
            self.received_stream = file.read()
        target = args[-1]
        base_guid = struct.unpack_from("<Q", self.received_stream, 48)[0]
        snapshots = [name for name in self.objects if name.startswith(f"{_get_filesystem(target)}@")]
        bases = [name for name in snapshots if int(self.objects[name]["guid"]) == base_guid]
        if base_guid and not bases:
            raise _Failure(
                f"cannot receive incremental stream: most recent snapshot of {target} does not\n"
                "match incremental source"
            )
        if "-F" in args and bases:
            for name in snapshots[snapshots.index(bases[0]) + 1 :]:
                del self.objects[name]
        self.add(_get_filesystem(target), target)
        return ""


def make_stream(from_guid: int) -> bytes:
    name = b"tank/source@new".ljust(256, b"\0")
    return struct.pack("<IIQQQIIQQ256s", 0, 0, 0x2F5BACBAC, 0x11, 7, 2, 0, 99, from_guid, name) + b"records"


@pytest.fixture
def zfs(monkeypatch: pytest.MonkeyPatch) -> FakeZfs:
    fake_zfs = FakeZfs()
    fake_zfs.add("tank", "dozer")
    monkeypatch.setattr(zfs_core.run, "execute", fake_zfs.execute)
    monkeypatch.setattr(capabilities, "_capabilities", make_openzfs_capabilities((2, 3)))
    return fake_zfs


@pytest.fixture
def run_lzc(zfs: FakeZfs, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_with_arguments(*argv: str) -> tuple[int, dict[str, Any]]:
        status = main(argv)
        return status, json.loads(capsys.readouterr().out)

    return run_with_arguments


def list_changes(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change["action"], change["name"]) for change in result.get("changes", [])]


# -- receive ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "pipe"])
def receive_stream(
    request: pytest.FixtureRequest, run_lzc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Return a function that receives a stream into tank/a@new, from a file or from standard input."""

    def run_with_stream(from_guid: int, *options: str) -> tuple[int, dict[str, Any]]:
        stream = make_stream(from_guid)
        if request.param == "file":
            (tmp_path / "stream").write_bytes(stream)
            return run_lzc("receive", "--file", f"{tmp_path}/stream", *options, "tank/a@new")
        read_fd, write_fd = os.pipe()
        os.write(write_fd, stream)
        os.close(write_fd)
        with os.fdopen(read_fd) as file:
            monkeypatch.setattr(sys, "stdin", file)
            return run_lzc("receive", *options, "tank/a@new")

    return run_with_stream


def test_a_forced_receive_refuses_to_destroy_newer_snapshots(zfs: FakeZfs, receive_stream: Run) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2", "tank/a@3")
    base_guid = int(zfs.objects["tank/a@1"]["guid"])
    status, result = receive_stream(base_guid, "--force")
    assert (status, result["error"]["kind"], result["changed"]) == (5, "in_use", False), result
    assert result["error"]["related"] == ["tank/a@2", "tank/a@3"]
    assert "--destroy-newer" in result["error"]["message"]
    assert zfs.list_changing_commands() == []
    status, result = receive_stream(base_guid, "--force", "--destroy-newer")
    assert status == 0, result
    expected_removals = [("destroy", "tank/a@2"), ("destroy", "tank/a@3")]
    assert list_changes(result) == [*expected_removals, ("receive", "tank/a@new")]
    assert zfs.list_changing_commands() == ["receive -u -F tank/a@new"]
    assert zfs.received_stream == make_stream(base_guid)


def test_a_forced_receive_onto_the_newest_snapshot_needs_no_further_option(zfs: FakeZfs, receive_stream: Run) -> None:
    zfs.add("tank/a", "tank/a@1")
    status, result = receive_stream(int(zfs.objects["tank/a@1"]["guid"]), "--force")
    assert (status, list_changes(result)) == (0, [("receive", "tank/a@new")]), result


def test_newer_snapshots_that_cannot_be_destroyed_are_found_before_the_transfer(
    zfs: FakeZfs, receive_stream: Run
) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2")
    base_guid = int(zfs.objects["tank/a@1"]["guid"])
    zfs.add("tank/clone", origin="tank/a@2")
    status, result = receive_stream(base_guid, "--force", "--destroy-newer")
    assert (status, result["error"]["related"]) == (5, ["tank/clone"]), result
    zfs.objects["tank/a@2"]["userrefs"] = "1"
    status, result = receive_stream(base_guid, "--force", "--destroy-newer")
    assert (status, result["error"]["related"]) == (5, ["tank/a@2"]), result
    assert zfs.list_changing_commands() == []


def test_a_whole_stream_replaces_a_filesystem_only_with_its_option(zfs: FakeZfs, receive_stream: Run) -> None:
    zfs.add("tank/a")
    status, result = receive_stream(0, "--force", "--destroy-newer")
    assert (status, result["error"]["related"], zfs.list_changing_commands()) == (4, ["tank/a"], []), result
    assert "--replace" in result["error"]["message"]
    status, result = receive_stream(0, "--force", "--replace")
    assert (status, list_changes(result)) == (0, [("replace", "tank/a"), ("receive", "tank/a@new")]), result


def test_a_filesystem_with_snapshots_is_not_replaced(zfs: FakeZfs, receive_stream: Run) -> None:
    zfs.add("tank/a", "tank/a@1")
    status, result = receive_stream(0, "--force", "--replace")
    assert (status, result["error"]["related"], zfs.list_changing_commands()) == (5, ["tank/a@1"], []), result


def test_zfs_fuse_receives_only_onto_the_newest_snapshot(
    zfs: FakeZfs, receive_stream: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    zfs.add("tank/a", "tank/a@1", "tank/a@2")
    status, result = receive_stream(int(zfs.objects["tank/a@1"]["guid"]), "--force", "--destroy-newer")
    assert (status, result["error"]["related"], zfs.list_changing_commands()) == (8, ["tank/a@2"], []), result
    assert "lzc rollback --destroy-newer tank/a@1" in result["error"]["message"]


def test_check_mode_predicts_what_a_file_would_destroy(zfs: FakeZfs, run_lzc: Run, tmp_path: Path) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2")
    (tmp_path / "stream").write_bytes(make_stream(int(zfs.objects["tank/a@1"]["guid"])))
    argv = ("--check", "receive", "--file", f"{tmp_path}/stream", "tank/a@new", "--force")
    assert run_lzc(*argv)[1]["error"]["related"] == ["tank/a@2"]
    assert list_changes(run_lzc(*argv, "--destroy-newer")[1]) == [("destroy", "tank/a@2"), ("receive", "tank/a@new")]
    assert zfs.list_changing_commands() == []


def test_an_existing_snapshot_is_kept_only_if_the_stream_contains_it(
    zfs: FakeZfs, receive_stream: Run, run_lzc: Run
) -> None:
    zfs.add("tank/a", "tank/a@new")
    status, result = receive_stream(0, "--if-absent")
    assert (status, result["error"]["kind"], result["error"]["related"]) == (4, "exists", ["tank/a@new"]), result
    assert "the stream contains another snapshot" in result["error"]["message"]
    zfs.objects["tank/a@new"]["guid"] = "99"
    status, result = receive_stream(0, "--if-absent")
    assert (status, result["changed"], result["unchanged"]) == (0, False, ["tank/a@new"]), result
    assert zfs.list_changing_commands() == []


def test_an_existing_snapshot_is_kept_if_there_is_no_stream(
    zfs: FakeZfs, run_lzc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zfs.add("tank/a", "tank/a@new")
    (tmp_path / "other").write_text("no stream")
    for name in ("other", "missing"):
        assert run_lzc("receive", "--if-absent", "--file", f"{tmp_path}/{name}", "tank/a@new")[0] == 0
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd) as file, os.fdopen(write_fd, "w"):
        monkeypatch.setattr(sys, "stdin", file)
        assert run_lzc("--check", "receive", "--if-absent", "tank/a@new")[0] == 0, "check mode must not wait"
        status, result = run_lzc("receive", "--if-absent", "--timeout", "0.1", "tank/a@new")
    assert (status, result["error"]["kind"]) == (10, "timeout"), result
    with Path(os.devnull).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run_lzc("receive", "--if-absent", "tank/a@new")[1]["unchanged"] == ["tank/a@new"]


def test_the_options_that_allow_data_loss_need_force(run_lzc: Run) -> None:
    for option in ("--destroy-newer", "--replace"):
        status, result = run_lzc("receive", option, "tank/a@new")
        assert (status, "add it" in result["error"]["message"]) == (2, True), result


# -- send -------------------------------------------------------------------------------------------------------------


def test_a_file_of_the_user_is_never_overwritten(zfs: FakeZfs, run_lzc: Run, tmp_path: Path) -> None:
    zfs.add("tank/a", "tank/a@1")
    target, part = tmp_path / "stream", tmp_path / "stream.part"
    part.write_text("of the user")
    assert run_lzc("send", "tank/a@1", "--file", str(target))[0] == 0
    assert (target.read_text(), part.read_text()) == ("stream of tank/a@1", "of the user")
    target.unlink()
    zfs.hooks_by_command["send tank/a@1"] = lambda: target.write_text("of another run")
    status, result = run_lzc("send", "tank/a@1", "--file", str(target))
    assert (status, result["error"]["kind"], result["changed"]) == (4, "exists", False), result
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "stream": "of another run",
        "stream.part": "of the user",
    }


def test_runs_that_overlap_do_not_mix_their_files(zfs: FakeZfs, run_lzc: Run, tmp_path: Path) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2")
    target = str(tmp_path / "stream")
    zfs.hooks_by_command["send tank/a@1"] = lambda: main(["send", "tank/a@2", "--file", target])
    main(["send", "tank/a@1", "--file", target])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["stream of tank/a@2"]


def test_a_file_system_without_hard_links_gets_the_file_too(
    zfs: FakeZfs, run_lzc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_link(*paths: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse_link)
    zfs.add("tank/a", "tank/a@1")
    assert run_lzc("send", "tank/a@1", "--file", f"{tmp_path}/stream")[0] == 0
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("stream", "stream of tank/a@1")]


def test_a_receiver_that_prints_more_than_a_pipe_holds_does_not_block(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@1")
    zfs.stream_bytes = 1 << 20
    # It reads the stream only after it has printed.
    script = (
        "head -c 1000000 /dev/zero | tr '\\0' x; head -c 1000000 /dev/zero >&2; cat >/dev/null; echo; echo '{\"a\": 1}'"
    )
    with _limited_time():
        status, result = run_lzc("send", "tank/a@1", "--", "sh", "-c", script)
    assert (status, result["receiver"]) == (0, {"a": 1}), result


def test_a_receiver_that_does_not_end_is_killed(zfs: FakeZfs, run_lzc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers: list[subprocess.Popen[bytes]] = []

    def start_receiver(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        receivers.append(_POPEN(*args, **options))
        return receivers[-1]

    monkeypatch.setattr(subprocess, "Popen", start_receiver)
    zfs.add("tank/a", "tank/a@1")
    with _limited_time():
        status, result = run_lzc("send", "tank/a@1", "--timeout", "0.2", "--", "sleep", "1000")
    assert (status, result["error"]["kind"]) == (10, "timeout"), result
    zfs.hooks_by_command["send tank/a@1"] = lambda: _raise_error(CommandError(Kind.NOT_FOUND, "gone"))
    with _limited_time():
        assert run_lzc("send", "tank/a@1", "--", "sleep", "1000")[0] == 3
    assert [receiver.returncode for receiver in receivers] == [-signal.SIGKILL] * 2


def _raise_error(error: Exception) -> NoReturn:
    raise error


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Fail if the code in the context takes longer than a minute."""

    def fail(number: int, frame: object) -> NoReturn:
        raise TimeoutError("lzc waits forever")

    previous_handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)


# -- rollback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_options", [(), ("--check",)])
def test_a_rollback_destroys_newer_bookmarks_only_with_its_option(
    zfs: FakeZfs, run_lzc: Run, check_options: tuple[str, ...]
) -> None:
    zfs.add("tank/a", "tank/a@1")
    zfs.add("tank/a#1", createtxg=zfs.objects["tank/a@1"]["createtxg"])
    zfs.add("tank/a@2", "tank/a#2")
    status, result = run_lzc(*check_options, "rollback", "tank/a@1")
    assert (status, result["error"]["related"]) == (5, ["tank/a#2", "tank/a@2"]), result
    assert zfs.list_changing_commands() == []
    status, result = run_lzc(*check_options, "rollback", "--destroy-newer", "tank/a@1")
    assert status == 0, result
    expected_removals = [("destroy", "tank/a#2"), ("destroy", "tank/a@2")]
    assert list_changes(result) == [*expected_removals, ("rollback", "tank/a")]
    assert bool(zfs.list_changing_commands()) is not bool(check_options)
    assert "tank/a#1" in zfs.objects


@pytest.mark.parametrize("check_options", [(), ("--check",)])
def test_clones_and_holds_of_newer_snapshots_prevent_a_rollback(
    zfs: FakeZfs, run_lzc: Run, check_options: tuple[str, ...]
) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2", "tank/a@3")
    zfs.add("tank/clone", origin="tank/a@3")
    status, result = run_lzc(*check_options, "rollback", "--destroy-newer", "tank/a@1")
    assert (status, result["error"]["related"], zfs.list_changing_commands()) == (5, ["tank/clone"], []), result
    zfs.objects["tank/a@3"]["userrefs"] = "1"
    status, result = run_lzc(*check_options, "rollback", "--destroy-newer", "tank/a@1")
    assert (status, result["error"]["related"], zfs.list_changing_commands()) == (5, ["tank/a@3"], []), result


@pytest.mark.parametrize(("written_bytes", "changes"), [("0", []), ("512", [("rollback", "tank/a")])])
def test_a_rollback_is_predicted_by_reading_only(
    zfs: FakeZfs, run_lzc: Run, written_bytes: str, changes: list[tuple[str, str]]
) -> None:
    zfs.add("tank/a", **{"written@tank/a@1": written_bytes})
    zfs.add("tank/a@1")
    status, result = run_lzc("--check", "rollback", "tank/a@1")
    assert (status, list_changes(result)) == (0, changes), result
    assert {command[0] for command in zfs.commands} <= {"get", "list"}


def test_a_rollback_is_predicted_on_zfs_fuse_by_reading_only(
    zfs: FakeZfs, run_lzc: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "_capabilities", ZFS_FUSE_CAPABILITIES)
    zfs.add("tank/a", unique="0")
    zfs.add("tank/a@1")
    assert run_lzc("--check", "rollback", "tank/a@1")[1]["changed"] is False
    zfs.objects["tank/a"]["unique"] = "4096"
    assert run_lzc("--check", "rollback", "tank/a@1")[1]["changed"] is True
    assert {command[0] for command in zfs.commands} <= {"get", "list"}


@pytest.mark.parametrize("filesystem", ["tank/a", "tank/new"])
def test_a_rollback_to_an_assumed_snapshot_is_predicted(zfs: FakeZfs, run_lzc: Run, filesystem: str) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a#1")
    status, result = run_lzc("--check", "--assume", f"{filesystem}@x", "rollback", f"{filesystem}@x")
    assert (status, list_changes(result)) == (0, [("rollback", filesystem)]), result
    # A snapshot that exists is examined even if it is assumed.
    status, result = run_lzc("--check", "--assume", "tank/a@1", "rollback", "tank/a@1")
    assert (status, result["error"]["related"]) == (5, ["tank/a#1"]), result
    assert zfs.list_changing_commands() == []


# -- bookmarks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_options", [(), ("--check",)])
def test_a_bookmark_is_kept_only_if_it_belongs_to_the_snapshot(
    zfs: FakeZfs, run_lzc: Run, check_options: tuple[str, ...]
) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a#x")
    argv = (*check_options, "bookmark", "--if-absent", "tank/a@1", "tank/a#x")
    status, result = run_lzc(*argv)
    assert (status, result["error"]["kind"], result["error"]["related"]) == (4, "exists", ["tank/a#x"]), result
    zfs.objects["tank/a#x"]["guid"] = zfs.objects["tank/a@1"]["guid"]
    assert run_lzc(*argv)[1]["unchanged"] == ["tank/a#x"]
    del zfs.objects["tank/a@1"]
    assert run_lzc(*argv)[1]["unchanged"] == ["tank/a#x"], "a bookmark outlives its snapshot"
    assert zfs.list_changing_commands() == []


# -- failure reports --------------------------------------------------------------------------------------------------


def test_a_failure_between_two_snapshots_reports_the_one_that_was_destroyed(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/b", "tank/b@2")
    zfs.messages_by_command["destroy tank/b@2"] = "cannot destroy 'tank/b@2': dataset is busy"
    status, result = run_lzc("destroy", "tank/a@1", "tank/b@2")
    assert (status, result["error"]["kind"], result["changed"]) == (5, "in_use", True), result
    assert list_changes(result) == [("destroy", "tank/a@1")]


def test_a_filesystem_created_by_a_hung_command_is_reported(zfs: FakeZfs, run_lzc: Run) -> None:
    def create_and_hang() -> None:
        zfs.add("tank/a")
        raise ZFSGenericError(errno.ETIMEDOUT, "tank/a", "`zfs create` did not finish within 60 s")

    zfs.hooks_by_command["create tank/a"] = create_and_hang
    status, result = run_lzc("create", "tank/a")
    assert (status, result["changed"], list_changes(result)) == (10, True, [("create", "tank/a")]), result


def test_a_snapshot_that_someone_else_created_in_the_meantime_is_not_reported(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a")
    zfs.hooks_by_command["snapshot tank/a@1"] = lambda: zfs.add("tank/a@1")
    status, result = run_lzc("snapshot", "tank/a@1")
    assert (status, result["error"]["kind"], result["changed"]) == (4, "exists", False), result


def test_the_cause_of_a_failure_is_reported_even_if_zfs_cannot_be_queried(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@1")
    error_message = "internal error: failed to initialize ZFS library"
    zfs.messages_by_command["destroy tank/a@1"] = "cannot destroy 'tank/a@1': dataset is busy"
    zfs.hooks_by_command["destroy tank/a@1"] = lambda: zfs.messages_by_command.update(
        {"get -H -o name,value type tank/a@1": error_message}
    )
    status, result = run_lzc("destroy", "tank/a@1")
    assert (status, result["changed"]) == (5, False), result


# -- predictions ------------------------------------------------------------------------------------------------------


def test_snapshots_of_two_pools_are_refused_in_check_mode_too(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@x", "dozer/b", "dozer/b@x")
    for check_options in ((), ("--check",)):
        status, result = run_lzc(*check_options, "destroy", "tank/a@x", "dozer/b@x")
        assert (status, result["error"]["kind"], zfs.list_changing_commands()) == (2, "invalid", []), result
    assert list_changes(run_lzc("destroy", "--defer", "tank/a@x", "dozer/b@x")[1]) == [
        ("destroy", "tank/a@x"),
        ("destroy", "dozer/b@x"),
    ]


@pytest.mark.parametrize("options", [(), ("--recursive",)])
def test_a_child_that_is_named_too_is_destroyed_once(zfs: FakeZfs, run_lzc: Run, options: tuple[str, ...]) -> None:
    zfs.add("tank/a", "tank/a/b", "dozer/c")
    argv = ("destroy", *options, "tank/a", "tank/a/b", "dozer/c")
    prediction = run_lzc("--check", *argv)
    status, result = run_lzc(*argv)
    assert (status, sorted(list_changes(result))) == (
        0,
        [("destroy", "dozer/c"), ("destroy", "tank/a"), ("destroy", "tank/a/b")],
    ), result
    assert prediction[1]["changes"] == result["changes"]


def test_a_clone_that_is_named_too_is_destroyed_first(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@1")
    zfs.add("tank/clone", origin="tank/a@1")
    status, result = run_lzc("destroy", "--recursive", "tank/a", "tank/clone")
    assert (status, [name for _, name in list_changes(result)]) == (0, ["tank/clone", "tank/a@1", "tank/a"]), result


@pytest.mark.parametrize("options", [(), ("--recursive",)])
def test_all_names_are_checked_before_one_is_destroyed(zfs: FakeZfs, run_lzc: Run, options: tuple[str, ...]) -> None:
    zfs.add("tank/a", "tank/b")
    zfs.add("tank/b@x", userrefs="1")
    status, result = run_lzc("destroy", *options, "tank/a", "tank/b")
    assert (status, result["error"]["related"], result["changed"]) == (5, ["tank/b@x"], False), result
    assert zfs.list_changing_commands() == []


def test_holds_on_snapshots_gone_with_their_filesystem_are_released(zfs: FakeZfs, run_lzc: Run) -> None:
    status, result = run_lzc("release", "--if-present", "--recursive", "keep", "tank/gone@x")
    assert (status, result["changed"], result["unchanged"]) == (0, False, ["tank/gone@x"]), result
    assert run_lzc("release", "--recursive", "keep", "tank/gone@x")[0] == 3


# -- deferred removal -------------------------------------------------------------------------------------------------


def test_retention_destroys_the_snapshots_of_each_pool_with_one_program(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.can_run_programs = True
    for filesystem in ("tank", "tank/a", "tank/a/b", "dozer", "dozer/c"):
        zfs.add(filesystem, *(f"{filesystem}@{number}" for number in (1, 2, 3)))
    zfs.objects["tank/a@2"]["userrefs"] = "1"
    zfs.objects["tank/a/b@1"]["defer_destroy"] = "on"
    zfs.add("tank/clone", origin="tank@1")
    argv = ("destroy", "--if-present", "--recursive", "--defer", "tank@1", "tank@2", "dozer@1", "dozer@2")
    prediction = run_lzc("--check", *argv)[1]
    assert zfs.list_changing_commands() == []
    status, result = run_lzc(*argv)
    assert (status, result["changes"], result["unchanged"]) == (0, prediction["changes"], ["tank/a/b@1"]), result
    assert sorted(name for action, name in list_changes(result) if action == "defer") == ["tank/a@2", "tank@1"]
    programs = [line.split() for line in zfs.list_changing_commands()]
    assert [words[0] for words in programs] == ["program", "program"]
    names = ["tank@1", "tank@2", "tank/a@1", "tank/a@2", "tank/a/b@2"]
    assert [sorted(words[words.index("-") + 2 :]) for words in programs] == [
        sorted(names),
        ["dozer/c@1", "dozer/c@2", "dozer@1", "dozer@2"],
    ]
    assert {name for name in names if name in zfs.objects} == {"tank@1", "tank/a@2"}
    assert not [name for name in zfs.objects if name.startswith("dozer") and name.endswith(("@1", "@2"))]
    status, result = run_lzc(*argv)
    assert (status, result["changed"]) == (0, False), result
    assert {"tank@1", "tank/a@2", "tank/a/b@1"} <= set(result["unchanged"])


@pytest.mark.parametrize("option", ["--defer", "--if-present"])
def test_only_existing_snapshots_are_destroyed_recursively(zfs: FakeZfs, run_lzc: Run, option: str) -> None:
    zfs.add("tank", "tank/a", "tank/a@1")
    status, result = run_lzc("destroy", "--recursive", option, "tank@1")
    assert (status, list_changes(result)) == (0, [("destroy", "tank/a@1")]), result


def test_retention_destroys_the_snapshots_of_one_filesystem_with_one_command(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/a@2", "tank/a@3")
    status, result = run_lzc("destroy", "--defer", "tank/a@1", "tank/a@2")
    assert (status, list_changes(result)) == (0, [("destroy", "tank/a@1"), ("destroy", "tank/a@2")]), result
    assert zfs.list_changing_commands() == ["destroy -d tank/a@1,2"]


def test_a_failed_deferred_removal_reports_the_snapshots_that_it_destroyed_or_marked(
    zfs: FakeZfs, run_lzc: Run
) -> None:
    zfs.add("tank/a", "tank/a@1", "tank/b", "tank/b@2", "tank/c", "tank/c@3", "tank/d")
    zfs.add("tank/d@4", userrefs="1")
    zfs.objects["tank/a@1"]["userrefs"] = "1"
    for name in ("tank/c@3", "tank/d@4"):
        zfs.messages_by_command[f"destroy -d {name}"] = f"cannot destroy '{name}': I/O error"
    status, result = run_lzc("destroy", "--defer", "tank/a@1", "tank/b@2", "tank/c@3", "tank/d@4")
    assert (status, list_changes(result)) == (1, [("defer", "tank/a@1"), ("destroy", "tank/b@2")]), result


# -- properties -------------------------------------------------------------------------------------------------------


def test_lzc_refuses_a_read_only_property_that_the_library_ignores(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/a", creation="1764140400")
    # OpenZFS, lib/libzfs/libzfs_dataset.c: zfs_valid_proplist.
    message = "cannot set property for 'tank/a': 'creation' is readonly"
    zfs.messages_by_command["set creation=0 tank/a"] = message
    status, result = run_lzc("set", "creation=0", "tank/a")
    assert (status, result["error"]["kind"], result["changed"]) == (2, "invalid", False), result
    assert message in result["error"]["message"]
    zfs_core.lzc_set_prop("tank/a", "creation", 0)
    assert zfs.list_changing_commands() == ["set creation=0 tank/a"] * 2
    zfs.messages_by_command["set quota=x tank/a"] = "cannot set property for 'tank/a': bad numeric value 'x'"
    with pytest.raises(PropertyInvalid):
        zfs_core.lzc_set_prop("tank/a", "quota", "x")


def test_a_value_that_zfs_stores_in_a_different_form_changes_once(zfs: FakeZfs, run_lzc: Run) -> None:
    zfs.add("tank/v", **{"refreservation": "0", "refreservation source": "default"})
    stored_properties = {"refreservation": "1082130432", "refreservation source": "local"}
    zfs.hooks_by_command["set refreservation=auto tank/v"] = lambda: zfs.objects["tank/v"].update(stored_properties)
    status, result = run_lzc("set", "refreservation=auto", "tank/v")
    assert (status, list_changes(result)) == (0, [("set", "tank/v")]), result
    status, result = run_lzc("set", "refreservation=auto", "tank/v")
    assert (status, result["changed"], result["unchanged"]) == (0, False, ["tank/v refreservation"]), result
    assert run_lzc("--check", "set", "refreservation=auto", "tank/v")[1]["changed"]
