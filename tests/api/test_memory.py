"""Memory does not grow with use: objects are counted before and after many rounds of mixed use."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter

from benchmarks.mixed_use import MixedUse
from tests.api.inside import eventually
from tests.api.memory_gateway import MemoryGateway

ROUNDS = 40
MAX_LEFTOVER_BLOCKS = 25
"""Memory blocks that a round may leave by chance, for example a timer that is not yet due. A round has some twenty
requests and three sandboxes; a leak in any of these leaves several objects.
"""


def test_repeated_use_does_not_leak_memory(memory_gateway: MemoryGateway) -> None:
    mixed_use = MixedUse(memory_gateway.client, "base", clients=2)
    mixed_use.run_rounds(15)
    counts_before, blocks_before = _count_objects()
    mixed_use.run_rounds(ROUNDS)

    def leaked_types() -> dict[str, int]:
        """Return the types with at least one additional object per round."""
        counts = _count_objects()[0]
        # The event loop keeps a cancelled timer and its context until the timer would have been due.
        types = counts.keys() - {"TimerHandle", "Context"}
        return {
            name: counts[name] - counts_before[name] for name in types if counts[name] - counts_before[name] >= ROUNDS
        }

    with contextlib.suppress(AssertionError):
        eventually(lambda: not leaked_types(), seconds=30)
    assert leaked_types() == {}
    assert _count_objects()[1] - blocks_before < ROUNDS * MAX_LEFTOVER_BLOCKS


def _count_objects() -> tuple[Counter[str], int]:
    """Return the number of garbage-collected objects by type, and the number of all allocated blocks."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects()), sys.getallocatedblocks()
