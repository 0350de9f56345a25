"""Translate pf's rulesets into one nftables table.

pf evaluates its rules twice for a forwarded packet: ``in`` on one interface and ``out`` on the other. Here, the hooks
prerouting (after rdr) and postrouting (after nat) do this. The last matching rule decides, a ``quick`` rule decides at
once, and a packet without a match passes, so bits of the packet mark store the verdict until the end. ``keep state``
sets a bit of the connection mark for the connection's direction. Only connections with this bit bypass the rules.
A packet from a member of a bridge is evaluated on the member first and then on the bridge (bridge_input() and
bridge_pfil() in sys/net/if_bridge.c), so a second table marks such packets with the member. The evaluation on the
member requires pfil_member and pfil_local_phys. FreeBSD delivers a frame for the member's own MAC address to the
member, and a copy of each broadcast to the member: pf evaluates these only on the member.

Anchors are evaluated where the main ruleset calls them; anchors called with a wildcard are evaluated in
alphabetical order. Other anchors have no effect.
"""

from __future__ import annotations

import os

from shim import base, net, pf

BLOCK, KEEP, RETURN, REDIRECTED = 0x40000000, 0x20000000, 0x10000000, 0x08000000
STATE_IN, STATE_OUT = 0x40000000, 0x20000000
NOT_ON_BRIDGE, MEMBER = 0x04000000, 0xFFFF
"""Mark bits of packets from members of a bridge: pf does not see the packet on the bridge; the member's number."""
INITIAL_STATE = {"enabled": True, "skip": [], "rules": {}}
ALL_MARK_BITS = BLOCK | KEEP | RETURN | REDIRECTED
SOURCES = "pf_sources"
NFT_PATHS = ("/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft")


def load_state() -> dict:  # type: ignore[type-arg]
    """Return the rulesets, the skipped interfaces, and whether pf is enabled."""
    return {**INITIAL_STATE, **base.load("pf", INITIAL_STATE)}


def get_table_name() -> str:
    """Return the name of the table, which is unique for each state directory."""
    return "freebsd_shim_" + "".join(letter if letter.isalnum() else "_" for letter in base.get_state_dir())[-40:]


def format_interface_expression(key: str | dict[str, int], name: str) -> list[str]:
    """Match an interface. ``key``: the name of nftables' selector, or the numbers of bridge members."""
    operator, interface = ("!= ", name[2:]) if name.startswith("! ") else ("", name)
    if isinstance(key, dict):
        return [f"meta mark and {MEMBER:#x} {operator or '== '}{key[interface]}"] if name else []
    interface = "lo" if interface == "lo0" else interface
    return [f'{key} {operator}"{interface}"'] if name else []


def format_address_expression(rule: pf.Rule, key: str, text: str) -> list[str]:
    if text == "any":
        return []
    operator, address = ("!= ", text[2:]) if text.startswith("! ") else ("", text)
    if address == "(self)":
        return [f"fib {key} type {operator}local"]
    return [f"{'ip6' if rule['af'] == 'inet6' else 'ip'} {key} {operator}{address}"]


def format_port_expression(rule: pf.Rule, key: str, text: str) -> list[str]:
    return [f"{rule['proto']} {key} {text.removeprefix('= ').replace(':', '-')}"] if text else []


def format_match_expressions(rule: pf.Rule, interface_key: str | dict[str, int]) -> list[str]:
    words = format_interface_expression(interface_key, rule["on"])
    if rule["af"]:
        words.append(f"meta nfproto {'ipv6' if rule['af'] == 'inet6' else 'ipv4'}")
    if rule["proto"]:
        protocol = {"icmp6": "ipv6-icmp"}.get(rule["proto"], rule["proto"])
        words.append(f"meta l4proto {protocol}")
    words += format_address_expression(rule, "saddr", rule["source"]) + format_address_expression(
        rule, "daddr", rule["target"]
    )
    return (
        words
        + format_port_expression(rule, "sport", rule["sport"])
        + format_port_expression(rule, "dport", rule["dport"])
    )


