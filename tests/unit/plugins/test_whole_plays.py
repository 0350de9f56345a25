"""Test, with generated plays, that a plan session predicts whole plays: each task sees what earlier ones would do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.records import Sandbox, Snapshot
from tests.api.memory_gateway import MemoryGateway
from tests.api.memory_host import MemoryHost
from tests.collection.runner import check_plan
from tests.unit.plugins.test_plans import run_task, tasks

_runs = itertools.count()


@pytest.fixture(autouse=True)
def _no_poll_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template, "POLL_SECONDS", (0, 0))


class BusyHost(MemoryHost):
    """A host whose guests write all the time. A plan cannot know whether a guest will have written until the run."""

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return True


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("plays"), BusyHost(), log={"level": "error"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


@settings(deadline=None)
@given(st.lists(tasks, max_size=4), st.lists(tasks, min_size=1, max_size=12))
def test_a_plan_predicts_a_whole_play(
    gateway: MemoryGateway,
    history: list[tuple[str, dict[str, Any]]],
    play: list[tuple[str, dict[str, Any]]],
) -> None:
    gateway.clear()
    client, planner = Client(gateway.unix_url), Client(gateway.unix_url)
    try:
        run_task(client, "volume", {"name": ["data", "cache"], "snapshots": ["one"]})
        run_task(
            client, "sandbox", {"name": ["a"], "template": "base", "volumes": [{"name": "data", "path": "/srv/a"}]}
        )
        for kind, params in history:
            run_task(client, kind, params)
        assert planner.enter_plan(f"generated-play-{next(_runs):06}")
        predicted = [run_task(planner, kind, params, check=True) for kind, params in play]
        actual = [run_task(client, kind, params) for kind, params in play]
        planner.delete(f"/plans/{planner._plan_id}")
    finally:
        client.close()
        planner.close()
    for number, (prediction, result) in enumerate(zip(predicted, actual, strict=True)):
        # Whether a guest writes in the meantime, only the run can know.
        check_plan(prediction, result, f"task {number}, {play[number][0]}", unknown_keys=("diverged",))
