"""Test which addresses sandboxes can reach, with real packets between jails, the host, and a simulated internet."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import build_bridge_rules, build_jail_rules
from sandbox_gateway.records import NetworkPolicy
from tests.support import session
from tests.support.jail_world import PF_RULES, JailZfsWorld, make_shim_environment, run_shim
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE

SERVER_PROGRAM = (
    "import socket\n"
    "s = socket.create_server(('', 7000)); print('up', flush=True)\n"
    "while True:\n"
    "    c, peer = s.accept(); c.sendall(peer[0].encode()); c.close()\n"
)
STATE_LIMIT = "keep state (source-track global, max-src-states 4096)"
METADATA_NETWORKS = ("100.100.100.200/32", "168.63.129.16/32", "169.254.0.0/16", "192.0.0.192/32")
CLIENT_PROGRAM = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 2).recv(99).decode())"
KEEP_OPEN_PROGRAM = (
    "import socket, sys, time\n"
    "c = socket.create_connection((sys.argv[1], 7001), 2)\n"
    "for number in range(40):\n"
    "    c.sendall(b'x'); open('/root/beats', 'w').write(str(number)); c.recv(1); time.sleep(0.1)\n"
)
ECHO_PROGRAM = (
    "import socket\n"
    "s = socket.create_server(('', 7001)); print('up', flush=True)\n"
    "while True:\n"
    "    c, _ = s.accept()\n"
    "    try:\n"
    "        while data := c.recv(9):\n"
    "            c.sendall(data)\n"
    "    except OSError:\n"
    "        pass\n"
)


class OutsideJail:
    """A jail on another network that simulates the internet, with servers on ports 7000 and 7001."""

    def __init__(self, root: Path) -> None:
        network = ipaddress.IPv4Network(session.allocate_network()["subnet"])
        self.host_address, self.address = str(network.network_address + 1), str(network.network_address + 9)
        self.interface = f"t{session.get_run_id()}-outa"
        self._root = root
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> OutsideJail:
        run_shim("jail", "-c", "name=outside", f"path={self._root}", "persist", "vnet=new")
        host_end = run_shim("ifconfig", "epair", "create").strip()
        jail_end = self.interface[:-1] + "b"
        run_shim("ifconfig", host_end, "name", self.interface)
        run_shim("ifconfig", f"{host_end[:-1]}b", "name", jail_end)
        run_shim("ifconfig", jail_end, "vnet", "outside")
        run_shim("ifconfig", self.interface, "inet", f"{self.host_address}/24")
        run_shim("ifconfig", "-j", "outside", jail_end, "inet", f"{self.address}/24")
        for program in (SERVER_PROGRAM, ECHO_PROGRAM):
            self._servers.append(start_server(["jexec", "outside", "/usr/bin/python3", "-c", program]))
        return self

    def __exit__(self, *_: object) -> None:
        run_shim("pkill", "-KILL", "-j", "outside")
        run_shim("jail", "-R", "outside")
        run_shim("ifconfig", self.interface, "destroy")
        for server in self._servers:
            server.communicate(timeout=20)


def start_server(argv: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, **make_shim_environment()}
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    return server


@pytest.fixture
def outside_jail(jail_zfs_world: JailZfsWorld) -> Iterator[OutsideJail]:
    with OutsideJail(Path("/")) as jail:
        yield jail


@pytest.fixture
def runner(jail_zfs_world: JailZfsWorld, outside_jail: OutsideJail) -> Iterator[EngineRunner]:
    config = jail_zfs_world.make_config(jail_zfs={"egress": outside_jail.interface}, network={"dns": ["9.9.9.9"]})
    runner = EngineRunner(jail_zfs_world.make_host(config), config)
    yield runner
    runner.remove_all()
    runner.close()
    jail_zfs_world.clean_up(config)


def query_server(runner: EngineRunner, ref: str, address: str) -> str:
    """From a sandbox, connect to ADDRESS:7000. Returns the response, or "" if the server is unreachable."""
    result = runner.do(runner.engine.commands.exec(ref, ["python3", "-c", CLIENT_PROGRAM, address]))
    return result.stdout.decode().strip() if result.exit_code == 0 else ""


def test_sandboxes_reach_the_internet_but_not_each_other_or_the_host(
    runner: EngineRunner, outside_jail: OutsideJail
) -> None:
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"])))
    other_address = runner.get_sandbox("b").host["address"]
    gateway_address = str(ipaddress.IPv4Network(runner.config.network.subnet).network_address + 1)
    runner.shell("b", f'python3 -c "{SERVER_PROGRAM}" </dev/null >/dev/null 2>&1 &')
    host_server = start_server(["/usr/bin/python3", "-c", SERVER_PROGRAM])
    try:
        assert query_server(runner, "a", outside_jail.address) == outside_jail.host_address  # under the host's address
        for address in (other_address, gateway_address, outside_jail.host_address):
            assert not query_server(runner, "a", address), address
        assert runner.shell("b", "echo alive").strip() == "alive"
    finally:
        host_server.kill()
        host_server.communicate()


def test_a_policy_also_applies_to_open_connections(runner: EngineRunner, outside_jail: OutsideJail) -> None:
    no_internet_policy = NetworkPolicy(allow_internet=False)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["shut"], network=no_internet_policy)))
    assert not query_server(runner, "shut", outside_jail.address)
    assert runner.shell("shut", "cat /etc/resolv.conf") == ""
    runner.do(
        runner.engine.sandboxes.set_network(
            "shut", NetworkPolicy(allow_internet=False, allow_out=[outside_jail.address])
        )
    )
    assert query_server(runner, "shut", outside_jail.address)
    assert runner.shell("shut", "cat /etc/resolv.conf") == "nameserver 9.9.9.9\n"
    runner.do(runner.engine.sandboxes.set_network("shut", NetworkPolicy(deny_out=[f"{outside_jail.address}/24"])))
    assert not query_server(runner, "shut", outside_jail.address)
    runner.do(runner.engine.sandboxes.set_network("shut", NetworkPolicy()))
    runner.shell("shut", f'python3 -c "{KEEP_OPEN_PROGRAM}" {outside_jail.address} </dev/null >/dev/null 2>&1 &')
    runner.shell("shut", "while ! [ -s /root/beats ]; do sleep 0.05; done")
    runner.do(runner.engine.sandboxes.set_network("shut", no_internet_policy))
    first_beat, later_beat = (runner.shell("shut", "sleep 0.5; cat /root/beats") for _ in range(2))
    assert first_beat == later_beat, "the open connection still works"


def test_packets_with_a_spoofed_address_are_dropped(runner: EngineRunner, outside_jail: OutsideJail) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["liar"])))
    number, interface = (
        runner.get_sandbox("liar").host["number"],
        f"{runner.config.network.prefix}-{runner.get_sandbox('liar').host['number']}b",
    )
    network = ipaddress.IPv4Network(runner.config.network.subnet)
    runner.shell("liar", f"ip address add {network.network_address + number + 50}/32 dev {interface}")
    spoofing_program = CLIENT_PROGRAM.replace("7000), 2)", f"7000), 2, ('{network.network_address + number + 50}', 0))")
    assert query_server(runner, "liar", outside_jail.address)
    assert (
        runner.do(
            runner.engine.commands.exec("liar", ["python3", "-c", spoofing_program, outside_jail.address])
        ).exit_code
        != 0
    )


def test_an_invalid_address_is_refused(runner: EngineRunner) -> None:
    with pytest.raises(Invalid, match="allowOut: 'nowhere'"):
        runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(network=NetworkPolicy(allow_out=["nowhere"]))))
    assert runner.engine.sandboxes.list() == []


@pytest.mark.parametrize(
    ("rules", "message"),
    [("pass\n", 'no `anchor "sbx/\\*"`'), ('anchor "sbx/*"\n', 'no `nat-anchor "sbx/\\*"`')],
)
def test_missing_anchors_are_refused_at_startup(jail_zfs_world: JailZfsWorld, rules: str, message: str) -> None:
    config = jail_zfs_world.make_config()
    run_shim("pfctl", "-q", "-f", "-", input=rules)
    try:
        with pytest.raises(BackendFailed, match=message):
            EngineRunner(jail_zfs_world.make_host(config), config)
    finally:
        run_shim("pfctl", "-q", "-f", "-", input=PF_RULES)
    EngineRunner(jail_zfs_world.make_host(config), config).close()
    jail_zfs_world.clean_up(config)


def test_disabled_pf_is_refused_at_startup(jail_zfs_world: JailZfsWorld) -> None:
    config = jail_zfs_world.make_config()
    run_shim("pfctl", "-q", "-d")
    with contextlib.ExitStack() as stack:
        stack.callback(run_shim, "pfctl", "-q", "-e")
        with pytest.raises(BackendFailed, match=r"pf is not enabled.*service pf start"):
            EngineRunner(jail_zfs_world.make_host(config), config)
    jail_zfs_world.clean_up(config)


def test_rules_are_formatted() -> None:
    bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    assert build_bridge_rules(bridge, "em0") == (
        "nat on em0 inet from 10.231.0.0/16 to any -> (em0)\nblock drop on sbxbr all\n"
    )
    assert build_bridge_rules(bridge, "") == "block drop on sbxbr all\n"
    policy = NetworkPolicy(allow_out=["192.0.2.1"], deny_out=["10.0.0.0/9", "10.128.0.0/9"])
    rules = build_jail_rules(bridge, bridge.epair(7), policy, ["9.9.9.9"]).splitlines()
    assert rules == [
        "block drop in quick on sbx-7a inet from ! 10.231.0.7 to any",
        "block drop in quick on sbx-7a inet6 all",
        "pass out quick on sbxbr inet from 10.231.0.1 to 10.231.0.7",
        "block return in quick on sbx-7a inet from 10.231.0.7 to (self)",
        "block return in quick on sbx-7a inet from 10.231.0.7 to 10.231.0.0/16",
        "block return in quick on sbx-7a inet from 10.231.0.7 to 224.0.0.0/4",
        "block return in quick on sbx-7a inet from 10.231.0.7 to 255.255.255.255",
        *(f"block return in quick on sbx-7a inet from 10.231.0.7 to {network}" for network in METADATA_NETWORKS),
        f"pass in quick on sbx-7a inet from 10.231.0.7 to 192.0.2.1/32 {STATE_LIMIT}",
        "block return in quick on sbx-7a inet from 10.231.0.7 to 10.0.0.0/8",
        f"pass in quick on sbx-7a inet from 10.231.0.7 to any {STATE_LIMIT}",
    ]
    closed_rules = build_jail_rules(
        bridge, bridge.epair(7), NetworkPolicy(allow_internet=False), ["9.9.9.9"]
    ).splitlines()
    assert closed_rules[-1] == "block return in quick on sbx-7a inet from 10.231.0.7 to any"
    assert not any("port 53" in rule for rule in closed_rules)
