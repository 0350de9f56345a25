"""Test commands, files and terminals in a sandbox with the unmodified, published ``e2b`` client and a live gateway."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import e2b
import pytest
from e2b import FilesystemEventType, FileType, PtySize, Sandbox

from tests.sdk.coverage import covers
from tests.sdk.test_e2b import client_environment, wait_until

__all__ = ["client_environment"]

_LARGE_FILE_BYTES = 50 << 20


@pytest.fixture(scope="module")
def sandbox(server) -> Iterator[Sandbox]:
    new_sandbox = Sandbox.create(server.template, api_key=server.key, api_url=server.url, sandbox_url=server.url)
    yield new_sandbox
    new_sandbox.kill()


@pytest.mark.core
@covers("Commands.run")
def test_commands_return_output_and_exit_code(sandbox):
    output: list[tuple[str, str]] = []
    result = sandbox.commands.run(
        'echo out; echo err >&2; pwd; echo "$WORD"',
        envs={"WORD": "a b"},
        cwd="/etc",
        on_stdout=lambda text: output.append(("out", text)),
        on_stderr=lambda text: output.append(("err", text)),
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n/etc\na b\n", "err\n", 0)
    assert "".join(text for kind, text in output if kind == "out") == result.stdout
    with pytest.raises(e2b.CommandExitException) as error_info:
        sandbox.commands.run("echo why >&2; exit 7")
    assert (error_info.value.exit_code, error_info.value.stderr) == (7, "why\n")


@covers("Commands.run", note="`user` can be any user of the sandbox, and defaults to root")
def test_commands_run_as_another_user(sandbox):
    assert sandbox.commands.run("id -un; pwd; echo $HOME", user="user").stdout == "user\n/home/user\n/home/user\n"
    assert sandbox.commands.run("id -un").stdout == "root\n"
    with pytest.raises(e2b.AuthenticationException, match="nobody-here"):
        sandbox.commands.run("true", user="nobody-here")


def test_a_command_is_killed_at_its_timeout(sandbox):
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 600.1", timeout=1)
    wait_until(lambda: sandbox.commands.run("pgrep -fc 'sleep 600[.]1' || true").stdout == "0\n")


def test_large_output_is_complete(sandbox):
    line_count = 200_000
    result = sandbox.commands.run(f"seq {line_count}", timeout=120)
    assert result.stdout.endswith(f"\n{line_count}\n") and result.stdout.count("\n") == line_count


@pytest.mark.core
@covers(
    "Commands.list",
    "Commands.connect",
    "Commands.send_stdin",
    "Commands.kill",
    "CommandHandle.wait",
    "CommandHandle.disconnect",
    "CommandHandle.kill",
)
def test_background_commands_can_be_reconnected_and_killed(sandbox):
    command = "while read line && [ $line != leave ]; do echo got $line; done; echo end"
    handle = sandbox.commands.run(command, background=True, stdin=True)
    assert handle.pid in [each.pid for each in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "one\n")
    handle.disconnect()
    reconnected_handle = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "two\nleave\n")
    assert reconnected_handle.wait().stdout.endswith("got two\nend\n")
    second_handle = sandbox.commands.run("sleep 600.2", background=True)
    assert sandbox.commands.kill(second_handle.pid)
    with pytest.raises(e2b.CommandExitException):
        second_handle.wait()
    assert not second_handle.kill()


@covers(
    "Commands.stream_input",
    "Commands.close_stdin",
    "CommandHandle.send_stdin",
    "CommandHandle.close_stdin",
)
def test_standard_input_can_be_streamed_and_closed(sandbox):
    handle = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    handle.send_stdin("one\n")
    sandbox.commands.stream_input(handle.pid, ["two\n"])
    sandbox.commands.stream_input(handle.pid, [b"three\n"])
    handle.close_stdin()
    assert handle.wait().stdout == "one\ntwo\nthree\nend\n"
    second_handle = sandbox.commands.run("sleep 600.2", background=True, stdin=True)
    sandbox.commands.close_stdin(second_handle.pid)
    assert second_handle.kill()


def test_a_server_outlives_its_stream(sandbox):
    handle = sandbox.commands.run("python3 -m http.server 8123", background=True)
    handle.disconnect()
    wait_until(
        lambda: (
            sandbox.commands.run(
                "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123\")' && echo up || true"
            ).stdout
            == "up\n"
        )
    )
    assert sandbox.commands.kill(handle.pid)


@covers("Pty.create", "Pty.connect", "Pty.resize", "Pty.send_stdin", "Pty.stream_input", "Pty.kill")
def test_a_terminal_can_be_resized_and_reconnected(sandbox):
    output = bytearray()
    handle = sandbox.pty.create(PtySize(rows=24, cols=80), user="user", cwd="/tmp", envs={"PS1": "$ "}, timeout=60)
    sandbox.pty.resize(handle.pid, PtySize(rows=33, cols=101))
    sandbox.pty.send_stdin(handle.pid, b"stty size; id -un; pwd\n")
    handle.disconnect()
    reconnected_handle = sandbox.pty.connect(handle.pid)
    sandbox.pty.stream_input(handle.pid, [b"echo A$((20+3));", b" exit\n"])
    reconnected_handle.wait(on_pty=output.extend)
    assert b"A23" in output
    second_handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    assert sandbox.pty.kill(second_handle.pid)
    wait_until(lambda: not sandbox.pty.kill(second_handle.pid))


@pytest.mark.core
@covers("Filesystem.write", "Filesystem.read", "Filesystem.write_files", "Filesystem.exists", "Filesystem.get_info")
def test_files_are_written_and_read(sandbox):
    files = sandbox.files
    assert files.write("/tmp/t/ü b.txt", "héllo").path == "/tmp/t/ü b.txt"
    assert files.read("/tmp/t/ü b.txt") == "héllo"
    assert files.read("/tmp/t/ü b.txt", format="bytes") == bytearray("héllo".encode())
    entries = files.write_files([{"path": f"/tmp/t/{number}", "data": str(number)} for number in range(5)])
    assert [entry.name for entry in entries] == [str(number) for number in range(5)]
    assert files.exists("/tmp/t/4") and not files.exists("/tmp/t/5")
    files.write("note", "mine", user="user")
    info = files.get_info("/home/user/note")
    assert (info.owner, info.size, info.type) == ("user", 4, FileType.FILE)
    with pytest.raises(e2b.FileNotFoundException):
        files.read("/tmp/none")
    with pytest.raises(e2b.InvalidArgumentException):
        files.read("/tmp")


def test_large_files_are_uploaded_and_downloaded(sandbox):
    block = hashlib.sha256(b"block").digest() * 2048
    data = block * (_LARGE_FILE_BYTES // len(block))
    sandbox.files.write("/tmp/big", data)
    remote_digest = sandbox.commands.run("sha256sum </tmp/big", timeout=120).stdout.split()[0]
    assert remote_digest == hashlib.sha256(data).hexdigest()
    digest, size = hashlib.sha256(), 0
    for piece in sandbox.files.read("/tmp/big", format="stream"):
        digest.update(piece)
        size += len(piece)
    assert (size, digest.hexdigest()) == (len(data), remote_digest)
    sandbox.files.remove("/tmp/big")


@pytest.mark.core
@covers("Filesystem.list", "Filesystem.make_dir", "Filesystem.rename", "Filesystem.remove")
def test_directories_are_created_listed_and_removed(sandbox):
    files = sandbox.files
    assert files.make_dir("/tmp/d/e") and not files.make_dir("/tmp/d/e")
    files.write("/tmp/d/e/f", "123")
    assert [(entry.path, entry.type) for entry in files.list("/tmp/d", depth=2)] == [
        ("/tmp/d/e", FileType.DIR),
        ("/tmp/d/e/f", FileType.FILE),
    ]
    assert files.rename("/tmp/d/e/f", "/tmp/d/g").path == "/tmp/d/g"
    files.remove("/tmp/d")
    assert not files.exists("/tmp/d")
    with pytest.raises(e2b.FileNotFoundException):
        files.list("/tmp/d")


@covers("Filesystem.watch_dir", "WatchHandle.get_new_events", "WatchHandle.stop")
def test_watches_report_events(sandbox):
    sandbox.files.make_dir("/tmp/w/deep")
    flat_watch = sandbox.files.watch_dir("/tmp/w")
    recursive_watch = sandbox.files.watch_dir("/tmp/w", recursive=True)
    sandbox.files.write("/tmp/w/a", "1")
    sandbox.files.write("/tmp/w/deep/b", "2")
    sandbox.files.rename("/tmp/w/a", "/tmp/w/c")
    sandbox.files.remove("/tmp/w/c")
    expected_events = {
        ("a", FilesystemEventType.CREATE),
        ("a", FilesystemEventType.RENAME),
        ("c", FilesystemEventType.REMOVE),
    }
    for handle, extra_events in ((flat_watch, set()), (recursive_watch, {("deep/b", FilesystemEventType.CREATE)})):
        events: set[tuple[str, Any]] = set()

        def has_enough_events(handle=handle, events=events, extra_events=extra_events) -> bool:
            events.update((event.name, event.type) for event in handle.get_new_events())
            return (expected_events | extra_events) <= events

        wait_until(has_enough_events)
        assert extra_events or not any(name.startswith("deep/") for name, _ in events)
        handle.stop()
        with pytest.raises(e2b.SandboxException):
            handle.get_new_events()


def test_writing_to_a_full_disk_fails(sandbox, server):
    if not server.abilities.memory:
        pytest.skip("a jail's quota is as large as its template's disk: filling it takes too long")
    sandbox.commands.run("mount -t tmpfs -o size=1m none /mnt")
    with pytest.raises(e2b.NotEnoughSpaceException):
        sandbox.files.write("/mnt/x", b"x" * (2 << 20))
    sandbox.commands.run("umount /mnt")


def test_missing_git_is_reported(sandbox):
    with pytest.raises(e2b.CommandExitException) as error_info:
        sandbox.git.init("/tmp/repository")
    assert error_info.value.exit_code == 127


def test_concurrent_commands_receive_their_own_input(sandbox):
    handles = [sandbox.commands.run(f"read x; echo {number} $x", background=True, stdin=True) for number in range(12)]
    for handle in reversed(handles):
        handle.send_stdin("now\n")
    assert [handle.wait().stdout for handle in handles] == [f"{number} now\n" for number in range(12)]
