"""Create the nftables rules for slots, on the host and in each slot's own namespace."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping, Sequence

from sandbox_gateway.command import run_async
from sandbox_gateway.config import Network
from sandbox_gateway.hosts.connect import AGENT_PORT, CODE_PORT, MARK
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    TAP_NAME,
    VOLUME_PORTS,
    Slot,
    count_slots,
    get_host_table,
    get_volume_address,
    get_volume_link,
)
from sandbox_gateway.hosts.network_policy import build_egress_rules, list_allowed_names
from sandbox_gateway.records import NetworkPolicy

VOLUME_ACCESS = "volume_access"
"""Name of the set of (`Slot.host_address` . port) pairs that may connect to volume servers."""

VOLUME_ALIASES = "volume_aliases"
"""Name of the map from these pairs to the address at which the server sees the sandbox, in ``ALIAS_NETWORK``."""

MAX_CONNECTIONS = 4096
"""Maximum concurrent outgoing connections of a sandbox.

Otherwise a guest could exhaust `nf_conntrack_max`, the kernel's limit for all connections. Refused, half-open and
closed connections count until the kernel forgets them.
"""

MAX_NAME_ADDRESSES = 1024
"""Maximum number of addresses of domain names that a sandbox can reach at the same time."""

_TABLE = "sandbox"
_NAME_ADDRESSES = "name_addresses"
"""Name of a slot's set of the addresses of allowed domain names. The gateway's resolver adds them, with a timeout."""
_QUERIES_PER_SECOND, _QUERY_BURST = 20, 200
"""How many DNS queries a sandbox can send to the resolver. The kernel drops more before the gateway sees them."""
_REJECT = "reject with icmp admin-prohibited"
_NFT_TIMEOUT_SECONDS = 20.0


async def apply_on_host(rules: str) -> None:
    """Run nft commands on the host, in one transaction. Raises BackendFailed."""
    await run_async(["nft", "-f", "-"], timeout=_NFT_TIMEOUT_SECONDS, input=rules)


async def apply_in_slot(slot: Slot, rules: str) -> None:
    """Run nft commands in a slot's namespace, in one transaction. Raises BackendFailed."""
    await run_async(["nsenter", f"--net={slot.path}", "nft", "-f", "-"], timeout=_NFT_TIMEOUT_SECONDS, input=rules)


def build_host_rules(network: Network) -> str:
    """Return nft commands that create the host's table, which restricts what slots can reach.

    A slot cannot reach the host, other slots, or volumes that its sandbox does not mount.
    """
    slots, servers = f'"{network.prefix}-*"', f'"{get_volume_link(network)}"'
    server_address = get_volume_address(network)
    unmarked_syn = f"tcp flags & (syn | ack) == syn meta mark != {MARK:#x}"
    return f"""{build_table_removal(get_host_table(network))}
table inet {get_host_table(network)} {{
    set {VOLUME_ACCESS} {{
        type ipv4_addr . inet_service
    }}
    map {VOLUME_ALIASES} {{
        type ipv4_addr . inet_service : ipv4_addr
    }}
    set connections {{
        type ipv4_addr
        flags dynamic
        size {count_slots(network)}
    }}
    chain volumes {{
        # Check each packet, not each connection: removing a slot from the set disconnects it immediately.
        ip daddr {server_address} ip saddr . tcp dport @{VOLUME_ACCESS} accept
        drop
    }}
    chain input {{
        type filter hook input priority filter - 5; policy accept;
        iifname {{ {slots}, {servers} }} meta nfproto ipv4 ct state established,related accept
        iifname {{ {slots}, {servers} }} drop
    }}
    chain output {{
        type filter hook output priority filter - 5; policy accept;
        # Agents accept requests from the host without a token, so only the gateway may connect to them, not other
        # processes of the host. Later packets need no check, because a refused connection has none.
        oifname {slots} tcp dport {{ {AGENT_PORT}, {CODE_PORT} }} {unmarked_syn} reject with tcp reset
        oifname {servers} {unmarked_syn} reject with tcp reset
    }}
    chain forward {{
        type filter hook forward priority filter - 5; policy accept;
        iifname {slots} oifname {slots} drop
        iifname {slots} meta nfproto != ipv4 drop
        iifname {slots} ip saddr != {network.subnet} drop
        # The slot also counts connections. But a guest can make the slot forget connections that the host still
        # tracks, with packets that end a connection from the slot's point of view and never reach the host.
        iifname {slots} ct state new add @connections {{ ip saddr ct count over {MAX_CONNECTIONS} }} \
            jump refuse
        iifname {slots} oifname {servers} jump volumes
        # Published ports of containers on the host are services of the host.
        iifname {slots} ct status dnat drop
        iifname {slots} tcp flags syn / syn,rst tcp option maxseg size set rt mtu
        oifname {slots} ct state established,related accept
        oifname {slots} drop
        iifname {servers} drop
        oifname {servers} drop
    }}
    chain refuse {{
        # The kernel limits the rate of ICMP errors, but not of resets. A client that receives neither would wait.
        meta l4proto tcp reject with tcp reset
        reject with icmp admin-prohibited
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname {servers} snat ip to ip saddr . tcp dport map @{VOLUME_ALIASES}
        ip saddr {network.subnet} oifname != {{ {slots}, {servers} }} masquerade
    }}
}}
"""


