"""The code interpreter over HTTP, as ``e2b_code_interpreter`` and ``cubesandbox`` call it, and ``POST /eval``."""

from __future__ import annotations

from sandbox_agent.failure import invalid
from sandbox_agent.http.message import get_number, get_text, get_variables
from sandbox_agent.interpreter.answers import LineAnswer, ValueAnswer
from sandbox_agent.interpreter.contexts import Context, Contexts
from sandbox_agent.interpreter.languages import Cell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.wire import Reply, Request

_MAX_SECONDS = 1e6


class Interpreter:
    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._contexts = Contexts(environment)

    def execute(self, request: Request, reply: Reply) -> None:
        """``{code, context_id?, language?, env_vars?, timeout?}`` → a line of JSON for each event, as it happens.

        Events: ``number_of_executions {execution_count}``; ``stdout`` and ``stderr`` ``{text, timestamp}``, in
        nanoseconds since the epoch; ``result {text, html, …, extra: {MIME type: content}, is_main_result}``, binary
        content in base64; ``error {name, value, traceback}``. ``env_vars`` apply to this execution. After ``timeout``
        seconds (default: none), or if the client hangs up, the code is interrupted; three seconds later its kernel is
        killed.
        """
        message = request.json()
        context = self._contexts.find(get_text(message, "context_id"), get_text(message, "language"))
        context.run(Cell(_code(message), get_variables(message, "env_vars")), LineAnswer(reply), _seconds(message))

    def evaluate(self, request: Request, reply: Reply) -> None:
        """``{code, timeout?}`` → ``{result, error, exit_code}``, run in the default Python context.

        ``result``: the ``repr`` of the last expression, "None" after a statement, "" after an error. ``error``: the
        error as text; ``exit_code`` is 1 then.
        """
        message = request.json()
        value = ValueAnswer(reply.connection)
        self._contexts.find("").run(Cell(_code(message), {}, plain=True), value, _seconds(message))
        failed = value.failed
        reply.json({"result": "" if failed else value.value, "error": value.error_text, "exit_code": int(failed)})

    def list(self, request: Request, reply: Reply) -> None:
        """→ ``[{id, language, cwd}]``: created contexts, and the default contexts that were used."""
        reply.json([context.describe() for context in self._contexts.list()])

    def make(self, request: Request, reply: Reply) -> None:
        """``{language?, cwd?}`` → ``{id, language, cwd}``. The first execution starts the kernel."""
        message = request.json()
        reply.json(self._contexts.make(get_text(message, "language"), get_text(message, "cwd")).describe())

    def remove(self, request: Request, reply: Reply) -> None:
        self._contexts.remove(request.parameter)
        reply.send(204)

    def restart(self, request: Request, reply: Reply) -> None:
        """→ ``{id, language, cwd}``. A running cell ends with an error."""
        context = self._context_of(request)
        context.restart()
        reply.json(context.describe())

    def start(self, request: Request, reply: Reply) -> None:
        """→ ``{id, language, cwd}``, once the kernel has started and run a cell: for capturing it in a template."""
        context = self._context_of(request)
        context.start()
        reply.json(context.describe())

    def _context_of(self, request: Request) -> Context:
        request.json()  # has no fields
        return self._contexts.find(request.parameter)


def _code(message: dict[str, Any]) -> str:
    if not isinstance(message.get("code"), str):
        raise invalid("code must be a string")
    return get_text(message, "code")


def _seconds(message: dict[str, Any]) -> float | None:
    return get_number(message, "timeout", default=0, most=_MAX_SECONDS) or None
