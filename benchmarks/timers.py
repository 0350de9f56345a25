"""Measure the duration of calls to the product's functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
FunctionRef = tuple[object, str]
"""A class or module and the name of one of its functions."""


@dataclass(frozen=True)
class Span:
    """The start and end of one call, in seconds of ``time.perf_counter``."""

    start: float
    end: float
    args: tuple[Any, ...] = ()
    """The arguments of the call, including ``self``; empty if the call raised an exception."""

    @property
    def ms(self) -> float:
        return (self.end - self.start) * 1000


class Timers:
    """Records every call of the given functions: ``with timers.recording({key: (owner, name)}): …``

    A function that does not exist, for example because it was renamed, is skipped and listed in ``missing_functions``.
    The other results remain valid.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self.missing_functions: list[str] = []

    @contextlib.contextmanager
    def recording(self, functions: dict[str, FunctionRef]) -> Iterator[Timers]:
        with contextlib.ExitStack() as undo:
            for key, (owner, name) in functions.items():
                original = inspect.getattr_static(owner, name, None)
                if original is None:
                    self.missing_functions.append(f"{getattr(owner, '__name__', owner)}.{name}")
                    continue
                setattr(owner, name, self._wrap(key, original))
                undo.callback(setattr, owner, name, original)
            yield self

    def find_completed_calls(self, key: str, *arguments: object) -> list[Span]:
        """Return the calls with these arguments that have returned without an exception since the last ``take``."""
        successful_spans = (span for span in list(self._spans.get(key, [])) if span.args)
        return [span for span in successful_spans if all(argument in span.args[1:] for argument in arguments)]

    def describe_missing_functions(self) -> list[str]:
        """Return a note about ``missing_functions``, or nothing if there are none."""
        names = ", ".join(self.missing_functions)
        return [f"functions that no longer exist and were not measured: {names}"] if names else []

    def take(self) -> dict[str, list[Span]]:
        """Return the calls recorded since the last ``take``, by the key of the function."""
        spans, self._spans = dict(self._spans), defaultdict(list)
        return spans

    def _wrap(self, key: str, function: Any) -> Any:
        """Return a function that calls ``function`` and records each call."""
        if isinstance(function, classmethod | staticmethod):
            return type(function)(self._wrap(key, function.__func__))
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._record(key, args):
                    return await function(*args, **kwargs)

            return timed_coroutine

        @functools.wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            with self._record(key, args):
                return function(*args, **kwargs)

        return timed_function

    @contextlib.contextmanager
    def _record(self, key: str, args: tuple[Any, ...]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._spans[key].append(Span(start, time.perf_counter()))
            raise
        self._spans[key].append(Span(start, time.perf_counter(), args))


def time_call(work: Callable[[], T]) -> tuple[T, float]:
    """Run ``work``. Returns its result and its duration in milliseconds."""
    start = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - start) * 1000


def split_time(whole: Span, parts: dict[str, list[Span]]) -> dict[str, float]:
    """Return the milliseconds of ``whole`` that were spent in each part, with the remainder under "rest".

    The values add up to the duration of ``whole``. If parts overlap, the time is attributed to the one listed first.
    """
    edges = {whole.start, whole.end}
    for spans in parts.values():
        edges.update(edge for span in spans for edge in (span.start, span.end) if whole.start < edge < whole.end)
    sorted_edges = sorted(edges)
    totals = dict.fromkeys([*parts, "rest"], 0.0)
    for start, end in itertools.pairwise(sorted_edges):
        active_keys = (
            key for key, spans in parts.items() if any(span.start <= start and end <= span.end for span in spans)
        )
        totals[next(active_keys, "rest")] += (end - start) * 1000
    return totals
