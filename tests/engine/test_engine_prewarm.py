"""Test prewarming on real machines. Forks of snapshots are held, and forks of templates run, until they are claimed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Unsupported
from sandbox_gateway.records import NetworkPolicy
from tests.engine.test_engine_fork import START_COUNTER_COMMAND, read_counter
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def requires_prewarming(world: World) -> None:
    if not world.abilities.prewarm:
        pytest.skip(f"{world.kind} declares that it cannot hold machines")


def keep_forks_ready(runner: EngineRunner, ref: str, count: int) -> None:
    """Set a snapshot's prewarm target, and wait until that many forks are ready."""
    runner.do(runner.engine.prewarm.set_target(ref, count))
    snapshot = runner.engine.snapshots.get(ref)
    wait_until(lambda: runner.engine.prewarm.get_level(snapshot).ready == count, 120)


@pytest.mark.usefixtures("requires_prewarming")
def test_a_prewarmed_fork_of_a_snapshot_is_held_until_it_is_claimed(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", START_COUNTER_COMMAND)
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    max_captured_count = read_counter(runner, "source")
    keep_forks_ready(runner, "mark", 1)
    while read_counter(runner, "source") < max_captured_count + 50:
        pass
    claim_count_before = runner.engine.machines.start_counts["prewarmed"]
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["fork"], env={"COLOUR": "green"})))
    assert read_counter(runner, "fork") < max_captured_count + 50
    assert runner.shell("fork", "hostname; echo $COLOUR").split() == ["fork", "green"]
    assert runner.engine.machines.start_counts["prewarmed"] == claim_count_before + 1
    keep_forks_ready(runner, "mark", 0)


@pytest.mark.usefixtures("requires_prewarming")
def test_prewarmed_forks_of_a_template_have_distinct_identities(runner: EngineRunner) -> None:
    keep_forks_ready(runner, TEMPLATE, 2)
    claim_count_before = runner.engine.machines.start_counts["prewarmed"]
    forks = runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    assert runner.engine.machines.start_counts["prewarmed"] == claim_count_before + 2
    for command in ("hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | od -An -tx1"):
        first_value, second_value = (runner.shell(fork.id, command) for fork in forks)
        assert first_value != second_value, command
    assert runner.shell("a", "hostname").strip() == "a"
    keep_forks_ready(runner, TEMPLATE, 0)


@pytest.mark.usefixtures("requires_prewarming")
def test_a_rollback_claims_a_prewarmed_machine(runner: EngineRunner) -> None:
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "echo first >/root/word")
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    keep_forks_ready(runner, "mark", 1)
    runner.shell("source", "echo second >/root/word")
    claim_count_before = runner.engine.machines.start_counts["prewarmed"]
    assert runner.do(runner.engine.sandboxes.rollback("source", "mark")).id == sandbox.id
    assert runner.engine.machines.start_counts["prewarmed"] == claim_count_before + 1
    assert runner.shell("source", "cat /root/word").strip() == "first"
    # A claimed machine is captured, paused and resumed like any other.
    runner.do(runner.engine.snapshots.create("source", name="later"))
    runner.do(runner.engine.sandboxes.pause("source"))
    runner.do(runner.engine.sandboxes.resume("source"))
    assert runner.shell("source", "cat /root/word").strip() == "first"
    keep_forks_ready(runner, "mark", 0)


@pytest.mark.usefixtures("requires_prewarming")
def test_a_claimed_machine_gets_its_network_policy(runner: EngineRunner) -> None:
    keep_forks_ready(runner, TEMPLATE, 1)
    claim_count_before = runner.engine.machines.start_counts["prewarmed"]
    runner.do(
        runner.engine.forks.create(TEMPLATE, ForkSpec(names=["shut"], network=NetworkPolicy(allow_internet=False)))
    )
    assert runner.engine.machines.start_counts["prewarmed"] == claim_count_before + 1
    keep_forks_ready(runner, TEMPLATE, 0)
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["open"])))
    runner.do(
        runner.engine.forks.create(TEMPLATE, ForkSpec(names=["cold"], network=NetworkPolicy(allow_internet=False)))
    )
    assert read_slot_rules(runner, "shut") == read_slot_rules(runner, "cold") != read_slot_rules(runner, "open")


def read_slot_rules(runner: EngineRunner, ref: str) -> str:
    """Return the firewall rules of a sandbox's network slot, with its name and addresses masked."""
    namespace = f"{runner.config.network.prefix}-{runner.get_sandbox(ref).host['slot']}"
    argv = ["ip", "netns", "exec", namespace, "nft", "--stateless", "list", "ruleset"]
    rules = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout
    return re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", rules.replace(namespace, "SLOT"))


@pytest.mark.usefixtures("requires_prewarming")
def test_a_restart_keeps_claimed_machines_and_starts_new_forks(make_runner: Callable[..., EngineRunner]) -> None:
    runner = make_runner()
    keep_forks_ready(runner, TEMPLATE, 1)
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["kept"])))
    runner.shell("kept", "echo here >/run/kept")
    runner.close()
    reopened_runner = make_runner(config=runner.config)
    assert reopened_runner.shell("kept", "cat /run/kept").strip() == "here"
    assert reopened_runner.get_sandbox("kept").instance == sandbox.instance
    template = reopened_runner.engine.snapshots.get(TEMPLATE)
    wait_until(lambda: reopened_runner.engine.prewarm.get_level(template).ready == 1, 120)
    keep_forks_ready(reopened_runner, TEMPLATE, 0)


def test_a_host_that_cannot_hold_machines_refuses_to_prewarm(runner: EngineRunner, world: World) -> None:
    if world.abilities.prewarm:
        pytest.skip(f"{world.kind} declares that it can hold machines")
    with pytest.raises(Unsupported, match="cannot prewarm forks"):
        runner.do(runner.engine.prewarm.set_target(TEMPLATE, 1))