def expand_anchors(rulesets: dict, kind: str, anchors: tuple[str, ...], path: str = "") -> list[pf.Rule]:  # type: ignore[type-arg]
    """Return the rules of a ruleset, with each anchor replaced by its rules."""
    expanded_rules: list[pf.Rule] = []
    for rule in rulesets.get(path, {}).get(kind, []):
        if "anchor" not in rule:
            expanded_rules.append(rule)
            continue
        if rule["what"] not in anchors:
            continue
        anchor_path = "/".join(part for part in (path, rule["anchor"]) if part)
        child_paths = sorted(each for each in rulesets if each.rpartition("/")[0] == anchor_path[:-2])
        paths = child_paths if anchor_path.endswith("/*") else [anchor_path]
        for each in paths:
            expanded_rules += expand_anchors(rulesets, kind, anchors, each)
    return expanded_rules


def format_filter_rules(rules: list[pf.Rule], direction: str, interface_key: str | dict[str, int]) -> list[str]:
    state_bit = STATE_IN if direction == "in" else STATE_OUT
    lines = []
    for rule in rules:
        if rule["direction"] not in ("", direction):
            continue
        matches = format_match_expressions(rule, interface_key)
        if rule["what"] == "block":
            if rule["drop"] == "return" and direction == "out":
                if rule["direction"] == "out":
                    raise base.unsupported("block return out")
                action = "drop" if rule["quick"] else format_mark_statement(BLOCK)
            elif rule["drop"] == "return":
                action = format_reject_statement(rule) if rule["quick"] else format_mark_statement(BLOCK | RETURN)
            else:
                action = "drop" if rule["quick"] else format_mark_statement(BLOCK)
            lines.append(" ".join([*matches, action]))
            continue
        if rule["quick"]:
            action = (f"ct mark set ct mark or {state_bit:#x} " if rule["state"] == "keep" else "") + "accept"
        else:
            action = format_mark_statement(KEEP if rule["state"] == "keep" else 0)
        actions = [format_limit_statement(rule), action] if rule.get("max_src_states") else [action]
        if rule["flags"] == "S/SA" and rule["proto"] == "":
            lines += [" ".join([*matches, "meta l4proto != tcp", each]) for each in actions]
        syn_match = ["meta l4proto tcp tcp flags & (syn | ack) == syn"] if rule["flags"] == "S/SA" else []
        lines += [" ".join([*matches, *syn_match, each]) for each in actions]
    return lines


def format_limit_statement(rule: pf.Rule) -> str:
    """Drop packets that would exceed the limit of a rule's states. See pf_insert_src_node() and pf_create_state()."""
    return f"add @{SOURCES} {{ ip saddr ct count over {rule['max_src_states']} }} drop"


def format_mark_statement(bits: int) -> str:
    return (
        f"meta mark set meta mark and {~ALL_MARK_BITS & 0xFFFFFFFF:#x}"
        if not bits
        else (f"meta mark set meta mark and {~ALL_MARK_BITS & 0xFFFFFFFF:#x} meta mark set meta mark or {bits:#x}")
    )


def format_reject_statement(rule: pf.Rule) -> str:
    return "reject with tcp reset" if rule["proto"] == "tcp" else "reject"


def format_nat_rules(rules: list[pf.Rule]) -> list[str]:
    lines = []
    for rule in rules:
        if rule["what"] != "nat":
            continue
        if rule["no"]:
            action = "accept"
        elif rule["to"].startswith("("):
            if rule["to"] != f"({rule['on']})":
                raise base.unsupported("nat to the address of another interface")
            action = "masquerade"
        else:
            action = f"snat {'ip6' if rule['af'] == 'inet6' else 'ip'} to {rule['to']}"
        lines.append(" ".join([*format_match_expressions(rule, "oifname"), action]))
    return lines


