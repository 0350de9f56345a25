"""Contexts of the code interpreter. Each has a language, a directory, and a kernel that keeps its variables."""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from sandbox_agent.failure import Failure, invalid_argument
from sandbox_agent.http.wire import ConnectionLost
from sandbox_agent.interpreter.answers import CellResponse
from sandbox_agent.interpreter.idle import IdleReader
from sandbox_agent.interpreter.kernel_process import Kernel, KernelExited
from sandbox_agent.interpreter.languages import LANGUAGES, Cell
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_CONTEXT_IDS = {"python": "default", "bash": "bash"}
"""The id of the default context of each language, which is created on demand."""
MAX_CONTEXTS = 64
_DEFAULT_DIRECTORY = "/home/user"
_STARTUP_TIMEOUT_SECONDS = 60.0


class Contexts:
    """All contexts of the code interpreter.

    ``environment``: a function that returns the sandbox's environment variables, called for each cell.
    """

    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._idle_reader = IdleReader()
        self._contexts: dict[str, Context] = {}

    def list(self) -> list[Context]:
        with self._lock:
            return list(self._contexts.values())

    def create(self, language: str, cwd: str) -> Context:
        """Create a context.

        Raises Failure if the language is unknown, the directory does not exist, or there are too many contexts.
        """
        language = _check_language(language or "python")
        user = users.find_user("")
        directory = user.resolve_path(cwd) if cwd else _find_default_directory(user)
        if not os.path.isdir(directory):
            raise invalid_argument(f"the working directory {directory} does not exist: create it first")
        return self._add(os.urandom(16).hex(), language, directory)

    def find(self, context_id: str, language: str = "") -> Context:
        """Return the context with the given id. If the id is "", return the default context of ``language``."""
        language = _check_language(language) if language else ""
        context_id = context_id or DEFAULT_CONTEXT_IDS[language or "python"]
        with self._lock:
            context = self._contexts.get(context_id)
        if context is None:
            default_language = next((key for key, value in DEFAULT_CONTEXT_IDS.items() if value == context_id), "")
            if not default_language:
                raise _make_not_found_error(context_id)
            context = self._add(context_id, default_language, _find_default_directory(users.find_user("")))
        if language and context.language != language:
            raise invalid_argument(
                f"the context {context_id} runs {context.language}, not {language}: send either context_id or language"
            )
        return context

    def remove(self, context_id: str) -> None:
        with self._lock:
            context = self._contexts.pop(context_id, None)
        if context is None:
            raise _make_not_found_error(context_id)
        context.close()

    def _add(self, context_id: str, language: str, cwd: str) -> Context:
        with self._lock:
            if context_id not in self._contexts:
                if len(self._contexts) >= MAX_CONTEXTS:
                    raise Failure(
                        "resource_exhausted",
                        f"there are already {MAX_CONTEXTS} contexts: remove one first",
                    )
                self._contexts[context_id] = Context(context_id, language, cwd, self._environment, self._idle_reader)
            return self._contexts[context_id]


