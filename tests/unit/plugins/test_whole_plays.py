"""Test, with generated plays, that a plan session predicts whole plays: each task sees what earlier ones would do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.records import Sandbox, Snapshot
from tests.api.memory_gateway import MemoryGateway
from tests.api.memory_host import MemoryHost
from tests.collection.plays import PlayChecks, PlayTask, make_plays, make_tasks, number_of_plays

tasks = make_tasks(with_templates=True)


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


def test_a_plan_applies_retention_rules(gateway: MemoryGateway) -> None:
    gateway.clear()

    def capture(*names: str, sandbox: str = "b") -> PlayTask:
        return "snapshot", {"name": list(names), "sandbox": [sandbox], "retention": {"keep_last": 1}}

    fork: PlayTask = ("fork", {"snapshot": "first", "names": ["user"]})
    history = [capture("first")]
    play: list[PlayTask] = [
        fork,
        capture("second"),
        fork,  # is unchanged, because a snapshot in use is kept
        ("sandbox", {"name": ["user"], "state": "absent"}),
        fork,  # fails, because the snapshot was removed with its last user
        capture("third", "fourth"),
        ("snapshot_info", {}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, history, play)
    assert checks.tasks == {"changed": 4, "ok": 2, "failed": 1}


def test_a_plan_predicts_a_whole_play(gateway: MemoryGateway, capsys: pytest.CaptureFixture[str]) -> None:
    checks = PlayChecks()

    @settings(max_examples=number_of_plays(100, of_long_run=2000), deadline=None)
    @given(st.lists(tasks, max_size=4), make_plays(tasks))
    def check(history: list[PlayTask], play: list[PlayTask]) -> None:
        gateway.clear()
        with gateway.client() as client:
            if client.get("/templates/base").status_code == 404:  # an earlier play removed it
                gateway.build_template("base")
        checks.check(gateway.unix_url, history, play)

    check()
    with capsys.disabled():
        print(f"\n{checks}")
    checks.check_unknown_share()
