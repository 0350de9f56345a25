"""Run the agent as a real process on a loopback port, and talk to it in its own protocols."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src"

# Login shells read these files. What they start can take a minute, or print to the output of a test's command.
_LOGIN_FILES = (".bash_profile", ".bash_login", ".profile", ".bashrc")


class Events:
    """A stream of process events. Iterating yields each ``event``. ``error`` is the error in the last frame."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.error: dict[str, str] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            flags, size = struct.unpack(">BI", self._read_exactly(5))
            message = json.loads(self._read_exactly(size))
            if flags & 2:
                self.error = message.get("error")
                assert self._response.read() == b""
                return
            yield message.get("event", message)

    def next(self) -> dict[str, Any]:
        return next(iter(self))

    def read_to_end(self) -> tuple[bytes, bytes, dict[str, Any]]:
        """Read until the end. Returns stdout (or the output of the terminal), stderr and the end event."""
        out, err, end_event = bytearray(), bytearray(), {}
        for event in self:
            data = event.get("data", {})
            out += base64.b64decode(data.get("stdout") or data.get("pty") or "")
            err += base64.b64decode(data.get("stderr", ""))
            end_event = event.get("end", end_event)
        return bytes(out), bytes(err), end_event

    def _read_exactly(self, size: int) -> bytes:
        data = self._response.read(size)
        assert len(data) == size, "the stream ended without a last frame"
        return data


class Agent:
    """A running agent.

    Each call opens a new connection and sends ``headers``. ``code_port`` is the port of the code interpreter.
    """

    def __init__(self, process: subprocess.Popen[str], port: int, code_port: int) -> None:
        self.process = process
        self.port = port
        self.code_port = code_port
        self.headers: dict[str, str] = {}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = self.connect()
        headers = {**self.headers, **(headers or {})}
        connection.request(method, path, body, headers, encode_chunked="Transfer-Encoding" in headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    def post(self, path: str, body: Any = None, user: str = "") -> tuple[int, Any]:
        """POST a JSON object. Returns the status and the JSON object of the response."""
        headers = {"Content-Type": "application/json", **_make_login_headers(user)}
        status, data = self.request("POST", path, json.dumps(body or {}), headers)
        return status, json.loads(data)

    def post_ok(self, path: str, body: Any = None, user: str = "") -> Any:
        status, response = self.post(path, body, user)
        assert status == 200, response
        return response

    def stream(
        self,
        method: str,
        *messages: dict[str, Any],
        user: str = "",
        service: str = "/process.Process",
        **headers: str,
    ) -> Events:
        body = b"".join(struct.pack(">BI", 0, len(data)) + data for data in (json.dumps(m).encode() for m in messages))
        connection = self.connect()
        connection.request(
            "POST",
            f"{service}/{method}",
            body,
            {**self.headers, "Content-Type": "application/connect+json", **_make_login_headers(user), **headers},
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.getheader("Content-Type") == "application/connect+json"
        return Events(response)

    def start(self, *argv: str, stdin: bool = False, user: str = "", **fields: Any) -> Events:
        """Start a process. ``fields`` are fields of its config, or ``pty``, ``tag`` and ``input``."""
        message_fields = {key: fields.pop(key) for key in ("pty", "tag", "input") if key in fields}
        headers = {key.replace("_", "-"): fields.pop(key) for key in list(fields) if key.startswith("Connect_")}
        config = {"cmd": argv[0], "args": list(argv[1:]), **fields}
        return self.stream("Start", {"process": config, "stdin": stdin, **message_fields}, user=user, **headers)


def _make_login_headers(user: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()} if user else {}


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until ``condition`` holds, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.02)


def _hide_login_files(argv: list[str]) -> list[str]:
    """Return a command that runs ``argv`` in a mount namespace where root's login files are empty."""
    paths = [str(path) for name in _LOGIN_FILES if (path := Path.home() / name).exists()]
    if os.geteuid() != 0 or not paths or not sys.platform.startswith("linux"):
        return argv
    hide = "; ".join(f"/bin/mount --bind /dev/null {shlex.quote(path)}" for path in paths)
    return ["/usr/bin/unshare", "--mount", "/bin/sh", "-ec", f'{hide}; exec "$@"', "sh", *argv]


@contextmanager
def running(argv: list[str], env: dict[str, str] | None = None) -> Iterator[Agent]:
    """Run an agent inside the context. ``argv`` is its command, which must choose a free port."""
    process = subprocess.Popen(
        _hide_login_files(argv),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY), **(env or {})},
    )
    try:
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line)
            port_match = re.search(r"listening on \S+:(\d+)", line)
            if port_match:
                break
        else:
            raise AssertionError(f"the agent did not start: {lines}")
        code_port_match = None
        if not any("without the code interpreter" in line for line in lines):
            code_port_match = re.search(r"code interpreter listening on \S+:(\d+)", process.stderr.readline())
        yield Agent(process, int(port_match[1]), int(code_port_match[1]) if code_port_match else 0)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., None]:
    return wait_until


@pytest.fixture(name="running", scope="session")
def _running() -> Callable[..., Any]:
    return running


@pytest.fixture(scope="session")
def unmanaged_command() -> list[str]:
    """The command of an agent that does not change this machine. Set AGENT_PYTHON to use another Python."""
    python = os.environ.get("AGENT_PYTHON", sys.executable)
    return [python, "-m", "sandbox_agent", "--unmanaged", "--bind", "127.0.0.1", "--port", "0"]


@pytest.fixture(scope="module")
def agent(unmanaged_command: list[str]) -> Iterator[Agent]:
    """An agent that the tests of a module share. Tests that set the identity use ``fresh_agent`` instead."""
    with running(unmanaged_command) as running_agent:
        yield running_agent


@pytest.fixture
def fresh_agent(unmanaged_command: list[str]) -> Iterator[Agent]:
    """An agent for a single test."""
    with running(unmanaged_command) as running_agent:
        yield running_agent


@pytest.fixture(scope="session")
def requires_root() -> None:
    """Skip the test if it cannot run as root in new namespaces."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("needs root on Linux")
    if not all(map(shutil.which, ("unshare", "setpriv", "nsenter", "ip"))):
        pytest.skip("needs unshare, setpriv, nsenter and ip")
