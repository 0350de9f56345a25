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
from tests.support.live import Live
from tests.support.waiting import eventually
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def with_prewarm(world: World) -> None:
    if not world.abilities.prewarm:
        pytest.skip(f"{world.kind} declares that it cannot hold machines")


def keep_ready(live: Live, ref: str, count: int) -> None:
    """Set a snapshot's prewarm target, and wait until that many forks are ready."""
    live.do(live.engine.prewarm.set_target(ref, count))
    snapshot = live.engine.snapshots.get(ref)
    eventually(lambda: live.engine.prewarm.get_level(snapshot).ready == count, 120)


@pytest.mark.usefixtures("with_prewarm")
def test_a_prewarmed_fork_of_a_snapshot_is_held_until_it_is_claimed(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", START_COUNTER_COMMAND)
    live.do(live.engine.snapshots.create("source", name="mark"))
    max_captured_count = read_counter(live, "source")
    keep_ready(live, "mark", 1)
    while read_counter(live, "source") < max_captured_count + 50:
        pass
    claim_count_before = live.engine.machines.starts["prewarmed"]
    live.do(live.engine.forks.create("mark", ForkSpec(names=["fork"], env={"COLOUR": "green"})))
    assert read_counter(live, "fork") < max_captured_count + 50
    assert live.shell("fork", "hostname; echo $COLOUR").split() == ["fork", "green"]
    assert live.engine.machines.starts["prewarmed"] == claim_count_before + 1
    keep_ready(live, "mark", 0)


@pytest.mark.usefixtures("with_prewarm")
def test_prewarmed_forks_of_a_template_have_distinct_identities(live: Live) -> None:
    keep_ready(live, TEMPLATE, 2)
    claim_count_before = live.engine.machines.starts["prewarmed"]
    forks = live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    assert live.engine.machines.starts["prewarmed"] == claim_count_before + 2
    for command in ("hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | od -An -tx1"):
        first_value, second_value = (live.shell(fork.id, command) for fork in forks)
        assert first_value != second_value, command
    assert live.shell("a", "hostname").strip() == "a"
    keep_ready(live, TEMPLATE, 0)


@pytest.mark.usefixtures("with_prewarm")
def test_a_rollback_claims_a_prewarmed_machine(live: Live) -> None:
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "echo first >/root/word")
    live.do(live.engine.snapshots.create("source", name="mark"))
    keep_ready(live, "mark", 1)
    live.shell("source", "echo second >/root/word")
    claim_count_before = live.engine.machines.starts["prewarmed"]
    assert live.do(live.engine.sandboxes.rollback("source", "mark")).id == sandbox.id
    assert live.engine.machines.starts["prewarmed"] == claim_count_before + 1
    assert live.shell("source", "cat /root/word").strip() == "first"
    # A claimed machine is captured, paused and resumed like any other.
    live.do(live.engine.snapshots.create("source", name="later"))
    live.do(live.engine.sandboxes.pause("source"))
    live.do(live.engine.sandboxes.resume("source"))
    assert live.shell("source", "cat /root/word").strip() == "first"
    keep_ready(live, "mark", 0)


@pytest.mark.usefixtures("with_prewarm")
def test_a_claimed_machine_gets_its_network_policy(live: Live) -> None:
    keep_ready(live, TEMPLATE, 1)
    claim_count_before = live.engine.machines.starts["prewarmed"]
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["shut"], network=NetworkPolicy(allow_internet=False))))
    assert live.engine.machines.starts["prewarmed"] == claim_count_before + 1
    keep_ready(live, TEMPLATE, 0)
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["open"])))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["cold"], network=NetworkPolicy(allow_internet=False))))
    assert read_slot_rules(live, "shut") == read_slot_rules(live, "cold") != read_slot_rules(live, "open")


def read_slot_rules(live: Live, ref: str) -> str:
    """Return the firewall rules of a sandbox's network slot, with its name and addresses masked."""
    namespace = f"{live.config.network.prefix}-{live.sandbox(ref).host['slot']}"
    argv = ["ip", "netns", "exec", namespace, "nft", "--stateless", "list", "ruleset"]
    rules = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout
    return re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", rules.replace(namespace, "SLOT"))


@pytest.mark.usefixtures("with_prewarm")
def test_a_restart_keeps_claimed_machines_and_starts_new_forks(make_live: Callable[..., Live]) -> None:
    live = make_live()
    keep_ready(live, TEMPLATE, 1)
    sandbox = live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["kept"])))
    live.shell("kept", "echo here >/run/kept")
    live.close()
    reopened_live = make_live(config=live.config)
    assert reopened_live.shell("kept", "cat /run/kept").strip() == "here"
    assert reopened_live.sandbox("kept").instance == sandbox.instance
    template = reopened_live.engine.snapshots.get(TEMPLATE)
    eventually(lambda: reopened_live.engine.prewarm.get_level(template).ready == 1, 120)
    keep_ready(reopened_live, TEMPLATE, 0)


def test_a_host_that_cannot_hold_machines_refuses_to_prewarm(live: Live, world: World) -> None:
    if world.abilities.prewarm:
        pytest.skip(f"{world.kind} declares that it can hold machines")
    with pytest.raises(Unsupported, match="cannot prewarm forks"):
        live.do(live.engine.prewarm.set_target(TEMPLATE, 1))
