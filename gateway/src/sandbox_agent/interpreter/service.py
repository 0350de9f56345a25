"""The HTTP API of the code interpreter for ``e2b_code_interpreter`` and ``cubesandbox``, and ``POST /eval``."""

from __future__ import annotations

from sandbox_agent.failure import invalid_argument
from sandbox_agent.http.message import get_number, get_text, get_variables
from sandbox_agent.interpreter.answers import LineResponse, ValueResponse
from sandbox_agent.interpreter.contexts import Context, Contexts
from sandbox_agent.interpreter.languages import Cell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.http.wire import Reply, Request

_MAX_TIMEOUT_SECONDS = 1e6


class Interpreter:
    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._contexts = Contexts(environment)

    def execute(self, request: Request, reply: Reply) -> None:
        """Run code in a context, and stream the events.

        ``{code, context_id?, language?, env_vars?, timeout?}`` → a stream of events, one line of JSON each.

        Events: ``number_of_executions {execution_count}``; ``stdout`` and ``stderr`` ``{text, timestamp}``, in
        nanoseconds since the epoch; ``result {text, html, …, extra: {MIME type: contents}, is_main_result}``, with
        binary contents in base64; ``error {name, value, traceback}``. ``env_vars`` apply only to this execution. After
        ``timeout`` seconds (default: no limit), or if the client hangs up, the code is interrupted. If it does not stop
        within three seconds, its kernel is killed.
        """
        message = request.json()
        context = self._contexts.find(get_text(message, "context_id"), get_text(message, "language"))
        context.run(
            Cell(_get_code(message), get_variables(message, "env_vars")), LineResponse(reply), _get_timeout(message)
        )

    def evaluate(self, request: Request, reply: Reply) -> None:
        """Run code in the default Python context, and return its value.

        ``{code, timeout?}`` → ``{result, error, exit_code}``.

        ``result``: the ``repr`` of the last expression, "None" after a statement, "" after an error; ``error``: the
        text of the error, otherwise ""; ``exit_code``: 1 after an error, otherwise 0.
        """
        message = request.json()
        response = ValueResponse(reply.connection)
        self._contexts.find("").run(Cell(_get_code(message), {}, plain=True), response, _get_timeout(message))
        has_failed = response.has_failed
        reply.json(
            {"result": "" if has_failed else response.value, "error": response.error_text, "exit_code": int(has_failed)}
        )

    def list(self, request: Request, reply: Reply) -> None:
        """List the contexts that clients created and the default contexts used so far: ``[{id, language, cwd}]``."""
        reply.json([context.describe() for context in self._contexts.list()])

    def create(self, request: Request, reply: Reply) -> None:
        """Create a context: ``{language?, cwd?}`` → ``{id, language, cwd}``. The first execution starts the kernel."""
        message = request.json()
        reply.json(self._contexts.create(get_text(message, "language"), get_text(message, "cwd")).describe())

    def remove(self, request: Request, reply: Reply) -> None:
        self._contexts.remove(request.parameter)
        reply.send(204)

    def restart(self, request: Request, reply: Reply) -> None:
        """Restart a context, and return its ``{id, language, cwd}``. A running cell fails with an error."""
        context = self._find_context(request)
        context.restart()
        reply.json(context.describe())

    def start(self, request: Request, reply: Reply) -> None:
        """Start the kernel of a context, run an empty cell, and return the context's ``{id, language, cwd}``.

        A template that is captured afterwards contains the running kernel.
        """
        context = self._find_context(request)
        context.start()
        reply.json(context.describe())

    def _find_context(self, request: Request) -> Context:
        request.json()  # raises Failure if the body is invalid; it has no fields
        return self._contexts.find(request.parameter)


def _get_code(message: dict[str, Any]) -> str:
    if not isinstance(message.get("code"), str):
        raise invalid_argument("the field 'code' must be a string")
    return get_text(message, "code")


def _get_timeout(message: dict[str, Any]) -> float | None:
    return get_number(message, "timeout", default=0, maximum=_MAX_TIMEOUT_SECONDS) or None
