"""Root in a jail tries to use up the tables that all jails share with the host: pf's states and open files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.network import pf
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.records import NetworkPolicy, Resources
from tests.freebsd_shim.harness import Shim, created_shim, is_supported
from tests.freebsd_shim.test_network import MAIN_RULES, connect_jail

_BRIDGE = Bridge(CommandRunner(), name="sxbr0", prefix="sx", subnet="10.213.0.0/16")
_MAX_CONNECTIONS = 100
_POLICY = NetworkPolicy(allow_out=["10.214.0.0/16"])
"""A policy with two rules that create states, for 10.214.0.0/16 and for all other addresses."""
_FLOOD_PROGRAM = """
import socket, sys
for address in ("10.214.0.9", "10.215.0.9"):
    for number in range(int(sys.argv[1])):
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (address, 20000 + number))
"""


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    if not is_supported():
        pytest.skip("needs root, util-linux, nftables and /usr/bin/python3")
    with created_shim(tmp_path) as shim:
        yield shim


def count_states(shim: Shim, address: str) -> int:
    table = shim.check_ok("cat", "/proc/net/nf_conntrack")
    return sum(f" src={address} " in line for line in table.splitlines())


def test_a_jail_cannot_fill_the_state_table(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to all rules together, not to each rule."""
    monkeypatch.setattr(pf, "MAX_CONNECTIONS", _MAX_CONNECTIONS, raising=False)
    for number in (5, 6):
        name = f"sx-{number}"
        shim.check_ok("jail", "-c", f"name={name}", f"path={shim.root}", "persist", "vnet=new")
        connect_jail(shim, name, number)
        rules = pf.build_jail_rules(_BRIDGE, _BRIDGE.epair(number), _POLICY, [])
        shim.check_ok("pfctl", "-q", "-a", f"sbx/{name}", "-f", "-", input=rules)
    shim.check_ok("pfctl", "-q", "-a", "sbx/sx", "-f", "-", input=pf.build_bridge_rules(_BRIDGE, ""))
    shim.check_ok("pfctl", "-q", "-f", "-", input=MAIN_RULES)
    shim.check_ok("sysctl", "net.inet.ip.forwarding=1", "net.link.bridge.pfil_local_phys=1")
    # The network outside has no machine that responds.
    outer_end = shim.check_ok("ifconfig", "epair", "create").strip()
    shim.check_ok("ifconfig", outer_end, "inet", "10.214.0.1/15", "up")
    shim.check_ok("ifconfig", f"{outer_end[:-1]}b", "up")

    shim.check_ok("jexec", "sx-5", "/usr/bin/python3", "-c", _FLOOD_PROGRAM, str(4 * _MAX_CONNECTIONS))
    assert _MAX_CONNECTIONS // 2 < count_states(shim, "10.213.0.5") <= _MAX_CONNECTIONS + 10
    shim.check_ok("jexec", "sx-6", "/usr/bin/python3", "-c", _FLOOD_PROGRAM, "10")
    assert count_states(shim, "10.213.0.6") >= 10, "another jail is affected"


@pytest.mark.skipif(not Path("/sys/fs/cgroup/pids").is_dir(), reason="the emulated rctl needs cgroups version 1")
async def test_the_limits_of_a_jail_include_files_and_threads(shim: Shim) -> None:
    """This checks only the configuration, because the emulated rctl does not enforce these two limits."""
    limits = Limits(CommandRunner(shim.environ), "sx", processes=100)
    await limits.open()
    await limits.apply("sx-1", Resources())
    rules = dict(line.rsplit(":deny=") for line in shim.check_ok("rctl", "jail:sx-1").split())
    max_files = int(shim.check_ok("sysctl", "-n", "kern.maxfiles"))
    assert int(rules["jail:sx-1:openfiles"]) == max_files // 4 > 0
    assert int(rules["jail:sx-1:nthr"]) == 400
