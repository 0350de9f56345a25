"""The command `forkd` and its port, with a real gateway and, where possible, the published client."""

from __future__ import annotations

import contextlib
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

from tests.api.memory_gateway import ADMIN_KEY, READ_KEY, MemoryGateway
from tests.support import forkd_command, session
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

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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
    monkeypatch.setenv("FORKD_URL", "ftp://gateway")
    assert "not a valid gateway address" in read_error(*fork_args)
    assert list_sandboxes(api) == []


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["pack", "base", "--out", "file"], "use `sandboxctl snapshot export`"),
        (["unpack", "file", "--tag", "base"], "use `sandboxctl snapshot import`"),
        (["compact", "base", "--to", "flat"], "every snapshot is complete"),
    ],
)
def test_commands_about_files_and_chains_are_refused(
    read_error: Callable[..., str], arguments: list[str], remedy: str
) -> None:
    message = read_error(*arguments)
    assert f"forkd: {arguments[0]} is not supported, because " in message and remedy in message


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
