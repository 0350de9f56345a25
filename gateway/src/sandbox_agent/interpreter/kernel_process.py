"""Run cells in a kernel process, which is controlled through a socket and pipes.

The output of a kernel is untrusted. It can affect only the responses to the kernel's own cells.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import socket
import subprocess
import threading
import time

from sandbox_agent.http.wire import ConnectionLost
from sandbox_agent.processes import child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.interpreter.answers import CellResponse
    from sandbox_agent.interpreter.languages import Cell, Language
    from sandbox_agent.machine.users import User

GRACE_SECONDS = 3.0
"""Seconds from the interrupt of a cell until its kernel is killed."""
_KILL_WAIT_MS = 5000
_EXIT_WAIT_MS = 500
_MAX_PIPE_BYTES = 1 << 20
_HEAD_DELAY_SECONDS = 0.5
"""Seconds without output after which the head of the response is sent separately."""
KERNEL_DIED = "KernelDied"


class KernelExited(Exception):
    """The kernel has exited. ``name`` and ``value``: the name and the value of the error to report."""

    def __init__(self, name: str, value: str) -> None:
        super().__init__(value)
        self.name = name
        self.value = value


class Kernel:
    """A kernel, which runs one cell at a time. Any thread may call ``terminate`` and ``drain``.

    ``count``: the number of cells so far.
    """

    def __init__(self, language: Language, user: User, env: dict[str, str], cwd: str) -> None:
        self.count = 0
        self._language = language
        self._env = env
        self._lock = threading.Lock()
        self._is_busy = False
        self._termination_reason = ""
        self._closed = False
        agent_end, kernel_end = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        try:
            self._process = _spawn(language, user, env, cwd, kernel_end.fileno(), pipes[0][1], pipes[1][1])
            self._exit_fd = child.open_exit_descriptor(self._process.pid)
        except BaseException:
            agent_end.close()  # a kernel that has already started exits
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            kernel_end.close()
            for _, writer in pipes:
                os.close(writer)
        self._channel = agent_end
        self._channel.setblocking(False)
        self.outputs = {pipes[0][0]: "stdout", pipes[1][0]: "stderr"}
        for fd in self.outputs:
            os.set_blocking(fd, False)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def terminate(self, reason: str) -> None:
        """Kill the kernel. A running cell fails with ``reason``."""
        with self._lock:
            if not self._closed:
                self._termination_reason = self._termination_reason or reason
                self._kill()
                if not self._is_busy:
                    self._close()

    def drain(self, fd: int) -> bool:
        """Discard available output. Returns False at the end of the output.

        If a cell is running, reads nothing and returns False.
        """
        with self._lock:
            return not self._is_busy and not self._closed and child.read_some(fd) != b""

    # -- a cell ------------------------------------------------------------------------------------------------------

    def run(self, cell: Cell, response: CellResponse, seconds: float | None) -> None:
        """Run a cell until it finishes. If the kernel exits, forward its last output, then raise KernelExited.

        Interrupts the code if the client hangs up or after ``seconds``, and kills the kernel if the code does not stop.
        """
        with self._lock:
            if self._termination_reason:
                raise KernelExited(KERNEL_DIED, self._termination_reason)
            self._is_busy = True
        has_completed = False
        try:
            _CellRun(self, cell, response, seconds).run()
            has_completed = True
        finally:
            with self._lock:
                self._is_busy = False
                if not has_completed or self._termination_reason:
                    self._kill()
                    self._close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def update_environment(self, env: dict[str, str]) -> dict[str, str | None]:
        """Return the changes since the previous call, for the next cell to apply. None removes a variable."""
        if env == self._env:
            return {}
        changes: dict[str, str | None] = {name: None for name in self._env if name not in env}
        changes.update({name: value for name, value in env.items() if self._env.get(name) != value})
        self._env = env
        return changes

    def interrupt(self) -> None:
        child.signal_group(self._process, signal.SIGINT)

    def describe_exit(self) -> str:
        """Wait until the process exits, kill it if necessary, and return a description of how it exited."""
        _is_readable(self._exit_fd, _EXIT_WAIT_MS)
        with self._lock:
            self._kill()
            if not _is_readable(self._exit_fd, _KILL_WAIT_MS):
                return f"the {self._language.name} kernel cannot be killed"
            exit_code = self._process.wait()
        if self._termination_reason:
            return self._termination_reason
        outcome = f"exited with code {exit_code}" if exit_code >= 0 else f"was killed by {_get_signal_name(-exit_code)}"
        return (
            f"the {self._language.name} kernel {outcome}: its variables are lost, and the next execution starts "
            "a new kernel"
        )

    def _kill(self) -> None:
        if self._process.returncode is None:
            child.kill_group(self._process)

    def _close(self) -> None:
        """Close all descriptors. The caller must hold ``_lock``, and the process must have exited or been killed."""
        if self._closed:
            return
        self._closed = True
        if _is_readable(self._exit_fd, _KILL_WAIT_MS):
            self._process.wait()
        os.close(self._exit_fd)
        self._channel.close()
        for fd in self.outputs:
            os.close(fd)


class _CellRun:
    """The agent's side of a running cell."""

    def __init__(self, kernel: Kernel, cell: Cell, response: CellResponse, seconds: float | None) -> None:
        self._kernel = kernel
        self._response = response
        self._seconds = seconds
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._send_head_at: float | None = time.monotonic() + _HEAD_DELAY_SECONDS
        self._kill_at: float | None = None
        self._is_overdue = False
        self._is_client_gone = False
        self._status: int | None = None
        self._channel = kernel._channel
        self._channel_fd = kernel._channel.fileno()
        self._exit_fd = kernel._exit_fd
        self._decoders: dict[int, Any] = {}
        self._language = kernel._language
        self._has_begun = not self._language.reports_begin
        self._unsent_data = memoryview(self._language.encode_cell(cell, kernel.count))
        self._poll = select.poll()
        # Register the channel before the pipes: if only the channel is ready, the pipes were empty at that time.
        self._poll.register(self._channel, select.POLLIN)
        self._open_outputs = list(kernel.outputs)
        for fd in self._open_outputs:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._exit_fd, select.POLLIN)
        self._client_fd = response.client_descriptor()
        if self._client_fd >= 0:
            self._poll.register(self._client_fd, select.POLLIN)

    def run(self) -> None:
        self._write_channel()
        while self._status is None:
            ready_events = dict(self._poll.poll(self._compute_poll_timeout_ms()))
            if self._client_fd in ready_events:
                self._check_client()
            self._check_deadlines()
            has_frames, has_ended = self._channel_fd in ready_events, self._exit_fd in ready_events
            for fd in list(self._open_outputs):
                if fd in ready_events:
                    self._forward_output(fd, until_empty=has_frames or has_ended)
            if has_frames:
                has_ended = self._read_channel(ready_events[self._channel_fd]) or has_ended
            if self._status is None:
                if has_ended:
                    self._read_last_output()
                self._flush_response()
        for fd in self._decoders:
            self._handle_text(fd, b"", is_final=True)

    def _compute_poll_timeout_ms(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        due_times = [due for due in (self._deadline, self._send_head_at, self._kill_at) if due is not None]
        return max(0.0, min(due_times) - time.monotonic()) * 1000 + 1 if due_times else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._send_head_at is not None and now >= self._send_head_at:
            self._send_head_at = None
            if not self._is_client_gone:
                self._send_to_client(self._response.begin)
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._is_overdue = True
            self._interrupt()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            problem = (
                f"the code ran longer than {self._seconds:g} s and did not stop"
                if self._is_overdue
                else "the code did not stop"
            )
            self._kernel.terminate(
                f"{problem} when it was interrupted, so its kernel was killed and its variables are lost"
            )

    def _check_client(self) -> None:
        self._poll.unregister(self._client_fd)
        self._client_fd = -1
        if self._response.is_client_gone():
            self._handle_hangup()

    def _handle_hangup(self) -> None:
        if not self._is_client_gone:
            self._is_client_gone = True
            self._interrupt()

    def _interrupt(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_SECONDS
            if self._has_begun:
                self._interrupt_now()

    def _interrupt_now(self) -> None:
        self._kernel.interrupt()
        self._unsent_data = memoryview(bytes(self._unsent_data) + self._language.handle_interrupt())
        self._write_channel()

    # -- from the kernel ---------------------------------------------------------------------------------------------

    def _forward_output(self, fd: int, *, until_empty: bool) -> None:
        """Forward a piece of the output.

        ``until_empty``: whether to forward everything in the pipe, up to its maximum capacity.
        """
        forwarded_byte_count = 0
        while forwarded_byte_count < _MAX_PIPE_BYTES:
            data = child.read_some(fd)
            if data is None:
                return
            if not data:
                self._poll.unregister(fd)
                self._open_outputs.remove(fd)
                return
            self._handle_text(fd, data)
            self._flush_response(limit=child.PIECE_SIZE)
            forwarded_byte_count += len(data)
            if not until_empty or len(data) < child.PIECE_SIZE:
                return

    def _handle_text(self, fd: int, data: bytes, *, is_final: bool = False) -> None:
        decoder = self._decoders.get(fd)
        if decoder is None:
            decoder = self._decoders[fd] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, is_final)
        if text and not self._is_client_gone:
            self._response.handle_text(self._kernel.outputs[fd], text)

    def _read_channel(self, events: int) -> bool:
        """Handle frames from the kernel. Returns True at the end of the channel."""
        if events & select.POLLOUT:
            self._write_channel()
        if not events & ~select.POLLOUT:
            return False
        try:
            data = self._channel.recv(child.PIECE_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            return True
        has_just_begun = False
        for kind, content in self._language.parse(data):
            if kind == "done":
                for fd in list(self._open_outputs) if has_just_begun else ():
                    self._forward_output(fd, until_empty=True)  # the pipes may have filled since the poll
                self._finish(content)
                return False
            if kind == "broken":
                return self._kill_broken_kernel()
            if kind == "begun":
                if not self._has_begun and self._kill_at is not None:
                    self._interrupt_now()
                self._has_begun = has_just_begun = True
                continue
            if self._unsent_data or not self._handle_event(content):
                return self._kill_broken_kernel()
            if kind == "sync":
                self._flush_response()
                self._unsent_data = memoryview(self._language.encode_acknowledgement())
                self._write_channel()
        return False

    def _handle_event(self, line: bytes) -> bool:
        """Forward an event. Returns False if ``line`` is not an event."""
        if self._is_client_gone:
            return True
        is_event = self._response.handle_event(line, self._format_timeout_message() if self._is_overdue else "")
        self._flush_response(limit=child.PIECE_SIZE)
        return is_event

    def _kill_broken_kernel(self) -> bool:
        self._kernel.terminate(
            "something other than the kernel wrote to the kernel's channel, so the kernel was killed"
        )
        return True

    def _finish(self, status: bytes) -> None:
        self._status = int(status)
        if self._is_overdue and not self._response.has_failed:
            self._response.handle_error("TimeoutError", self._format_timeout_message())
        elif self._status and not self._is_overdue:
            self._response.handle_error("ExitError", f"exit code {self._status}")

    def _format_timeout_message(self) -> str:
        return f"the code ran longer than {self._seconds:g} s"

    def _read_last_output(self) -> None:
        """Read the rest of the output after the kernel has exited or closed its channel.

        Raises KernelExited unless the cell has finished.
        """
        description = self._kernel.describe_exit()
        for fd in list(self._open_outputs):
            self._forward_output(fd, until_empty=True)
        while self._status is None and _is_readable(self._channel_fd, 0):
            if self._read_channel(select.POLLIN):
                break
        if self._status is None:
            raise KernelExited("TimeoutError" if self._is_overdue else KERNEL_DIED, description)

    # -- to the kernel and the client --------------------------------------------------------------------------------

    def _write_channel(self) -> None:
        try:
            while self._unsent_data:
                self._unsent_data = self._unsent_data[self._channel.send(self._unsent_data) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent_data = memoryview(b"")  # the kernel has exited; the poll reports that
        self._poll.modify(self._channel, select.POLLIN | (select.POLLOUT if self._unsent_data else 0))

    def _flush_response(self, limit: int = 0) -> None:
        """Send the pending bytes of the response if there are more than ``limit``."""
        if self._response.pending_byte_count > limit:
            self._send_head_at = None
            self._send_to_client(self._response.flush)

    def _send_to_client(self, send: Any) -> None:
        try:
            if not self._is_client_gone:
                send()
        except ConnectionLost:
            self._handle_hangup()


def _spawn(
    language: Language, user: User, env: dict[str, str], cwd: str, channel: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start the first of the language's programs that can be run."""
    env = {**child.build_environment(user, env), **language.environment()}
    *preferred_programs, fallback_program = language.programs()
    for argv in preferred_programs:
        try:
            return child.spawn(argv, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)
        except child.StartFailure:
            continue
    return child.spawn(fallback_program, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)


def _is_readable(fd: int, milliseconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
