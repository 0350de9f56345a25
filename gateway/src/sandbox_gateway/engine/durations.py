"""Measure how long operations take, and how they end.

``measured`` decorates the methods that carry out operations. A group calls ``Durations.operation_measured`` itself only
for operations that have no request of their own, such as the start of a prewarmed fork.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from sandbox_gateway.errors import GatewayError, NoSpace
from sandbox_gateway.records import MemoryMode, Snapshot

if TYPE_CHECKING:
    from sandbox_gateway.engine.context import Context

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class Measurement:
    """One execution of an operation.

    ``memory``: the memory mode of the snapshot that was taken or started from, or "" if there was none, or if the
    operation finished before the mode was known. ``outcome``: "ok", "refused", "failed" or "cancelled".
    """

    operation: str
    memory: str = ""
    outcome: str = "ok"
    seconds: float = 0.0


_current_measurement: ContextVar[Measurement | None] = ContextVar("measurement", default=None)


def set_memory_mode(mode: MemoryMode) -> None:
    """Set the memory mode of the operation that is being carried out."""
    if (measurement := _current_measurement.get()) is not None:
        measurement.memory = mode.value


class Durations:
    """Reports each operation to ``listener`` when it ends, and each new snapshot to ``capture_listener``."""

    def __init__(self) -> None:
        self.listener: Callable[[Measurement], None] = lambda measurement: None
        self.capture_listener: Callable[[Snapshot], None] = lambda snapshot: None

    @contextmanager
    def operation_measured(self, operation: str, memory: MemoryMode | None = None) -> Iterator[Measurement]:
        """Measure the operation that is carried out inside this context."""
        measurement = Measurement(operation, memory.value if memory else "")
        caller = _current_measurement.get()
        token = _current_measurement.set(measurement)
        start_time = time.monotonic()
        try:
            yield measurement
        except BaseException as error:
            measurement.outcome = _determine_outcome(error)
            raise
        finally:
            _current_measurement.reset(token)
            if caller is not None:
                caller.memory = caller.memory or measurement.memory
            measurement.seconds = time.monotonic() - start_time
            self.listener(measurement)


def _determine_outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    is_refusal = isinstance(error, GatewayError) and (error.status < 500 or isinstance(error, NoSpace))
    return "refused" if is_refusal else "failed"


class _Group(Protocol):
    _context: Context


_G = TypeVar("_G", bound=_Group)


def measured(
    operation: str,
) -> Callable[[Callable[Concatenate[_G, _P], Awaitable[_R]]], Callable[Concatenate[_G, _P], Coroutine[Any, Any, _R]]]:
    """Decorate a method that carries out ``operation``, so that each call is measured.

    If the method returns a list that contains errors, the first error determines the outcome.
    """

    def decorate(
        method: Callable[Concatenate[_G, _P], Awaitable[_R]],
    ) -> Callable[Concatenate[_G, _P], Coroutine[Any, Any, _R]]:
        @functools.wraps(method)
        async def wrapper(self: _G, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._context.durations.operation_measured(operation) as measurement:
                result = await method(self, *args, **kwargs)
                errors = [each for each in result if isinstance(each, GatewayError)] if isinstance(result, list) else []
                if errors:
                    measurement.outcome = _determine_outcome(errors[0])
                return result

        return wrapper

    return decorate
