"""A kernel as the agent sees it: a child process that runs one cell after another, followed by its pipes.

Whatever it writes is taken for what a stranger wrote: it decides about its own cells' answers and nothing else.
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

from sandbox_agent import child
from sandbox_agent.wire import Gone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.answers import Answer
    from sandbox_agent.languages import Cell, Language
    from sandbox_agent.users import User

GRACE = 3.0
"""Seconds that code has to end after an interrupt, before its kernel is killed."""
_END_MS = 5000
_CLOSING_MS = 500
_PIPES_HOLD = 1 << 20
_HEAD_SECONDS = 0.5
"""How long an answer may have nothing to say before its head is sent alone."""
DIED = "KernelDied"


class Ended(Exception):
    """The kernel is no more: ``name`` of the error that this is, and a sentence."""

    def __init__(self, name: str, value: str) -> None:
        super().__init__(value)
        self.name = name
        self.value = value


class Kernel:
    """Runs one cell at a time; ``retire`` and ``drain`` may come from any thread. ``count``: its cells so far."""

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
            ours.close()  # at which a kernel that was started ends
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
        """Kill it; what runs in it is answered with ``reason``."""
        with self._lock:
            if not self._closed:
                self._retired = self._retired or reason
                self._kill()
                if not self._busy:
                    self._close()

    def drain(self, fd: int) -> bool:
        """Drop some of what it wrote after a cell; False while that is not to be dropped, or not any more."""
        with self._lock:
            return not self._busy and not self._closed and child.read_some(fd) != b""

    # -- a cell ------------------------------------------------------------------------------------------------------

    def run(self, cell: Cell, answer: Answer, seconds: float | None) -> None:
        """Run it to its end. Raises Ended when the kernel is gone, whose last words were passed on before.

        An answer that nobody takes, and time that is up, interrupt the code; if it goes on, the kernel is killed.
        """
        with self._lock:
            if self._retired:
                raise Ended(DIED, self._retired)
            self._busy = True
        well = False
        try:
            _Conversation(self, cell, answer, seconds).hold()
            well = True
        finally:
            with self._lock:
                self._busy = False
                if not well or self._retired:
                    self._kill()
                    self._close()

    @property
    def closed(self) -> bool:
        return self._closed

    def changes(self, env: dict[str, str]) -> dict[str, str | None]:
        """How the sandbox's variables differ from those the kernel was told last; it is told now."""
        if env == self._env:
            return {}
        changed: dict[str, str | None] = {name: None for name in self._env if name not in env}
        changed.update({name: value for name, value in env.items() if self._env.get(name) != value})
        self._env = env
        return changed

    def interrupt(self) -> None:
        child.signal_group(self._process, signal.SIGINT)

    def how_it_ended(self) -> str:
        """Wait for its end, kill it if need be; a sentence."""
        _readable(self._exited, _CLOSING_MS)
        with self._lock:
            self._kill()
            if not _readable(self._exited, _END_MS):
                return f"the {self._language.name} kernel does not end"
            code = self._process.wait()
        if self._retired:
            return self._retired
        how = f"with exit code {code}" if code >= 0 else f"by {_signal_name(-code)}"
        return (
            f"the {self._language.name} kernel ended {how}: its variables are lost, the next execution starts a new one"
        )

    def _kill(self) -> None:
        if self._process.returncode is None:
            child.kill_group(self._process)

    def _close(self) -> None:
        """Let go of it; ``_lock`` is held, and it was killed or ended by itself."""
        if self._closed:
            return
        self._closed = True
        if _readable(self._exited, _END_MS):
            self._process.wait()
        os.close(self._exited)
        self._channel.close()
        for fd in self.outputs:
            os.close(fd)


