"""Processes that outlive the requests that started them, and a table of all such processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time

from sandbox_agent.failure import Failure
from sandbox_agent.processes import child, shell
from sandbox_agent.processes.output import Output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.machine.users import User

KEEP_SECONDS = 60.0
"""How long clients can still connect to an ended process."""
MAX_KEPT = 32
INPUT_SECONDS = 60.0
"""How long to wait for a process to read its input."""
_LEFTOVER = 1 << 20
_TURN_MS = 200
"""How long ``feed`` holds the input lock at a time."""


class Process:
    """A running or ended process.

    ``config``: the client's request; ``overdue``: the process was killed at its deadline.
    """

    def __init__(
        self,
        argv: list[str],
        *,
        user: User,
        env: dict[str, str],
        cwd: str,
        size: tuple[int, int] | None,
        stdin: bool,
        deadline: float | None,
        tag: str,
        config: dict[str, Any],
    ) -> None:
        """Start the process. ``size``: (columns, rows) of a terminal, None for pipes; ``deadline``: when to kill it."""
        self.tag = tag
        self.config = config
        self.output = Output()
        self.ended_at = 0.0
        self.overdue = False
        self._deadline = deadline
        self._terminal = size is not None
        self._input_lock = threading.Lock()
        self._state_lock = threading.Lock()
        if size is not None:
            self._start_on_terminal(argv, user, env, cwd, size)
        else:
            self._start_on_pipes(argv, user, env, cwd, stdin)
        self.pid = self._child.pid

    def _start_on_terminal(
        self, argv: list[str], user: User, env: dict[str, str], cwd: str, size: tuple[int, int]
    ) -> None:
        ours, theirs = child.open_terminal(user, *size)
        program, argv = shell.resolve_program(argv, env.get("PATH", ""))
        try:
            self._child = child.spawn(
                argv,
                user=user,
                env=env,
                cwd=cwd,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                terminal=True,
                program=program,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._outputs = {ours: "pty"}
        self._input = os.dup(ours)
        os.set_blocking(self._input, False)

    def _start_on_pipes(self, argv: list[str], user: User, env: dict[str, str], cwd: str, stdin: bool) -> None:
        pipe = subprocess.PIPE
        source = pipe if stdin else subprocess.DEVNULL
        program, argv = shell.resolve_program(argv, env.get("PATH", ""))
        self._child = child.spawn(
            argv, user=user, env=env, cwd=cwd, stdin=source, stdout=pipe, stderr=pipe, program=program
        )
        assert self._child.stdout and self._child.stderr
        self._outputs = {_detach(self._child.stdout): "stdout", _detach(self._child.stderr): "stderr"}
        self._input = -1
        if self._child.stdin:
            self._input = _detach(self._child.stdin)
            os.set_blocking(self._input, False)

    def pump(self) -> None:
        """Move the output until the process ends, and record its exit status. Then discard its children's output."""
        exited = child.exit_descriptor(self.pid)
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        for fd in self._outputs:
            poll.register(fd, select.POLLIN)
        while True:
            if not self.output.wait_for_room(self._seconds_left()):
                self._kill_if_overdue()
                continue
            ready = [fd for fd, _ in poll.poll(_milliseconds(self._seconds_left()))]
            if not ready:
                self._kill_if_overdue()
            for fd in ready:
                if fd != exited:
                    self._move_output(fd, poll)
            if exited in ready:
                break
        os.close(exited)
        self._collect()
        self.close_input()
        child.drain(list(self._outputs))

    def _move_output(self, fd: int, poll: select.poll) -> None:
        data = child.read_some(fd)
        if data:
            self.output.put(self._outputs[fd], data)
        elif data is not None:
            poll.unregister(fd)
            del self._outputs[fd]
            os.close(fd)

    def _collect(self) -> None:
        """Read the rest of an ended process's output, then its exit status."""
        for fd, kind in self._outputs.items():
            taken = 0
            while taken < _LEFTOVER:
                data = child.read_available(fd)
                if not data:
                    break
                self.output.put(kind, data)
                taken += len(data)
        with self._state_lock:
            code = self._child.wait()
            self.ended_at = time.monotonic()
        self.output.end(end_event(code))

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _kill_if_overdue(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.overdue = True
            child.kill_group(self._child)

    def signal(self, number: int) -> None:
        """Signal the process group. Raises Failure if the process has ended."""
        with self._state_lock:
            if self.ended_at:
                raise Failure("not_found", f"process {self.pid} not found: it has already ended")
            child.signal_group(self._child, number)

    def resize(self, cols: int, rows: int) -> None:
        with self._input_lock:
            if not self._terminal or self._input < 0:
                raise Failure("failed_precondition", f"process {self.pid} has no terminal")
            child.resize_terminal(self._input, cols, rows)

    def write(self, data: bytes, *, terminal: bool) -> None:
        """Write ``data`` to the process. Raises Failure if it has no such input or does not read in time."""
        with self._input_lock:
            if terminal != self._terminal or self._input < 0:
                kind = "terminal" if terminal else "standard input"
                raise Failure("failed_precondition", f"process {self.pid} has no {kind} to write to")
            self._write(memoryview(data))

    def feed(self, data: bytes) -> None:
        """Write the whole standard input, however long the process takes to read it, then close it."""
        rest = memoryview(data)
        while rest:
            with self._input_lock:
                if self._input < 0:
                    return
                poll = select.poll()
                poll.register(self._input, select.POLLOUT)
                try:
                    if poll.poll(_TURN_MS):
                        rest = rest[os.write(self._input, rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    break
        self.close_input()

    def _write(self, data: memoryview) -> None:
        poll = select.poll()
        poll.register(self._input, select.POLLOUT)
        while data:
            if not poll.poll(INPUT_SECONDS * 1000):
                raise Failure(
                    "deadline_exceeded",
                    f"process {self.pid} does not read its input: send less data, or wait until the process reads it",
                )
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Failure("failed_precondition", f"process {self.pid} has closed its input") from None

    def close_stdin(self) -> None:
        if self._terminal:
            raise Failure("failed_precondition", "the input of a terminal cannot be closed: send Ctrl+D (\\x04)")
        self.close_input()

    def close_input(self) -> None:
        with self._input_lock:
            if self._input >= 0:
                os.close(self._input)
                self._input = -1


class Table:
    """A table of the processes that are running or ended recently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[int, Process] = {}

    def add(self, process: Process) -> None:
        """Add a process and start moving its output."""
        with self._lock:
            self._processes[process.pid] = process
            self._forget_ended()
        threading.Thread(target=process.pump, daemon=True).start()

    def list_running(self) -> list[Process]:
        with self._lock:
            return [process for process in self._processes.values() if not process.ended_at]

    def find(self, selector: Any, *, ended: bool = False) -> Process:
        """Find the process by ``{"pid": n}`` or ``{"tag": "…"}``; ended processes only if ``ended``."""
        selector = selector if isinstance(selector, dict) else {}
        pid, tag = selector.get("pid"), selector.get("tag")
        with self._lock:
            self._forget_ended()
            found = [
                process
                for process in self._processes.values()
                if (process.pid == pid if pid else tag and process.tag == tag) and (ended or not process.ended_at)
            ]
        if not found:
            what = f"with pid {pid}" if pid else f"with tag {tag!r}"
            raise Failure("not_found", f"process {what} not found")
        return min(found, key=lambda process: bool(process.ended_at))

    def _forget_ended(self) -> None:
        now = time.monotonic()
        gone = sorted((p.ended_at, p.pid) for p in self._processes.values() if p.ended_at)
        for index, (ended_at, pid) in enumerate(gone):
            if now - ended_at > KEEP_SECONDS or len(gone) - index > MAX_KEPT:
                del self._processes[pid]


def end_event(code: int) -> dict[str, object]:
    """Return the end event for an exit code (negative: a signal), in envd's format."""
    if code < 0:
        try:
            name = signal.strsignal(-code) or str(-code)
        except ValueError:
            name = str(-code)
        status = f"signal: {name.lower()}"
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    status = f"exit status {code}"
    event: dict[str, object] = {"exitCode": code, "exited": True, "status": status}
    if code:
        event["error"] = status
    return event


def _detach(pipe: Any) -> int:
    """Take over a pipe's descriptor from the object around it."""
    fd = os.dup(pipe.fileno())
    pipe.close()
    return fd


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000 + 1