class Context:
    """A context, which runs one cell at a time. The first cell starts the kernel."""

    def __init__(
        self,
        context_id: str,
        language: str,
        cwd: str,
        environment: Callable[[], dict[str, str]],
        idle_reader: IdleReader,
    ) -> None:
        self.id = context_id
        self.language = language
        self.cwd = cwd
        self._environment = environment
        self._idle_reader = idle_reader
        self._queue = Queue()
        self._lock = threading.Lock()
        self._kernel: Kernel | None = None
        self._is_closed = False

    def describe(self) -> dict[str, str]:
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def run(self, cell: Cell, response: CellResponse, seconds: float | None = None) -> None:
        """Run a cell after all earlier cells, for at most ``seconds``, and send the response.

        Raises Failure if the cell cannot run, and ConnectionLost if the client hangs up.
        """
        LANGUAGES[self.language]().check_cell(cell)
        with self._queue.turn(response):
            kernel = self._ensure_kernel()
            kernel.count += 1
            cell.changes = kernel.update_environment(self._environment())
            response.begin_cell(kernel.count)
            try:
                kernel.run(cell, response, seconds)
            except KernelExited as error:
                self._forget_kernel(kernel)
                response.handle_error(error.name, error.value)
            try:
                response.end()
            finally:
                self._idle_reader.watch(kernel)

    def start(self) -> None:
        """Start the kernel and run an empty cell, which loads everything that cells need."""
        with self._queue.turn(CellResponse()):
            kernel = self._ensure_kernel()
            if not kernel.count:
                self._run_quietly(kernel, Cell("", {}))

    def restart(self) -> None:
        """Stop the kernel and its running cell. The next cell starts a new kernel."""
        self._terminate_kernel("the context was restarted")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._terminate_kernel("the context was removed")

    def _terminate_kernel(self, reason: str) -> None:
        with self._lock:
            kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.terminate(reason)

    def _forget_kernel(self, kernel: Kernel) -> None:
        with self._lock:
            if self._kernel is kernel:
                self._kernel = None

    def _ensure_kernel(self) -> Kernel:
        """Return the running kernel. Start one if there is none."""
        with self._lock:
            if self._is_closed:
                raise _make_not_found_error(self.id)
            if self._kernel is not None and not self._kernel.is_closed:
                return self._kernel
        language = LANGUAGES[self.language]()
        kernel = Kernel(language, users.find_user(""), self._environment(), self.cwd)
        startup_cell = language.startup_cell()
        if startup_cell:
            self._run_quietly(kernel, startup_cell)
        with self._lock:
            if self._is_closed:
                kernel.terminate("the context was removed")
                raise _make_not_found_error(self.id)
            self._kernel = kernel
        return kernel

    def _run_quietly(self, kernel: Kernel, cell: Cell) -> None:
        try:
            kernel.run(cell, CellResponse(), _STARTUP_TIMEOUT_SECONDS)
        except KernelExited as error:
            self._forget_kernel(kernel)
            raise Failure("unavailable", f"the {self.language} kernel did not start: {error.value}") from None
        self._idle_reader.watch(kernel)


class Queue:
    """A first-come, first-served queue of cells. A client that hangs up is removed from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_busy = False
        self._waiters: deque[int] = deque()

    def turn(self, response: CellResponse) -> _Turn:
        return _Turn(self, response)

    def enter(self, response: CellResponse) -> None:
        with self._lock:
            if not self._is_busy:
                self._is_busy = True
                return
            reader, writer = os.pipe()
            self._waiters.append(writer)
        try:
            if not _wait_for_turn(reader, response):
                with self._lock:
                    has_turn = writer not in self._waiters
                    if not has_turn:
                        self._waiters.remove(writer)
                if has_turn:
                    self.leave()
                raise ConnectionLost
        finally:
            os.close(reader)
            os.close(writer)

    def leave(self) -> None:
        with self._lock:
            if self._waiters:
                os.write(self._waiters.popleft(), b".")
            else:
                self._is_busy = False


class _Turn:
    def __init__(self, queue: Queue, response: CellResponse) -> None:
        self._queue = queue
        self._response = response

    def __enter__(self) -> None:
        self._queue.enter(self._response)

    def __exit__(self, *error: object) -> None:
        self._queue.leave()


def _wait_for_turn(reader: int, response: CellResponse) -> bool:
    """Wait until it is this client's turn. Returns False if the client hangs up first."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    client_fd = response.client_descriptor()
    if client_fd >= 0:
        poll.register(client_fd, select.POLLIN)
    while True:
        ready_fds = [fd for fd, _ in poll.poll()]
        if reader in ready_fds:
            return True
        if response.is_client_gone():
            return False
        poll.unregister(client_fd)  # the client has sent its next request


def _check_language(language: str) -> str:
    language = language.lower()
    if language not in LANGUAGES:
        raise invalid_argument(f"the language {language!r} is not available: use {' or '.join(LANGUAGES)}")
    return language


def _make_not_found_error(context_id: str) -> Failure:
    return Failure("not_found", f"context {context_id} not found")


def _find_default_directory(user: users.User) -> str:
    return next((path for path in (_DEFAULT_DIRECTORY, user.home) if os.path.isdir(path)), "/")
