"""Memory does not grow with use. The test counts objects before and after many rounds of mixed use."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable

from benchmarks.mixed_use import MixedUse
from tests.support.guest_services import wait_until
from tests.support.memory_gateway import MemoryGateway

ROUND_COUNT = 40
MAX_LEFTOVER_BLOCKS_PER_ROUND = 25
"""Memory blocks that a round may leave by chance, for example a timer that is not yet due. A round has about twenty
requests and three sandboxes; a leak in any of these leaves several objects.
"""


def test_repeated_use_does_not_leak_memory(memory_gateway: MemoryGateway) -> None:
    check_no_leaks(MixedUse(memory_gateway.client, "base", clients=2).run_rounds)


def check_no_leaks(run_rounds: Callable[[int], None]) -> None:
    """Check that rounds of use leave no objects behind. ``run_rounds``: runs the given number of rounds."""
    run_rounds(15)
    counts_before, blocks_before = _count_objects()
    run_rounds(ROUND_COUNT)

    def find_leaked_types() -> dict[str, int]:
        """Return the number of additional objects of each type that has at least one per round."""
        counts = _count_objects()[0]
        # The event loop keeps a cancelled timer and its context until the timer would have been due.
        type_names = counts.keys() - {"TimerHandle", "Context", "hamt", "hamt_bitmap_node", "hamt_array_node"}
        return {
            name: counts[name] - counts_before[name]
            for name in type_names
            if counts[name] - counts_before[name] >= ROUND_COUNT
        }

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not find_leaked_types(), seconds=30)
    assert find_leaked_types() == {}
    assert _count_objects()[1] - blocks_before < ROUND_COUNT * MAX_LEFTOVER_BLOCKS_PER_ROUND


def _count_objects() -> tuple[Counter[str], int]:
    """Return the number of objects tracked by the garbage collector, by type, and of allocated memory blocks."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects()), sys.getallocatedblocks()
