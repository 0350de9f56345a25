"""Test ifconfig and route: names, errors, and packets between host and jail."""

from __future__ import annotations

import re

from tests.freebsd_shim.harness import Shim

SERVER_PROGRAM = (
    "import socket\n"
    "s = socket.create_server(('', 7000)); print('up', flush=True)\n"
    "while True:\n"
    "    c, peer = s.accept(); c.sendall(peer[0].encode()); c.close()\n"
)
CLIENT_PROGRAM = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 2).recv(99).decode())"


def connect_jail(shim: Shim, name: str, number: int) -> None:
    """Connect a jail to the bridge sxbr0 with the address 10.213.0.<number>."""
    if "sxbr0" not in shim.check_ok("ifconfig", "-l").split():
        assert shim.check_ok("ifconfig", "bridge", "create", "name", "sxbr0") == "sxbr0\n"
        shim.check_ok("ifconfig", "sxbr0", "ether", "58:9c:fc:00:00:01")
        shim.check_ok("ifconfig", "sxbr0", "inet", "10.213.0.1/24", "up")
    host_end = shim.check_ok("ifconfig", "epair", "create").strip()
    assert re.fullmatch(r"epair\d+a", host_end)
    assert shim.check_ok("ifconfig", host_end, "name", f"{name}a") == f"{name}a\n"
    shim.check_ok("ifconfig", host_end[:-1] + "b", "name", f"{name}b")
    shim.check_ok("ifconfig", f"{name}b", "ether", f"02:00:00:00:00:{number:02x}")
    shim.check_ok("ifconfig", "sxbr0", "addm", f"{name}a")
    shim.check_ok("ifconfig", f"{name}a", "up")
    shim.check_ok("ifconfig", f"{name}b", "vnet", name)
    shim.check_ok("ifconfig", "-j", name, "lo0", "inet", "127.0.0.1/8", "up")
    shim.check_ok("ifconfig", "-j", name, f"{name}b", "inet", f"10.213.0.{number}/24")
    assert shim.check_ok("route", "-j", name, "add", "default", "10.213.0.1") == "add net default: gateway 10.213.0.1\n"


