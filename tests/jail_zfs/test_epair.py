"""Test the bridge and its epairs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge, parse_inet
from tests.support import session
from tests.support.jail_world import JailZfsWorld, run_shim, shim_environment

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


@pytest.fixture
def bridge(jail_zfs_world: JailZfsWorld) -> Iterator[Bridge]:
    network = session.network()
    bridge = Bridge(CommandRunner(shim_environment()), name=f"{network['prefix']}br", **network)
    yield bridge
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


def test_a_bridge_with_another_address_is_refused_and_not_changed(bridge: Bridge) -> None:
    run_shim("ifconfig", "bridge", "create", "name", bridge.name)
    run_shim("ifconfig", bridge.name, "inet", "10.9.8.7/24")
    with pytest.raises(BackendFailed, match=r"has the address 10\.9\.8\.7/24, not .*\[jail_zfs\] bridge"):
        run_async(bridge.open())
    assert parse_inet(run_shim("ifconfig", bridge.name)) == ["10.9.8.7/24"]


def test_a_failed_epair_creation_keeps_the_existing_epair(bridge: Bridge) -> None:
    run_async(bridge.open())
    epair = bridge.epair(5)
    run_async(bridge.create(epair))
    assert f"ether {epair.mac}" in run_shim("ifconfig", epair.inner)
    assert re.search(rf"member: {epair.outer} .*PRIVATE", run_shim("ifconfig", bridge.name))
    with pytest.raises(BackendFailed, match="File exists"):
        run_async(bridge.create(epair))  # its number is already in use, and its owner is unknown
    run_async(bridge.destroy(epair))
    run_async(bridge.destroy(epair))
    assert run_shim("ifconfig", "-g", f"{epair.outer.rpartition('-')[0]}-epair", check=False) == ""


def test_sweep_destroys_unknown_epairs(bridge: Bridge) -> None:
    run_async(bridge.open())
    for number in (2, 3):
        run_async(bridge.create(bridge.epair(number)))
    stray_epair = run_shim(
        "ifconfig", "epair", "create", "group", f"{bridge.epair(2).outer.rpartition('-')[0]}-epair"
    ).strip()
    assert set(run_async(bridge.sweep({2}))) == {bridge.epair(3).outer, stray_epair}
    assert run_async(bridge.sweep({2})) == []
    assert bridge.epair(2).inner in run_shim("ifconfig", "-l").split()


@given(st.integers(2, 65_533), st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True))
def test_names_are_short_enough_and_addresses_are_unique(number: int, prefix: str) -> None:
    bridge = Bridge(CommandRunner(), name="b", prefix=prefix, subnet="10.231.0.0/16")
    epair = bridge.epair(number)
    assert len(epair.outer) <= 15 and len(f"{prefix}-epair") <= 15
    assert epair.address != bridge.gateway and epair != bridge.epair(number + 1)
    assert int(epair.mac[:2], 16) & 3 == 2  # locally administered, and unicast


@given(st.text())
def test_arbitrary_ifconfig_output_raises_no_error(text: str) -> None:
    assert isinstance(parse_inet(text), list)
