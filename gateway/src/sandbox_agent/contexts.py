"""Contexts of the code interpreter: a language, a directory, and a kernel that keeps what cells leave behind."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from sandbox_agent import users
from sandbox_agent.answers import Answer
from sandbox_agent.failure import Failure, invalid
from sandbox_agent.idle import Idle
from sandbox_agent.kernel_process import Ended, Kernel
from sandbox_agent.languages import LANGUAGES, Cell
from sandbox_agent.wire import Gone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS = {"python": "default", "bash": "bash"}
"""The context of each language that is made on demand."""
MOST = 64
_HOME = "/home/user"
_GREETING_SECONDS = 60.0


class Contexts:
    """The table of them; ``environment``: asked at each execution for the variables that every process gets."""

    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._idle = Idle()
        self._contexts: dict[str, Context] = {}

    def list(self) -> list[Context]:
        with self._lock:
            return list(self._contexts.values())

    def make(self, language: str, cwd: str) -> Context:
        """A new context. Raises Failure where the language or the directory is not there, or there are too many."""
        language = _known(language or "python")
        user = users.named("")
        directory = user.path(cwd) if cwd else _home(user)
        if not os.path.isdir(directory):
            raise invalid(f"the working directory {directory} does not exist")
        return self._add(os.urandom(16).hex(), language, directory)

    def find(self, name: str, language: str = "") -> Context:
        """The context of that id, else the one of ``language`` that is made on demand."""
        language = _known(language) if language else ""
        name = name or DEFAULTS[language or "python"]
        with self._lock:
            found = self._contexts.get(name)
        if found is None:
            owner = next((some for some, default in DEFAULTS.items() if default == name), "")
            if not owner:
                raise _missing(name)
            found = self._add(name, owner, _home(users.named("")))
        if language and found.language != language:
            raise invalid(f"the context {name} runs {found.language}, not {language}: name one of the two")
        return found

    def remove(self, name: str) -> None:
        with self._lock:
            context = self._contexts.pop(name, None)
        if context is None:
            raise _missing(name)
        context.end()

    def _add(self, name: str, language: str, cwd: str) -> Context:
        with self._lock:
            if name not in self._contexts:
                if len(self._contexts) >= MOST:
                    raise Failure("resource_exhausted", f"there are {MOST} contexts already: remove one first")
                self._contexts[name] = Context(name, language, cwd, self._environment, self._idle)
            return self._contexts[name]


class Context:
    """Cells in it run one after another. Its kernel is started by the first that needs one."""

    def __init__(
        self, name: str, language: str, cwd: str, environment: Callable[[], dict[str, str]], idle: Idle
    ) -> None:
        self.id = name
        self.language = language
        self.cwd = cwd
        self._environment = environment
        self._idle = idle
        self._queue = Queue()
        self._lock = threading.Lock()
        self._kernel: Kernel | None = None
        self._ended = False

    def describe(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def run(self, cell: Cell, answer: Answer, seconds: float | None = None) -> None:
        """Run it when those before it are done, and end the answer; ``seconds``: for how long at most.

        Raises Failure where it was not run, Gone where nobody is there to take the answer.
        """
        LANGUAGES[self.language]().check(cell)
        with self._queue.turn(answer):
            kernel = self._ready()
            kernel.count += 1
            cell.changes = kernel.changes(self._environment())
            answer.started(kernel.count)
            try:
                kernel.run(cell, answer, seconds)
            except Ended as end:
                self._forget(kernel)
                answer.error(end.name, end.value)
            try:
                answer.end()
            finally:
                self._idle.watch(kernel)

    def start(self) -> None:
        """Have a kernel that has run something already, and so has loaded all it needs."""
        with self._queue.turn(Answer()):
            kernel = self._ready()
            if not kernel.count:
                self._run_quietly(kernel, Cell("", {}))

    def restart(self) -> None:
        """End the kernel, and what runs in it; the next cell gets a new one."""
        self._drop("the context was restarted")

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._drop("the context was removed")

    def _drop(self, reason: str) -> None:
        with self._lock:
            kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.retire(reason)

    def _forget(self, kernel: Kernel) -> None:
        with self._lock:
            if self._kernel is kernel:
                self._kernel = None

    def _ready(self) -> Kernel:
        """The kernel, a new one if need be."""
        with self._lock:
            if self._ended:
                raise _missing(self.id)
            if self._kernel is not None and not self._kernel.closed:
                return self._kernel
        language = LANGUAGES[self.language]()
        kernel = Kernel(language, users.named(""), self._environment(), self.cwd)
        greeting = language.greeting()
        if greeting:
            self._run_quietly(kernel, greeting)
        with self._lock:
            if self._ended:
                kernel.retire("the context was removed")
                raise _missing(self.id)
            self._kernel = kernel
        return kernel

    def _run_quietly(self, kernel: Kernel, cell: Cell) -> None:
        try:
            kernel.run(cell, Answer(), _GREETING_SECONDS)
        except Ended as end:
            self._forget(kernel)
            raise Failure("unavailable", f"the {self.language} kernel did not start: {end.value}") from None
        self._idle.watch(kernel)


class Queue:
    """First come, first served; who hangs up while waiting is forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[int] = deque()

    def turn(self, answer: Answer) -> _Turn:
        return _Turn(self, answer)

    def enter(self, answer: Answer) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            reader, writer = os.pipe()
            self._waiting.append(writer)
        try:
            if not _called(reader, answer):
                with self._lock:
                    called = writer not in self._waiting
                    if not called:
                        self._waiting.remove(writer)
                if called:
                    self.leave()
                raise Gone
        finally:
            os.close(reader)
            os.close(writer)

    def leave(self) -> None:
        with self._lock:
            if self._waiting:
                os.write(self._waiting.popleft(), b".")
            else:
                self._taken = False


class _Turn:
    def __init__(self, queue: Queue, answer: Answer) -> None:
        self._queue = queue
        self._answer = answer

    def __enter__(self) -> None:
        self._queue.enter(self._answer)

    def __exit__(self, *error: object) -> None:
        self._queue.leave()


def _called(reader: int, answer: Answer) -> bool:
    """Wait to be called; False where the client hung up first."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    client = answer.client()
    if client >= 0:
        poll.register(client, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if reader in ready:
            return True
        if answer.gone():
            return False
        poll.unregister(client)  # it sent something, for later


def _known(language: str) -> str:
    language = language.lower()
    if language not in LANGUAGES:
        raise invalid(f"there is no language {language!r} here: {' and '.join(LANGUAGES)} are")
    return language


def _missing(name: str) -> Failure:
    return Failure("not_found", f"context {name} not found")


def _home(user: users.User) -> str:
    return next((path for path in (_HOME, user.home) if os.path.isdir(path)), "/")
