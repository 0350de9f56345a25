"""Test which addresses a network policy allows, and which name servers sandboxes get."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox_gateway.config import Network
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import build_jail_rules, require_enforceable_policy
from sandbox_gateway.hosts.network_policy import (
    METADATA_NETWORKS,
    build_egress_rules,
    find_name_servers,
    list_allowed_names,
)
from sandbox_gateway.records import NetworkPolicy

NO_INTERNET_POLICY = NetworkPolicy(allow_internet=False)


def can_reach(policy: NetworkPolicy, address: str, port: int = 80, dns: Sequence[str] = ()) -> bool:
    """Return whether the first rule that matches an address and a port allows connections."""
    for rule in build_egress_rules(policy, dns):
        is_in_network = any(ipaddress.IPv4Address(address) in network for network in rule.networks)
        if is_in_network and (port == 53 or not rule.dns_only):
            return rule.allow
    raise AssertionError("no rule matches")


def test_without_a_policy_everything_but_metadata_is_open() -> None:
    assert can_reach(NetworkPolicy(), "1.1.1.1")
    for network in METADATA_NETWORKS:
        assert not can_reach(NetworkPolicy(), str(ipaddress.IPv4Network(network)[-1]))


def test_allowed_addresses_are_open_if_all_other_addresses_are_closed() -> None:
    policy = NetworkPolicy(allow_internet=False, allow_out=["192.0.2.0/24", " 198.51.100.7 "])
    assert can_reach(policy, "192.0.2.200") and can_reach(policy, "198.51.100.7")
    assert not can_reach(policy, "198.51.100.8") and not can_reach(NO_INTERNET_POLICY, "1.1.1.1")


def test_denied_addresses_are_closed_unless_allowed() -> None:
    policy = NetworkPolicy(deny_out=["192.0.2.0/24"], allow_out=["192.0.2.1"])
    assert can_reach(policy, "192.0.2.1") and can_reach(policy, "1.1.1.1")
    assert not can_reach(policy, "192.0.2.2")


@pytest.mark.parametrize(
    "wide_network", ["0.0.0.0/0", "169.0.0.0/8", "168.63.129.0/24", "192.0.0.0/16", "100.64.0.0/10"]
)
def test_only_an_entry_within_a_metadata_range_opens_it(wide_network: str) -> None:
    for network in METADATA_NETWORKS:
        address = str(ipaddress.IPv4Network(network)[0])
        assert not can_reach(NetworkPolicy(allow_out=[wide_network]), address)
        assert can_reach(NetworkPolicy(allow_internet=False, allow_out=[wide_network, address]), address)


def test_a_name_server_at_a_metadata_address_opens_only_its_port() -> None:
    server_address = "169.254.169.253"
    assert can_reach(NetworkPolicy(), server_address, 53, [server_address, "1.1.1.1"])
    assert not can_reach(NetworkPolicy(), server_address, 80, [server_address])
    assert not can_reach(NetworkPolicy(), "169.254.169.254", 53, [server_address])
    assert not can_reach(NO_INTERNET_POLICY, server_address, 53, [server_address])
    assert not can_reach(NetworkPolicy(deny_out=["169.254.0.0/16"]), server_address, 53, [server_address])
    assert can_reach(NetworkPolicy(allow_internet=False, allow_out=["0.0.0.0/0"]), server_address, 53, [server_address])
    assert can_reach(
        NetworkPolicy(deny_out=["169.254.0.0/16"], allow_out=["169.0.0.0/8"]), server_address, 53, [server_address]
    )
    assert not any(rule.dns_only for rule in build_egress_rules(NetworkPolicy(), ["1.1.1.1"]))


def test_overlapping_entries_are_merged() -> None:
    (rule,) = (
        rule
        for rule in build_egress_rules(NetworkPolicy(allow_out=["192.0.2.0/25", "192.0.2.128/25", "192.0.2.7"]), [])
        if rule.allow and ipaddress.IPv4Network("0.0.0.0/0") not in rule.networks
    )
    assert rule.networks == (ipaddress.IPv4Network("192.0.2.0/24"),)


def test_errors_name_the_field_and_the_text() -> None:
    for option, field, text in (("allow_out", "allowOut", "host"), ("deny_out", "denyOut", "host.example")):
        with pytest.raises(Invalid) as error_info:
            build_egress_rules(NetworkPolicy.model_validate({option: ["1.1.1.1", text]}), [])
        assert error_info.value.message.startswith(f"{field}: {text!r} is not an IPv4 address or CIDR block. ")


def test_names_are_normalized() -> None:
    policy = NetworkPolicy(allow_internet=False, allow_out=["1.1.1.1", " API.Example.com. ", "*.xn--bcher-kva.example"])
    assert list_allowed_names(policy) == ["api.example.com", "*.xn--bcher-kva.example"]
    assert can_reach(policy, "1.1.1.1") and not can_reach(policy, "1.1.1.2")


@pytest.mark.parametrize(
    "text",
    [
        *("*", "*.com", "com", "a.*.com", "*a.com", "**.a.com", "*..a.com", ".a.com", "a..com", "a.com..", "a .com"),
        *("-a.com", "a-.com", "a.com:443", "a.com/", "https://a.com", "1.2.3.4.5", "300.1.1.1", "1.1.1", "0x7f.1"),
        *("b\u00fccher.example", "\u212aelvin.com", "\u017f.example.com", "a\u3002com", f"{'a' * 64}.com"),
        ".".join(["a" * 63] * 4),
    ],
)
def test_text_that_is_not_a_name_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"or a domain name such as 'api\.example\.com'"):
        build_egress_rules(NetworkPolicy(allow_internet=False, allow_out=[text]), [])


def test_names_need_a_policy_that_denies_everything_else() -> None:
    for denied_addresses in ([], ["10.0.0.0/8"], ["0.0.0.0/1", "128.0.0.0/1"]):
        with pytest.raises(Invalid, match="only if all other addresses are denied"):
            build_egress_rules(NetworkPolicy(allow_out=["a.example.com"], deny_out=denied_addresses), [])
    assert list_allowed_names(NetworkPolicy(allow_out=["a.example.com"], deny_out=["10.0.0.0/8", "0.0.0.0/0"]))


def test_jail_hosts_refuse_names() -> None:
    bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    policy = NetworkPolicy(allow_internet=False, allow_out=["1.1.1.1", "a.example.com"])
    for refuse in (require_enforceable_policy, lambda policy: build_jail_rules(bridge, bridge.epair(7), policy, [])):
        with pytest.raises(Unsupported, match=r"'a\.example\.com' is a domain name, but hosts of kind jail_zfs"):
            refuse(policy)


def test_loopback_name_servers_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    text_by_path = {
        "/etc/resolv.conf": "search x\nnameserver 127.0.0.53\n#nameserver 3.3.3.3\n",
        "/run/systemd/resolve/resolv.conf": " nameserver  9.9.9.9\nnameserver fd00::1\nnameserver 9.9.9.9\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in text_by_path:
            raise FileNotFoundError(path)
        return text_by_path[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert find_name_servers(Network()) == ["9.9.9.9"]
    assert find_name_servers(Network(dns=["127.0.0.1", "1.1.1.1", "x", "2.2.2.2", "1.1.1.1"])) == ["1.1.1.1", "2.2.2.2"]
    text_by_path["/etc/resolv.conf"] = "nameserver 8.8.8.8"
    assert find_name_servers(Network()) == ["8.8.8.8"]
    del text_by_path["/etc/resolv.conf"]
    assert find_name_servers(Network()) == ["9.9.9.9"]
    text_by_path.clear()
    assert find_name_servers(Network()) == []
