"""The envd service ``process.Process``, which runs commands and terminals."""

from __future__ import annotations

import binascii
import json
import signal
import threading
import time

from sandbox_agent.failure import Failure, invalid_argument
from sandbox_agent.http.connect import Stream, encode_frame, make_streaming_route, make_unary_route
from sandbox_agent.http.message import get_bytes, get_object, get_strings, get_text, get_variables, make_displayable
from sandbox_agent.http.server import IDLE_TIMEOUT_SECONDS
from sandbox_agent.machine import users
from sandbox_agent.processes import child
from sandbox_agent.processes.process import Process, ProcessTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.server import Route
    from sandbox_agent.http.wire import Request

INPUT_IDLE_TIMEOUT_SECONDS = 3600.0
_KEEPALIVE_FRAME = encode_frame(b'{"event":{"keepalive":{}}}')
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}


class ProcessService:
    def __init__(self, table: ProcessTable, default_env: Callable[[], dict[str, str]]) -> None:
        """Create the service. ``default_env`` returns the environment variables that every new process gets."""
        self._table = table
        self._default_env = default_env

    def build_routes(self) -> dict[str, list[Route]]:
        return {
            "/process.Process/Start": [make_streaming_route(self.start)],
            "/process.Process/Connect": [make_streaming_route(self.connect)],
            "/process.Process/StreamInput": [make_streaming_route(self.stream_input)],
            "/process.Process/SendInput": [make_unary_route(self.send_input)],
            "/process.Process/CloseStdin": [make_unary_route(self.close_stdin)],
            "/process.Process/SendSignal": [make_unary_route(self.send_signal)],
            "/process.Process/Update": [make_unary_route(self.update)],
            "/process.Process/List": [make_unary_route(self.list)],
        }

    def start(self, request: Request, stream: Stream) -> None:
        """Start a process, and stream its events until it exits.

        The request is ``{process: {cmd, args, envs, cwd}, pty?: {size}, tag?, stdin?, input?}``. ``input``, which
        envd's API does not have, is the whole standard input in base64; the start event confirms that it is supported.
        The process is killed at the request's deadline, but not when the client disconnects.
        """
        message = stream.receive_single()
        config = get_object(message, "process")
        argv = [get_text(config, "cmd"), *get_strings(config, "args")]
        if not argv[0]:
            raise invalid_argument("the field 'process.cmd' is missing: set it to the program to run")
        user = users.find_request_user(request)
        envs = get_variables(config, "envs")
        cwd = get_text(config, "cwd")
        tag = get_text(message, "tag")
        users.require_encodable(*argv, *envs, *envs.values(), cwd, tag)
        input_data = get_bytes(message, "input") if "input" in message else None
        if input_data is not None and "pty" in message:
            raise invalid_argument(
                "'input' and 'pty' are mutually exclusive, because a terminal has no end of input: remove one of them"
            )
        process = Process(
            argv,
            user=user,
            env=child.build_environment(user, self._default_env(), envs),
            cwd=cwd,
            size=_get_terminal_size(message),
            stdin=input_data is not None or message.get("stdin") is not False,
            deadline=stream.deadline,
            tag=tag,
            config=_describe_config(argv, envs, cwd),
        )
        # Follow the process before its output is forwarded, so that no output is dropped.
        self._follow(process, stream, lambda: self._table.add(process), input_data)

    def connect(self, request: Request, stream: Stream) -> None:
        """Stream the events of an existing process: the start event, the tail of its output, then new events.

        The request is ``{process: selector}``.
        """
        process = self._table.find(stream.receive_single().get("process"), include_exited=True)
        self._follow(process, stream)

    def _follow(
        self,
        process: Process,
        stream: Stream,
        on_ready: Callable[[], None] = lambda: None,
        input_data: bytes | None = None,
    ) -> None:
        follower = process.output.follow()
        on_ready()
        start_event = {"pid": process.pid}
        if input_data is not None:
            threading.Thread(target=process.feed, args=(input_data,), daemon=True).start()
            start_event["input"] = True
        keepalive_interval = stream.keepalive
        try:
            stream.send(encode_frame(json.dumps({"event": {"start": start_event}}).encode()))
            while True:
                timeout = (
                    keepalive_interval
                    if stream.deadline is None
                    else min(keepalive_interval, max(0.0, stream.deadline - time.monotonic()))
                )
                chunks, end_event = follower.take(timeout)
                frames = b"".join([_make_data_frame(kind, data) for kind, data in chunks])
                is_past_deadline = stream.deadline is not None and time.monotonic() >= stream.deadline
                if is_past_deadline and (end_event is None or process.is_overdue):
                    if frames:
                        stream.send(frames)
                    raise Failure("deadline_exceeded", "the request's deadline passed before the process exited")
                if end_event is not None:
                    stream.end(frames=frames + encode_frame(json.dumps({"event": {"end": end_event}}).encode()))
                    return
                stream.send(frames or _KEEPALIVE_FRAME)
        finally:
            follower.close()

    def send_input(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """Write to a process's standard input or terminal.

        The request is ``{process: selector, input: {stdin|pty: base64}}``.
        """
        _write_input(self._table.find(message.get("process")), get_object(message, "input"))
        return {}

    def stream_input(self, request: Request, stream: Stream) -> None:
        """Write a stream of frames to a process's standard input or terminal.

        The first frame is ``{start: {process: selector}}``; any number of ``{data: {input}}`` and ``{keepalive}``
        frames follow.
        """
        # Some clients send no keepalives.
        stream.set_idle_timeout(INPUT_IDLE_TIMEOUT_SECONDS)
        try:
            self._receive_input(stream)
        finally:
            stream.set_idle_timeout(IDLE_TIMEOUT_SECONDS)
        stream.end(frames=encode_frame(b"{}"))

    def _receive_input(self, stream: Stream) -> None:
        process = None
        message = stream.receive()
        while message is not None:
            if "start" in message:
                process = self._table.find(get_object(message, "start").get("process"))
            elif "data" in message:
                if process is None:
                    raise invalid_argument("the first message of StreamInput must contain 'start'")
                _write_input(process, get_object(get_object(message, "data"), "input"))
            message = stream.receive()

    def close_stdin(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        self._table.find(message.get("process")).close_stdin()
        return {}

    def send_signal(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """Send a signal to a process and its whole process group.

        The request is ``{process: selector, signal: SIGNAL_SIGTERM|SIGNAL_SIGKILL}``.
        """
        process = self._table.find(message.get("process"))
        signal_number = _SIGNALS.get(message.get("signal", ""))
        if signal_number is None:
            raise invalid_argument("the field 'signal' must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        process.signal(signal_number)
        return {}

    def update(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """Resize the terminal of a process. The request is ``{process: selector, pty: {size: {cols, rows}}}``."""
        process = self._table.find(message.get("process"))
        size = _get_terminal_size(message)
        if size is not None:
            process.resize(*size)
        return {}

    def list(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """List the running processes. The response is ``{processes: [{config, pid, tag?}]}``."""
        return {"processes": [_describe(process) for process in self._table.list_running()]}


def _describe(process: Process) -> dict[str, Any]:
    tag = {"tag": make_displayable(process.tag)} if process.tag else {}
    return {"config": process.config, "pid": process.pid, **tag}


def _describe_config(argv: list[str], envs: dict[str, str], cwd: str) -> dict[str, Any]:
    cmd, *args = map(make_displayable, argv)
    variables = {make_displayable(name): make_displayable(value) for name, value in envs.items()}
    return {"cmd": cmd, "args": args, "envs": variables, **({"cwd": make_displayable(cwd)} if cwd else {})}


def _make_data_frame(kind: str, data: bytes) -> bytes:
    encoded_data = binascii.b2a_base64(data, newline=False)
    return encode_frame(b'{"event":{"data":{"%s":"%s"}}}' % (kind.encode(), encoded_data))


def _write_input(process: Process, message: dict[str, Any]) -> None:
    kind = "pty" if "pty" in message else "stdin"
    process.write(get_bytes(message, kind), terminal=kind == "pty")


def _get_terminal_size(message: dict[str, Any]) -> tuple[int, int] | None:
    """Return the columns and rows in ``pty.size``; None if there is no ``pty``."""
    if not message.get("pty"):
        return None
    size = get_object(message, "pty").get("size") or {}
    try:
        return int(size.get("cols") or 80), int(size.get("rows") or 24)
    except (ValueError, TypeError, AttributeError):
        raise invalid_argument("the field 'pty.size' must be {cols, rows}, both integers") from None
