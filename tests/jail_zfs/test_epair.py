"""Test the bridge and its epairs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge, parse_arp, parse_inet
from tests.support import session
from tests.support.jail_world import JailZfsWorld, make_shim_environment, run_shim

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


@pytest.fixture
def bridge(jail_zfs_world: JailZfsWorld) -> Iterator[Bridge]:
    network = session.allocate_network()
    bridge = Bridge(CommandRunner(make_shim_environment()), name=f"{network['prefix']}br", **network)
    yield bridge
    if bridge.name in run_shim("ifconfig", "-l").split():
        run_async(bridge.sweep(set()))
    run_async(bridge.close())


def test_opening_the_bridge_twice_creates_it_once(bridge: Bridge) -> None:
    run_async(bridge.open())
    output = run_shim("ifconfig", bridge.name)
    assert parse_inet(output) == [f"{bridge.gateway}/22"]
    mac_match = re.search(r"ether (58:9c:fc:\S+)", output)
    run_async(bridge.open())
    assert mac_match and mac_match[1] in run_shim("ifconfig", bridge.name)
    run_async(bridge.close())
    run_async(bridge.close())
    assert bridge.name not in run_shim("ifconfig", "-l").split()


def test_a_bridge_with_a_different_address_is_refused_and_not_changed(bridge: Bridge) -> None:
    run_shim("ifconfig", "bridge", "create", "name", bridge.name)
    run_shim("ifconfig", bridge.name, "inet", "10.9.8.7/24")
    with pytest.raises(BackendFailed, match=r"has the address 10\.9\.8\.7/24, not .*\[jail_zfs\] bridge"):
        run_async(bridge.open())
    assert parse_inet(run_shim("ifconfig", bridge.name)) == ["10.9.8.7/24"]


def test_a_failed_epair_creation_keeps_the_existing_epair(bridge: Bridge) -> None:
    run_async(bridge.open())
    epair = bridge.epair(5)
    run_async(bridge.create(epair))
    assert f"ether {epair.mac}" in run_shim("ifconfig", epair.inner_end)
    assert f"\tmember: {epair.outer_end} flags=940<AUTOEDGE,AUTOPTP,PRIVATE>\n" in run_shim("ifconfig", bridge.name)
    assert list_arp_entries(bridge) == {epair.address: epair.mac}
    with pytest.raises(BackendFailed, match="File exists"):
        run_async(bridge.create(epair))  # its number is already in use, and its owner is unknown
    run_async(bridge.destroy(epair))
    run_async(bridge.destroy(epair))
    assert run_shim("ifconfig", "-g", f"{epair.outer_end.rpartition('-')[0]}-epair", check=False) == ""
    assert list_arp_entries(bridge) == {}


def list_arp_entries(bridge: Bridge) -> dict[str, str]:
    """Return the MAC addresses of all permanent ARP entries except the host's own, by IP address."""
    lines = run_shim("arp", "-n", "-i", bridge.name, "-a").splitlines()
    fields = [line.split() for line in lines if " permanent " in line]
    return {field[1].strip("()"): field[3] for field in fields if field[1] != f"({bridge.gateway})"}


def list_static_addresses(bridge: Bridge) -> dict[str, str]:
    """Return the members to which MAC addresses are bound, by address."""
    output = subprocess.run(["bridge", "-j", "fdb", "show", "br", bridge.name], capture_output=True, check=True).stdout
    return {entry["mac"]: entry["ifname"] for entry in json.loads(output) if entry["state"] == "static"}


def test_addresses_are_set_before_a_jail_starts_and_removed_with_its_epair(bridge: Bridge) -> None:
    run_async(bridge.open())
    assert "STATICARP" in run_shim("ifconfig", bridge.name)
    epairs = [bridge.epair(number) for number in (5, 6)]
    for epair in epairs:
        run_async(bridge.create(epair))
    assert list_arp_entries(bridge) == {epair.address: epair.mac for epair in epairs}
    assert list_static_addresses(bridge) == {epair.mac: epair.outer_end for epair in epairs}
    run_async(bridge.destroy(epairs[0]))
    assert list_arp_entries(bridge) == {epairs[1].address: epairs[1].mac}
    assert list_static_addresses(bridge) == {epairs[1].mac: epairs[1].outer_end}


