"""A kernel's process: runs one cell after another and is controlled through pipes.

Its output is untrusted: it can affect only the answers of its own cells.
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

from sandbox_agent.http.wire import Gone
from sandbox_agent.processes import child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.interpreter.answers import Answer
    from sandbox_agent.interpreter.languages import Cell, Language
    from sandbox_agent.machine.users import User

GRACE = 3.0
"""Seconds between an interrupt and killing the kernel."""
_END_MS = 5000
_CLOSING_MS = 500
_PIPES_HOLD = 1 << 20
_HEAD_SECONDS = 0.5
"""Seconds without output after which the head of the answer is sent on its own."""
KERNEL_DIED = "KernelDied"


class KernelEnded(Exception):
    """The kernel has ended: ``name`` and ``value`` describe the error to report."""

    def __init__(self, name: str, value: str) -> None:
        super().__init__(value)
        self.name = name
        self.value = value


class Kernel:
    """A kernel, which runs one cell at a time. Any thread may call ``retire`` and ``drain``. ``count``: its cells."""

    def __init__(self, language: Language, user: User, env: dict[str, str], cwd: str) -> None:
        self.count = 0
        self._language = language
        self._env = env
        self._lock = threading.Lock()
        self._busy = False
        self._retired = ""
        self._closed = False
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        try:
            self._process = _spawn(language, user, env, cwd, theirs.fileno(), pipes[0][1], pipes[1][1])
            self._exited = child.exit_descriptor(self._process.pid)
        except BaseException:
            ours.close()  # this ends a kernel that has already started
            for reader, _ in pipes:
                os.close(reader)
            raise
        finally:
            theirs.close()
            for _, writer in pipes:
                os.close(writer)
        self._channel = ours
        self._channel.setblocking(False)
        self.outputs = {pipes[0][0]: "stdout", pipes[1][0]: "stderr"}
        for fd in self.outputs:
            os.set_blocking(fd, False)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Kill the kernel; a running cell fails with ``reason``."""
        with self._lock:
            if not self._closed:
                self._retired = self._retired or reason
                self._kill()
                if not self._busy:
                    self._close()

    def drain(self, fd: int) -> bool:
        """Discard output written after a cell; False while a cell runs or at the end of the output."""
        with self._lock:
            return not self._busy and not self._closed and child.read_some(fd) != b""

    # -- a cell ------------------------------------------------------------------------------------------------------

    def run(self, cell: Cell, answer: Answer, seconds: float | None) -> None:
        """Run a cell to its end. Raises KernelEnded if the kernel ends, after passing on its last output.

        Interrupts the code if the client hangs up or ``seconds`` have passed, and kills the kernel if it continues.
        """
        with self._lock:
            if self._retired:
                raise KernelEnded(KERNEL_DIED, self._retired)
            self._busy = True
        completed = False
        try:
            _CellRun(self, cell, answer, seconds).run()
            completed = True
        finally:
            with self._lock:
                self._busy = False
                if not completed or self._retired:
                    self._kill()
                    self._close()

    @property
    def closed(self) -> bool:
        return self._closed

    def update_environment(self, env: dict[str, str]) -> dict[str, str | None]:
        """Return the changes since the last call, for the next cell to pass to the kernel; None removes a variable."""
        if env == self._env:
            return {}
        changed: dict[str, str | None] = {name: None for name in self._env if name not in env}
        changed.update({name: value for name, value in env.items() if self._env.get(name) != value})
        self._env = env
        return changed

    def interrupt(self) -> None:
        child.signal_group(self._process, signal.SIGINT)

    def describe_end(self) -> str:
        """Wait for the process to end, kill it if necessary, and return a sentence that describes how it ended."""
        _is_readable(self._exited, _CLOSING_MS)
        with self._lock:
            self._kill()
            if not _is_readable(self._exited, _END_MS):
                return f"the {self._language.name} kernel cannot be killed"
            code = self._process.wait()
        if self._retired:
            return self._retired
        how = f"with exit code {code}" if code >= 0 else f"by {_name_of_signal(-code)}"
        return (
            f"the {self._language.name} kernel ended {how}: its variables are lost, the next execution starts a new one"
        )

    def _kill(self) -> None:
        if self._process.returncode is None:
            child.kill_group(self._process)

    def _close(self) -> None:
        """Release resources. The caller holds ``_lock``; the process was killed or has ended."""
        if self._closed:
            return
        self._closed = True
        if _is_readable(self._exited, _END_MS):
            self._process.wait()
        os.close(self._exited)
        self._channel.close()
        for fd in self.outputs:
            os.close(fd)


