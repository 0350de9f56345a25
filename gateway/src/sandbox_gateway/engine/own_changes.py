"""Count the changes that a playbook run makes itself, and subtract them from the generations that it sees.

A run therefore sees the same generation of an object in its plan session and when it applies the plan, unless someone
else has changed the object. The order of the run's own changes makes no difference.
"""

from __future__ import annotations

from collections.abc import Container
from contextvars import ContextVar

from sandbox_gateway.records import Record

_MIN_PRUNE_COUNT = 1000
_MAX_SPANS = 100
"""If other clients change an object more often than this between a run's changes, the run's later changes count as
theirs.
"""


class OwnChanges:
    """The changes that one run has made to objects."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """By the id of an object: the generations before and after each series of changes."""
        self._prune_count = _MIN_PRUNE_COUNT

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, id: str, before: int, after: int, existing_ids: Container[str]) -> None:
        """Add a change to an object. Forgets removed objects from time to time, so that they do not accumulate."""
        spans = self._spans.setdefault(id, [])
        if spans and spans[-1][1] == before:
            spans[-1] = (spans[-1][0], after)
        elif len(spans) < _MAX_SPANS:
            spans.append((before, after))
        if len(self._spans) > self._prune_count:
            self._spans = {id: spans for id, spans in self._spans.items() if id in existing_ids}
            self._prune_count = max(_MIN_PRUNE_COUNT, 2 * len(self._spans))

    def count(self, id: str, generation: int) -> int:
        """Return how many of an object's changes up to ``generation`` the run made itself.

        ``generation``: the generation of the record that a request has read. The run may have changed the object since.
        """
        return sum(min(after, generation) - before for before, after in self._spans.get(id, ()) if before < generation)


own_changes: ContextVar[OwnChanges | None] = ContextVar("own_changes", default=None)
"""The changes of the run to which the current request belongs. The tasks that the request starts inherit it."""


def count_change(old_record: Record, record: Record, existing_ids: Container[str]) -> None:
    """Count a change that the current request has made, if it belongs to a run."""
    changes = own_changes.get()
    if changes is not None and record.generation > old_record.generation:
        changes.add(record.id, old_record.generation, record.generation, existing_ids)


def count_own_changes(record: Record) -> int:
    """Return how many of an object's changes were made by the run to which the current request belongs."""
    changes = own_changes.get()
    return changes.count(record.id, record.generation) if changes is not None else 0


def get_generation_without_own_changes(record: Record) -> int:
    """Return the generation of an object without the changes of the run to which the current request belongs."""
    return record.generation - count_own_changes(record)
