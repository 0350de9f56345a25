"""Test which names a policy allows, and which of their addresses become reachable."""

from __future__ import annotations

import ipaddress

import dns.name
import pytest

from sandbox_gateway.hosts.kvm_xfs.network.name_policy import NamePolicy
from sandbox_gateway.hosts.network_policy import METADATA_NETWORKS
from sandbox_gateway.records import NetworkPolicy

SUBNET = ipaddress.IPv4Network("10.231.0.0/16")


def make_name_policy(*allowed: str, deny_out: tuple[str, ...] = ()) -> NamePolicy:
    return NamePolicy(NetworkPolicy(allow_internet=False, allow_out=[*allowed], deny_out=[*deny_out]), SUBNET)


def parse_address(text: str) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(text)


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("api.example.com", True),
        ("API.eXample.COM.", True),
        ("v1.api.example.com", False),
        ("example.com", False),
        ("xapi.example.com", False),
        ("api.example.com.evil.net", False),
        (r"api\.example.com", False),
        ("a.wild.org", True),
        ("a.b.WILD.org", True),
        ("wild.org", False),
        ("evilwild.org", False),
        (r"evil\.wild.org", False),
        ("*.wild.org", True),
        ("org", False),
        (".", False),
        ("xn--bcher-kva.example", True),
        ("b\u00fccher.example", True),
    ],
)
def test_names_and_wildcards_match_whole_labels(name: str, is_allowed: bool) -> None:
    policy = make_name_policy("api.example.com", "*.wild.org", "xn--bcher-kva.example.")
    assert policy.allows_name(dns.name.from_text(name)) is is_allowed


def test_a_policy_without_names_is_falsy() -> None:
    assert not make_name_policy("1.1.1.1") and make_name_policy("a.example.com") and make_name_policy("*.example.com")


@pytest.mark.parametrize("network", [ipaddress.IPv4Network(each) for each in METADATA_NETWORKS])
def test_names_never_open_metadata_services(network: ipaddress.IPv4Network) -> None:
    policy = make_name_policy("a.example.com", "0.0.0.0/0")
    for metadata_address in (network[0], network[-1]):
        assert not policy.may_open(metadata_address) and not policy.is_open(metadata_address)


@pytest.mark.parametrize(
    "text",
    [
        *("10.0.0.1", "172.16.5.5", "192.168.1.1", "100.64.0.1", "127.0.0.1", "0.0.0.0", "169.254.1.1", "198.18.0.1"),
        *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "10.231.0.6", "203.0.113.80"),
    ],
)
def test_names_do_not_open_addresses_outside_the_public_internet(text: str) -> None:
    policy = make_name_policy("a.example.com")
    assert not policy.may_open(parse_address(text)) and not policy.is_open(parse_address(text))


def test_names_open_public_addresses_that_are_not_denied() -> None:
    policy = make_name_policy("a.example.com", deny_out=("0.0.0.0/0", "8.8.0.0/16"))
    assert policy.may_open(parse_address("1.1.1.1")) and not policy.is_open(parse_address("1.1.1.1"))
    assert not policy.may_open(parse_address("8.8.8.8"))


def test_listed_addresses_are_reachable_but_never_those_of_other_sandboxes() -> None:
    policy = make_name_policy("a.example.com", "10.0.0.0/8", "169.254.169.254")
    assert policy.is_open(parse_address("10.1.2.3")) and policy.is_open(parse_address("169.254.169.254"))
    assert not policy.is_open(parse_address("10.231.0.6")) and not policy.may_open(parse_address("10.231.0.6"))
    assert not policy.is_open(parse_address("169.254.169.253"))
