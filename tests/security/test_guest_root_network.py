"""Root in a sandbox attacks over the network: metadata services, the host's connection table, other sandboxes.

The guest is a network namespace on a real slot (see ``tests.kvm_xfs.test_netns``): its packets take the path that
those of a virtual machine take.
"""

from __future__ import annotations

import pytest

from sandbox_gateway.hosts.jail_zfs.commands import Commands
from sandbox_gateway.hosts.jail_zfs.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.pf import jail_rules
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.test_netns import METADATA, METADATA_SERVICES, OPEN, run, world

pytestmark = pytest.mark.usefixtures("need_root")

AZURE = "168.63.129.16"
EVERYTHING = NetworkPolicy(allow_internet=False, allow_out=["0.0.0.0/0"])
HALVES = NetworkPolicy(allow_out=["0.0.0.0/1", "128.0.0.0/1"])
NEIGHBOURS = NetworkPolicy(allow_out=["169.252.0.0/14", "100.100.100.200/31", "168.63.128.0/23", "192.0.0.192/31"])


# --- metadata services -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [OPEN, EVERYTHING, HALVES, NEIGHBOURS])
def test_no_metadata_service_is_reached_unless_an_entry_lies_within_its_range(policy: NetworkPolicy) -> None:
    async def test() -> None:
        async with world() as w:
            guest = w.guest(await w.pool.take(policy))
            elsewhere = w.elsewhere()
            w.keep(elsewhere.listen(80))
            assert guest.reaches(elsewhere.address, 80), "the way there is open"
            assert [service for service in METADATA_SERVICES if guest.reaches(service, 80)] == []

    run(test)


@pytest.mark.parametrize("service", METADATA_SERVICES)
def test_an_entry_within_a_metadata_range_opens_that_address_alone(service: str) -> None:
    async def test() -> None:
        async with world() as w:
            guest = w.guest(await w.pool.take(NetworkPolicy(allow_out=["0.0.0.0/0", service])))
            w.keep(w.elsewhere().listen(80))
            assert [each for each in METADATA_SERVICES if guest.reaches(each, 80)] == [service]

    run(test)


@pytest.mark.parametrize(
    ("policy", "reached"),
    [
        (OPEN, True),
        (EVERYTHING, True),
        (NetworkPolicy(deny_out=["168.63.129.0/24"]), False),
        (NetworkPolicy(allow_internet=False), False),
        (NetworkPolicy(allow_internet=False, allow_out=["10.0.0.0/8"]), False),
    ],
)
def test_a_name_server_at_a_metadata_address_answers_names_alone(policy: NetworkPolicy, reached: bool) -> None:
    async def test() -> None:
        async with world(dns=[AZURE]) as w:
            guest = w.guest(await w.pool.take(policy))
            elsewhere = w.elsewhere()
            for port in (80, 53):
                w.keep(elsewhere.listen(port))
            assert guest.reaches(AZURE, 53) is reached
            assert not guest.reaches(METADATA, 53)
            assert not guest.reaches(AZURE, 80)

    run(test)


@pytest.mark.parametrize("policy", [OPEN, EVERYTHING, HALVES, NEIGHBOURS])
def test_a_jails_rules_block_metadata_before_they_allow_anything(policy: NetworkPolicy) -> None:
    bridge = Bridge(Commands(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    rules = jail_rules(bridge, bridge.cable(7), policy, ["9.9.9.9"]).splitlines()
    allowed = next(at for at, rule in enumerate(rules) if rule.startswith("pass in"))
    for network in ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"):
        assert rules.index(f"block return in quick on sbxbr inet from 10.231.0.7 to {network}") < allowed


def test_a_jails_rules_open_the_metadata_that_an_entry_names() -> None:
    bridge = Bridge(Commands(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    policy = NetworkPolicy(allow_out=["0.0.0.0/0", "169.254.170.2"])
    rules = jail_rules(bridge, bridge.cable(7), policy, [AZURE]).splitlines()
    here = "quick on sbxbr inet"
    block = rules.index(f"block return in {here} from 10.231.0.7 to 169.254.0.0/16")
    for opened in (
        f"pass in {here} from 10.231.0.7 to 169.254.170.2/32",
        f"pass in {here} proto udp from 10.231.0.7 to {AZURE}/32 port 53",
    ):
        assert rules.index(opened) < block
    assert rules.index(f"pass in {here} from 10.231.0.7 to any") > block