def test_packets_flow_between_host_and_jail(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    server = shim.start("jexec", "sx1", "/usr/bin/python3", "-c", SERVER_PROGRAM)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    assert shim.check_ok("/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.5") == "10.213.0.1\n"
    assert shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", CLIENT_PROGRAM, "127.0.0.1") == "127.0.0.1\n"
    shim.check_ok("pkill", "-KILL", "-j", "sx1")
    server.communicate()


def test_ifconfig_prints_interfaces_like_freebsd(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    jail_lines = shim.check_ok("ifconfig", "-j", "sx1", "sx1b").splitlines()
    assert jail_lines[0] == ("sx1b: flags=1008843<UP,BROADCAST,RUNNING,SIMPLEX,MULTICAST,LOWER_UP> metric 0 mtu 1500")
    assert "\tether 02:00:00:00:00:05" in jail_lines
    assert "\tinet 10.213.0.5 netmask 0xffffff00 broadcast 10.213.0.255" in jail_lines
    assert "\tgroups: epair" in jail_lines
    bridge_output = shim.check_ok("ifconfig", "sxbr0")
    assert "\tether 58:9c:fc:00:00:01\n" in bridge_output
    assert "\tmember: sx1a flags=143<LEARNING,DISCOVER,AUTOEDGE,AUTOPTP>\n" in bridge_output
    assert shim.check_ok("ifconfig", "-g", "epair") == "sx1a\n"
    assert set(shim.check_ok("ifconfig", "-l").split()) == {"lo0", "sxbr0", "sx1a"}
    assert shim.check_ok("ifconfig", "-j", "sx1", "-l", "-u", "inet").split() == ["lo0", "sx1b"]
    shim.check_ok("ifconfig", "sx1a", "description", "sandbox one")
    assert "\tdescription: sandbox one\n" in shim.check_ok("ifconfig", "sx1a")
    shim.check_ok("ifconfig", "sxbr0", "private", "sx1a")
    assert "AUTOPTP,PRIVATE>" in shim.check_ok("ifconfig", "sxbr0")


def test_teardown_in_the_documented_order_removes_everything(shim: Shim) -> None:
    names_before = shim.check_ok("ifconfig", "-l")
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("ifconfig", "sx1b", "-vnet", "sx1")
    assert "sx1b" in shim.check_ok("ifconfig", "-l").split()
    shim.check_ok("jail", "-R", "sx1")
    shim.check_ok("ifconfig", "sx1a", "destroy")
    assert "sx1b" not in shim.check_ok("ifconfig", "-l").split()  # both ends are removed
    shim.check_ok("umount", f"{shim.root}/dev")
    shim.check_ok("ifconfig", "sxbr0", "destroy")
    assert shim.check_ok("ifconfig", "-l") == names_before


def test_interfaces_return_to_the_host_when_the_jail_ends(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("jail", "-R", "sx1")
    output = shim.check_ok("ifconfig", "sx1b")
    assert "ether 02:00:00:00:00:05" in output and "inet " not in output
    shim.check_ok("ifconfig", "sx1b", "destroy")
    shim.expect_failure(1, "ifconfig: interface sx1a does not exist", "ifconfig", "sx1a")


def test_a_dying_jail_keeps_its_interfaces(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("freebsd-shim", "set", "dying", "forever")
    shim.check_ok("jail", "-R", "sx1")
    shim.expect_failure(1, "ifconfig: interface sx1b does not exist", "ifconfig", "sx1b")
    shim.expect_failure(1, 'ifconfig: jail "sx1" is dying', "ifconfig", "sx1b", "-vnet", "sx1")
    shim.check_ok("ifconfig", "sx1a", "destroy")


def test_interfaces_are_created_and_renamed(shim: Shim) -> None:
    assert shim.check_ok("ifconfig", "epair", "create") == "epair0a\n"
    shim.check_ok("ifconfig", "epair0a", "name", "one")
    shim.check_ok("ifconfig", "epair0b", "name", "two")
    assert shim.check_ok("ifconfig", "epair", "create") == "epair1a\n"  # the unit stays in use
    shim.expect_failure(1, "ifconfig: interface epair1a already exists", "ifconfig", "epair1a", "create")
    assert shim.check_ok("ifconfig", "bridge7", "create") == ""
    rename_error_prefix = "ifconfig: ioctl SIOCSIFNAME (set name): "
    shim.expect_failure(1, rename_error_prefix + "File name too long", "ifconfig", "one", "name", "sixteencharacter")
    shim.check_ok("ifconfig", "one", "name", "fifteencharacte")
    shim.expect_failure(1, rename_error_prefix + "File exists", "ifconfig", "two", "name", "fifteencharacte")
    shim.expect_failure(1, "ifconfig: SIOCIFCREATE2 (foo0): Invalid argument", "ifconfig", "foo0", "create")
    shim.expect_failure(
        1, "ifconfig: averyverylongname: cloning name too long", "ifconfig", "averyverylongname", "create"
    )


def test_ifconfig_and_route_report_errors_like_freebsd(shim: Shim) -> None:
    shim.create_jail()
    shim.check_ok("ifconfig", "epair", "create")
    shim.check_ok("ifconfig", "bridge", "create")
    shim.check_ok("ifconfig", "bridge", "create")
    shim.expect_failure(1, "ifconfig: interface none0 does not exist", "ifconfig", "none0", "up")
    shim.expect_failure(1, "ifconfig: BRDGADD none0: No such file or directory", "ifconfig", "bridge0", "addm", "none0")
    shim.check_ok("ifconfig", "bridge0", "addm", "epair0a")
    shim.expect_failure(1, "ifconfig: BRDGADD epair0a: File exists", "ifconfig", "bridge0", "addm", "epair0a")
    shim.expect_failure(1, "ifconfig: BRDGADD epair0a: Device busy", "ifconfig", "bridge1", "addm", "epair0a")
    shim.expect_failure(
        1, "ifconfig: BRDGDEL epair0b: No such file or directory", "ifconfig", "bridge0", "deletem", "epair0b"
    )
    shim.check_ok("ifconfig", "bridge0", "deletem", "epair0a")
    shim.expect_failure(1, 'ifconfig: jail "none" not found', "ifconfig", "epair0b", "vnet", "none")
    shim.expect_failure(
        1, "ifconfig: SIOCSIFRVNET(1, epair0b): Device not configured", "ifconfig", "epair0b", "-vnet", "sx1"
    )
    shim.expect_failure(1, "ifconfig: jail not found: No such file or directory", "ifconfig", "-j", "none", "-l")
    shim.expect_failure(1, "ifconfig: foo: bad value", "ifconfig", "epair0a", "foo")
    shim.expect_failure(1, "ifconfig: malformed link-level address", "ifconfig", "epair0a", "ether", "02:00")
    shim.expect_failure(1, "ifconfig: 'vnet' requires argument", "ifconfig", "epair0a", "vnet")
    shim.expect_failure(1, "ifconfig: SIOCIFDESTROY: Invalid argument", "ifconfig", "lo0", "destroy")
    address_error = "ifconfig: ioctl (SIOCDIFADDR): Can't assign requested address"
    shim.expect_failure(1, address_error, "ifconfig", "epair0a", "inet", "10.9.9.9/24", "-alias")
    shim.check_ok("jail", "-c", "name=plain", f"path={shim.root}", "persist")
    shim.expect_failure(1, "ifconfig: SIOCSIFVNET: File exists", "ifconfig", "epair0b", "vnet", "plain")


def test_addresses_are_added_and_replaced(shim: Shim) -> None:
    shim.check_ok("ifconfig", "epair", "create")
    shim.check_ok("ifconfig", "epair0a", "inet", "10.1.0.1/24")
    assert "flags=1008843<UP," in shim.check_ok("ifconfig", "epair0a") or "flags=8843<UP," in shim.check_ok(
        "ifconfig", "epair0a"
    )
    shim.check_ok("ifconfig", "epair0a", "inet", "10.2.0.1/24", "alias")
    shim.check_ok("ifconfig", "epair0a", "inet", "10.3.0.1/24")  # Without alias, this replaces the first address.
    output = shim.check_ok("ifconfig", "epair0a", "inet")
    assert "10.1.0.1" not in output and "10.2.0.1" in output and "10.3.0.1" in output
    shim.check_ok("ifconfig", "epair0a", "inet", "10.2.0.1", "-alias")
    assert "10.2.0.1" not in shim.check_ok("ifconfig", "epair0a")


def test_routes_are_added_and_deleted(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    output = shim.check_ok("route", "-n", "-j", "sx1", "get", "default")
    assert "    gateway: 10.213.0.1\n" in output and "  interface: sx1b\n" in output
    result = shim("route", "-j", "sx1", "add", "default", "10.213.0.1")
    assert (result.returncode, result.stdout) == (
        1,
        "add net default: gateway 10.213.0.1 fib 0: route already in table\n",
    )
    assert shim.check_ok("route", "-j", "sx1", "delete", "default") == "delete net default\n"
    result = shim("route", "-j", "sx1", "delete", "default")
    assert (result.returncode, result.stdout) == (1, "delete net default fib 0: not in table\n")
    result = shim("route", "-j", "sx1", "add", "default", "172.16.0.1")
    assert result.returncode == 1 and result.stdout.endswith("fib 0: Network is unreachable\n")
    shim.expect_failure(1, "route: route has not been found", "route", "-j", "sx1", "get", "default")
    shim.expect_failure(68, "route: bad address: nowhere!", "route", "add", "default", "nowhere!")
    shim.expect_failure(1, "route: Jail not found", "route", "-j", "none", "add", "default", "10.0.0.1")
    assert shim("route", "frobnicate").returncode == 64


def test_private_bridge_members_cannot_reach_each_other(shim: Shim) -> None:
    for number, name in enumerate(("sx1", "sx2"), start=5):
        shim.check_ok("jail", "-c", f"name={name}", f"path={shim.root}", "persist", "vnet=new")
        connect_jail(shim, name, number)
    server = shim.start("jexec", "sx2", "/usr/bin/python3", "-c", SERVER_PROGRAM)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    assert shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.6") == "10.213.0.5\n"
    shim.check_ok("ifconfig", "sxbr0", "private", "sx1a", "private", "sx2a")
    assert shim("jexec", "sx1", "/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.6").returncode == 1
    assert shim.check_ok("/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.6") == "10.213.0.1\n"
    shim.check_ok("pkill", "-KILL", "-j", "sx2")
    server.communicate()


def test_bridge_members_have_flags_and_static_addresses(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    mac = "02:00:00:00:00:05"
    assert shim.check_ok("ifconfig", "sxbr0", "-learn", "sx1a", "-discover", "sx1a", "static", "sx1a", mac) == ""
    assert "\tmember: sx1a flags=140<AUTOEDGE,AUTOPTP>\n" in shim.check_ok("ifconfig", "sxbr0")
    shim.check_ok("ifconfig", "sxbr0", "static", "sx1a", mac)
    assert re.search(rf"{mac} dev sx1a .*\bstatic\b", shim.check_ok("bridge", "fdb", "show", "br", "sxbr0"))
    shim.check_ok("ifconfig", "sxbr0", "learn", "sx1a", "discover", "sx1a")
    assert "flags=143<LEARNING,DISCOVER,AUTOEDGE,AUTOPTP>" in shim.check_ok("ifconfig", "sxbr0")
    for words, message in (
        (("static", "sx1a"), "'static' requires 2 arguments"),
        (("static", "sx1a", "02:00"), "sx1a: invalid address: 02:00"),
        (("static", "sx1a", "02:00:00:00:00:fg"), "sx1a: invalid address: 02:00:00:00:00:fg"),
        (("static", "sx1a", "01:00:5e:00:00:01"), "BRDGSADDR sx1a: Invalid argument"),
        (("static", "sx1a", "00:00:00:00:00:00"), "BRDGSADDR sx1a: Invalid argument"),
        (("static", "sx9a", mac), "BRDGSADDR sx9a: No such file or directory"),
        (("-learn", "sx9a"), "unable to get bridge flags: No such file or directory"),
    ):
        shim.expect_failure(1, f"ifconfig: {message}", "ifconfig", "sxbr0", *words)
    shim.expect_failure(1, "ifconfig: BRDGSADDR sx1a: Invalid argument", "ifconfig", "sx1a", "static", "sx1a", mac)
    shim.check_ok("ifconfig", "sx1a", "destroy")
    assert mac not in shim.check_ok("bridge", "fdb", "show", "br", "sxbr0")


def test_staticarp_stops_learning(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("ifconfig", "sxbr0", "staticarp")
    assert "MULTICAST,STATICARP," in shim.check_ok("ifconfig", "sxbr0")
    server = shim.start("jexec", "sx1", "/usr/bin/python3", "-c", SERVER_PROGRAM)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    assert shim("/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.5").returncode == 1, "the host has asked the jail"
    # The jail asks the host for its MAC address and gets an answer, but the host does not learn the jail's.
    assert shim("jexec", "sx1", "/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.1").returncode == 1
    assert " 58:9c:fc:00:00:01 " in shim.check_ok("jexec", "sx1", "ip", "neighbour", "show", "10.213.0.1")
    assert "02:00:00:00:00:05" not in shim("arp", "-n", "10.213.0.5").stdout
    shim("arp", "-S", "10.213.0.5", "02:00:00:00:00:05")
    assert shim.check_ok("/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.5") == "10.213.0.1\n"
    shim.check_ok("arp", "-d", "10.213.0.5")
    shim.check_ok("ifconfig", "sxbr0", "-staticarp")
    assert "STATICARP" not in shim.check_ok("ifconfig", "sxbr0")
    assert shim.check_ok("/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.5") == "10.213.0.1\n"
    assert re.fullmatch(
        r"\? \(10\.213\.0\.5\) at 02:00:00:00:00:05 on sxbr0 expires in \d+ seconds \[bridge\]\n",
        shim.check_ok("arp", "-n", "10.213.0.5"),
    )
    shim.check_ok("pkill", "-KILL", "-j", "sx1")
    server.communicate()


def test_arp_entries_are_set_listed_and_deleted(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    mac = "02:00:00:00:00:05"
    missing = shim("arp", "-S", "10.213.0.5", mac)
    assert (missing.returncode, missing.stdout, missing.stderr) == (
        0,
        "",
        "arp: delete 10.213.0.5: No such file or directory\n",
    )
    assert shim.check_ok("arp", "-S", "10.213.0.5", "2:0:0:0:0:6") == "10.213.0.5 (10.213.0.5) deleted\n"
    assert shim.check_ok("arp", "-s", "10.213.0.5", mac) == ""
    entry = f"? (10.213.0.5) at {mac} on sxbr0 permanent [bridge]\n"
    assert shim.check_ok("arp", "-n", "10.213.0.5") == entry
    own_entry = "? (10.213.0.1) at 58:9c:fc:00:00:01 on sxbr0 permanent [bridge]\n"
    assert shim.check_ok("arp", "-n", "-i", "sxbr0", "-a") == own_entry + entry
    assert shim.check_ok("arp", "-n", "-i", "sx1a", "-a") == ""
    assert shim.check_ok("arp", "-d", "10.213.0.5") == "10.213.0.5 (10.213.0.5) deleted\n"
    for words, message in (
        (("-d", "10.213.0.5"), "delete 10.213.0.5: No such file or directory"),
        (("-d", "10.213.0.1"), "delete 10.213.0.1: Operation not permitted"),
        (("-s", "10.213.0.5", "02:00"), "invalid Ethernet address '02:00'"),
        (("-n", "-i", "sx9a", "-a"), "interface sx9a does not exist"),
        (("-i", "sxbr0", "-d", "10.213.0.5"), "-i not applicable to this operation"),
    ):
        shim.expect_failure(1, f"arp: {message}", "arp", *words)
    for words in (("-s", "10.99.0.1", mac), ("-d", "10.99.0.1")):  # FreeBSD's arp succeeds.
        result = shim("arp", *words)
        assert (result.returncode, result.stderr) == (0, "arp: delete: cannot locate 10.99.0.1\n")
    for words in (("-s", "10.213.0.5"), ("-d",), ("-d", "-s", "10.213.0.5", mac), ("-x",)):
        result = shim("arp", *words)
        assert result.returncode == 1 and "usage: arp [-n] [-i interface] hostname\n" in result.stderr
    for words in (("-s", "10.213.0.5", mac, "pub"), ("-a",), ("-s", "host", mac)):
        assert shim("arp", *words).returncode == 70


MAIN_RULES = """\
set skip on lo0
nat-anchor "sbx/*"
rdr-anchor "sbx/*"
anchor "sbx/*"
"""


def test_pf_filters_and_translates_real_packets(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("pfctl", "-f", "-", input=MAIN_RULES)
    # The jail "out" is on a second network, behind the host.
    shim.check_ok("jail", "-c", "name=out", f"path={shim.root}", "persist", "vnet=new")
    shim.check_ok("ifconfig", "epair", "create", "name", "outa")
    shim.check_ok("ifconfig", "epair1b", "name", "outb")
    shim.check_ok("ifconfig", "outb", "vnet", "out")
    shim.check_ok("ifconfig", "outa", "inet", "10.214.0.1/24")
    shim.check_ok("ifconfig", "-j", "out", "outb", "inet", "10.214.0.9/24")
    shim.check_ok("sysctl", "net.inet.ip.forwarding=1")
    servers = [shim.start("jexec", name, "/usr/bin/python3", "-c", SERVER_PROGRAM) for name in ("out", "sx1")]
    for server in servers:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
    client_command = ["/usr/bin/python3", "-c", CLIENT_PROGRAM]
    assert shim("jexec", "sx1", *client_command, "10.214.0.9").returncode == 1  # The jail "out" has no route back.
    nat_rule = "nat on outa inet from 10.213.0.5 to any -> (outa)\n"
    shim.check_ok("pfctl", "-a", "sbx/1", "-f", "-", input=nat_rule)
    assert shim.check_ok("jexec", "sx1", *client_command, "10.214.0.9") == "10.214.0.1\n"
    shim.check_ok(
        "pfctl", "-a", "sbx/1", "-f", "-", input=nat_rule + "block drop quick from 10.213.0.5 to 10.214.0.0/16\n"
    )
    assert shim("jexec", "sx1", *client_command, "10.214.0.9").returncode == 1
    assert shim.check_ok("jexec", "sx1", *client_command, "127.0.0.1") == "127.0.0.1\n"
    rdr_rule = "rdr pass on outa inet proto tcp from any to 10.214.0.1 port 7000 -> 10.213.0.5 port 7000\n"
    shim.check_ok("pfctl", "-a", "sbx/1", "-f", "-", input=nat_rule + rdr_rule)
    assert shim.check_ok("jexec", "out", *client_command, "10.214.0.1") == "10.214.0.9\n"
    # The main ruleset does not call this anchor, so its rules have no effect.
    shim.check_ok("pfctl", "-a", "other/1", "-f", "-", input="block drop quick all\n")
    assert shim.check_ok("jexec", "sx1", *client_command, "10.214.0.9") == "10.214.0.1\n"
    assert shim("pfctl", "-a", "sbx/1", "-F", "all").stderr == "rules cleared\nnat cleared\n0 tables deleted.\n"
    assert shim("jexec", "sx1", *client_command, "10.214.0.9").returncode == 1
    shim.check_ok("pkill", "-KILL", "-j", "sx1,out")
    for server in servers:
        server.communicate()


def test_pf_sees_packets_on_the_bridge_and_on_its_members(shim: Shim) -> None:
    shim.create_jail()
    connect_jail(shim, "sx1", 5)
    shim.check_ok("pfctl", "-q", "-f", "-", input=MAIN_RULES)
    server = shim.start("/usr/bin/python3", "-c", SERVER_PROGRAM)
    assert server.stdout is not None and server.stdout.readline() == "up\n"
    client_command = ("jexec", "sx1", "/usr/bin/python3", "-c", CLIENT_PROGRAM, "10.213.0.1")

    def is_reachable(rules: str) -> bool:
        shim.check_ok("pfctl", "-q", "-a", "sbx/1", "-f", "-", input=rules)
        return shim(*client_command).returncode == 0

    # By default, pf does not see packets for the host on the member: pfil_local_phys is 0.
    assert is_reachable("block drop in quick on sx1a all\n")
    assert not is_reachable("pass in quick on sx1a all\nblock drop in quick on sxbr0 all\n")
    shim.check_ok("sysctl", "net.link.bridge.pfil_local_phys=1")
    assert not is_reachable("block drop in quick on sx1a all\n")
    assert not is_reachable("block drop in quick on sxbr0 all\n")
    assert is_reachable("block drop in quick on sx2a all\n")
    # A state of the member also counts on the bridge.
    assert is_reachable("pass in quick on sx1a all\nblock drop in quick on sxbr0 all\n")
    assert not is_reachable("pass in quick on sx1a all no state\nblock drop in quick on sxbr0 all\n")
    # The host receives a frame for the member's own address from the member.
    member_match = re.search(r"ether (\S+)", shim.check_ok("ifconfig", "sx1a"))
    assert member_match is not None
    shim.check_ok("ifconfig", "sxbr0", "ether", "58:9c:fc:00:00:02")
    set_neighbour = f"ip neighbour replace 10.213.0.1 lladdr {member_match[1]} dev sx1b"
    shim.check_ok("jexec", "sx1", *set_neighbour.split())
    assert is_reachable("block drop in quick on sxbr0 all\n")
    assert not is_reachable("block drop in quick on sx1a all\n")
    server.kill()
    server.communicate()
