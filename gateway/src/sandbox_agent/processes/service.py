"""``process.Process``, the service of envd for commands and terminals."""

from __future__ import annotations

import binascii
import json
import signal
import threading
import time

from sandbox_agent.failure import Failure, invalid
from sandbox_agent.http.connect import Stream, encode_frame, streaming, unary
from sandbox_agent.http.message import get_bytes, get_object, get_strings, get_text, get_variables, make_displayable
from sandbox_agent.http.server import IDLE_SECONDS
from sandbox_agent.machine import users
from sandbox_agent.processes import child
from sandbox_agent.processes.process import Process, ProcessTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.server import Route
    from sandbox_agent.http.wire import Request

INPUT_SILENCE_SECONDS = 3600.0
_KEEPALIVE = encode_frame(b'{"event":{"keepalive":{}}}')
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}


class ProcessService:
    def __init__(self, table: ProcessTable, default_env: Callable[[], dict[str, str]]) -> None:
        """Create the service. ``default_env``: a function that returns the variables of every new process."""
        self._table = table
        self._default_env = default_env

    def routes(self) -> dict[str, list[Route]]:
        return {
            "/process.Process/Start": [streaming(self.start)],
            "/process.Process/Connect": [streaming(self.connect)],
            "/process.Process/StreamInput": [streaming(self.stream_input)],
            "/process.Process/SendInput": [unary(self.send_input)],
            "/process.Process/CloseStdin": [unary(self.close_stdin)],
            "/process.Process/SendSignal": [unary(self.send_signal)],
            "/process.Process/Update": [unary(self.update)],
            "/process.Process/List": [unary(self.list)],
        }

    def start(self, request: Request, stream: Stream) -> None:
        """``{process: {cmd, args, envs, cwd}, pty?: {size}, tag?, stdin?, input?}`` → events until the process ends.

        ``input``, which envd's API does not have, is the whole standard input in base64. The start event confirms it.
        The process is killed at the request's deadline, but not when the client hangs up.
        """
        message = stream.receive_single()
        config = get_object(message, "process")
        argv = [get_text(config, "cmd"), *get_strings(config, "args")]
        if not argv[0]:
            raise invalid("the field 'process.cmd' is missing: set it to the program to run")
        user = users.user_of(request)
        envs = get_variables(config, "envs")
        cwd = get_text(config, "cwd")
        tag = get_text(message, "tag")
        users.require_encodable(*argv, *envs, *envs.values(), cwd, tag)
        input_data = get_bytes(message, "input") if "input" in message else None
        if input_data is not None and "pty" in message:
            raise invalid(
                "'input' and 'pty' are mutually exclusive, because a terminal has no end of input: remove one of them"
            )
        process = Process(
            argv,
            user=user,
            env=child.build_environment(user, self._default_env(), envs),
            cwd=cwd,
            size=_terminal_size(message),
            stdin=input_data is not None or message.get("stdin") is not False,
            deadline=stream.deadline,
            tag=tag,
            config=_describe_config(argv, envs, cwd),
        )
        # Follow the process before its output is forwarded, so that no output is dropped.
        self._follow(process, stream, lambda: self._table.add(process), input_data)

    def connect(self, request: Request, stream: Stream) -> None:
        """``{process: selector}`` → the start event, the tail of the output, then new events."""
        process = self._table.find(stream.receive_single().get("process"), ended=True)
        self._follow(process, stream)

    def _follow(
        self,
        process: Process,
        stream: Stream,
        ready: Callable[[], None] = lambda: None,
        input_data: bytes | None = None,
    ) -> None:
        follower = process.output.follow()
        ready()
        start_event = {"pid": process.pid}
        if input_data is not None:
            threading.Thread(target=process.feed, args=(input_data,), daemon=True).start()
            start_event["input"] = True
        interval = stream.keepalive
        try:
            stream.send(encode_frame(json.dumps({"event": {"start": start_event}}).encode()))
            while True:
                timeout = (
                    interval if stream.deadline is None else min(interval, max(0.0, stream.deadline - time.monotonic()))
                )
                chunks, end_event = follower.take(timeout)
                frames = b"".join([_data_frame(kind, data) for kind, data in chunks])
                is_late = stream.deadline is not None and time.monotonic() >= stream.deadline
                if is_late and (end_event is None or process.overdue):
                    if frames:
                        stream.send(frames)
                    raise Failure("deadline_exceeded", "the request's deadline passed before the process ended")
                if end_event is not None:
                    stream.end(before=frames + encode_frame(json.dumps({"event": {"end": end_event}}).encode()))
                    return
                stream.send(frames or _KEEPALIVE)
        finally:
            follower.close()

    def send_input(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, input: {stdin|pty: base64}}``"""
        _write_input(self._table.find(message.get("process")), get_object(message, "input"))
        return {}

    def stream_input(self, request: Request, stream: Stream) -> None:
        """A frame ``{start: {process: selector}}``, then any number of ``{data: {input}}`` and ``{keepalive}``."""
        # Some clients send no keepalives.
        stream.allow_silence(INPUT_SILENCE_SECONDS)
        try:
            self._receive_input(stream)
        finally:
            stream.allow_silence(IDLE_SECONDS)
        stream.end(before=encode_frame(b"{}"))

    def _receive_input(self, stream: Stream) -> None:
        process = None
        message = stream.receive()
        while message is not None:
            if "start" in message:
                process = self._table.find(get_object(message, "start").get("process"))
            elif "data" in message:
                if process is None:
                    raise invalid("the first message of StreamInput must contain 'start'")
                _write_input(process, get_object(get_object(message, "data"), "input"))
            message = stream.receive()

    def close_stdin(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        self._table.find(message.get("process")).close_stdin()
        return {}

    def send_signal(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, signal: SIGNAL_SIGTERM|SIGNAL_SIGKILL}``. Signals the whole process group."""
        process = self._table.find(message.get("process"))
        number = _SIGNALS.get(message.get("signal", ""))
        if number is None:
            raise invalid("the field 'signal' must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        process.signal(number)
        return {}

    def update(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, pty: {size: {cols, rows}}}``"""
        process = self._table.find(message.get("process"))
        size = _terminal_size(message)
        if size is not None:
            process.resize(*size)
        return {}

    def list(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """→ ``{processes: [{config, pid, tag?}]}`` of the running processes."""
        return {"processes": [_describe(process) for process in self._table.list_running()]}


def _describe(process: Process) -> dict[str, Any]:
    tag = {"tag": make_displayable(process.tag)} if process.tag else {}
    return {"config": process.config, "pid": process.pid, **tag}


def _describe_config(argv: list[str], envs: dict[str, str], cwd: str) -> dict[str, Any]:
    cmd, *args = map(make_displayable, argv)
    variables = {make_displayable(name): make_displayable(value) for name, value in envs.items()}
    return {"cmd": cmd, "args": args, "envs": variables, **({"cwd": make_displayable(cwd)} if cwd else {})}


def _data_frame(kind: str, data: bytes) -> bytes:
    encoded = binascii.b2a_base64(data, newline=False)
    return encode_frame(b'{"event":{"data":{"%s":"%s"}}}' % (kind.encode(), encoded))


def _write_input(process: Process, message: dict[str, Any]) -> None:
    kind = "pty" if "pty" in message else "stdin"
    process.write(get_bytes(message, kind), terminal=kind == "pty")


def _terminal_size(message: dict[str, Any]) -> tuple[int, int] | None:
    """Return the columns and rows in ``pty.size``; None if there is no ``pty``."""
    if not message.get("pty"):
        return None
    size = get_object(message, "pty").get("size") or {}
    try:
        return int(size.get("cols") or 80), int(size.get("rows") or 24)
    except (ValueError, TypeError, AttributeError):
        raise invalid("the field 'pty.size' must be {cols, rows}") from None