def build_slot_rules(slot: Slot, network: Network, dns: Sequence[str]) -> str:
    """Return nft commands that create a slot's table with the default policy."""
    veth = f'"{slot.name}v"'
    tap = f'"{TAP_NAME}"'
    server_address = get_volume_address(network)
    port_range = f"{VOLUME_PORTS.start}-{VOLUME_PORTS.stop - 1}"
    return f"""{build_table_removal(_TABLE)}
table inet {_TABLE} {{
    chain guard {{
        type filter hook prerouting priority raw; policy accept;
        meta nfproto ipv6 drop
        iifname {tap} ip saddr != {GUEST_ADDRESS} drop
    }}
    chain inwards {{
        type nat hook prerouting priority dstnat; policy accept;
        # Accept only the host, because late packets of an earlier sandbox's connections have other sources.
        iifname {veth} ip saddr {slot.veth_address} ip daddr {slot.host_address} dnat ip to {GUEST_ADDRESS}
        iifname {tap} ip daddr {GATEWAY_ADDRESS} tcp dport {port_range} dnat ip to {server_address}
    }}
    chain outwards {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname {tap} snat ip to {GATEWAY_ADDRESS}
        oifname {veth} snat ip to {slot.host_address}
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        # Reset connections that exist only in the sandbox's memory, so that they do not hang.
        ct state invalid meta l4proto tcp reject with tcp reset
        ct state invalid drop
        iifname {tap} ct state new jump connections
        # Network policies do not apply to volumes: the host decides which volumes a slot can reach.
        iifname {tap} oifname {veth} ip daddr {server_address} tcp dport {port_range} ct status dnat accept
        # Check each packet, not each connection: a new policy also applies to open connections.
        iifname {tap} oifname {veth} ct direction original jump outside
        ct state established,related accept
        iifname {veth} oifname {tap} ct status dnat accept
    }}
    chain connections {{
        # Refuse before the kernel creates an entry. Open connections continue.
        ct count over {MAX_CONNECTIONS} reject with icmp admin-prohibited
    }}
    chain outside {{
    }}
}}
{build_policy_rules(NetworkPolicy(), dns, ipaddress.IPv4Network(network.subnet))}"""


def build_policy_rules(policy: NetworkPolicy, dns: Sequence[str], subnet: ipaddress.IPv4Network) -> str:
    """Return nft commands that apply ``policy`` to a slot in one transaction. Raises Invalid for an invalid address.

    The commands also create the sets and chains that slots of older releases lack.
    """
    has_names = bool(list_allowed_names(policy))
    rules_by_chain = {
        "resolver": [f'iifname "{TAP_NAME}" udp dport 53 redirect to :53'] if has_names else [],
        "input": _build_input_rules(with_resolver=has_names),
        "outside": _build_outside_rules(policy, dns, subnet),
    }
    lines = [
        f"add set inet {_TABLE} {_NAME_ADDRESSES} {{ type ipv4_addr; flags timeout; size {MAX_NAME_ADDRESSES}; }}",
        f"flush set inet {_TABLE} {_NAME_ADDRESSES}",
        f"add chain inet {_TABLE} resolver {{ type nat hook prerouting priority dstnat - 1; policy accept; }}",
    ]
    for chain, rules in rules_by_chain.items():
        lines += [f"flush chain inet {_TABLE} {chain}", *(f"add rule inet {_TABLE} {chain} {rule}" for rule in rules)]
    return "".join(f"{line}\n" for line in lines)


def _build_input_rules(*, with_resolver: bool) -> list[str]:
    """Return the rules for packets that a guest sends to its slot itself."""
    from_guest = f'iifname "{TAP_NAME}"'
    query = f"{from_guest} ip daddr {GATEWAY_ADDRESS} udp dport 53"
    resolver_rules = [
        f"{query} limit rate {_QUERIES_PER_SECOND}/second burst {_QUERY_BURST} packets accept",
        f"{query} drop",
    ]
    return [
        f"{from_guest} ct state new jump connections",
        *(resolver_rules if with_resolver else ()),
        f"{from_guest} icmp type echo-request accept",
        "ct state invalid meta l4proto tcp reject with tcp reset",
        f"{from_guest} {_REJECT}",
    ]


def _build_outside_rules(policy: NetworkPolicy, dns: Sequence[str], subnet: ipaddress.IPv4Network) -> list[str]:
    """Return the rules for packets from a guest to addresses outside the slot."""
    # Connections continue after the timeout of their address. Those of an earlier policy have another mark.
    connection_mark = f"{1 + secrets.randbelow(0xFFFFFFFF):#x}"
    rules = [f"ip daddr {subnet} {_REJECT}"]
    for rule in build_egress_rules(policy, dns):
        if rule.matches_allowed_names:
            rules.append(f"ct mark {connection_mark} accept")
            rules.append(f"ip daddr @{_NAME_ADDRESSES} ct mark set {connection_mark} accept")
            continue
        condition = f"ip daddr {{ {', '.join(map(str, rule.networks))} }}"
        if rule.dns_only:
            condition += " meta l4proto { tcp, udp } th dport 53"
        rules.append(f"{condition} {'accept' if rule.allow else _REJECT}")
    return rules


def build_name_address_rules(seconds: Mapping[str, int]) -> str:
    """Return nft commands that allow connections to addresses of allowed names for a number of seconds each."""
    # The kernel does not change the timeout of an element that exists, and cannot delete one that does not.
    elements = ", ".join(seconds)
    elements_with_timeouts = ", ".join(f"{address} timeout {number}s" for address, number in seconds.items())
    name = f"inet {_TABLE} {_NAME_ADDRESSES}"
    return f"""add element {name} {{ {elements} }}
delete element {name} {{ {elements} }}
add element {name} {{ {elements_with_timeouts} }}
"""


def build_table_removal(table: str) -> str:
    """Return nft commands that remove a table if it exists."""
    return f"add table inet {table}\ndelete table inet {table}\n"
