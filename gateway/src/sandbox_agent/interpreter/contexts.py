"""Contexts of the code interpreter: a language, a directory, and a kernel that keeps variables between cells."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from sandbox_agent.failure import Failure, invalid
from sandbox_agent.http.wire import Gone
from sandbox_agent.interpreter.answers import Answer
from sandbox_agent.interpreter.idle import IdleReader
from sandbox_agent.interpreter.kernel_process import Kernel, KernelEnded
from sandbox_agent.interpreter.languages import LANGUAGES, Cell
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS = {"python": "default", "bash": "bash"}
"""The default context of each language, created on demand."""
MAX_CONTEXTS = 64
_HOME = "/home/user"
_STARTUP_SECONDS = 60.0


class Contexts:
    """The table of contexts. ``environment``: called for each cell; returns the variables that all processes get."""

    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._idle = IdleReader()
        self._contexts: dict[str, Context] = {}

    def list(self) -> list[Context]:
        with self._lock:
            return list(self._contexts.values())

    def make(self, language: str, cwd: str) -> Context:
        """Create a context. Raises Failure for an unknown language, a missing directory or too many contexts."""
        language = _check_language(language or "python")
        user = users.find_user("")
        directory = user.path(cwd) if cwd else _default_directory(user)
        if not os.path.isdir(directory):
            raise invalid(f"the working directory {directory} does not exist")
        return self._add(os.urandom(16).hex(), language, directory)

    def find(self, name: str, language: str = "") -> Context:
        """Find the context with the id ``name``, or the default context of ``language``."""
        language = _check_language(language) if language else ""
        name = name or DEFAULTS[language or "python"]
        with self._lock:
            found = self._contexts.get(name)
        if found is None:
            owner = next((some for some, default in DEFAULTS.items() if default == name), "")
            if not owner:
                raise _not_found_error(name)
            found = self._add(name, owner, _default_directory(users.find_user("")))
        if language and found.language != language:
            raise invalid(
                f"the context {name} runs {found.language}, not {language}: send either the context or the language"
            )
        return found

    def remove(self, name: str) -> None:
        with self._lock:
            context = self._contexts.pop(name, None)
        if context is None:
            raise _not_found_error(name)
        context.end()

    def _add(self, name: str, language: str, cwd: str) -> Context:
        with self._lock:
            if name not in self._contexts:
                if len(self._contexts) >= MAX_CONTEXTS:
                    raise Failure(
                        "resource_exhausted",
                        f"there are {MAX_CONTEXTS} contexts already: remove one first",
                    )
                self._contexts[name] = Context(name, language, cwd, self._environment, self._idle)
            return self._contexts[name]


class Context:
    """A context, which runs cells one after another. The first cell starts the kernel."""

    def __init__(
        self, name: str, language: str, cwd: str, environment: Callable[[], dict[str, str]], idle: IdleReader
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
        """Run a cell when the earlier ones are done, for at most ``seconds``, and end the answer.

        Raises Failure if the cell did not run, Gone if the client hung up.
        """
        LANGUAGES[self.language]().check(cell)
        with self._queue.turn(answer):
            kernel = self._ensure_kernel()
            kernel.count += 1
            cell.changes = kernel.update_environment(self._environment())
            answer.begin_cell(kernel.count)
            try:
                kernel.run(cell, answer, seconds)
            except KernelEnded as end:
                self._forget(kernel)
                answer.error(end.name, end.value)
            try:
                answer.end()
            finally:
                self._idle.watch(kernel)

    def start(self) -> None:
        """Start the kernel, and run an empty cell so that everything is loaded."""
        with self._queue.turn(Answer()):
            kernel = self._ensure_kernel()
            if not kernel.count:
                self._run_quietly(kernel, Cell("", {}))

    def restart(self) -> None:
        """Stop the kernel and the running cell. The next cell starts a new kernel."""
        self._retire_kernel("the context was restarted")

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._retire_kernel("the context was removed")

    def _retire_kernel(self, reason: str) -> None:
        with self._lock:
            kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.retire(reason)

    def _forget(self, kernel: Kernel) -> None:
        with self._lock:
            if self._kernel is kernel:
                self._kernel = None

    def _ensure_kernel(self) -> Kernel:
        """Return the running kernel; starts one if there is none."""
        with self._lock:
            if self._ended:
                raise _not_found_error(self.id)
            if self._kernel is not None and not self._kernel.closed:
                return self._kernel
        language = LANGUAGES[self.language]()
        kernel = Kernel(language, users.find_user(""), self._environment(), self.cwd)
        startup_cell = language.startup_cell()
        if startup_cell:
            self._run_quietly(kernel, startup_cell)
        with self._lock:
            if self._ended:
                kernel.retire("the context was removed")
                raise _not_found_error(self.id)
            self._kernel = kernel
        return kernel

    def _run_quietly(self, kernel: Kernel, cell: Cell) -> None:
        try:
            kernel.run(cell, Answer(), _STARTUP_SECONDS)
        except KernelEnded as end:
            self._forget(kernel)
            raise Failure("unavailable", f"the {self.language} kernel did not start: {end.value}") from None
        self._idle.watch(kernel)


class Queue:
    """A first-come, first-served queue. A client that hangs up leaves it."""

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
            if not _wait_for_turn(reader, answer):
                with self._lock:
                    has_turn = writer not in self._waiting
                    if not has_turn:
                        self._waiting.remove(writer)
                if has_turn:
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


def _wait_for_turn(reader: int, answer: Answer) -> bool:
    """Wait for this client's turn; False if the client hung up first."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    client = answer.client_descriptor()
    if client >= 0:
        poll.register(client, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if reader in ready:
            return True
        if answer.is_client_gone():
            return False
        poll.unregister(client)  # the client has sent its next request


def _check_language(language: str) -> str:
    language = language.lower()
    if language not in LANGUAGES:
        raise invalid(f"the language {language!r} is not available: use {' or '.join(LANGUAGES)}")
    return language


def _not_found_error(name: str) -> Failure:
    return Failure("not_found", f"context {name} not found")


def _default_directory(user: users.User) -> str:
    return next((path for path in (_HOME, user.home) if os.path.isdir(path)), "/")
