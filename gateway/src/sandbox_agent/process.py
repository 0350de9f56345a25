"""Processes that outlive the request that started them, and the table of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time

from sandbox_agent import child, shell
from sandbox_agent.failure import Failure
from sandbox_agent.output import Output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.users import User

KEEP_SECONDS = 60.0
"""How long an ended process can still be connected to."""
KEEP_MOST = 32
INPUT_SECONDS = 60.0
"""How long input waits for a process that does not read it."""
_LEFTOVER = 1 << 20
_TURN_MS = 200
"""How long whoever feeds a process keeps others from its input."""


class Process:
    """A running or ended process.

    ``config`` is what was asked for, as the client wrote it; ``overdue``: its deadline has killed it.
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
        """Start it. ``size``: columns and rows of its terminal, None for pipes; ``deadline``: when it is killed."""
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
        program, argv = shell.program(argv, env.get("PATH", ""))
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
        program, argv = shell.program(argv, env.get("PATH", ""))
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
        """Move output until the process ended; then say how. Afterwards what it left behind is read and dropped."""
        exited = child.exit_descriptor(self.pid)
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        for fd in self._outputs:
            poll.register(fd, select.POLLIN)
        while True:
            if not self.output.wait_room(self._left()):
                self._overdue()
                continue
            ready = [fd for fd, _ in poll.poll(_milliseconds(self._left()))]
            if not ready:
                self._overdue()
            for fd in ready:
                if fd != exited:
                    self._move(fd, poll)
            if exited in ready:
                break
        os.close(exited)
        self._collect()
        self.close_input()
        child.drain(list(self._outputs))

    def _move(self, fd: int, poll: select.poll) -> None:
        data = child.read_some(fd)
        if data:
            self.output.put(self._outputs[fd], data)
        elif data is not None:
            poll.unregister(fd)
            del self._outputs[fd]
            os.close(fd)

    def _collect(self) -> None:
        """Take what the ended process still had in its pipes, then its exit status."""
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
        self.output.end(ending(code))

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _overdue(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.overdue = True
            child.kill_group(self._child)

    def signal(self, number: int) -> None:
        """Signal the process group. Raises Failure where the process has ended."""
        with self._state_lock:
            if self.ended_at:
                raise Failure("not_found", f"process {self.pid} not found: it has ended")
            child.signal_group(self._child, number)

    def resize(self, cols: int, rows: int) -> None:
        with self._input_lock:
            if not self._terminal or self._input < 0:
                raise Failure("failed_precondition", f"process {self.pid} has no terminal")
            child.resize_terminal(self._input, cols, rows)

    def write(self, data: bytes, *, terminal: bool) -> None:
        """Hand ``data`` to the process; raises Failure where it has no such input or does not read it in time."""
        with self._input_lock:
            if terminal != self._terminal or self._input < 0:
                kind = "terminal" if terminal else "standard input"
                raise Failure("failed_precondition", f"process {self.pid} has no {kind} to write to")
            self._write(memoryview(data))

    def feed(self, data: bytes) -> None:
        """Hand over all of its standard input and close it, however long the process takes to read."""
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
                raise Failure("deadline_exceeded", f"process {self.pid} does not read its input")
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Failure("failed_precondition", f"process {self.pid} has closed its input") from None

    def close_stdin(self) -> None:
        if self._terminal:
            raise Failure("failed_precondition", "a terminal's input is not closed: send it Ctrl+D (\\x04)")
        self.close_input()

    def close_input(self) -> None:
        with self._input_lock:
            if self._input >= 0:
                os.close(self._input)
                self._input = -1


class Table:
    """The processes that were started and not forgotten yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[int, Process] = {}

    def add(self, process: Process) -> None:
        """Record it and start moving its output."""
        with self._lock:
            self._processes[process.pid] = process
            self._forget()
        threading.Thread(target=process.pump, daemon=True).start()

    def running(self) -> list[Process]:
        with self._lock:
            return [process for process in self._processes.values() if not process.ended_at]

    def find(self, selector: Any, *, ended: bool = False) -> Process:
        """The process of ``{"pid": n}`` or ``{"tag": "…"}``; one that ended a while ago only with ``ended``."""
        selector = selector if isinstance(selector, dict) else {}
        pid, tag = selector.get("pid"), selector.get("tag")
        with self._lock:
            self._forget()
            found = [
                process
                for process in self._processes.values()
                if (process.pid == pid if pid else tag and process.tag == tag) and (ended or not process.ended_at)
            ]
        if not found:
            what = f"with pid {pid}" if pid else f"with tag {tag!r}"
            raise Failure("not_found", f"process {what} not found")
        return min(found, key=lambda process: bool(process.ended_at))

    def _forget(self) -> None:
        now = time.monotonic()
        gone = sorted((p.ended_at, p.pid) for p in self._processes.values() if p.ended_at)
        for index, (ended_at, pid) in enumerate(gone):
            if now - ended_at > KEEP_SECONDS or len(gone) - index > KEEP_MOST:
                del self._processes[pid]


def ending(code: int) -> dict[str, object]:
    """The end event of an exit code (negative: a signal), in envd's words."""
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
