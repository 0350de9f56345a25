"""pf's rulesets as one nftables table.

pf evaluates its rules twice for a forwarded packet, ``in`` on one interface and ``out`` on the other: the hooks
prerouting (after rdr) and postrouting (after nat). The last matching rule decides, ``quick`` decides at once, and
without a match the packet passes: a verdict is kept in packet mark bits until the end. ``keep state`` is a bit in the
connection's mark for the direction in which it was made; only connections with it bypass the rules. Anchors are
evaluated where the main ruleset calls them, wildcards in alphabetical order; anchors without a call have no effect.
"""

from __future__ import annotations

import os

from shim import base, pf

BLOCK, KEEP, RETURN, REDIRECTED = 0x40000000, 0x20000000, 0x10000000, 0x08000000
STATE_IN, STATE_OUT = 0x40000000, 0x20000000
ALL = BLOCK | KEEP | RETURN | REDIRECTED
NFT = ("/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft")


def table() -> str:
    """The name of the table, unique for each state directory."""
    return "freebsd_shim_" + "".join(letter if letter.isalnum() else "_" for letter in base.state_dir())[-40:]


def interface_expression(key: str, name: str) -> list[str]:
    no, plain = ("!= ", name[2:]) if name.startswith("! ") else ("", name)
    plain = "lo" if plain == "lo0" else plain
    return [f'{key} {no}"{plain}"'] if name else []


def address_expression(rule: pf.Rule, key: str, text: str) -> list[str]:
    if text == "any":
        return []
    no, plain = ("!= ", text[2:]) if text.startswith("! ") else ("", text)
    if plain == "(self)":
        return [f"fib {key} type {no}local"]
    return [f"{'ip6' if rule['af'] == 'inet6' else 'ip'} {key} {no}{plain}"]


def port_expression(rule: pf.Rule, key: str, text: str) -> list[str]:
    return [f"{rule['proto']} {key} {text.removeprefix('= ').replace(':', '-')}"] if text else []


def match_expressions(rule: pf.Rule, interface_key: str) -> list[str]:
    words = interface_expression(interface_key, rule["on"])
    if rule["af"]:
        words.append(f"meta nfproto {'ipv6' if rule['af'] == 'inet6' else 'ipv4'}")
    if rule["proto"]:
        protocol = {"icmp6": "ipv6-icmp"}.get(rule["proto"], rule["proto"])
        words.append(f"meta l4proto {protocol}")
    words += address_expression(rule, "saddr", rule["source"]) + address_expression(rule, "daddr", rule["target"])
    return words + port_expression(rule, "sport", rule["sport"]) + port_expression(rule, "dport", rule["dport"])


def expand_anchors(rulesets: dict, kind: str, anchors: tuple[str, ...], path: str = "") -> list[pf.Rule]:  # type: ignore[type-arg]
    """The rules of the ruleset, with its anchors replaced by their rules."""
    found: list[pf.Rule] = []
    for rule in rulesets.get(path, {}).get(kind, []):
        if "anchor" not in rule:
            found.append(rule)
            continue
        if rule["what"] not in anchors:
            continue
        name = "/".join(part for part in (path, rule["anchor"]) if part)
        below = sorted(each for each in rulesets if each.rpartition("/")[0] == name[:-2])
        paths = below if name.endswith("/*") else [name]
        for each in paths:
            found += expand_anchors(rulesets, kind, anchors, each)
    return found


def filter_lines(rules: list[pf.Rule], direction: str) -> list[str]:
    state = STATE_IN if direction == "in" else STATE_OUT
    lines = []
    for rule in rules:
        if rule["direction"] not in ("", direction):
            continue
        start = match_expressions(rule, "iifname" if direction == "in" else "oifname")
        if rule["what"] == "block":
            if rule["drop"] == "return" and direction == "out":
                if rule["direction"] == "out":
                    raise base.unsupported("block return out")
                action = "drop" if rule["quick"] else set_mark(BLOCK)
            elif rule["drop"] == "return":
                action = reject_statement(rule) if rule["quick"] else set_mark(BLOCK | RETURN)
            else:
                action = "drop" if rule["quick"] else set_mark(BLOCK)
            lines.append(" ".join([*start, action]))
            continue
        if rule["quick"]:
            action = (f"ct mark set ct mark or {state:#x} " if rule["state"] == "keep" else "") + "accept"
        else:
            action = set_mark(KEEP if rule["state"] == "keep" else 0)
        if rule["flags"] == "S/SA" and rule["proto"] == "":
            lines.append(" ".join([*start, "meta l4proto != tcp", action]))
        syn = ["meta l4proto tcp tcp flags & (syn | ack) == syn"] if rule["flags"] == "S/SA" else []
        lines.append(" ".join([*start, *syn, action]))
    return lines


