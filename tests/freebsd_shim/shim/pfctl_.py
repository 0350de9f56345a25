"""pfctl(8). Messages and order: sbin/pfctl/pfctl.c, sbin/pfctl/parse.y."""

from __future__ import annotations

import errno
import sys

from shim import base, pf, pf_nft, states

USAGE = """\
usage: pfctl [-AdeghMmNnOPqRrvz] [-a anchor] [-D macro=value] [-F modifier]
\t[-f file] [-i interface] [-K host | network]
\t[-k host | network | gateway | label | id] [-o level] [-p device]
\t[-s modifier] [-t table -T command [address ...]] [-x level]"""
EMPTY = {"enabled": True, "skip": [], "rules": {}}
SHOWN = ("nat", "rules", "Anchors", "info")
FLUSHED = ("nat", "rules", "all")
MODIFIERS = (
    "ether nat queue rules Anchors Sources states info Running labels timeouts memory Tables osfp Interfaces all "
    "creatorids Reset"
).split()


def main(argv: list[str]) -> int:
    try:
        options, rest = base.getopt(argv, "a:AdD:eqf:F:ghi:k:K:mMnNOo:Pp:rRs:S:t:T:vx:z")
    except base.BadOption:
        raise base.usage(USAGE) from None
    values = dict(options)
    for letter in values:
        if letter not in "adeqfFknPsv":
            raise base.unsupported(f"-{letter}")
    if rest or not (set(values) & set("edfFks")):
        raise base.usage(USAGE)
    anchor = values.get("a", "").strip("/")
    if any(len(part) >= 64 for part in anchor.split("/")):  # PF_ANCHOR_NAME_SIZE
        raise base.errx(1, f"anchor name '{anchor}' too long")
    show_what = modifier(values, "s", SHOWN)
    flush_what = modifier(values, "F", FLUSHED)
    if base.knob("pf.loaded") != "1":
        raise base.err(1, "/dev/pf", errno.ENOENT)
    quiet = "q" in values
    with base.locked():
        state = {**EMPTY, **base.load("pf", EMPTY)}
        if show_what:
            show(state, anchor, show_what, "P" in values)
        if flush_what:
            flush(state, anchor, flush_what, quiet)
        if "k" in values:
            kill([value for letter, value in options if letter == "k"], quiet)
        if "f" in values:
            load(state, anchor, values["f"], "n" in values)
        for letter, wanted in (("e", True), ("d", False)):
            if letter in values:
                enable(state, wanted, quiet)
    return 0


def kill(places: list[str], quiet: bool) -> None:
    """pfctl_net_kill_states(): from the first, to the second."""
    if len(places) > 2:
        raise base.usage(USAGE)  # main(): "if (state_killers >= 2) usage()"
    found = []
    for place in places:
        try:
            found.append(states.Place(place))
        except OSError:
            raise base.unsupported(f"-k {place}") from None
    killed = states.kill(found[0], found[1] if len(found) > 1 else None)
    if not quiet:
        sys.stderr.write(f"killed {killed} states from 1 sources and {len(found) - 1} destinations\n")


def modifier(values: dict[str, str], letter: str, built: tuple[str, ...]) -> str:
    """pfctl_lookup_option(): a prefix is enough ("-s r", "-F all"); the first match counts."""
    if letter not in values:
        return ""
    for name in MODIFIERS:
        if values[letter] and name.startswith(values[letter]):
            if name not in built:
                raise base.unsupported(f"-{letter} {name}")
            return name
    base.warnx(f"Unknown {'show' if letter == 's' else 'flush'} modifier '{values[letter]}'")
    raise base.usage(USAGE)


def commit(state: dict) -> None:  # type: ignore[type-arg]
    """pf_remove_if_empty_ruleset(): an anchor without rules is removed."""
    state["rules"] = {name: each for name, each in state["rules"].items() if not name or each["nat"] or each["filter"]}
    pf_nft.apply_ruleset(state)
    base.save("pf", state)


def load(state: dict, anchor: str, path: str, dry: bool) -> None:  # type: ignore[type-arg]
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
        raise not_loaded(dry) from None
    try:
        ruleset = pf.parse(text, main=not anchor)
    except pf.SyntaxProblem as problem:
        sys.stderr.write(f"{name}:{problem.line}: {problem.message}\n")
        raise not_loaded(dry) from None
    state["rules"][anchor] = {"nat": ruleset.nat, "filter": ruleset.filter}
    if not anchor:
        state["skip"] = ruleset.skip
    if dry:
        pf_nft.ruleset(state)
    else:
        commit(state)


def not_loaded(dry: bool) -> SystemExit:
    """pfctl_rules(): with -n, only the parser's line is printed."""
    return SystemExit(1) if dry else base.errx(1, "Syntax error in config file: pf rules not loaded")


def flush(state: dict, anchor: str, what: str, quiet: bool) -> None:  # type: ignore[type-arg]
    rules = state["rules"].setdefault(anchor, {"nat": [], "filter": []})
    said = []
    if what in ("rules", "all"):
        rules["filter"] = []
        said.append("rules cleared")
    if what in ("nat", "all"):
        rules["nat"] = []
        said.append("nat cleared")
    if what == "all":
        said.append("0 tables deleted.")
    commit(state)
    if not quiet:
        sys.stderr.write("".join(line + "\n" for line in said))


def show(state: dict, anchor: str, what: str, numeric: bool) -> None:  # type: ignore[type-arg]
    if what == "info":
        base.say(f"Status: {'Enabled' if state['enabled'] else 'Disabled'}")
        return
    if what == "Anchors":
        prefix = anchor + "/" if anchor else ""
        below = {name[len(prefix) :].partition("/")[0] for name in state["rules"] if name and name.startswith(prefix)}
        for name in sorted(below):
            base.say(f"  {prefix}{name}")
        return
    rules = state["rules"].get(anchor, {"nat": [], "filter": []})
    if anchor and anchor not in state["rules"] and not any(n.startswith(anchor + "/") for n in state["rules"]):
        raise base.err(1, "DIOCGETRULES", errno.EINVAL)  # pfctl_show_rules()
    for rule in rules["filter" if what == "rules" else "nat"]:
        base.say(pf.show(rule, numeric))


def enable(state: dict, wanted: bool, quiet: bool) -> None:  # type: ignore[type-arg]
    """pfctl_enable(): EEXIST, pfctl_disable(): ENOENT."""
    if state["enabled"] == wanted:
        raise base.errx(1, "pf already enabled" if wanted else "pf not enabled")
    state["enabled"] = wanted
    commit(state)
    if not quiet:
        sys.stderr.write("pf enabled\n" if wanted else "pf disabled\n")
