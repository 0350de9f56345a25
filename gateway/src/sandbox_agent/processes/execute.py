"""``POST /exec``: runs a command to its end and returns all of its output."""

from __future__ import annotations

import binascii
import os
import select
import subprocess
import threading
import time

from sandbox_agent.failure import invalid
from sandbox_agent.http.message import get_bytes, get_number, get_strings, get_text, get_variables
from sandbox_agent.machine import users
from sandbox_agent.processes import child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sandbox_agent.http.wire import Reply, Request

MAX_OUTPUT = 16 << 20
"""Bytes kept of each of stdout and stderr; the rest is discarded."""
DEFAULT_SECONDS = 60.0


class Execute:
    def __init__(self, default_env: Callable[[], dict[str, str]]) -> None:
        self._default_env = default_env

    def handle(self, request: Request, reply: Reply) -> None:
        """``{args, env?, cwd?, user?, timeout?, stdin?}`` → ``{exitCode, stdout, stderr, timedOut, truncated}``.

        ``timeout`` in seconds, by default 60; ``stdin``, ``stdout`` and ``stderr`` in base64. exitCode is 128 + n if
        signal n ended the process, 127 if the command does not exist, 126 if it cannot be run (stderr has the reason).
        """
        message = request.json()
        argv = get_strings(message, "args")
        if not argv or not argv[0]:
            raise invalid("the field args must contain a command")
        user = users.find_user(get_text(message, "user")) if message.get("user") else users.user_of(request)
        env = child.environment(user, self._default_env(), get_variables(message, "env"))
        run = Run(get_bytes(message, "stdin"), get_number(message, "timeout", default=DEFAULT_SECONDS, most=1e6))
        try:
            code = run.run(argv, user, env, get_text(message, "cwd"))
        except child.NotStarted as failure:
            code = failure.exit_code
            run.output[1] = [failure.message.encode() + b"\n"]
        reply.json(
            {
                "exitCode": code,
                "stdout": _encode(run.output[0]),
                "stderr": _encode(run.output[1]),
                "timedOut": run.timed_out,
                "truncated": run.truncated,
            }
        )


class Run:
    """One run of a command; ``output``: pieces of stdout and of stderr."""

    def __init__(self, stdin: bytes, seconds: float) -> None:
        self.output: list[list[bytes]] = [[], []]
        self.timed_out = False
        self.truncated = False
        self._sizes = [0, 0]
        self._stdin = memoryview(stdin)
        self._until = time.monotonic() + seconds

    def run(self, argv: list[str], user: users.User, env: dict[str, str], cwd: str) -> int:
        pipe = subprocess.PIPE
        source = pipe if self._stdin else subprocess.DEVNULL
        process = child.spawn(argv, user=user, env=env, cwd=cwd, stdin=source, stdout=pipe, stderr=pipe)
        assert process.stdout and process.stderr
        outputs = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
        exited = child.exit_descriptor(process.pid)
        try:
            self._run_command(process, outputs, exited)
        except BaseException:
            child.kill_group(process)
            raise
        finally:
            os.close(exited)
            code = process.wait()
            if process.stdin:
                process.stdin.close()
            self._collect(process, outputs)
        return code if code >= 0 else 128 - code

    def _run_command(self, process: subprocess.Popen[bytes], outputs: dict[int, int], exited: int) -> None:
        """Feed and read the process until it ends; kill it when its time is up."""
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        for fd in outputs:
            poll.register(fd, select.POLLIN)
        feed = -1
        if process.stdin:
            feed = process.stdin.fileno()
            os.set_blocking(feed, False)
            poll.register(feed, select.POLLOUT)
        while True:
            left = self._until - time.monotonic()
            if left <= 0 and not self.timed_out:
                self.timed_out = True
                child.kill_group(process)
            ready = [fd for fd, _ in poll.poll(None if self.timed_out else left * 1000 + 1)]
            for fd in ready:
                if fd == feed:
                    self._feed(process, poll)
                elif fd != exited and self._read_output(fd, outputs[fd]):
                    poll.unregister(fd)
            if exited in ready:
                return

    def _feed(self, process: subprocess.Popen[bytes], poll: select.poll) -> None:
        assert process.stdin
        fd = process.stdin.fileno()
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin) :]
        except BlockingIOError:
            return
        except OSError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            poll.unregister(fd)
            process.stdin.close()

    def _read_output(self, fd: int, stream: int) -> bool:
        """Read a piece of an output; True at its end."""
        data = child.read_some(fd)
        if data:
            self._append(stream, data)
        return data == b""

    def _append(self, stream: int, data: bytes) -> None:
        room = MAX_OUTPUT - self._sizes[stream]
        if len(data) > room:
            self.truncated = True
            data = data[:room]
        self._sizes[stream] += len(data)
        self.output[stream].append(data)

    def _collect(self, process: subprocess.Popen[bytes], outputs: dict[int, int]) -> None:
        """Read the rest of the pipes; if a child process still has them open, drain them for it."""
        held = []
        for fd, stream in outputs.items():
            budget = MAX_OUTPUT
            while budget > 0:
                data = child.read_available(fd)
                if not data:
                    break
                self._append(stream, data)
                budget -= len(data)
            if not _is_at_end(fd):
                held.append(os.dup(fd))
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        if held:
            threading.Thread(target=child.drain, args=(held,), daemon=True).start()


def _is_at_end(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _encode(pieces: list[bytes]) -> str:
    return binascii.b2a_base64(b"".join(pieces), newline=False).decode()
