"""Processes that can outlive the request that started them, and a table of these processes."""

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

RETENTION_SECONDS = 60.0
"""How long clients can connect to a process after it has exited."""
MAX_EXITED_PROCESSES = 32
INPUT_TIMEOUT_SECONDS = 60.0
"""How long a process may take to read its input."""
_MAX_LEFTOVER_BYTES = 1 << 20
_TURN_MS = 200
"""Maximum time for which ``feed`` holds the input lock at once, in milliseconds."""


class Process:
    """A process that is running or has exited.

    ``config``: the command in the client's request; ``is_overdue``: whether the process was killed at its deadline.
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
        """Start the process.

        ``size``: the columns and rows of the terminal, None for pipes; ``deadline``: the time on the monotonic clock at
        which to kill it.
        """
        self.tag = tag
        self.config = config
        self.output = Output()
        self.exited_at = 0.0
        self.is_overdue = False
        self._deadline = deadline
        self._has_terminal = size is not None
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
        agent_fd, process_fd = child.open_terminal(user, *size)
        program, argv = shell.resolve_program(argv, env.get("PATH", ""))
        try:
            self._child = child.spawn(
                argv,
                user=user,
                env=env,
                cwd=cwd,
                stdin=process_fd,
                stdout=process_fd,
                stderr=process_fd,
                terminal=True,
                program=program,
            )
        except BaseException:
            os.close(agent_fd)
            raise
        finally:
            os.close(process_fd)
        self._outputs = {agent_fd: "pty"}
        self._input = os.dup(agent_fd)
        os.set_blocking(self._input, False)

    def _start_on_pipes(self, argv: list[str], user: User, env: dict[str, str], cwd: str, stdin: bool) -> None:
        pipe = subprocess.PIPE
        stdin_source = pipe if stdin else subprocess.DEVNULL
        program, argv = shell.resolve_program(argv, env.get("PATH", ""))
        self._child = child.spawn(
            argv, user=user, env=env, cwd=cwd, stdin=stdin_source, stdout=pipe, stderr=pipe, program=program
        )
        assert self._child.stdout and self._child.stderr
        self._outputs = {_detach(self._child.stdout): "stdout", _detach(self._child.stderr): "stderr"}
        self._input = -1
        if self._child.stdin:
            self._input = _detach(self._child.stdin)
            os.set_blocking(self._input, False)

    def forward_output(self) -> None:
        """Forward the output until the process exits, record its exit status, then drain the output of its children."""
        exit_fd = child.open_exit_descriptor(self.pid)
        poll = select.poll()
        poll.register(exit_fd, select.POLLIN)
        for fd in self._outputs:
            poll.register(fd, select.POLLIN)
        while True:
            if not self.output.wait_for_room(self._compute_remaining_seconds()):
                self._kill_if_overdue()
                continue
            ready_fds = [fd for fd, _ in poll.poll(_to_milliseconds(self._compute_remaining_seconds()))]
            if not ready_fds:
                self._kill_if_overdue()
            for fd in ready_fds:
                if fd != exit_fd:
                    self._forward_chunk(fd, poll)
            if exit_fd in ready_fds:
                break
        os.close(exit_fd)
        self._collect_rest()
        self.close_input()
        child.drain(list(self._outputs))

    def _forward_chunk(self, fd: int, poll: select.poll) -> None:
        data = child.read_some(fd)
        if data:
            self.output.put(self._outputs[fd], data)
        elif data is not None:
            poll.unregister(fd)
            del self._outputs[fd]
            os.close(fd)

    def _collect_rest(self) -> None:
        """Read the rest of the output after the process has exited, then its exit status."""
        for fd, kind in self._outputs.items():
            read_byte_count = 0
            while read_byte_count < _MAX_LEFTOVER_BYTES:
                data = child.read_available(fd)
                if not data:
                    break
                self.output.put(kind, data)
                read_byte_count += len(data)
        with self._state_lock:
            exit_code = self._child.wait()
            self.exited_at = time.monotonic()
        self.output.end(make_end_event(exit_code))

    def _compute_remaining_seconds(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _kill_if_overdue(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.is_overdue = True
            child.kill_group(self._child)

    def signal(self, number: int) -> None:
        """Signal the process group. Raises Failure if the process has exited."""
        with self._state_lock:
            if self.exited_at:
                raise Failure("not_found", f"process {self.pid} not found: it has already exited")
            child.signal_group(self._child, number)

    def resize(self, cols: int, rows: int) -> None:
        with self._input_lock:
            if not self._has_terminal or self._input < 0:
                raise Failure("failed_precondition", f"process {self.pid} has no terminal")
            child.resize_terminal(self._input, cols, rows)

    def write(self, data: bytes, *, terminal: bool) -> None:
        """Write ``data`` to the terminal or to the standard input of the process.

        Raises Failure if the process has no such input, or does not read the input for INPUT_TIMEOUT_SECONDS.
        """
        with self._input_lock:
            if terminal != self._has_terminal or self._input < 0:
                kind = "terminal" if terminal else "standard input"
                raise Failure("failed_precondition", f"process {self.pid} has no {kind} to write to")
            self._write_all(memoryview(data))

    def feed(self, data: bytes) -> None:
        """Write ``data`` as the whole standard input, and close it. Waits indefinitely for the process to read it."""
        unwritten_data = memoryview(data)
        while unwritten_data:
            with self._input_lock:
                if self._input < 0:
                    return
                poll = select.poll()
                poll.register(self._input, select.POLLOUT)
                try:
                    if poll.poll(_TURN_MS):
                        unwritten_data = unwritten_data[os.write(self._input, unwritten_data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    break
        self.close_input()

    def _write_all(self, data: memoryview) -> None:
        poll = select.poll()
        poll.register(self._input, select.POLLOUT)
        while data:
            if not poll.poll(INPUT_TIMEOUT_SECONDS * 1000):
                raise Failure(
                    "deadline_exceeded",
                    f"process {self.pid} is not reading its input: send less data, or wait until it has read more",
                )
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Failure("failed_precondition", f"process {self.pid} has closed its input") from None

    def close_stdin(self) -> None:
        if self._has_terminal:
            raise Failure("failed_precondition", "the input of a terminal cannot be closed: send Ctrl+D (\\x04)")
        self.close_input()

    def close_input(self) -> None:
        with self._input_lock:
            if self._input >= 0:
                os.close(self._input)
                self._input = -1


class ProcessTable:
    """The processes that are running or have exited recently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[int, Process] = {}

    def add(self, process: Process) -> None:
        """Add a process, and start forwarding its output."""
        with self._lock:
            self._processes[process.pid] = process
            self._forget_exited_processes()
        threading.Thread(target=process.forward_output, daemon=True).start()

    def list_running(self) -> list[Process]:
        with self._lock:
            return [process for process in self._processes.values() if not process.exited_at]

    def find(self, selector: Any, *, include_exited: bool = False) -> Process:
        """Return the process that ``{"pid": n}`` or ``{"tag": "…"}`` selects.

        ``include_exited``: whether to include processes that have exited.
        """
        selector = selector if isinstance(selector, dict) else {}
        pid, tag = selector.get("pid"), selector.get("tag")
        with self._lock:
            self._forget_exited_processes()
            matching_processes = [
                process
                for process in self._processes.values()
                if (process.pid == pid if pid else tag and process.tag == tag)
                and (include_exited or not process.exited_at)
            ]
        if not matching_processes:
            description = f"with pid {pid}" if pid else f"with tag {tag!r}"
            raise Failure("not_found", f"process {description} not found")
        return min(matching_processes, key=lambda process: bool(process.exited_at))

    def _forget_exited_processes(self) -> None:
        now = time.monotonic()
        exited_processes = sorted(
            (process.exited_at, process.pid) for process in self._processes.values() if process.exited_at
        )
        for index, (exited_at, pid) in enumerate(exited_processes):
            if now - exited_at > RETENTION_SECONDS or len(exited_processes) - index > MAX_EXITED_PROCESSES:
                del self._processes[pid]


def make_end_event(code: int) -> dict[str, object]:
    """Return the end event, in envd's format, for an exit code. A negative code is the number of a signal."""
    if code < 0:
        try:
            signal_name = signal.strsignal(-code) or str(-code)
        except ValueError:
            signal_name = str(-code)
        status = f"signal: {signal_name.lower()}"
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    status = f"exit status {code}"
    event: dict[str, object] = {"exitCode": code, "exited": True, "status": status}
    if code:
        event["error"] = status
    return event


def _detach(pipe: Any) -> int:
    """Duplicate the descriptor of a pipe, and close the pipe."""
    fd = os.dup(pipe.fileno())
    pipe.close()
    return fd


def _to_milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000 + 1