class _Conversation:
    """The agent's side of one cell."""

    def __init__(self, kernel: Kernel, cell: Cell, answer: Answer, seconds: float | None) -> None:
        self._kernel = kernel
        self._answer = answer
        self._seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds
        self._head_at: float | None = time.monotonic() + _HEAD_SECONDS
        self._kill_at: float | None = None
        self._overdue = False
        self._gone = False
        self._done: int | None = None
        self._channel = kernel._channel
        self._channel_fd = kernel._channel.fileno()
        self._exited = kernel._exited
        self._decoders: dict[int, Any] = {}
        self._language = kernel._language
        self._begun = not self._language.says_begun
        self._unsent = memoryview(self._language.ask(cell, kernel.count))
        self._poll = select.poll()
        # Asked about before the pipes: when it has something to say, and they have not, they were empty by then.
        self._poll.register(self._channel, select.POLLIN)
        self._open = list(kernel.outputs)
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._exited, select.POLLIN)
        self._client = answer.client()
        if self._client >= 0:
            self._poll.register(self._client, select.POLLIN)

    def hold(self) -> None:
        self._write()
        while self._done is None:
            ready = dict(self._poll.poll(self._patience()))
            if self._client in ready:
                self._look_at_client()
            self._look_at_time()
            heard, ended = self._channel_fd in ready, self._exited in ready
            for fd in list(self._open):
                if fd in ready:
                    self._take(fd, empty=heard or ended)
            if heard:
                ended = self._hear(ready[self._channel_fd]) or ended
            if self._done is None:
                if ended:
                    self._last_words()
                self._pass_on()
        for fd in self._decoders:
            self._text(fd, b"", final=True)

    def _patience(self) -> float | None:
        """Milliseconds until something has to be done even if nothing happens."""
        soonest = min((at for at in (self._until, self._head_at, self._kill_at) if at is not None), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _look_at_time(self) -> None:
        now = time.monotonic()
        if self._head_at is not None and now >= self._head_at:
            self._head_at = None
            if not self._gone:
                self._try(self._answer.begin)
        if self._until is not None and now >= self._until:
            self._until = None
            self._overdue = True
            self._interrupt()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            late = (
                f"the code ran longer than {self._seconds:g} s and did not end" if self._overdue else "it did not end"
            )
            self._kernel.retire(f"{late} when it was interrupted, so its kernel was killed; its variables are lost")

    def _look_at_client(self) -> None:
        self._poll.unregister(self._client)
        self._client = -1
        if self._answer.gone():
            self._leave()

    def _leave(self) -> None:
        if not self._gone:
            self._gone = True
            self._interrupt()

    def _interrupt(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE
            if self._begun:
                self._interrupt_now()

    def _interrupt_now(self) -> None:
        self._kernel.interrupt()
        self._unsent = memoryview(bytes(self._unsent) + self._language.after_interrupt())
        self._write()

    # -- from the kernel ---------------------------------------------------------------------------------------------

    def _take(self, fd: int, *, empty: bool) -> None:
        """Pass on a piece of its output; with ``empty`` all that a pipe can have held."""
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
            self._pass_on(most=child.PIECE)
            taken += len(data)
            if not empty or len(data) < child.PIECE:
                return

    def _text(self, fd: int, data: bytes, *, final: bool = False) -> None:
        decoder = self._decoders.get(fd)
        if decoder is None:
            decoder = self._decoders[fd] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final)
        if text and not self._gone:
            self._answer.text(self._kernel.outputs[fd], text)

    def _hear(self, events: int) -> bool:
        """What came over the channel; True at its end."""
        if events & select.POLLOUT:
            self._write()
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
        for kind, content in self._language.hear(data):
            if kind == "done":
                for fd in list(self._open) if just_begun else ():
                    self._take(fd, empty=True)  # all of it has happened since they were asked about
                self._finish(content)
                return False
            if kind == "broken":
                return self._broken()
            if kind == "begun":
                if not self._begun and self._kill_at is not None:
                    self._interrupt_now()
                self._begun = just_begun = True
                continue
            if self._unsent or not self._event(content):
                return self._broken()
            if kind == "sync":
                self._pass_on()
                self._unsent = memoryview(self._language.passed_on())
                self._write()
        return False

    def _event(self, line: bytes) -> bool:
        """Pass it on; False where it is none. A kernel that says something has read all that it was told."""
        if self._gone:
            return True
        known = self._answer.event(line, self._too_late() if self._overdue else "")
        self._pass_on(most=child.PIECE)
        return known

    def _broken(self) -> bool:
        self._kernel.retire("something other than the kernel wrote to its channel, so it was killed")
        return True

    def _finish(self, status: bytes) -> None:
        self._done = int(status)
        if self._overdue and not self._answer.failed:
            self._answer.error("TimeoutError", self._too_late())
        elif self._done and not self._overdue:
            self._answer.error("ExitError", f"exit code {self._done}")

    def _too_late(self) -> str:
        return f"the code ran longer than {self._seconds:g} s"

    def _last_words(self) -> None:
        """It has ended, or let go of its channel: take what it still said, then say that."""
        how = self._kernel.how_it_ended()
        for fd in list(self._open):
            self._take(fd, empty=True)
        while self._done is None and _readable(self._channel_fd, 0):
            if self._hear(select.POLLIN):
                break
        if self._done is None:
            raise Ended("TimeoutError" if self._overdue else DIED, how)

    # -- to the kernel and the client --------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")  # it has ended, which is seen elsewhere
        self._poll.modify(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _pass_on(self, most: int = 0) -> None:
        """Send what there is, if it is more than ``most`` bytes."""
        if self._answer.waiting > most:
            self._head_at = None
            self._try(self._answer.flush)

    def _try(self, send: Any) -> None:
        try:
            if not self._gone:
                send()
        except Gone:
            self._leave()


def _spawn(
    language: Language, user: User, env: dict[str, str], cwd: str, channel: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start the first of the language's programs that is there."""
    env = {**child.environment(user, env), **language.environment()}
    *others, last = language.programs()
    for argv in others:
        try:
            return child.spawn(argv, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)
        except child.NotStarted:
            continue
    return child.spawn(last, user=user, env=env, cwd=cwd, stdin=channel, stdout=stdout, stderr=stderr)


def _readable(fd: int, milliseconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
