"""Time the product's functions for the duration of a bench."""

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
Stop = tuple[object, str]
"""A class or module, and the name of one of its functions."""


@dataclass(frozen=True)
class Span:
    """One call; both times are on the clock of ``time.perf_counter``, in seconds."""

    start: float
    end: float
    args: tuple[Any, ...] = ()
    """The arguments of the call, with the object itself first; empty for calls that did not return."""

    @property
    def ms(self) -> float:
        return (self.end - self.start) * 1000


class Timers:
    """``watching({key: (owner, name)})`` records every call of these functions inside the context.

    A function that does not exist (for example because it was renamed) is skipped and listed in ``missing``; the other
    results remain valid.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self.missing: list[str] = []

    @contextlib.contextmanager
    def watching(self, places: dict[str, Stop]) -> Iterator[Timers]:
        with contextlib.ExitStack() as undo:
            for key, (owner, name) in places.items():
                plain = inspect.getattr_static(owner, name, None)
                if plain is None:
                    self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
                    continue
                setattr(owner, name, self._wrap(key, plain))
                undo.callback(setattr, owner, name, plain)
            yield self

    def returned(self, key: str, *arguments: object) -> list[Span]:
        """Return the calls with these arguments since the last ``take`` that returned without an error."""
        came_back = (span for span in list(self._spans.get(key, [])) if span.args)
        return [span for span in came_back if all(argument in span.args[1:] for argument in arguments)]

    def take(self) -> dict[str, list[Span]]:
        """Return the calls recorded since the last call of this method."""
        taken, self._spans = dict(self._spans), defaultdict(list)
        return taken

    def _wrap(self, key: str, plain: Any) -> Any:
        if isinstance(plain, classmethod | staticmethod):
            return type(plain)(self._wrap(key, plain.__func__))
        if inspect.iscoroutinefunction(plain):

            @functools.wraps(plain)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._record(key, args):
                    return await plain(*args, **kwargs)

            return timed_coroutine

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._record(key, args):
                return plain(*args, **kwargs)

        return timed

    @contextlib.contextmanager
    def _record(self, key: str, args: tuple[Any, ...]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._spans[key].append(Span(start, time.perf_counter()))
            raise
        self._spans[key].append(Span(start, time.perf_counter(), args))


def milliseconds(work: Callable[[], T]) -> tuple[T, float]:
    """Run ``work``. Returns its result and its duration in milliseconds."""
    start = time.perf_counter()
    answer = work()
    return answer, (time.perf_counter() - start) * 1000


def shares(whole: Span, parts: dict[str, list[Span]]) -> dict[str, float]:
    """Return the milliseconds of ``whole`` spent in each part, and the rest under "rest". They add up to the whole.

    Where two parts overlap, the time counts for the part named first.
    """
    edges = {whole.start, whole.end}
    for spans in parts.values():
        edges.update(edge for span in spans for edge in (span.start, span.end) if whole.start < edge < whole.end)
    ordered = sorted(edges)
    found = dict.fromkeys([*parts, "rest"], 0.0)
    for start, end in itertools.pairwise(ordered):
        busy = (key for key, spans in parts.items() if any(span.start <= start and end <= span.end for span in spans))
        found[next(busy, "rest")] += (end - start) * 1000
    return found