def format_rdr_rules(rules: list[pf.Rule]) -> list[str]:
    lines = []
    for rule in rules:
        if rule["what"] != "rdr":
            continue
        if rule["no"]:
            action = "accept"
        else:
            target = rule["to"] + (f":{rule['toport']}" if rule["toport"] else "")
            action = f"dnat {'ip6' if rule['af'] == 'inet6' else 'ip'} to {target}"
            if rule["pass"]:
                action = f"meta mark set meta mark or {REDIRECTED:#x} {action}"
        lines.append(" ".join([*format_match_expressions(rule, "iifname"), action]))
    return lines


def format_ruleset(state: dict) -> str:  # type: ignore[type-arg]
    """Return the nft(8) script that applies the state atomically."""
    name = get_table_name()
    header = "".join(f"table {each} {name}\ndelete table {each} {name}\n" for each in ("inet", "bridge"))
    if not state["enabled"] or not any(any(each.values()) for each in state["rules"].values()):
        return header
    filter_rules = expand_anchors(state["rules"], "filter", ("anchor",))
    nat_rules = expand_anchors(state["rules"], "nat", ("nat-anchor",))
    rdr_rules = expand_anchors(state["rules"], "nat", ("rdr-anchor",))
    numbers = number_interfaces(state, filter_rules)
    bridges, members = list_bridges()
    chains = [
        ("rdr", "type nat hook prerouting priority -100", format_rdr_rules(rdr_rules)),
        ("in", "type filter hook prerouting priority -90", format_filter_chain(state, filter_rules, "in", bridges)),
        ("nat", "type nat hook postrouting priority 100", format_nat_rules(nat_rules)),
        ("out", "type filter hook postrouting priority 110", format_filter_chain(state, filter_rules, "out")),
    ]
    if bridges:
        lines = format_filter_chain(state, filter_rules, "in", bridges, numbers)
        chains.append(("member", "type filter hook prerouting priority -95", lines))
    body = "".join(
        f"  chain pf_{key} {{\n    {hook}; policy accept;\n" + "".join(f"    {line}\n" for line in lines) + "  }\n"
        for key, hook, lines in chains
        if lines
    )
    sources = f"  set {SOURCES} {{ type ipv4_addr; size 65535; flags dynamic; }}\n" if f"@{SOURCES} " in body else ""
    bridge_table = format_bridge_table(numbers, bridges, members) if bridges else ""
    return f"{header}{bridge_table}table inet {name} {{\n{sources}{body}}}\n" if body else header


def number_interfaces(state: dict, rules: list[pf.Rule]) -> dict[str, int]:  # type: ignore[type-arg]
    """Return a number for each interface that a rule names. All other interfaces have the number MEMBER."""
    names = sorted({*state["skip"], *(rule["on"].removeprefix("! ") for rule in rules if rule["on"])})
    return {name: number for number, name in enumerate(names, start=1)}


def list_bridges() -> tuple[list[net.Link], list[net.Link]]:
    """Return the bridges of this state directory that have members, and the members.

    Bridges of other state directories may be in the same network namespace.
    """
    own_interfaces = base.load("interfaces", {"names": []})["names"]
    links = net.NetlinkSocket().list_links()
    bridges = [link for link in links if link.driver == "bridge" and f"bridge{link.unit}" in own_interfaces]
    members = [link for link in links if link.master in {bridge.index for bridge in bridges}]
    return [bridge for bridge in bridges if bridge.index in {member.master for member in members}], members


def format_name_set(links: list[net.Link]) -> str:
    return "{ " + ", ".join(f'"{link.linux_name}"' for link in links) + " }"


