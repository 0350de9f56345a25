"""Nothing is kept of what is gone: objects are counted after many rounds of mixed use."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter

from benchmarks.mixed_use import MixedUse
from tests.api.inside import eventually
from tests.api.served import Served

ROUNDS = 40
KEPT = 25
"""Objects a round may leave by chance, as a timer that is not due. It is some twenty requests and three sandboxes, and
what is kept of one of these is several objects."""


def test_rounds_of_use_leave_nothing(served: Served) -> None:
    use = MixedUse(served.client, "base", clients=2)
    use.rounds(15)
    before, blocks = _objects()
    use.rounds(ROUNDS)

    def kept() -> dict[str, int]:
        """Kinds of which each round left one, or more."""
        now = _objects()[0]
        # The event loop keeps a timer that was cancelled, and its context, until it would have been due.
        kinds = now.keys() - {"TimerHandle", "Context"}
        return {name: now[name] - before[name] for name in kinds if now[name] - before[name] >= ROUNDS}

    with contextlib.suppress(AssertionError):
        eventually(lambda: not kept(), seconds=30)
    assert kept() == {}
    assert _objects()[1] - blocks < ROUNDS * KEPT


def _objects() -> tuple[Counter[str], int]:
    """Those that the collector knows, by kind; and how many there are of all."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects()), sys.getallocatedblocks()