class _CellRun:
    """The agent's side of one running cell."""

    def __init__(self, kernel: Kernel, cell: Cell, answer: Answer, seconds: float | None) -> None:
        self._kernel = kernel
        self._answer = answer
        self._seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds
        self._head_at: float | None = time.monotonic() + _HEAD_SECONDS
        self._kill_at: float | None = None
        self._overdue = False
        self._client_gone = False
        self._done: int | None = None
        self._channel = kernel._channel
        self._channel_fd = kernel._channel.fileno()
        self._exited = kernel._exited
        self._decoders: dict[int, Any] = {}
        self._language = kernel._language
        self._begun = not self._language.reports_begin
        self._unsent = memoryview(self._language.encode_cell(cell, kernel.count))
        self._poll = select.poll()
        # Register the channel before the pipes: if only the channel is ready, the pipes were empty at that time.
        self._poll.register(self._channel, select.POLLIN)
        self._open = list(kernel.outputs)
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._exited, select.POLLIN)
        self._client = answer.client_descriptor()
        if self._client >= 0:
            self._poll.register(self._client, select.POLLIN)

    def run(self) -> None:
        self._write_channel()
        while self._done is None:
            ready = dict(self._poll.poll(self._milliseconds_until_due()))
            if self._client in ready:
                self._check_client()
            self._check_deadlines()
            heard, ended = self._channel_fd in ready, self._exited in ready
            for fd in list(self._open):
                if fd in ready:
                    self._read_output(fd, empty=heard or ended)
            if heard:
                ended = self._read_channel(ready[self._channel_fd]) or ended
            if self._done is None:
                if ended:
                    self._read_last_output()
                self._flush_answer()
        for fd in self._decoders:
            self._text(fd, b"", final=True)

    def _milliseconds_until_due(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        soonest = min((at for at in (self._until, self._head_at, self._kill_at) if at is not None), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._head_at is not None and now >= self._head_at:
            self._head_at = None
            if not self._client_gone:
                self._send_to_client(self._answer.begin)
        if self._until is not None and now >= self._until:
            self._until = None
            self._overdue = True
            self._interrupt()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            late = (
                f"the code ran longer than {self._seconds:g} s and did not end"
                if self._overdue
                else "the code did not end"
            )
            self._kernel.retire(f"{late} when it was interrupted, so its kernel was killed and its variables are lost")

    def _check_client(self) -> None:
        self._poll.unregister(self._client)
        self._client = -1
        if self._answer.is_client_gone():
            self._lose_client()

    def _lose_client(self) -> None:
        if not self._client_gone:
            self._client_gone = True
            self._interrupt()

    def _interrupt(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE
            if self._begun:
                self._interrupt_now()

    def _interrupt_now(self) -> None:
        self._kernel.interrupt()
        self._unsent = memoryview(bytes(self._unsent) + self._language.after_interrupt())
        self._write_channel()

    # -- from the kernel ---------------------------------------------------------------------------------------------

    def _read_output(self, fd: int, *, empty: bool) -> None:
        """Pass on a piece of the output; with ``empty``, as much as the pipe can hold."""
        taken = 0
        while taken < _PIPES_HOLD:
            data = child.read_some(fd)
            if data is None:
                return
            if not data:
                self._poll.unregister(fd)
                self._open.remove(fd)
                return
            self._text(fd, data)
            self._flush_answer(most=child.PIECE)
            taken += len(data)
            if not empty or len(data) < child.PIECE:
                return

    def _text(self, fd: int, data: bytes, *, final: bool = False) -> None:
        decoder = self._decoders.get(fd)
        if decoder is None:
            decoder = self._decoders[fd] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final)
        if text and not self._client_gone:
            self._answer.text(self._kernel.outputs[fd], text)

    def _read_channel(self, events: int) -> bool:
        """Handle the kernel's frames; True at the end of the channel."""
        if events & select.POLLOUT:
            self._write_channel()
        if not events & ~select.POLLOUT:
            return False
        try:
            data = self._channel.recv(child.PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            return True
        just_begun = False
        for kind, content in self._language.parse(data):
            if kind == "done":
                for fd in list(self._open) if just_begun else ():
                    self._read_output(fd, empty=True)  # they may have filled since the poll
                self._finish(content)
                return False
            if kind == "broken":
                return self._kill_broken()
            if kind == "begun":
                if not self._begun and self._kill_at is not None:
                    self._interrupt_now()
                self._begun = just_begun = True
                continue
            if self._unsent or not self._event(content):
                return self._kill_broken()
            if kind == "sync":
                self._flush_answer()
                self._unsent = memoryview(self._language.acknowledge())
                self._write_channel()
        return False

    def _event(self, line: bytes) -> bool:
        """Pass on an event; False if ``line`` is not an event."""
        if self._client_gone:
            return True
        known = self._answer.event(line, self._timeout_message() if self._overdue else "")
        self._flush_answer(most=child.PIECE)
        return known

    def _kill_broken(self) -> bool:
        self._kernel.retire("something other than the kernel wrote to its channel, so it was killed")
        return True

    def _finish(self, status: bytes) -> None:
        self._done = int(status)
        if self._overdue and not self._answer.failed:
            self._answer.error("TimeoutError", self._timeout_message())
        elif self._done and not self._overdue:
            self._answer.error("ExitError", f"exit code {self._done}")

    def _timeout_message(self) -> str:
        return f"the code ran longer than {self._seconds:g} s"

    def _read_last_output(self) -> None:
        """Read the rest of the output of a kernel that has ended or closed its channel, then raise KernelEnded."""
        how = self._kernel.describe_end()
        for fd in list(self._open):
            self._read_output(fd, empty=True)
        while self._done is None and _is_readable(self._channel_fd, 0):
            if self._read_channel(select.POLLIN):
                break
        if self._done is None:
            raise KernelEnded("TimeoutError" if self._overdue else KERNEL_DIED, how)

    # -- to the kernel and the client --------------------------------------------------------------------------------

    def _write_channel(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # the kernel has ended; the poll reports that
        self._poll.modify(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _flush_answer(self, most: int = 0) -> None:
        """Send the pending answer if it has more than ``most`` bytes."""
        if self._answer.pending > most:
            self._head_at = None
            self._send_to_client(self._answer.flush)

    def _send_to_client(self, send: Any) -> None:
        try:
            if not self._client_gone:
                send()
        except Gone:
            self._lose_client()


def _spawn(
    language: Language, user: User, env: dict[str, str], cwd: str, channel: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start the first program of the language that exists."""
    env = {**child.environment(user, env), **language.environment()}
    *others, last = language.programs()
    for argv in others:
        try:
            return child.spawn(argv, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)
        except child.NotStarted:
            continue
    return child.spawn(last, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)


def _is_readable(fd: int, milliseconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