def format_bridge_table(numbers: dict[str, int], bridges: list[net.Link], members: list[net.Link]) -> str:
    """Return the table that marks packets with the bridge member from which they come."""
    macs = "{ " + ", ".join({link.mac for link in bridges}) + " }"
    lines = [f"iifname != {format_name_set(members)} accept", f"meta mark set {MEMBER:#x}"]
    lines += [f'iifname "{name}" meta mark set {number}' for name, number in numbers.items()]
    lines.append(f"ether daddr != {macs} meta mark set meta mark or {NOT_ON_BRIDGE:#x}")
    sysctls = base.load("sysctl", {})
    if "0" in (sysctls.get("net.link.bridge.pfil_member", "1"), sysctls.get("net.link.bridge.pfil_local_phys", "0")):
        lines.append(f"ether daddr {macs} meta mark set 0")
    body = "".join(f"    {line}\n" for line in lines)
    hook = "    type filter hook prerouting priority -300\n"
    return f"table bridge {get_table_name()} {{\n  chain members {{\n{hook}{body}  }}\n}}\n"


def format_filter_chain(
    state: dict,  # type: ignore[type-arg]
    rules: list[pf.Rule],
    direction: str,
    bridges: list[net.Link] | None = None,
    numbers: dict[str, int] | None = None,
) -> list[str]:
    """Return the lines of the chain for one direction of the filter rules, or [] if there are no rules.

    ``bridges``: the bridges from which packets may come. ``numbers``: the numbers of interfaces, for the chain that
    evaluates the rules on the members of these bridges.
    """
    if not rules:
        return []
    own_state_bit, reply_state_bit = (STATE_IN, STATE_OUT) if direction == "in" else (STATE_OUT, STATE_IN)
    key = numbers if numbers is not None else "iifname" if direction == "in" else "oifname"
    lines = []
    if numbers is not None:
        lines += [f"iifname != {format_name_set(bridges or [])} accept", f"meta mark and {MEMBER:#x} == 0 accept"]
    elif bridges:
        lines.append(f"iifname {format_name_set(bridges)} meta mark and {NOT_ON_BRIDGE:#x} != 0 accept")
    lines += [" ".join([*format_interface_expression(key, name), "accept"]) for name in state["skip"]]
    lines += [
        # A state that the packet itself has created on the member also counts on the bridge.
        f"ct direction original ct mark and {own_state_bit:#x} != 0 accept",
        f"ct direction reply ct state established,related ct mark and {reply_state_bit:#x} != 0 accept",
    ]
    if direction == "in" and numbers is None:
        lines.append(f"meta mark and {REDIRECTED:#x} != 0 ct mark set ct mark or {own_state_bit:#x} accept")
    lines.append(f"meta mark set meta mark and {~ALL_MARK_BITS & 0xFFFFFFFF:#x}")
    lines += format_filter_rules(rules, direction, key)
    if direction == "in":
        lines.append(f"meta mark and {RETURN:#x} != 0 meta l4proto tcp reject with tcp reset")
        lines.append(f"meta mark and {RETURN:#x} != 0 reject")
    return [
        *lines,
        f"meta mark and {BLOCK:#x} != 0 drop",
        f"meta mark and {KEEP:#x} != 0 ct mark set ct mark or {own_state_bit:#x}",
    ]


def apply_ruleset(state: dict) -> None:  # type: ignore[type-arg]
    run_nft(format_ruleset(state))


def remove_ruleset() -> None:
    run_nft(format_ruleset({**INITIAL_STATE, "enabled": False}))


def run_nft(script: str) -> None:
    """Run a script with nft(8). An error is a bug in this module and raises RuntimeError."""
    nft_path = next((path for path in NFT_PATHS if os.access(path, os.X_OK)), "")
    if not nft_path:
        raise base.unsupported("pf without nftables")
    input_read, input_write = os.pipe()
    output_read, output_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(input_read, 0)
        os.dup2(output_write, 1)
        os.dup2(output_write, 2)
        try:
            os.execv(nft_path, [nft_path, "-f", "-"])
        finally:
            os._exit(127)
    os.close(input_read)
    os.close(output_write)
    with os.fdopen(input_write, "w") as stream:
        stream.write(script)
    with os.fdopen(output_read) as stream:
        output = stream.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"nft refused the translated rules: {output}\n{script}")
