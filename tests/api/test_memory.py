"""Nothing stays in memory after use: objects are counted after many rounds of mixed use."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter

from benchmarks.mixed_use import MixedUse
from tests.api.inside import eventually
from tests.api.memory_gateway import MemoryGateway

ROUNDS = 40
KEPT = 25
"""Objects that a round may leave by chance, for example a timer that is not yet due. A round has some twenty requests
and three sandboxes; a leak in any of these leaves several objects.
"""


def test_repeated_use_leaks_nothing(memory_gateway: MemoryGateway) -> None:
    use = MixedUse(memory_gateway.client, "base", clients=2)
    use.rounds(15)
    before, blocks = _count_objects()
    use.rounds(ROUNDS)

    def leaked_types() -> dict[str, int]:
        """Types with at least one additional object for each round."""
        now = _count_objects()[0]
        # The event loop keeps a cancelled timer and its context until the timer would have been due.
        kinds = now.keys() - {"TimerHandle", "Context"}
        return {name: now[name] - before[name] for name in kinds if now[name] - before[name] >= ROUNDS}

    with contextlib.suppress(AssertionError):
        eventually(lambda: not leaked_types(), seconds=30)
    assert leaked_types() == {}
    assert _count_objects()[1] - blocks < ROUNDS * KEPT


def _count_objects() -> tuple[Counter[str], int]:
    """Objects that the garbage collector knows, by type; and the number of all allocated blocks."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects()), sys.getallocatedblocks()
