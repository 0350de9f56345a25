"""Test that generated plays contain loops and blocks, and are carried out as Ansible does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from tests.collection.plays import MAX_TASKS, Block, Loop, Node, PlayTask, carry_out, make_plays, make_tasks

TASK: PlayTask = ("volume_info", {})
BLOCK = Block([TASK, TASK], [TASK, TASK], [TASK])
NESTED_BLOCK = Block([Block([TASK], [], [TASK]), TASK], [TASK], [])
plays = make_plays(make_tasks(with_templates=True))


@pytest.mark.parametrize(
    ("node", "failing_locations", "locations"),
    [
        (TASK, "0", "0 1"),
        (BLOCK, "", "0.block.0 0.block.1 0.always.0 1"),
        (BLOCK, "0.block.0", "0.block.0 0.rescue.0 0.rescue.1 0.always.0 1"),
        (BLOCK, "0.block.0 0.rescue.0 0.always.0", "0.block.0 0.rescue.0 0.rescue.1 0.always.0 1"),
        (NESTED_BLOCK, "", "0.block.0.block.0 0.block.0.always.0 0.block.1 1"),
        (NESTED_BLOCK, "0.block.0.block.0", "0.block.0.block.0 0.block.0.always.0 0.rescue.0 1"),
        (NESTED_BLOCK, "0.block.0.always.0", "0.block.0.block.0 0.block.0.always.0 0.rescue.0 1"),
    ],
)
def test_a_task_failure_starts_the_rescue_section_of_its_block(
    node: Node, failing_locations: str, locations: str
) -> None:
    visited_locations: list[str] = []

    def run_task(location: str, _task: PlayTask | Loop) -> bool:
        visited_locations.append(location)
        return location not in failing_locations.split()

    assert carry_out([node, TASK], run_task)
    assert visited_locations == locations.split()


def count_tasks(nodes: list[Node]) -> int:
    return sum(
        sum(map(count_tasks, (node.nodes, node.rescue, node.always))) if isinstance(node, Block) else 1
        for node in nodes
    )


@settings(max_examples=20, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(plays)
def test_plays_have_at_most_twelve_tasks(play: list[Node]) -> None:
    assert 1 <= count_tasks(play) <= MAX_TASKS


@pytest.mark.parametrize("kind", [Loop, Block])
def test_plays_contain_loops_and_nested_blocks(kind: type) -> None:
    def has_node_in_block(play: list[Node]) -> bool:
        return any(isinstance(each, kind) for node in play if isinstance(node, Block) for each in node.nodes)

    find(plays, has_node_in_block, settings=settings(max_examples=1000, phases=[Phase.generate], database=None))
