"""The code interpreter over HTTP, as ``e2b_code_interpreter`` and ``cubesandbox`` call it, and ``POST /eval``."""

from __future__ import annotations

from sandbox_agent.answers import Lines, Value
from sandbox_agent.contexts import Context, Contexts
from sandbox_agent.failure import invalid
from sandbox_agent.languages import Cell
from sandbox_agent.message import number, text, variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sandbox_agent.wire import Reply, Request

_MOST_SECONDS = 1e6


class Interpreter:
    def __init__(self, environment: Callable[[], dict[str, str]]) -> None:
        self._contexts = Contexts(environment)

    def execute(self, request: Request, reply: Reply) -> None:
        """``{code, context_id?, language?, env_vars?, timeout?}`` → lines of JSON, as it happens.

        ``number_of_executions {execution_count}``; ``stdout`` and ``stderr`` ``{text, timestamp}``, nanoseconds since
        the epoch; ``result {text, html, …, extra: {MIME type: content}, is_main_result}``, what is binary in base64;
        ``error {name, value, traceback}``. ``env_vars`` hold for this execution; ``timeout`` in seconds, none without:
        then, as when the client hangs up, the code is interrupted, and after three seconds its kernel killed.
        """
        message = request.json()
        context = self._contexts.find(text(message, "context_id"), text(message, "language"))
        context.run(Cell(_code(message), variables(message, "env_vars")), Lines(reply), _seconds(message))

    def evaluate(self, request: Request, reply: Reply) -> None:
        """``{code, timeout?}`` → ``{result, error, exit_code}``, run in the default Python context.

        ``result``: the ``repr`` of the last expression, "None" after a statement, "" after an error, which is a
        sentence in ``error``, with exit_code 1.
        """
        message = request.json()
        value = Value(reply.connection)
        self._contexts.find("").run(Cell(_code(message), {}, plain=True), value, _seconds(message))
        failed = value.failed
        reply.json({"result": "" if failed else value.value, "error": value.words, "exit_code": int(failed)})

    def list(self, request: Request, reply: Reply) -> None:
        """→ ``[{id, language, cwd}]``: the default contexts once they were used, and those that were made."""
        reply.json([context.describe() for context in self._contexts.list()])

    def make(self, request: Request, reply: Reply) -> None:
        """``{language?, cwd?}`` → ``{id, language, cwd}``; its kernel starts with its first execution."""
        message = request.json()
        reply.json(self._contexts.make(text(message, "language"), text(message, "cwd")).describe())

    def remove(self, request: Request, reply: Reply) -> None:
        self._contexts.remove(request.parameter)
        reply.send(204)

    def restart(self, request: Request, reply: Reply) -> None:
        """→ ``{id, language, cwd}``; what runs in it ends with an error."""
        context = self._asked(request)
        context.restart()
        reply.json(context.describe())

    def start(self, request: Request, reply: Reply) -> None:
        """→ ``{id, language, cwd}``, when its kernel is ready and warm: a template can be captured with it."""
        context = self._asked(request)
        context.start()
        reply.json(context.describe())

    def _asked(self, request: Request) -> Context:
        request.json()  # which has nothing to say
        return self._contexts.find(request.parameter)


def _code(message: dict[str, Any]) -> str:
    if not isinstance(message.get("code"), str):
        raise invalid("code must be a string")
    return text(message, "code")


def _seconds(message: dict[str, Any]) -> float | None:
    return number(message, "timeout", default=0, most=_MOST_SECONDS) or None
