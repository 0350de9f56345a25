"""jls(8), with the text output of usr.sbin/jls/jls.c and the JSON output of libxo."""

from __future__ import annotations

from shim import base, prison

USAGE = "usage: jls [-dhNnqsv] [-j jail] [param ...]"
DEFAULT_VALUES = {
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


def format_value(jail: prison.Jail, name: str) -> str:
    """Return the text of a parameter's value, or "" if it has no value. See jailparam_export()."""
    parameter, kind, is_negated = prison.look_up_parameter(name)
    result: object
    if parameter in ("jid", "name", "path"):
        result = jail[parameter]
    elif parameter == "cpuset.id":
        result = jail["jid"] + 1
    elif parameter == "dying":
        result = bool(jail["dying"])
    elif parameter in ("osrelease", "osreldate"):
        osreldate = base.read_osreldate()
        release = f"{osreldate // 100000}.{osreldate // 1000 % 100}-RELEASE"
        result = jail["params"].get(parameter, osreldate if parameter == "osreldate" else release)
    elif parameter in ("ip4", "ip6"):
        result = jail["params"].get(parameter, "inherit" if not jail["vnet"] else "new")
    else:
        result = jail["params"].get(
            parameter, DEFAULT_VALUES.get(parameter, parameter in prison.DEFAULT_ALLOW if kind[0] == "B" else "")
        )
    if kind[0] == "B":
        return "true" if bool(result) != is_negated else "false"
    return str(result)


def quote(text: str, enabled: bool) -> str:
    """Quote a text if necessary. See quoted_print()."""
    if not text:
        return '""'
    quote_character = '"' if "'" in text else "'" if '"' in text else '"' if " " in text or "\t" in text else ""
    return quote_character + text + quote_character if quote_character and enabled else text


def main(argv: list[str]) -> int:
    argv, is_json = base.parse_libxo(argv)
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
            prison.look_up_parameter(name)
        key = dict(options).get("j")
        include_dying = bool(option_letters & {"a", "d"})
        if key is not None:
            jails = [prison.find_jail(key, include_dying=include_dying)]
        else:
            jails = [jail for jail in prison.load_state()["jails"] if include_dying or not jail["dying"]]
    except prison.JailError as error:
        raise base.errx(1, str(error)) from None
    if is_json:
        show_json(jails, names, "N" in option_letters)
    elif names:
        show_parameters(jails, names, option_letters)
    else:
        show_table(jails, "N" in option_letters)
    return 0


def show_json(jails: list[prison.Jail], names: list[str], by_name: bool) -> None:
    """Print jails as JSON. Requested parameters are strings ({a:/%s}); the default columns have their own types."""
    rows = []
    for jail in jails:
        if names:
            fields = ",".join(f"{base.quote_json(name)}:{base.quote_json(format_value(jail, name))}" for name in names)
        else:
            identity_field = f'"name":{base.quote_json(jail["name"])}' if by_name else f'"jid":{jail["jid"]}'
            hostname, path = base.quote_json(format_value(jail, "host.hostname")), base.quote_json(jail["path"])
            fields = f'{identity_field},"ipv4":"","hostname":{hostname},"path":{path}'
        rows.append("{" + fields + "}")
    base.print_line('{"__version": "2", "jail-information": {"jail": [' + ", ".join(rows) + "]}}")


def show_parameters(jails: list[prison.Jail], names: list[str], option_letters: set[str]) -> None:
    if "h" in option_letters:
        base.print_line(" ".join(names))
    for jail in jails:
        words = []
        for name in names:
            parameter, kind, is_negated = prison.look_up_parameter(name)
            text = format_value(jail, name)
            if "n" in option_letters and kind[0] == "B":
                head, dot, tail = parameter.rpartition(".")
                is_on = (text == "true") != is_negated
                words.append(parameter if is_on else f"{head}{dot}no{tail}")
            elif "n" in option_letters:
                words.append(f"{name}={quote(text, 'q' in option_letters)}")
            else:
                words.append(quote(text, "q" in option_letters))
        base.print_line(" ".join(words))


def show_table(jails: list[prison.Jail], by_name: bool) -> None:
    if by_name:
        base.print_line(f" {'JID':<15} {'IP Address':<15} {'Hostname':<29} Path")
    else:
        base.print_line("   JID  IP Address      Hostname                      Path")
    for jail in jails:
        identity_cell = f" {jail['name']:<15} " if by_name else f"{jail['jid']:>6}  "
        hostname = format_value(jail, "host.hostname")[:29]
        base.print_line(f"{identity_cell}{'':<15} {hostname:<29} {jail['path'][:74]}")
