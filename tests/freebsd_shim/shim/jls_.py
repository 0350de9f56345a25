"""jls(8). Output: usr.sbin/jls/jls.c; JSON as libxo writes it."""

from __future__ import annotations

from shim import base, prison

USAGE = "usage: jls [-dhNnqsv] [-j jail] [param ...]"
DEFAULTS = {
    "securelevel": -1,
    "enforce_statfs": 2,
    "devfs_ruleset": 0,
    "children.max": 0,
    "children.cur": 0,
    "parent": 0,
    "host.hostuuid": "00000000-0000-0000-0000-000000000000",
    "host.hostid": 0,
    "host": "new",
    "vnet": "inherit",
    "ip4.saddrsel": True,
    "ip6.saddrsel": True,
    "sysvmsg": "disable",
    "sysvsem": "disable",
    "sysvshm": "disable",
}


def value(jail: prison.Jail, name: str) -> str:
    """The parameter as jailparam_export() writes it; "" if it has no value."""
    own, kind, no = prison.describe(name)
    found: object
    if own in ("jid", "name", "path"):
        found = jail[own]
    elif own == "cpuset.id":
        found = jail["jid"] + 1
    elif own == "dying":
        found = bool(jail["dying"])
    elif own in ("osrelease", "osreldate"):
        date = base.osreldate()
        release = f"{date // 100000}.{date // 1000 % 100}-RELEASE"
        found = jail["params"].get(own, date if own == "osreldate" else release)
    elif own in ("ip4", "ip6"):
        found = jail["params"].get(own, "inherit" if not jail["vnet"] else "new")
    else:
        found = jail["params"].get(own, DEFAULTS.get(own, own in prison.ALLOWED if kind[0] == "B" else ""))
    if kind[0] == "B":
        return "true" if bool(found) != no else "false"
    return str(found)


def quote(text: str, quoting: bool) -> str:
    """quoted_print()."""
    if not text:
        return '""'
    mark = '"' if "'" in text else "'" if '"' in text else '"' if " " in text or "\t" in text else ""
    return mark + text + mark if mark and quoting else text


def main(argv: list[str]) -> int:
    argv, json = base.take_libxo(argv)
    try:
        options, names = base.getopt(argv, "adj:hNnqsv")
    except base.BadOption:
        raise base.errx(1, USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in "sv":
        if letter in option_letters:
            raise base.unsupported(f"-{letter}")
    if not names and option_letters & {"h", "n"}:
        raise base.unsupported("-h or -n for all parameters")
    try:
        for name in names:
            if name == "all":
                raise base.unsupported("the parameter all")
            prison.describe(name)
        chosen = dict(options).get("j")
        dying = bool(option_letters & {"a", "d"})
        if chosen is not None:
            jails = [prison.find(chosen, dying=dying)]
        else:
            jails = [jail for jail in prison.table()["jails"] if dying or not jail["dying"]]
    except prison.JailError as error:
        raise base.errx(1, str(error)) from None
    if json:
        show_json(jails, names, "N" in option_letters)
    elif names:
        show_names(jails, names, option_letters)
    else:
        show(jails, "N" in option_letters)
    return 0


def show_json(jails: list[prison.Jail], names: list[str], by_name: bool) -> None:
    """{a:/%s} prints every parameter as a string; the columns of a plain jls have their own types."""
    rows = []
    for jail in jails:
        if names:
            fields = ",".join(f"{base.quoted(name)}:{base.quoted(value(jail, name))}" for name in names)
        else:
            first = f'"name":{base.quoted(jail["name"])}' if by_name else f'"jid":{jail["jid"]}'
            hostname, path = base.quoted(value(jail, "host.hostname")), base.quoted(jail["path"])
            fields = f'{first},"ipv4":"","hostname":{hostname},"path":{path}'
        rows.append("{" + fields + "}")
    base.say('{"__version": "2", "jail-information": {"jail": [' + ", ".join(rows) + "]}}")


def show_names(jails: list[prison.Jail], names: list[str], option_letters: set[str]) -> None:
    if "h" in option_letters:
        base.say(" ".join(names))
    for jail in jails:
        words = []
        for name in names:
            own, kind, no = prison.describe(name)
            text = value(jail, name)
            if "n" in option_letters and kind[0] == "B":
                head, dot, tail = own.rpartition(".")
                on = (text == "true") != no
                words.append(own if on else f"{head}{dot}no{tail}")
            elif "n" in option_letters:
                words.append(f"{name}={quote(text, 'q' in option_letters)}")
            else:
                words.append(quote(text, "q" in option_letters))
        base.say(" ".join(words))


def show(jails: list[prison.Jail], by_name: bool) -> None:
    if by_name:
        base.say(f" {'JID':<15} {'IP Address':<15} {'Hostname':<29} Path")
    else:
        base.say("   JID  IP Address      Hostname                      Path")
    for jail in jails:
        first = f" {jail['name']:<15} " if by_name else f"{jail['jid']:>6}  "
        hostname = value(jail, "host.hostname")[:29]
        base.say(f"{first}{'':<15} {hostname:<29} {jail['path'][:74]}")
