"""``POST /exec``: run a command until it exits, and return its output."""

from __future__ import annotations

import binascii
import os
import select
import subprocess
import threading
import time

from sandbox_agent.failure import invalid_argument
from sandbox_agent.http.message import get_bytes, get_number, get_strings, get_text, get_variables
from sandbox_agent.machine import users
from sandbox_agent.processes import child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from sandbox_agent.http.wire import Reply, Request

MAX_OUTPUT_BYTES = 16 << 20
"""Maximum number of bytes to return from stdout, and from stderr. The rest is discarded."""
DEFAULT_TIMEOUT_SECONDS = 60.0


class ExecHandler:
    def __init__(self, default_env: Callable[[], dict[str, str]]) -> None:
        self._default_env = default_env

    def handle(self, request: Request, reply: Reply) -> None:
        """Run a command until it exits, and return its output.

        ``{args, env?, cwd?, user?, timeout?, stdin?}`` → ``{exitCode, stdout, stderr, timedOut, truncated}``.
        ``timeout`` is in seconds (default 60); ``stdin``, ``stdout`` and ``stderr`` are in base64. ``exitCode`` is
        ``128 + n`` if signal n killed the process, 127 if the command does not exist, and 126 if it cannot be run. In
        the last two cases, stderr contains the reason.
        """
        message = request.json()
        argv = get_strings(message, "args")
        if not argv or not argv[0]:
            raise invalid_argument("the field 'args' must contain a command")
        user = users.find_user(get_text(message, "user")) if message.get("user") else users.find_request_user(request)
        env = child.build_environment(user, self._default_env(), get_variables(message, "env"))
        command_run = CommandRun(
            get_bytes(message, "stdin"), get_number(message, "timeout", default=DEFAULT_TIMEOUT_SECONDS, maximum=1e6)
        )
        try:
            exit_code = command_run.run(argv, user, env, get_text(message, "cwd"))
        except child.StartFailure as failure:
            exit_code = failure.exit_code
            command_run.output[1] = [failure.message.encode() + b"\n"]
        reply.json(
            {
                "exitCode": exit_code,
                "stdout": _encode(command_run.output[0]),
                "stderr": _encode(command_run.output[1]),
                "timedOut": command_run.has_timed_out,
                "truncated": command_run.is_truncated,
            }
        )


class CommandRun:
    """A single run of a command. ``output``: the chunks of stdout and the chunks of stderr."""

    def __init__(self, stdin: bytes, seconds: float) -> None:
        self.output: list[list[bytes]] = [[], []]
        self.has_timed_out = False
        self.is_truncated = False
        self._sizes = [0, 0]
        self._stdin = memoryview(stdin)
        self._deadline = time.monotonic() + seconds

    def run(self, argv: list[str], user: users.User, env: dict[str, str], cwd: str) -> int:
        pipe = subprocess.PIPE
        stdin_source = pipe if self._stdin else subprocess.DEVNULL
        process = child.spawn(argv, user=user, env=env, cwd=cwd, stdin=stdin_source, stdout=pipe, stderr=pipe)
        assert process.stdout and process.stderr
        stream_by_fd = {process.stdout.fileno(): 0, process.stderr.fileno(): 1}
        exit_fd = child.open_exit_descriptor(process.pid)
        try:
            self._run_command(process, stream_by_fd, exit_fd)
        except BaseException:
            child.kill_group(process)
            raise
        finally:
            os.close(exit_fd)
            exit_code = process.wait()
            if process.stdin:
                process.stdin.close()
            self._collect_rest(process, stream_by_fd)
        return exit_code if exit_code >= 0 else 128 - exit_code

    def _run_command(self, process: subprocess.Popen[bytes], stream_by_fd: dict[int, int], exit_fd: int) -> None:
        """Transfer input and output until the process exits, and kill its group at the deadline."""
        poll = select.poll()
        poll.register(exit_fd, select.POLLIN)
        for fd in stream_by_fd:
            poll.register(fd, select.POLLIN)
        stdin_fd = -1
        if process.stdin:
            stdin_fd = process.stdin.fileno()
            os.set_blocking(stdin_fd, False)
            poll.register(stdin_fd, select.POLLOUT)
        while True:
            remaining_seconds = self._deadline - time.monotonic()
            if remaining_seconds <= 0 and not self.has_timed_out:
                self.has_timed_out = True
                child.kill_group(process)
            ready_fds = [fd for fd, _ in poll.poll(None if self.has_timed_out else remaining_seconds * 1000 + 1)]
            for fd in ready_fds:
                if fd == stdin_fd:
                    self._write_stdin(process, poll)
                elif fd != exit_fd and self._read_output(fd, stream_by_fd[fd]):
                    poll.unregister(fd)
            if exit_fd in ready_fds:
                return

    def _write_stdin(self, process: subprocess.Popen[bytes], poll: select.poll) -> None:
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
        """Read the available bytes from an output stream. Returns True at its end."""
        data = child.read_some(fd)
        if data:
            self._append(stream, data)
        return data == b""

    def _append(self, stream: int, data: bytes) -> None:
        free_bytes = MAX_OUTPUT_BYTES - self._sizes[stream]
        if len(data) > free_bytes:
            self.is_truncated = True
            data = data[:free_bytes]
        self._sizes[stream] += len(data)
        self.output[stream].append(data)

    def _collect_rest(self, process: subprocess.Popen[bytes], stream_by_fd: dict[int, int]) -> None:
        """Read the rest of the output. Keep draining a pipe in a thread if a child process still has it open."""
        open_fds = []
        for fd, stream in stream_by_fd.items():
            remaining_bytes = MAX_OUTPUT_BYTES
            while remaining_bytes > 0:
                data = child.read_available(fd)
                if not data:
                    break
                self._append(stream, data)
                remaining_bytes -= len(data)
            if not _is_at_end(fd):
                open_fds.append(os.dup(fd))
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
        if open_fds:
            threading.Thread(target=child.drain, args=(open_fds,), daemon=True).start()


def _is_at_end(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _encode(pieces: list[bytes]) -> str:
    return binascii.b2a_base64(b"".join(pieces), newline=False).decode()