def test_restore_connects_the_epair_of_an_earlier_gateway(bridge: Bridge) -> None:
    run_async(bridge.open())
    epair = bridge.epair(5)
    assert not run_async(bridge.restore(epair)), "there is no such epair"
    run_async(bridge.create(epair))
    # An earlier release set only `private`. An administrator may have removed the member or the entry.
    for words in (("learn", epair.outer_end, "discover", epair.outer_end), ("deletem", epair.outer_end)):
        run_shim("ifconfig", bridge.name, *words)
        run_shim("arp", "-d", epair.address)
        assert run_async(bridge.restore(epair))
        assert f"\tmember: {epair.outer_end} flags=940<AUTOEDGE,AUTOPTP,PRIVATE>\n" in run_shim("ifconfig", bridge.name)
        assert list_arp_entries(bridge) == {epair.address: epair.mac}
        assert list_static_addresses(bridge) == {epair.mac: epair.outer_end}


@pytest.mark.parametrize("failing_command", ["addm", "-S"])
def test_a_failed_step_leaves_nothing_behind(bridge: Bridge, failing_command: str) -> None:
    class FailingRunner(CommandRunner):
        async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
            output = await super().__call__(*argv, input=input, silent=silent)
            if failing_command in argv:
                raise BackendFailed("killed")
            return output

    run_async(bridge.open())
    prefix = bridge.epair(5).outer_end.rpartition("-")[0]
    failing_bridge = Bridge(
        FailingRunner(make_shim_environment()), name=bridge.name, prefix=prefix, subnet=str(bridge.subnet)
    )
    with pytest.raises(BackendFailed, match="killed"):
        run_async(failing_bridge.create(bridge.epair(5)))
    assert run_shim("ifconfig", "-g", f"{prefix}-epair", check=False) == ""
    assert list_arp_entries(bridge) == {} and list_static_addresses(bridge) == {}


def test_sweep_removes_arp_entries_without_an_epair(bridge: Bridge) -> None:
    """A gateway that is killed between two steps leaves an entry, for example after it has destroyed the epair."""
    run_async(bridge.open())
    for number in (2, 3):
        run_async(bridge.create(bridge.epair(number)))
    run_shim("ifconfig", bridge.epair(3).outer_end, "destroy")
    assert run_async(bridge.sweep({2})) == [f"the ARP entry of {bridge.epair(3).address}"]
    assert list_arp_entries(bridge) == {bridge.epair(2).address: bridge.epair(2).mac}
    assert run_async(bridge.sweep({2})) == []


def test_sweep_destroys_unknown_epairs(bridge: Bridge) -> None:
    run_async(bridge.open())
    for number in (2, 3):
        run_async(bridge.create(bridge.epair(number)))
    stray_epair = run_shim(
        "ifconfig", "epair", "create", "group", f"{bridge.epair(2).outer_end.rpartition('-')[0]}-epair"
    ).strip()
    assert set(run_async(bridge.sweep({2}))) == {
        f"the epair {bridge.epair(3).outer_end}",
        f"the epair {stray_epair}",
        f"the ARP entry of {bridge.epair(3).address}",
    }
    assert run_async(bridge.sweep({2})) == []
    assert bridge.epair(2).inner_end in run_shim("ifconfig", "-l").split()


@given(st.integers(2, 65_533), st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True))
def test_names_are_short_enough_and_addresses_are_unique(number: int, prefix: str) -> None:
    bridge = Bridge(CommandRunner(), name="b", prefix=prefix, subnet="10.231.0.0/16")
    epair = bridge.epair(number)
    assert len(epair.outer_end) <= 15 and len(f"{prefix}-epair") <= 15
    assert epair.address != bridge.gateway and epair != bridge.epair(number + 1)
    assert int(epair.mac[:2], 16) & 3 == 2  # locally administered, and unicast


@given(st.text())
def test_arbitrary_output_raises_no_error(text: str) -> None:
    assert isinstance(parse_inet(text), list) and isinstance(parse_arp(text), dict)
