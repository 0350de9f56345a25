"""pkill(1) and pgrep(1), with the messages, order and exit status of usr.bin/pkill/pkill.c (since 13: bin/pkill)."""

from __future__ import annotations

import _signal
import os
import sys

from shim import base, prison

MATCH, NO_MATCH, BAD_USAGE, ERROR = 0, 1, 2, 3
SIGNALS = {name[3:]: getattr(_signal, name) for name in dir(_signal) if name.startswith("SIG") and "_" not in name}


def usage() -> SystemExit:
    flags = "[-LSfilnoqvx] [-d delim]" if base.PROG == "pgrep" else "[-signal] [-ILfinovx]"
    return base.usage(
        f"usage: {base.PROG} {flags} [-F pidfile] [-G gid] [-M core] [-N system]\n"
        "             [-P ppid] [-U uid] [-c class] [-g pgrp] [-j jail]\n"
        "             [-s sid] [-t tty] [-u euid] pattern ...",
        BAD_USAGE,
    )


def main(argv: list[str]) -> int:
    number = int(_signal.SIGTERM)
    if argv and argv[0].startswith("-"):
        word = argv[0][1:]
        name = word.upper().removeprefix("SIG")
        if word.isdigit():
            number, argv = int(word), argv[1:]
        elif name in SIGNALS:
            number, argv = int(SIGNALS[name]), argv[1:]
    return run_on_matches(argv, "fij:nxv", lambda pid: kill_process(pid, number))


def pgrep_main(argv: list[str]) -> int:
    return run_on_matches(argv, "fij:lnxv", lambda pid: base.print_line(str(pid)))


def kill_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except OSError as error:
        raise base.err(ERROR, f"signalling pid {pid}", error.errno or 0) from None


def run_on_matches(argv: list[str], supported: str, action: object) -> int:
    try:
        options, patterns = base.getopt(argv, "DF:G:ILM:N:P:SU:ac:d:fg:ij:lnoqs:t:u:vx")
    except base.BadOption:
        raise usage() from None
    for letter, _ in options:
        if letter not in supported or letter in "nv:" or (letter == "l"):
            raise base.unsupported(f"-{letter}")
    option_letters = {letter for letter, _ in options}
    jail_arguments = [value for letter, value in options if letter == "j"]
    if not jail_arguments and not patterns:
        raise usage()
    candidate_pids = list_jail_processes(jail_arguments) if jail_arguments else list_all_processes()
    pids = [pid for pid in candidate_pids if not patterns or matches(pid, patterns, option_letters)]
    for pid in pids:
        action(pid)  # type: ignore[operator]
    sys.stdout.flush()
    return MATCH if pids else NO_MATCH


def list_jail_processes(arguments: list[str]) -> list[int]:
    """Return the pids of the processes in the given jails. See makelist(LT_JID).

    Each argument is a comma-separated list of jids and names. 0 and "any" mean all jails.
    """
    jails = []
    for word in ",".join(arguments).split(","):
        if not word:
            raise usage()
        if word in ("0", "any"):
            jails += prison.load_state()["jails"]
            continue
        if word == "none":
            raise base.unsupported("-j none")
        if word.isdigit():
            # A number may belong to a jail that does not exist.
            jails += [jail for jail in prison.load_state()["jails"] if jail["jid"] == int(word)]
            continue
        try:
            jails.append(prison.find_jail(word))
        except prison.JailError:
            raise base.errx(BAD_USAGE, f"Invalid jail ID or name `{word}'") from None
    return sorted({pid for jail in jails for pid in prison.list_processes(jail)})


def list_all_processes() -> list[int]:
    holder_pids = {jail["holder"] for jail in prison.load_state()["jails"]}
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in holder_pids)


def matches(pid: int, patterns: list[str], option_letters: set[str]) -> bool:
    import re

    if pid == os.getpid():
        return False
    try:
        with open(f"/proc/{pid}/{'cmdline' if 'f' in option_letters else 'comm'}") as file:
            text = file.read().replace("\0", " ").strip()
    except OSError:
        return False
    flags = re.IGNORECASE if "i" in option_letters else 0
    try:
        match_function = re.fullmatch if "x" in option_letters else re.search
        return any(match_function(pattern, text, flags) for pattern in patterns)
    except re.error as error:
        raise base.errx(BAD_USAGE, f"Cannot compile regular expression `{patterns[0]}' ({error})") from None
