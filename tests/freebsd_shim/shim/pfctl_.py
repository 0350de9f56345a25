"""pfctl(8), with the messages and order of sbin/pfctl/pfctl.c and sbin/pfctl/parse.y."""

from __future__ import annotations

import errno
import sys

from shim import base, pf, pf_nft, states

USAGE = """\
usage: pfctl [-AdeghMmNnOPqRrvz] [-a anchor] [-D macro=value] [-F modifier]
\t[-f file] [-i interface] [-K host | network]
\t[-k host | network | gateway | label | id] [-o level] [-p device]
\t[-s modifier] [-t table -T command [address ...]] [-x level]"""
SHOW_MODIFIERS = ("nat", "rules", "Anchors", "info")
FLUSH_MODIFIERS = ("nat", "rules", "all")
MODIFIERS = (
    "ether nat queue rules Anchors Sources states info Running labels timeouts memory Tables osfp Interfaces all "
    "creatorids Reset"
).split()


def main(argv: list[str]) -> int:
    try:
        options, arguments = base.getopt(argv, "a:AdD:eqf:F:ghi:k:K:mMnNOo:Pp:rRs:S:t:T:vx:z")
    except base.BadOption:
        raise base.usage(USAGE) from None
    values = dict(options)
    for letter in values:
        if letter not in "adeqfFknPsv":
            raise base.unsupported(f"-{letter}")
    if arguments or not (set(values) & set("edfFks")):
        raise base.usage(USAGE)
    anchor = values.get("a", "").strip("/")
    if any(len(part) >= 64 for part in anchor.split("/")):  # PF_ANCHOR_NAME_SIZE
        raise base.errx(1, f"anchor name '{anchor}' too long")
    shown_modifier = find_modifier(values, "s", SHOW_MODIFIERS)
    flushed_modifier = find_modifier(values, "F", FLUSH_MODIFIERS)
    if base.read_knob("pf.loaded") != "1":
        raise base.err(1, "/dev/pf", errno.ENOENT)
    quiet = "q" in values
    with base.locked():
        state = pf_nft.load_state()
        if shown_modifier:
            show_information(state, anchor, shown_modifier, "P" in values)
        if flushed_modifier:
            flush_rules(state, anchor, flushed_modifier, quiet)
        if "k" in values:
            kill_states([value for letter, value in options if letter == "k"], quiet)
        if "f" in values:
            load_rules(state, anchor, values["f"], "n" in values)
        for letter, should_enable in (("e", True), ("d", False)):
            if letter in values:
                set_enabled(state, should_enable, quiet)
    return 0


def kill_states(addresses: list[str], quiet: bool) -> None:
    """Delete the states from the first address to the second, or to any address. See pfctl_net_kill_states()."""
    if len(addresses) > 2:
        raise base.usage(USAGE)  # main(): "if (state_killers >= 2) usage()"
    ranges = []
    for address in addresses:
        try:
            ranges.append(states.AddressRange(address))
        except OSError:
            raise base.unsupported(f"-k {address}") from None
    killed_count = states.delete_states(ranges[0], ranges[1] if len(ranges) > 1 else None)
    if not quiet:
        sys.stderr.write(f"killed {killed_count} states from 1 sources and {len(ranges) - 1} destinations\n")


def find_modifier(values: dict[str, str], letter: str, supported: tuple[str, ...]) -> str:
    """Return the first modifier that begins with an option's value ("-s r"). See pfctl_lookup_option()."""
    if letter not in values:
        return ""
    for name in MODIFIERS:
        if values[letter] and name.startswith(values[letter]):
            if name not in supported:
                raise base.unsupported(f"-{letter} {name}")
            return name
    base.warnx(f"Unknown {'show' if letter == 's' else 'flush'} modifier '{values[letter]}'")
    raise base.usage(USAGE)


def commit_state(state: dict) -> None:  # type: ignore[type-arg]
    """Remove empty anchors from the state, then apply and save it. See pf_remove_if_empty_ruleset()."""
    state["rules"] = {name: each for name, each in state["rules"].items() if not name or each["nat"] or each["filter"]}
    pf_nft.apply_ruleset(state)
    base.save("pf", state)


def load_rules(state: dict, anchor: str, path: str, dry_run: bool) -> None:  # type: ignore[type-arg]
    name = "stdin" if path == "-" else path
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path) as file:
                text = file.read()
    except OSError as error:
        base.warn(path, error.errno or 0)
        base.warn("cannot open the main config file!", error.errno or 0)
        raise create_load_error(dry_run) from None
    try:
        ruleset = pf.parse_rules(text, is_main=not anchor)
    except pf.RuleSyntaxError as problem:
        sys.stderr.write(f"{name}:{problem.line}: {problem.message}\n")
        raise create_load_error(dry_run) from None
    state["rules"][anchor] = {"nat": ruleset.nat, "filter": ruleset.filter}
    if not anchor:
        state["skip"] = ruleset.skip
    if dry_run:
        pf_nft.format_ruleset(state)
    else:
        commit_state(state)


def create_load_error(dry_run: bool) -> SystemExit:
    """Return the exception for rules that cannot be loaded. Prints a message, except with -n. See pfctl_rules()."""
    return SystemExit(1) if dry_run else base.errx(1, "Syntax error in config file: pf rules not loaded")


def flush_rules(state: dict, anchor: str, modifier: str, quiet: bool) -> None:  # type: ignore[type-arg]
    rules = state["rules"].setdefault(anchor, {"nat": [], "filter": []})
    messages = []
    if modifier in ("rules", "all"):
        rules["filter"] = []
        messages.append("rules cleared")
    if modifier in ("nat", "all"):
        rules["nat"] = []
        messages.append("nat cleared")
    if modifier == "all":
        messages.append("0 tables deleted.")
    commit_state(state)
    if not quiet:
        sys.stderr.write("".join(line + "\n" for line in messages))


def show_information(state: dict, anchor: str, modifier: str, numeric: bool) -> None:  # type: ignore[type-arg]
    if modifier == "info":
        base.print_line(f"Status: {'Enabled' if state['enabled'] else 'Disabled'}")
        return
    if modifier == "Anchors":
        prefix = anchor + "/" if anchor else ""
        child_names = {
            name[len(prefix) :].partition("/")[0] for name in state["rules"] if name and name.startswith(prefix)
        }
        for name in sorted(child_names):
            base.print_line(f"  {prefix}{name}")
        return
    rules = state["rules"].get(anchor, {"nat": [], "filter": []})
    if anchor and anchor not in state["rules"] and not any(n.startswith(anchor + "/") for n in state["rules"]):
        raise base.err(1, "DIOCGETRULES", errno.EINVAL)  # pfctl_show_rules()
    for rule in rules["filter" if modifier == "rules" else "nat"]:
        base.print_line(pf.format_rule(rule, numeric))


def set_enabled(state: dict, should_enable: bool, quiet: bool) -> None:  # type: ignore[type-arg]
    """Enable or disable pf. Fails if there is nothing to change, like pfctl_enable() and pfctl_disable()."""
    if state["enabled"] == should_enable:
        raise base.errx(1, "pf already enabled" if should_enable else "pf not enabled")
    state["enabled"] = should_enable
    commit_state(state)
    if not quiet:
        sys.stderr.write("pf enabled\n" if should_enable else "pf disabled\n")
