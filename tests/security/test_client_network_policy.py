"""A client tries to inject firewall rules through a network policy. It gets an error, and the rules do not change."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import build_jail_rules
from sandbox_gateway.hosts.kvm_xfs.network.addresses import Slot
from sandbox_gateway.hosts.kvm_xfs.network.rules import build_policy_rules
from sandbox_gateway.hosts.network_policy import list_allowed_names
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.slot_networks import OPEN_POLICY, world
from tests.support.gateway import Gateway

SUBNET = ipaddress.IPv4Network("10.231.0.0/16")
INJECTIONS = [
    *("1.1.1.1; flush ruleset", "1.1.1.1\nflush ruleset", "1.1.1.1 }\nflush ruleset\n{", "1.1.1.1 accept"),
    *("1.1.1.1, 10.0.0.0/8", "{ 10.0.0.0/8 }", "}", "{", '"', "'", "\\", "1.1.1.1 # ", "# x", "$x", "@volume_access"),
    *("10.0.0.1-10.0.0.9", "!10.0.0.1", "!= 10.0.0.1", "any", "self", "<table>", "(self)", "em0", "em0:network"),
    *(
        "localhost",
        "0",
        "1",
        "127.1",
        "0x7f000001",
        "017700000001",
        "2130706433",
        "010.0.0.1",
        "1.1.1.1/",
    ),
    *("::1", "::ffff:10.0.0.1", "fe80::1%eth0", "::/0", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/8/8", "10.0.0.0/0x8"),
    *(
        "1.1.1.1\x00",
        "1.1.1.1\x00; flush ruleset",
        "\u0661.1.1.1",
        "1.1.1.1\u2028flush ruleset",
        "\uff11.1.1.1",
        "1\u30021.1.1",
    ),
    *("1.1.1.1 jump inwards", 'include "/etc/passwd"', "define x = 1", "`id`", "$(id)", "../../x", "%s", "{{ x }}"),
    *("", " ", "\t", "\n", "a" * 100_000, "1" * 100_000, "," * 1000, "1.1.1.1;", "1.1.1.1\r\nx", "10.0.0.0/255.0.0.x"),
]
"""Texts that are neither an IPv4 address nor a range."""
_PREFIX_PATTERN = r"(\d{1,3}\.){3}\d{1,3}(/\d{1,2})?"
_PREFIX_SET_PATTERN = rf"\{{ {_PREFIX_PATTERN}(, {_PREFIX_PATTERN})* \}}"
_NAME_PATTERN = re.compile(r"(\*\.)?([a-z0-9_-]{1,63}\.)+[a-z][a-z0-9-]{0,62}")
_NFT_RULES_PATTERN = re.compile(
    r"add set inet sandbox name_addresses \{ type ipv4_addr; flags timeout; size 1024; \}\n"
    r"flush set inet sandbox name_addresses\n"
    r"add chain inet sandbox resolver \{ type nat hook prerouting priority dstnat - 1; policy accept; \}\n"
    r"flush chain inet sandbox resolver\n"
    r"(add rule inet sandbox resolver iifname \"tap0\" udp dport 53 redirect to :53\n)?"
    r"flush chain inet sandbox input\n"
    r"(add rule inet sandbox input [a-z0-9 .\":/-]+\n)+"
    r"flush chain inet sandbox outside\n"
    rf"(add rule inet sandbox outside (ip daddr ({_PREFIX_PATTERN}|{_PREFIX_SET_PATTERN})"
    r" (accept|reject with icmp admin-prohibited)"
    rf"|ip daddr {_PREFIX_SET_PATTERN} meta l4proto \{{ tcp, udp \}} th dport 53 accept"
    r"|ct mark 0x[0-9a-f]{1,8} accept|ip daddr @name_addresses ct mark set 0x[0-9a-f]{1,8} accept"
    r"|accept|reject with icmp admin-prohibited)\n)+"
)
_PF_RULES_PATTERN = re.compile(
    rf"((pass|block drop|block return) (in|out) quick on [a-z0-9-]+ inet6?( proto (tcp|udp))?"
    rf"( all| from (! )?{_PREFIX_PATTERN} to (any|\(self\)|{_PREFIX_PATTERN}))( port 53)?"
    r"( keep state \(source-track global, max-src-states 4096\))?\n)+"
)
# Arbitrary texts, and texts that resemble addresses or domain names.
_address_strategy = (
    st.text(max_size=30) | st.text("0123456789./ \n;{}#,-:", max_size=30) | st.ip_addresses(v=4).map(str)
)
_name_strategy = st.text("aZ09_-.*\n \u212a\u017f", max_size=30)


def build_rules(policy: NetworkPolicy) -> tuple[str, str]:
    bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    return build_policy_rules(policy, ["9.9.9.9"], SUBNET), build_jail_rules(
        bridge, bridge.epair(7), policy, ["9.9.9.9"]
    )


@pytest.mark.parametrize("field", ["allow_out", "deny_out"])
@pytest.mark.parametrize("text", INJECTIONS, ids=lambda text: ascii(text[:30]))
def test_an_invalid_address_is_refused(text: str, field: str) -> None:
    for addresses in ([text], ["192.0.2.1", text], [text, "192.0.2.1"]):
        policy = NetworkPolicy.model_validate({field: addresses})
        for build in (
            lambda policy=policy: build_policy_rules(policy, [], SUBNET),
            lambda policy=policy: build_rules(policy),
        ):
            with pytest.raises(Invalid, match="not an IPv4 address or CIDR"):
                build()
        bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
        with pytest.raises(Invalid, match="not an IPv4 address or CIDR"):
            build_jail_rules(bridge, bridge.epair(7), policy, [])


@given(st.lists(_address_strategy, max_size=4), st.lists(_address_strategy, max_size=4), st.booleans())
@example(["10.0.0.0/255.0.0.0", " 192.0.2.1\n"], ["0.0.0.0/0"], False)
@settings(max_examples=300, deadline=None)
def test_accepted_addresses_produce_only_known_rules(
    allowed_addresses: list[str], denied_addresses: list[str], allow_internet: bool
) -> None:
    policy = NetworkPolicy(allow_internet=allow_internet, allow_out=allowed_addresses, deny_out=denied_addresses)
    try:
        nft_rules, pf_rules = build_rules(policy)
    except (Invalid, Unsupported):
        return
    assert _NFT_RULES_PATTERN.fullmatch(nft_rules), nft_rules
    assert _PF_RULES_PATTERN.fullmatch(pf_rules), pf_rules
    assert len(pf_rules.splitlines()) <= 20 + len(allowed_addresses) + len(denied_addresses)


@given(st.lists(_name_strategy, max_size=4))
@example(["api.example.com", " *.Example.com.\n"])
@settings(max_examples=300, deadline=None)
def test_names_never_occur_in_rules(texts: list[str]) -> None:
    policy = NetworkPolicy(allow_internet=False, allow_out=texts)
    try:
        rules = build_policy_rules(policy, [], SUBNET)
    except Invalid:
        return
    assert _NFT_RULES_PATTERN.fullmatch(rules), rules
    assert all(_NAME_PATTERN.fullmatch(name) for name in list_allowed_names(policy))


def read_ruleset(slot: Slot) -> str:
    """Return a slot's rules and its gateway's rules on the host, without counters."""
    host_command = ["nft", "list", "table", "inet", f"{slot.name.partition('-')[0]}_sandbox"]
    commands = (host_command, ["nsenter", f"--net={slot.path}", "nft", "list", "ruleset"])
    outputs = [subprocess.run(each, capture_output=True, text=True, check=True, timeout=20).stdout for each in commands]
    return re.sub(r"counter packets \d+ bytes \d+", "", "\n".join(outputs))


@pytest.mark.usefixtures("requires_root")
async def test_invalid_addresses_do_not_change_the_active_rules() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        ruleset_before = read_ruleset(slot)
        assert "chain outside" in ruleset_before
        for text in INJECTIONS:
            for policy in (NetworkPolicy(allow_out=[text]), NetworkPolicy(deny_out=["192.0.2.1", text])):
                with pytest.raises(Invalid):
                    await w.pool.apply(slot, policy)
        assert read_ruleset(slot) == ruleset_before


def test_a_real_gateway_refuses_invalid_addresses(shared_gateway: Gateway, template: str) -> None:
    client = shared_gateway.client
    sandboxes_before = client.get("/sandboxes").json()
    for text in (each for each in INJECTIONS if len(each) < 1000):
        for field in ("allowOut", "denyOut"):
            network: dict[str, Any] = {field: [text]}
            response = client.post("/sandboxes", json={"templateID": template, "network": network})
            assert response.status_code == 400 and response.json()["kind"] == "invalid", response.text
    sandboxes = client.get("/sandboxes").json()
    assert [each["sandboxID"] for each in sandboxes] == [each["sandboxID"] for each in sandboxes_before]
    table_line = f"table inet {shared_gateway.prefix}_sandbox"
    assert table_line in subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=20).stdout
