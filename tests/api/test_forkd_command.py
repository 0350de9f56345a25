"""The command `forkd` and its port, with a real gateway and, where possible, the published client."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import forkd
import httpx
import pytest

from tests.api.test_transfers import make_foreign_file
from tests.support import forkd_command, session
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway
from tests.support.memory_host import MemorySource
from tests.support.waiting import wait_until

StartCommand = Callable[..., subprocess.Popen[str]]
_TIMEOUT_SECONDS = 20


@pytest.fixture
def target(memory_gateway: MemoryGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address on which the command will listen. The command is on PATH and configured for the gateway."""
    address = f"127.0.0.1:{session.allocate_port()}"
    forkd_command.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FORKD_URL", memory_gateway.url)
    monkeypatch.setenv("FORKD_TOKEN", ADMIN_KEY)
    monkeypatch.setenv("FORKD_TARGET", address)
    monkeypatch.delenv("FORKD_REMOTE", raising=False)
    return address


@pytest.fixture
def start_command(target: str, tmp_path: Path) -> Iterator[StartCommand]:
    """A function that applies the assignments in ``settings``, starts the command, and waits until it is listening."""
    processes: list[subprocess.Popen[str]] = []

    def start_with_arguments(*args: str, settings: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = forkd_command.install(tmp_path, *settings)
        process = subprocess.Popen(
            [str(command), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        processes.append(process)
        forkd_command.wait_until_listening(target)
        return process

    yield start_with_arguments
    for process in processes:
        process.kill()
        process.communicate(timeout=_TIMEOUT_SECONDS)


@pytest.fixture
def read_error(target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command in this process, which is faster than a new process, and returns its error."""
    monkeypatch.syspath_prepend(str(forkd_command.PACKAGE_DIRECTORY / "src"))
    from sandbox_gateway_forkd.command import main  # type: ignore[import-not-found]

    def run_and_read_error(*args: str) -> str:
        assert main(args) == 1
        return capsys.readouterr().err

    return run_and_read_error


def list_sandboxes(api: httpx.Client) -> list[str]:
    return [sandbox["id"] for sandbox in api.get("/v1/sandboxes").json()]


def send_and_receive(target: str, request: bytes, *, half_close: bool = True) -> list[dict[str, Any]]:
    """Send ``request``, and return the responses until the peer closes the connection."""
    host, _, port = target.rpartition(":")
    received_bytes = b""
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
        connection.sendall(request)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 16):
            received_bytes += piece
    return [json.loads(line) for line in received_bytes.splitlines()]


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server with this handler, and yield its URL."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def other_server() -> Iterator[str]:
    """Run a server that responds to every request with an empty object."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as url:
        yield url


def test_the_published_client_spawns_and_kills_a_sandbox(api: httpx.Client, target: str) -> None:
    with forkd.Sandbox(tag="base", target=target) as sandbox:
        (sandbox_id,) = list_sandboxes(api)
        assert sandbox.commands.run(["write", "k", "v"]).exit_code == 0
        assert sandbox.commands.run(["read", "k"]) == forkd.CommandResult(stdout="v", stderr="", exit_code=0)
        missing_program_result = sandbox.commands.run("nonsense")
        assert missing_program_result.exit_code == 127 and "not found" in missing_program_result.stderr
        timeout_result = sandbox.commands.run(["sleep", "9"], timeout=1)
        assert timeout_result.exit_code == 137 and "did not finish within 1 s" in timeout_result.stderr
        assert sandbox.commands.run([]).stderr.startswith("args: ")
        assert sandbox.eval("1 + 1") == "2" and sandbox.eval("x = 5") == "None" and sandbox.eval("x") == "5"
        with pytest.raises(RuntimeError, match="forkd eval: NameError"):
            sandbox.eval("y")
        assert sandbox.ping()["pong"] is True
        api.delete(f"/v1/sandboxes/{sandbox_id}").raise_for_status()
        assert "not found" in sandbox.commands.run(["exit", "0"]).stderr
    assert list_sandboxes(api) == []


def test_a_failure_of_the_command_reaches_the_client(api: httpx.Client, target: str) -> None:
    with pytest.raises(RuntimeError, match=r"exited with code 1:\nforkd: snapshot 'missing' not found"):
        forkd.Sandbox.create(tag="missing", target=target)


def test_the_command_creates_several_sandboxes_over_the_unix_socket(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    start_command: StartCommand,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORKD_URL", memory_gateway.unix_url)
    monkeypatch.delenv("FORKD_TOKEN")
    process = start_command("fork", "--tag", "base", "-n", "3", "--settle-secs", "3600")
    assert process.stdout is not None
    sandbox_ids = [process.stdout.readline().strip() for _ in range(3)]
    assert sorted(sandbox_ids) == sorted(list_sandboxes(api))
    sandbox = forkd.Sandbox(target=target, spawn=False)
    sandbox.commands.run(["write", "k", "v"])
    assert [memory_gateway.machine(sandbox_id).state for sandbox_id in sandbox_ids] == [{"k": "v"}, {}, {}], (
        "the port serves the first sandbox"
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(_TIMEOUT_SECONDS) == 0 and list_sandboxes(api) == []
    with pytest.raises(ConnectionRefusedError):
        sandbox.ping()


def test_the_command_is_killed_at_the_timeout(api: httpx.Client, target: str) -> None:
    argv = ["forkd", "fork", "--tag", "base", "--settle-secs", "0"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    assert len(result.stdout.split()) == 1 and list_sandboxes(api) == []


def test_the_sandbox_of_a_killed_command_expires(
    memory_gateway: MemoryGateway, api: httpx.Client, start_command: StartCommand
) -> None:
    process = start_command("fork", "--tag", "base", "-n", "2", settings=("command.LEASE_SECONDS = 2",))
    time.sleep(2.2)
    assert len(list_sandboxes(api)) == 2, "the leases are renewed"
    process.kill()
    wait_until(lambda: list_sandboxes(api) == [], _TIMEOUT_SECONDS)


def test_the_command_exits_with_its_sandbox(api: httpx.Client, start_command: StartCommand) -> None:
    process = start_command("fork", "--tag", "base", "-n", "2", settings=("command.LEASE_SECONDS = 3",))
    assert process.stdout is not None
    first_id = process.stdout.readline().strip()
    api.delete(f"/v1/sandboxes/{first_id}").raise_for_status()
    _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
    assert process.returncode == 1 and "not found" in errors and list_sandboxes(api) == []


def test_attach_serves_an_existing_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, start_command: StartCommand, target: str
) -> None:
    sandbox_id = api.post("/v1/sandboxes", json={"snapshot_tag": "base"}).json()[0]["id"]
    process = start_command("attach", sandbox_id)
    sandbox = forkd.Sandbox(target=target, spawn=False)
    assert sandbox.eval("6 * 7") == "42"
    process.terminate()
    assert process.wait(_TIMEOUT_SECONDS) == 0 and list_sandboxes(api) == [sandbox_id]


def test_startup_errors_are_reported(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    target: str,
    read_error: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_args = ("fork", "--tag", "base")
    assert "'gone' not found" in read_error("attach", "gone")
    with socket.create_server(("127.0.0.1", int(target.rpartition(":")[2]))):
        assert "listens on" in read_error(*fork_args)
    address_hint = "set FORKD_TARGET=127.0.0.1:8888"
    assert f"not an address of this machine: {address_hint}" in read_error(*fork_args, "--listen", "192.0.2.1:8888")
    assert "no authentication" in read_error(*fork_args, "--listen", f"0.0.0.0:{session.allocate_port()}")
    assert "HOST:PORT" in read_error(*fork_args, "--listen", "8888")
    monkeypatch.setenv("FORKD_TOKEN", READ_KEY)
    assert "needs a key with scope admin" in read_error(*fork_args)
    monkeypatch.setenv("FORKD_TOKEN", "nonsense-0123456789")
    assert "set FORKD_TOKEN" in read_error(*fork_args)
    monkeypatch.setenv("FORKD_URL", f"http://127.0.0.1:{session.allocate_port()}")
    assert "cannot be reached" in read_error(*fork_args)
    monkeypatch.setenv("FORKD_URL", "unix:///nowhere/gateway.sock")
    assert "cannot be reached" in read_error(*fork_args)
    with other_server() as url:
        monkeypatch.setenv("FORKD_URL", url)
        assert "is not a gateway" in read_error(*fork_args)
        assert "is not a gateway" in read_error("snapshot-compact", "--from", "a", "--to", "b")
    monkeypatch.setenv("FORKD_URL", "ftp://gateway")
    assert "not a valid gateway address" in read_error(*fork_args)
    assert list_sandboxes(api) == []


@pytest.fixture
def run_main(read_error: object, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs the command in this process, and returns its output."""
    from sandbox_gateway_forkd.command import main

    def run(*args: str) -> str:
        code = main(args)
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out + output.err

    return run


@pytest.fixture
def tag(api: httpx.Client) -> str:
    """The tag of a snapshot."""
    (sandbox,) = api.post("/v1/sandboxes", json={"snapshot_tag": "base"}).json()
    return str(api.post(f"/v1/sandboxes/{sandbox['id']}/branch", json={"tag": "py_1"}).raise_for_status().json()["tag"])


def list_tags(api: httpx.Client) -> list[str]:
    return [each["tag"] for each in api.get("/v1/snapshots").json()]


@pytest.mark.parametrize("uses_socket", [False, True], ids=["tcp", "unix"])
def test_a_snapshot_is_packed_and_unpacked(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    tag: str,
    run_main: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uses_socket: bool,
) -> None:
    if uses_socket:
        monkeypatch.setenv("FORKD_URL", memory_gateway.unix_url)
        monkeypatch.delenv("FORKD_TOKEN")
    directory = tmp_path / "files"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert run_main("pack", "--tag", tag) == "py-1.forkd-snapshot.tar.zst\n", "the name that forkd chooses"
    file = directory / "py-1.forkd-snapshot.tar.zst"
    assert file.stat().st_mode & 0o777 == 0o600 and [*directory.iterdir()] == [file]
    contents = file.read_bytes()
    assert run_main("unpack", str(file), "--tag", "copy") == "copy\n"
    assert list_tags(api) == ["base", tag, "copy"]
    api.post("/v1/sandboxes", json={"snapshot_tag": "copy"}).raise_for_status()
    file.write_bytes(b"old")
    run_main("pack", "--tag", tag, "-o", str(file))
    assert len(file.read_bytes()) == len(contents) and [*directory.iterdir()] == [file], "like forkd's, it replaces"
    api.delete(f"/v1/snapshots/{tag}").raise_for_status()
    assert run_main("unpack", str(file)) == f"{tag}\n", "the name in the file"


def test_an_unpacked_snapshot_without_memory_says_why(
    memory_gateway: MemoryGateway,
    tag: str,
    run_main: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_main("pack", "--tag", tag, "--out", str(tmp_path / "file"))
    monkeypatch.setattr(memory_gateway.host, "import_problem", "it was captured elsewhere")
    output = run_main("unpack", str(tmp_path / "file"), "--tag", "copy")
    assert output == "copy\nforkd: the memory was omitted: it was captured elsewhere\n"


def test_files_of_other_gateways_need_trust(
    api: httpx.Client, run_main: Callable[..., str], read_error: Callable[..., str], tmp_path: Path
) -> None:
    contents, fingerprint = make_foreign_file()
    file = tmp_path / "file"
    file.write_bytes(contents)
    assert f"'trust: {fingerprint}' (with the option --trust)" in read_error("unpack", str(file), "--tag", "copy")
    assert list_tags(api) == ["base"]
    run_main("unpack", str(file), "--tag", "copy", "--trust", "0" * 64, "--trust", fingerprint)
    assert list_tags(api) == ["base", "copy"]
    file.write_bytes(contents[:-1])
    assert "is incomplete" in read_error("unpack", str(file), "--tag", "more", "--trust", fingerprint)
    file.write_bytes(b"no file" * (1 << 20))
    assert "not a snapshot file" in read_error("unpack", str(file)), "the gateway refuses it before it has all of it"
    assert list_tags(api) == ["base", "copy"]


def test_packs_and_options_of_forkd_itself_are_refused(
    api: httpx.Client, tag: str, read_error: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "py.forkd-snapshot.tar.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 100)
    assert "like the packs of forkd itself" in read_error("unpack", str(file), "--tag", "copy")
    pack_arguments = ("pack", "--tag", tag, "--out", str(tmp_path / "file"))
    assert "--description is not supported, because" in read_error(*pack_arguments, "--description", "x")
    assert "--base-image is not supported, because" in read_error(*pack_arguments, "--base-image", "python:3.12")
    assert "choose a different --tag" in read_error("unpack", str(file), "--force")
    assert [*tmp_path.glob("*file*")] == [] and list_tags(api) == ["base", tag]


def test_a_pack_that_fails_leaves_no_file(
    memory_gateway: MemoryGateway,
    tag: str,
    run_main: Callable[..., str],
    read_error: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    file, partial_file = directory / "file", directory / ".file.partial"
    file.write_bytes(b"old")
    assert "'gone' not found" in read_error("pack", "--tag", "gone", "--out", str(file))
    assert "is a directory" in read_error("pack", "--tag", tag, "--out", str(directory))
    assert "check the path" in read_error("pack", "--tag", tag, "--out", str(directory / "missing" / "file"))
    assert "check the path" in read_error("unpack", str(directory / "missing"))
    monkeypatch.setenv("FORKD_TOKEN", EXEC_KEY)
    assert "needs a key with scope admin" in read_error("pack", "--tag", tag, "--out", str(file))
    monkeypatch.setenv("FORKD_TOKEN", ADMIN_KEY)
    read = MemorySource.read

    def fail(source: MemorySource, *arguments: Any) -> Any:
        raise OSError("the disk is broken")

    monkeypatch.setattr(MemorySource, "read", fail)
    assert "try again" in read_error("pack", "--tag", tag, "--out", str(file))
    monkeypatch.setattr(MemorySource, "read", read)
    partial_file.symlink_to(tmp_path / "other")
    assert "check the path" in read_error("pack", "--tag", tag, "--out", str(file))
    partial_file.unlink()
    with partial_file.open("w") as other_output:
        fcntl.flock(other_output, fcntl.LOCK_EX)
        assert "another `forkd pack` is writing" in read_error("pack", "--tag", tag, "--out", str(file))
    assert file.read_bytes() == b"old"
    # A pack that was killed left this file.
    partial_file.write_bytes(b"x" * 1_000_000)
    run_main("pack", "--tag", tag, "--out", str(file))
    assert [*directory.iterdir()] == [file]
    run_main("unpack", str(file), "--tag", "copy")


def test_a_stopped_pack_leaves_no_file(tag: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, started, stopped = tmp_path / "files", threading.Event(), threading.Event()
    directory.mkdir()
    read = MemorySource.read

    def wait(source: MemorySource, *arguments: Any) -> Any:
        started.set()
        stopped.wait(_TIMEOUT_SECONDS)
        return read(source, *arguments)

    monkeypatch.setattr(MemorySource, "read", wait)
    argv = ["forkd", "pack", "--tag", tag, "--out", str(directory / "file")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert started.wait(_TIMEOUT_SECONDS)
        process.terminate()
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        stopped.set()
    assert process.returncode == 1 and "stopped by a signal" in errors and [*directory.iterdir()] == []


def test_a_truncated_response_leaves_no_file(
    target: str, read_error: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that speaks HTTP/1.0 sends no length, so that a lost connection looks like the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 1000)

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as url:
        monkeypatch.setenv("FORKD_URL", url)
        file = tmp_path / "file"
        assert "before all of" in read_error("pack", "--tag", "py", "--out", str(file))
        assert not [*tmp_path.glob("*file*"), *tmp_path.glob(".*")]


def test_compact_adds_a_tag(
    api: httpx.Client, tag: str, run_main: Callable[..., str], read_error: Callable[..., str]
) -> None:
    assert run_main("snapshot-compact", "--from", tag, "--to", "flat") == "flat\n"
    assert list_tags(api) == ["base", tag, "flat"]
    assert "already in use" in read_error("snapshot-compact", "--from", tag, "--to", "flat")
    assert "not found" in read_error("snapshot-compact", "--from", "gone", "--to", "new")


def test_the_remote_option_allows_all_addresses(api: httpx.Client, start_command: StartCommand, target: str) -> None:
    start_command("fork", "--tag", "base", "--remote", "--listen", f"0.0.0.0:{target.rpartition(':')[2]}")
    assert forkd.Sandbox(target=target, spawn=False).ping()["pong"] is True


def test_the_help_contains_a_warning(target: str, read_error: object, capsys: pytest.CaptureFixture[str]) -> None:
    from sandbox_gateway_forkd.command import main

    for command in ("fork", "attach"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "no authentication" in " ".join(capsys.readouterr().out.split())
    for argv in (["fork"], ["fork", "--tag", "x", "-n", "0"], ["fork", "--tag", "x", "--settle-secs", "nan"], []):
        with pytest.raises(SystemExit) as error_info:
            main(argv)
        assert error_info.value.code == 2


def test_misbehaving_clients_do_not_affect_other_clients(
    api: httpx.Client, start_command: StartCommand, target: str
) -> None:
    """The clients connect one after the other, and none of them affects the next one."""
    start_command("fork", "--tag", "base", settings=("port.IDLE_TIMEOUT_SECONDS = 2", "port.MAX_CONNECTIONS = 4"))
    for line, expected_text in (
        (b"{\xff\xfe\n", "JSON"),
        (b'POST / HTTP/1.1\r\n\r\n{"action": "exec", "args": ["touch", "/tmp/x"]}\n', "JSON object"),
        (b'{"action": "ping"\n', "JSON"),
        (b'{"action": "exec", "args": ["ex', "JSON"),
        (b'{"action":' + b"[" * 100_000 + b"\n", "JSON"),
        (b"[]\n", "JSON object"),
        (b"{}\n", "unknown action"),
        (b'{"action": "exec", "args": ["x"], "timeout": NaN}\n', "NaN"),
        (b'{"action": "exec", "args": ["x"], "timeout": -1}\n', "timeout_secs"),
        (b'{"action": "exec", "args": ["\\ud800"]}\n', "the request to"),
        (b'{"action": "exec"}\n', "args"),
        (b'{"action": "eval"}\n', "code"),
    ):
        (response,) = send_and_receive(target, line)
        assert expected_text in response["error"] and response["exit_code"] == 1, line[:80]
    assert send_and_receive(target, b"") == []
    assert [pong["pong"] for pong in send_and_receive(target, b'{"action": "ping"}\n' * 3)] == [True] * 3
    host, _, port = target.rpartition(":")
    with pytest.raises(OSError), socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as connection:
        for _ in range(100):
            connection.sendall(b"x" * (1 << 20))
    idle_connections = [socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) for _ in range(4)]
    try:
        idle_connections[0].sendall(b'{"action"')
        assert "connections has been reached" in send_and_receive(target, b"")[0]["error"]
        for connection in idle_connections:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "idle clients are disconnected"
    finally:
        for connection in idle_connections:
            connection.close()
    assert forkd.Sandbox(target=target, spawn=False).ping()["pong"] is True
