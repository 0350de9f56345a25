"""process.Process, envd's service of commands."""

from __future__ import annotations

import binascii
import json
import signal
import threading
import time

from sandbox_agent import child, users
from sandbox_agent.connect import Stream, frame, streamed, unary
from sandbox_agent.entries import shown
from sandbox_agent.failure import Failure, invalid
from sandbox_agent.message import decoded, record, strings, text, variables
from sandbox_agent.process import Process, Table
from sandbox_agent.server import IDLE_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.server import Route
    from sandbox_agent.wire import Request

INPUT_SILENCE_SECONDS = 3600.0
_KEEPALIVE = frame(b'{"event":{"keepalive":{}}}')
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}


class ProcessService:
    def __init__(self, table: Table, default_env: Callable[[], dict[str, str]]) -> None:
        """``default_env``: asked at each start for the variables every process gets."""
        self._table = table
        self._default_env = default_env

    def routes(self) -> dict[str, list[Route]]:
        return {
            "/process.Process/Start": [streamed(self.start)],
            "/process.Process/Connect": [streamed(self.connect)],
            "/process.Process/StreamInput": [streamed(self.stream_input)],
            "/process.Process/SendInput": [unary(self.send_input)],
            "/process.Process/CloseStdin": [unary(self.close_stdin)],
            "/process.Process/SendSignal": [unary(self.send_signal)],
            "/process.Process/Update": [unary(self.update)],
            "/process.Process/List": [unary(self.list)],
        }

    def start(self, request: Request, stream: Stream) -> None:
        """``{process: {cmd, args, envs, cwd}, pty?: {size}, tag?, stdin?, input?}`` → events until the process ends.

        ``input``, which envd does not have: all of its standard input, in base64; the start event then says so. A
        deadline of the request is the process's too; a client that goes away is not.
        """
        message = stream.receive_only()
        config = record(message, "process")
        argv = [text(config, "cmd"), *strings(config, "args")]
        if not argv[0]:
            raise invalid("process.cmd is missing")
        user = users.of_request(request)
        envs = variables(config, "envs")
        cwd = text(config, "cwd")
        tag = text(message, "tag")
        users.encodable(*argv, *envs, *envs.values(), cwd, tag)
        given = decoded(message, "input") if "input" in message else None
        if given is not None and "pty" in message:
            raise invalid("a terminal has no end of input: leave out input, or pty")
        process = Process(
            argv,
            user=user,
            env=child.environment(user, self._default_env(), envs),
            cwd=cwd,
            size=_size(message),
            stdin=given is not None or message.get("stdin") is not False,
            deadline=stream.deadline,
            tag=tag,
            config=_config(argv, envs, cwd),
        )
        # Followed before its output moves, so that nothing can have been dropped from the tail.
        self._follow(process, stream, lambda: self._table.add(process), given)

    def connect(self, request: Request, stream: Stream) -> None:
        """``{process: selector}`` → events: the start, the tail of the output, then as they come."""
        process = self._table.find(stream.receive_only().get("process"), ended=True)
        self._follow(process, stream)

    def _follow(
        self,
        process: Process,
        stream: Stream,
        ready: Callable[[], None] = lambda: None,
        given: bytes | None = None,
    ) -> None:
        follower = process.output.follow()
        ready()
        start = {"pid": process.pid}
        if given is not None:
            threading.Thread(target=process.feed, args=(given,), daemon=True).start()
            start["input"] = True
        pause = stream.keepalive
        try:
            stream.send(frame(json.dumps({"event": {"start": start}}).encode()))
            while True:
                left = pause if stream.deadline is None else min(pause, max(0.0, stream.deadline - time.monotonic()))
                chunks, ending = follower.take(left)
                frames = b"".join([_data(kind, data) for kind, data in chunks])
                late = stream.deadline is not None and time.monotonic() >= stream.deadline
                if late and (ending is None or process.overdue):
                    if frames:
                        stream.send(frames)
                    raise Failure("deadline_exceeded", "the request's deadline passed before the process ended")
                if ending is not None:
                    stream.end(before=frames + frame(json.dumps({"event": {"end": ending}}).encode()))
                    return
                stream.send(frames or _KEEPALIVE)
        finally:
            follower.close()

    def send_input(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, input: {stdin|pty: base64}}``"""
        _feed(self._table.find(message.get("process")), record(message, "input"))
        return {}

    def stream_input(self, request: Request, stream: Stream) -> None:
        """Frames ``{start: {process: selector}}``, then any number of ``{data: {input}}`` or ``{keepalive}``."""
        # Not every client sends keepalives while it has nothing to say.
        stream.allow_silence(INPUT_SILENCE_SECONDS)
        try:
            self._take_input(stream)
        finally:
            stream.allow_silence(IDLE_SECONDS)
        stream.end(before=frame(b"{}"))

    def _take_input(self, stream: Stream) -> None:
        process = None
        message = stream.receive()
        while message is not None:
            if "start" in message:
                process = self._table.find(record(message, "start").get("process"))
            elif "data" in message:
                if process is None:
                    raise invalid("the first message of StreamInput must be 'start'")
                _feed(process, record(record(message, "data"), "input"))
            message = stream.receive()

    def close_stdin(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        self._table.find(message.get("process")).close_stdin()
        return {}

    def send_signal(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, signal: SIGNAL_SIGTERM|SIGNAL_SIGKILL}``, to the process group."""
        process = self._table.find(message.get("process"))
        number = _SIGNALS.get(message.get("signal", ""))
        if number is None:
            raise invalid("signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        process.signal(number)
        return {}

    def update(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{process: selector, pty: {size: {cols, rows}}}``"""
        process = self._table.find(message.get("process"))
        size = _size(message)
        if size is not None:
            process.resize(*size)
        return {}

    def list(self, request: Request, message: dict[str, Any]) -> dict[str, Any]:
        """``{processes: [{config, pid, tag?}]}``: those that run."""
        return {
            "processes": [
                {"config": process.config, "pid": process.pid, **({"tag": shown(process.tag)} if process.tag else {})}
                for process in self._table.running()
            ]
        }


def _config(argv: list[str], envs: dict[str, str], cwd: str) -> dict[str, Any]:
    cmd, *args = map(shown, argv)
    named = {shown(name): shown(value) for name, value in envs.items()}
    return {"cmd": cmd, "args": args, "envs": named, **({"cwd": shown(cwd)} if cwd else {})}


def _data(kind: str, data: bytes) -> bytes:
    encoded = binascii.b2a_base64(data, newline=False)
    return frame(b'{"event":{"data":{"%s":"%s"}}}' % (kind.encode(), encoded))


def _feed(process: Process, message: dict[str, Any]) -> None:
    kind = "pty" if "pty" in message else "stdin"
    process.write(decoded(message, kind), terminal=kind == "pty")


def _size(message: dict[str, Any]) -> tuple[int, int] | None:
    """Columns and rows of ``pty.size``; None without a ``pty``."""
    if not message.get("pty"):
        return None
    size = record(message, "pty").get("size") or {}
    try:
        return int(size.get("cols") or 80), int(size.get("rows") or 24)
    except (ValueError, TypeError, AttributeError):
        raise invalid("pty.size must be {cols, rows}") from None
