"""Test, with generated playbooks, that loops, blocks, rescues, includes and failures are predicted.

Half of the playbooks run with the plan of their check-mode run, and half without it. The playbooks run on one host or
on two, which declare the same objects, in parallel or one after the other (`serial`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandbox_gateway.engine.plans.sessions import PlanSessions
from tests.collection.plan_comparison import Counts, PlanComparison, read_state
from tests.collection.plays import (
    BY_ID,
    Block,
    Loop,
    Node,
    PlayTask,
    make_plays,
    make_tasks,
    read_play_count,
    skip_first,
)
from tests.collection.runner import Result, Target, Task
from tests.support.memory_gateway import MemoryGateway
from tests.unit.plugins.test_whole_plays import BusyHost

ENABLED_CALLBACKS = {"ANSIBLE_CALLBACKS_ENABLED": "record,grove.sandbox.plan"}
_SET_UP: tuple[Task, ...] = (
    {"grove.sandbox.sandbox_volume": {"name": ["data", "cache"], "size_mb": 64, "snapshots": ["one"]}},
    {"grove.sandbox.sandbox": {"name": "a", "template": "base", "volumes": [{"name": "data", "path": "/srv/a"}]}},
    {"grove.sandbox.sandbox": {"name": "b", "template": "base"}},
    {"grove.sandbox.sandbox_snapshot": {"name": "s", "sandbox": "a", "volumes": ["data"]}},
)
_FAILING_TASKS: tuple[Task, ...] = (
    {"grove.sandbox.sandbox_rollback": {"sandbox": "missing", "snapshot": "s"}},
    {"grove.sandbox.sandbox": {"name": "d", "template": "missing"}},
    {"ansible.builtin.fail": {"msg": "no"}},
)
_CHANGING_TASK: Task = {"grove.sandbox.sandbox": {"name": "b", "metadata": {"play": "generated"}}}
tasks = make_tasks(with_templates=True)
_INCLUDED_FILE = "included.yml"


def make_ansible_task(task: PlayTask) -> Task:
    kind, params = task
    module = kind if kind.startswith("sandbox") else f"sandbox_{kind}"
    return {
        f"grove.sandbox.{module}": {key: value for key, value in params.items() if value is not None and key != BY_ID}
    }


def make_loop(loop: Loop) -> Task:
    """Return a task that takes the options of each item from variables."""
    keys = {key: None for item in loop.items for key, value in item.items() if value is not None and key != BY_ID}
    (module,) = make_ansible_task((loop.kind, {}))
    items = [{key: item[key] for key in keys if item.get(key) is not None} for item in loop.items]
    return {module: {key: f"{{{{ item.{key} | default(omit) }}}}" for key in keys}, "loop": items}


def make_ansible_nodes(nodes: list[Node], *, is_strict: bool = False) -> list[Task]:
    """Return the tasks and blocks of a playbook. ``is_strict``: see ``carry_out``."""
    ansible_nodes: list[Task] = []
    for node in nodes:
        if isinstance(node, Block):
            sections = {
                "block": make_ansible_nodes(node.nodes, is_strict=True),
                "rescue": make_ansible_nodes(node.rescue, is_strict=is_strict),
                "always": make_ansible_nodes(node.always, is_strict=is_strict),
            }
            ansible_nodes.append({key: section for key, section in sections.items() if section})
        else:
            task = make_loop(node) if isinstance(node, Loop) else make_ansible_task(node)
            ansible_nodes.append(task if is_strict else {**task, "ignore_errors": True})
    return ansible_nodes


_plain_tasks = tasks.map(lambda task: {**make_ansible_task(task), "ignore_errors": True})
_include: Task = {"ansible.builtin.include_tasks": _INCLUDED_FILE}
# Together with the included tasks, at most twelve.
playbooks = st.builds(
    lambda first, failing, rescue, last: [
        # It fails on the second host of a play with `serial`, if the first host has removed the sandbox.
        {**_CHANGING_TASK, "ignore_errors": True},
        *make_ansible_nodes(first),
        {"block": [failing], "rescue": [rescue]},
        _include,
        *make_ansible_nodes(last),
    ],
    make_plays(tasks, max_tasks=6),
    st.sampled_from(_FAILING_TASKS),
    _plain_tasks,
    st.just([]) | make_plays(tasks, max_tasks=1),
)
_hosts = st.sampled_from([{"hosts": "h1"}, {"hosts": "h1,h2"}, {"hosts": "h1,h2", "serial": 1}])
# With one process, the hosts have the same order in the check-mode run and in the run.
_OPTIONS = ("--diff", "--forks", "1", "-i", "h1,h2,")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("playbooks"), BusyHost(), log={"level": "warning"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


@pytest.mark.parametrize("has_approved_plan", [False, True], ids=["without the plan", "with the plan"])
def test_generated_playbooks_run_as_predicted(gateway: MemoryGateway, tmp_path: Path, has_approved_plan: bool) -> None:
    target, plan_path = Target(gateway.unix_url, tmp_path), tmp_path / "plan.json"
    results, states, outcomes = Counts(), Counts(), Counter[str]()

    @settings(
        max_examples=1 + read_play_count(1, long_run_count=20),
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(playbooks, st.lists(_plain_tasks, min_size=1, max_size=2), _hosts)
    @skip_first
    def check(playbook: list[Task], included: list[Task], hosts: dict[str, Any]) -> None:
        gateway.clear()
        with gateway.client() as api:
            if api.get("/templates/base").status_code == 404:  # an earlier playbook removed it
                gateway.build_template("base")
        target.write_file(_INCLUDED_FILE, included)
        play = {**hosts, "tasks": playbook}
        for result in target.play(*_SET_UP):
            assert result["changed"], target.output
        environment = {**ENABLED_CALLBACKS, "GROVE_SANDBOX_PLAN_FILE": str(plan_path)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PlanSessions, "close", _keep_session)  # the callback would end it
            predicted = target.run(play, options=("--check", *_OPTIONS), environment=environment)
        assert json.loads(plan_path.read_text())["problems"] == [], target.output
        planner, client = find_session(gateway.unix_url), Client(gateway.unix_url)
        apply_environment = {"GROVE_SANDBOX_APPLY": str(plan_path)} if has_approved_plan else {}
        actual = target.run(play, options=_OPTIONS, environment=apply_environment)
        try:
            comparison = PlanComparison(planner.plan_opened_at, results, states, has_approved_plan=has_approved_plan)
            assert len(predicted) == len(actual), target.output
            for number, (prediction, result) in enumerate(zip(predicted, actual, strict=True)):
                comparison.check_result(prediction, result, f"result {number}")
                outcomes[describe_result(result)] += 1
            for run in client.get("/applied-runs"):  # none without a plan, or if the run had nothing to apply
                client.run_id = run["runID"]
            comparison.check_state(lambda: read_state(planner), lambda: read_state(client))
        finally:
            for each in (planner, client):
                if path := each.session_path:
                    each.plan_id = each.run_id = ""
                    each.delete(path)
                each.close()

    check()
    print(f"playbooks: {dict(outcomes)}\nresults of tasks: {results}\nstates of gateways: {states}")
    assert outcomes["failed"] and outcomes["changed"], outcomes
    results.check_unknown_share()
    states.check_unknown_share()


async def _keep_session(sessions: PlanSessions, owner: str, id: str) -> None:
    pass


def find_session(url: str) -> Client:
    """Return a client that uses the only plan session of a gateway."""
    client = Client(url)
    (plan,) = client.get("/plans")
    client.plan_id, client.plan_opened_at = plan["planID"], plan["openedAt"]
    return client


def describe_result(result: Result) -> str:
    return "failed" if result.get("failed") else "changed" if result["changed"] else "ok"