def set_mark(bits: int) -> str:
    return (
        f"meta mark set meta mark and {~ALL & 0xFFFFFFFF:#x}"
        if not bits
        else (f"meta mark set meta mark and {~ALL & 0xFFFFFFFF:#x} meta mark set meta mark or {bits:#x}")
    )


def reject_statement(rule: pf.Rule) -> str:
    return "reject with tcp reset" if rule["proto"] == "tcp" else "reject"


def nat_lines(rules: list[pf.Rule]) -> list[str]:
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
        lines.append(" ".join([*match_expressions(rule, "oifname"), action]))
    return lines


def rdr_lines(rules: list[pf.Rule]) -> list[str]:
    lines = []
    for rule in rules:
        if rule["what"] != "rdr":
            continue
        if rule["no"]:
            action = "accept"
        else:
            where = rule["to"] + (f":{rule['toport']}" if rule["toport"] else "")
            action = f"dnat {'ip6' if rule['af'] == 'inet6' else 'ip'} to {where}"
            if rule["pass"]:
                action = f"meta mark set meta mark or {REDIRECTED:#x} {action}"
        lines.append(" ".join([*match_expressions(rule, "iifname"), action]))
    return lines


def ruleset(state: dict) -> str:  # type: ignore[type-arg]
    """The nft(8) script that applies the state atomically."""
    name = table()
    head = f"table inet {name}\ndelete table inet {name}\n"
    if not state["enabled"] or not any(any(each.values()) for each in state["rules"].values()):
        return head
    rules = expand_anchors(state["rules"], "filter", ("anchor",))
    nat = expand_anchors(state["rules"], "nat", ("nat-anchor",))
    rdr = expand_anchors(state["rules"], "nat", ("rdr-anchor",))
    chains = [
        ("rdr", "type nat hook prerouting priority -100", rdr_lines(rdr)),
        ("in", "type filter hook prerouting priority -90", filter_pass(state, rules, "in")),
        ("nat", "type nat hook postrouting priority 100", nat_lines(nat)),
        ("out", "type filter hook postrouting priority 110", filter_pass(state, rules, "out")),
    ]
    body = "".join(
        f"  chain pf_{key} {{\n    {hook}; policy accept;\n" + "".join(f"    {line}\n" for line in lines) + "  }\n"
        for key, hook, lines in chains
        if lines
    )
    return f"{head}table inet {name} {{\n{body}}}\n" if body else head


def filter_pass(state: dict, rules: list[pf.Rule], direction: str) -> list[str]:  # type: ignore[type-arg]
    """One of the two passes through the filter rules; empty if there are no rules."""
    if not rules:
        return []
    key, own, other = ("iifname", STATE_IN, STATE_OUT) if direction == "in" else ("oifname", STATE_OUT, STATE_IN)
    lines = [" ".join([*interface_expression(key, name), "accept"]) for name in state["skip"]]
    lines += [
        f"ct direction original ct state established,related ct mark and {own:#x} != 0 accept",
        f"ct direction reply ct state established,related ct mark and {other:#x} != 0 accept",
    ]
    if direction == "in":
        lines.append(f"meta mark and {REDIRECTED:#x} != 0 ct mark set ct mark or {own:#x} accept")
    lines.append(f"meta mark set meta mark and {~ALL & 0xFFFFFFFF:#x}")
    lines += filter_lines(rules, direction)
    if direction == "in":
        lines.append(f"meta mark and {RETURN:#x} != 0 meta l4proto tcp reject with tcp reset")
        lines.append(f"meta mark and {RETURN:#x} != 0 reject")
    return [
        *lines,
        f"meta mark and {BLOCK:#x} != 0 drop",
        f"meta mark and {KEEP:#x} != 0 ct mark set ct mark or {own:#x}",
    ]


def apply_ruleset(state: dict) -> None:  # type: ignore[type-arg]
    run_nft(ruleset(state))


def remove_ruleset() -> None:
    run_nft(f"table inet {table()}\ndelete table inet {table()}\n")


def run_nft(script: str) -> None:
    """Pass the script to nft(8). Raises RuntimeError with its error message: a bug of the translation."""
    nft = next((path for path in NFT if os.access(path, os.X_OK)), "")
    if not nft:
        raise base.unsupported("pf without nftables")
    back, front = os.pipe()
    said, telling = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(back, 0)
        os.dup2(telling, 1)
        os.dup2(telling, 2)
        try:
            os.execv(nft, [nft, "-f", "-"])
        finally:
            os._exit(127)
    os.close(back)
    os.close(telling)
    with os.fdopen(front, "w") as stream:
        stream.write(script)
    with os.fdopen(said) as stream:
        answer = stream.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"nft refused the translated rules: {answer}\n{script}")
