"""The command lines that the jail host issues, and the manual pages of FreeBSD 14 that document them.

While tests run jails, `checked` compares each command line with this list. docs/jail_zfs.md contains it as a table. A
second table contains the command lines of the role `jail_zfs_host`, which are read from its tasks.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import yaml
from sandbox_gateway.hosts.jail_zfs import commands
from sandbox_gateway.hosts.jail_zfs.jail import rootfs
from zfs_core import process

from tests.support.session import REPOSITORY

_ROLE_TASKS = REPOSITORY / "roles" / "jail_zfs_host" / "tasks"


@dataclass(frozen=True)
class CommandLine:
    """A form of command lines, with placeholders in capitals.

    A word in brackets is optional, and `…` stands for more words like the last one. ``page`` and ``section`` say where
    FreeBSD's manual describes the form. ``is_rare``: the form is only used after a failure or on a real FreeBSD host.
    """

    form: str
    page: str
    section: str
    is_rare: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        patterns: list[str] = []
        for word in self.form.split(" "):
            if word == "…":
                patterns.append(f"(?:{patterns[-1]})*")
            elif word.startswith("["):
                patterns.append(f"(?:{_make_word_pattern(word[1:-1])})?")
            else:
                patterns.append(_make_word_pattern(word))
        return re.compile("".join(patterns), re.DOTALL)

    def matches(self, argv: Sequence[str]) -> bool:
        return bool(self._pattern.fullmatch("".join(f"{word}\0" for word in argv)))


def _make_word_pattern(word: str) -> str:
    """Return a pattern for one word. A word that begins with a placeholder does not match options."""
    option_guard = "(?!-)" if re.match("[A-Z]{2}", word) else ""
    return option_guard + "[^\0]+".join(map(re.escape, re.split(r"[A-Z]{2,}", word))) + "\0"


_BRIDGE_FLAGS = "private INTERFACE -learn INTERFACE -discover INTERFACE static INTERFACE ETHER"

COMMAND_LINES = (
    CommandLine(
        "jail -c name=JAIL path=DIRECTORY vnet=new host.hostname=HOSTNAME [mount=FSTAB] mount.devfs devfs_ruleset=4 "
        "enforce_statfs=2 securelevel=2 children.max=0 allow.noset_hostname allow.noraw_sockets "
        "vnet.interface=INTERFACE exec.clean exec.start=COMMAND",
        "jail(8)",
        "Jail Parameters",
    ),
    CommandLine("jail -R JAIL", "jail(8)", "DESCRIPTION: -R"),
    CommandLine("jls --libxo json -d name path dying", "jls(8)", "DESCRIPTION: -d, --libxo"),
    CommandLine("pkill -SIGNAL -j JAIL", "pkill(1)", "DESCRIPTION: -signal, -j"),
    CommandLine("ifconfig -l", "ifconfig(8)", "DESCRIPTION: -l"),
    CommandLine("ifconfig -g GROUP", "ifconfig(8)", "DESCRIPTION: -g"),
    CommandLine("ifconfig BRIDGE", "ifconfig(8)", "DESCRIPTION"),
    CommandLine("ifconfig bridge create name BRIDGE", "ifconfig(8)", "PARAMETERS: create, name"),
    CommandLine("ifconfig BRIDGE ether ETHER", "ifconfig(8)", "DESCRIPTION: address (the link-level address)"),
    CommandLine(
        "ifconfig BRIDGE inet ADDRESS/LENGTH staticarp up",
        "ifconfig(8)",
        "DESCRIPTION: address; PARAMETERS: staticarp, up",
    ),
    CommandLine("ifconfig BRIDGE staticarp up", "ifconfig(8)", "PARAMETERS: staticarp, up", is_rare=True),
    CommandLine(f"ifconfig BRIDGE addm INTERFACE {_BRIDGE_FLAGS}", "ifconfig(8)", "Bridge Interface Parameters"),
    CommandLine(f"ifconfig BRIDGE {_BRIDGE_FLAGS}", "ifconfig(8)", "Bridge Interface Parameters", is_rare=True),
    CommandLine("ifconfig epair create group GROUP", "ifconfig(8), epair(4)", "PARAMETERS: create, group"),
    CommandLine("ifconfig INTERFACE name INTERFACE up", "ifconfig(8)", "PARAMETERS: name, up"),
    CommandLine(
        "ifconfig INTERFACE ether ETHER name INTERFACE", "ifconfig(8)", "DESCRIPTION: address; PARAMETERS: name"
    ),
    CommandLine("ifconfig INTERFACE -vnet JAIL", "ifconfig(8)", "PARAMETERS: -vnet"),
    CommandLine("ifconfig INTERFACE destroy", "ifconfig(8)", "PARAMETERS: destroy"),
    CommandLine("ifconfig -j JAIL INTERFACE inet ADDRESS/LENGTH up", "ifconfig(8)", "DESCRIPTION: -j (since 14.0)"),
    CommandLine("route -n -j JAIL add default ADDRESS", "route(8)", "DESCRIPTION: -j (since 14.0), add"),
    CommandLine("route -n get default", "route(8)", "DESCRIPTION: get"),
    CommandLine("arp -S ADDRESS ETHER", "arp(8)", "DESCRIPTION: -S"),
    CommandLine("arp -d ADDRESS", "arp(8)", "DESCRIPTION: -d"),
    CommandLine("arp -n -i BRIDGE -a", "arp(8)", "DESCRIPTION: -a, -i, -n"),
    CommandLine("pfctl -s info", "pfctl(8)", "DESCRIPTION: -s info"),
    CommandLine("pfctl -s rules", "pfctl(8)", "DESCRIPTION: -s rules"),
    CommandLine("pfctl -s nat", "pfctl(8)", "DESCRIPTION: -s nat"),
    CommandLine("pfctl -a sbx -s Anchors", "pfctl(8)", "DESCRIPTION: -a, -s Anchors"),
    CommandLine("pfctl -q -a sbx/NAME -f -", "pfctl(8), pf.conf(5)", "DESCRIPTION: -a, -f; ANCHORS"),
    CommandLine("pfctl -q -a sbx/NAME -F all", "pfctl(8)", "DESCRIPTION: -F all"),
    CommandLine("pfctl -q -k ADDRESS", "pfctl(8)", "DESCRIPTION: -k"),
    CommandLine("pfctl -q -k 0.0.0.0/0 -k ADDRESS", "pfctl(8)", "DESCRIPTION: -k"),
    CommandLine("rctl", "rctl(8)", "DESCRIPTION"),
    CommandLine("rctl -a RULE …", "rctl(8)", "DESCRIPTION: -a; RULE SYNTAX"),
    CommandLine("rctl -r jail:JAIL", "rctl(8)", "DESCRIPTION: -r"),
    CommandLine("rctl -u jail:JAIL …", "rctl(8)", "DESCRIPTION: -u"),
    CommandLine("mount --libxo json -v", "mount(8)", "DESCRIPTION: -v (fsid), --libxo"),
    CommandLine(
        "mount -t nullfs -o OPTIONS DIRECTORY DIRECTORY",
        "mount(8), mount_nullfs(8)",
        "DESCRIPTION: -t, -o: nocover, nosuid",
    ),
    CommandLine("umount FSID", "umount(8)", "DESCRIPTION: fsid"),
    CommandLine("umount -f FSID", "umount(8)", "DESCRIPTION: -f", is_rare=True),
    CommandLine("fstat -f DIRECTORY", "fstat(1)", "DESCRIPTION: -f", is_rare=True),
    CommandLine("sysctl -n NAME", "sysctl(8)", "DESCRIPTION: -n"),
    CommandLine("sysctl -ie NAME …", "sysctl(8)", "DESCRIPTION: -i, -e"),
    CommandLine("sysctl NAME=VALUE …", "sysctl(8), if_bridge(4)", "DESCRIPTION; PACKET FILTERING"),
    CommandLine("sysctl -inx kern.boot_id", "sysctl(8)", "DESCRIPTION: -i, -n, -x", is_rare=True),
    CommandLine("ps -o lstart= -p PID", "ps(1)", "DESCRIPTION: -o, -p; KEYWORDS", is_rare=True),
    CommandLine(
        "pw -R DIRECTORY useradd user -u UID -d DIRECTORY -s /bin/sh -C /dev/null",
        "pw(8)",
        "DESCRIPTION: -R, -C; USER OPTIONS: -u, -d, -s",
        is_rare=True,
    ),
    CommandLine("cp -a -x DIRECTORY/. DIRECTORY/", "cp(1)", "DESCRIPTION: -a, -x", is_rare=True),
    CommandLine(
        "tar -x -p -f FILE -C DIRECTORY --numeric-owner --exclude=./dev/* --exclude=dev/*",
        "tar(1)",
        "DESCRIPTION: -x; OPTIONS: -p, -f, -C, --numeric-owner, --exclude",
        is_rare=True,
    ),
    CommandLine("pkg -r DIRECTORY install -y PACKAGE …", "pkg(8), pkg-install(8)", "-r; -y", is_rare=True),
)
"""The command lines that `CommandRunner` runs, and those that build templates."""


@dataclass(frozen=True)
class ZfsCommand:
    """A subcommand of `zfs` or `zpool` with its options, in any order.

    An option with a value is followed by a placeholder.

    ``page``: the manual page of FreeBSD, which is the same as OpenZFS's, that describes these options.
    """

    subcommand: str
    options: tuple[str, ...]
    page: str
    program: str = "zfs"

    @property
    def form(self) -> str:
        return " ".join([self.program, self.subcommand, *(f"[{option}]" for option in self.options), "…"])

    def matches(self, argv: Sequence[str]) -> bool:
        """Return whether all options in ``argv`` are listed. Options precede the other arguments."""
        return list(argv[:2]) == [self.program, self.subcommand] and self.list_options(argv) <= {
            option[:2] for option in self.options
        }

    def list_options(self, argv: Sequence[str]) -> set[str]:
        """Return the options in ``argv``, each as `-x`. The result contains "" if the value of an option is missing."""
        valued_options = {option.partition(" ")[0] for option in self.options if " " in option}
        options: set[str] = set()
        words = iter(argv[2:])
        for word in words:
            if word == "--" or not word.startswith("-") or word == "-":
                break
            if word in valued_options:
                options.add(word if next(words, None) is not None else "")
            else:
                options |= {f"-{letter}" for letter in word[1:]}
        return options


ZFS_COMMANDS = (
    ZfsCommand("bookmark", (), "zfs-bookmark(8)"),
    ZfsCommand("clone", ("-o PROPERTY=VALUE",), "zfs-clone(8)"),
    ZfsCommand("create", ("-u", "-s", "-V SIZE", "-o PROPERTY=VALUE"), "zfs-create(8)"),
    ZfsCommand("destroy", ("-d", "-n", "-v", "-p"), "zfs-destroy(8)"),
    ZfsCommand("get", ("-H", "-p", "-r", "-s SOURCES", "-o COLUMNS"), "zfs-get(8)"),
    ZfsCommand("hold", (), "zfs-hold(8)"),
    ZfsCommand("holds", ("-H", "-p"), "zfs-hold(8)"),
    ZfsCommand("inherit", (), "zfs-inherit(8)"),
    ZfsCommand("list", ("-H", "-p", "-r", "-d DEPTH", "-t TYPES", "-s PROPERTY", "-o COLUMNS"), "zfs-list(8)"),
    ZfsCommand("mount", (), "zfs-mount(8)"),
    ZfsCommand("program", ("-n", "-j", "-t LIMIT", "-m LIMIT"), "zfs-program(8)"),
    ZfsCommand("promote", (), "zfs-promote(8)"),
    ZfsCommand("receive", ("-u", "-F", "-s", "-c", "-A", "-o PROPERTY=VALUE", "-x PROPERTY"), "zfs-receive(8)"),
    ZfsCommand("release", (), "zfs-release(8)"),
    ZfsCommand("rename", ("-u",), "zfs-rename(8)"),
    ZfsCommand("rollback", (), "zfs-rollback(8)"),
    ZfsCommand("send", ("-e", "-L", "-c", "-w", "-n", "-v", "-P", "-i BASE", "-t TOKEN"), "zfs-send(8)"),
    ZfsCommand("set", (), "zfs-set(8)"),
    ZfsCommand("snapshot", ("-o PROPERTY=VALUE",), "zfs-snapshot(8)"),
    ZfsCommand("unmount", (), "zfs-unmount(8)"),
    ZfsCommand("version", (), "zfs-version(8)"),
    ZfsCommand("checkpoint", ("-d",), "zpool-checkpoint(8)", program="zpool"),
    ZfsCommand("reopen", ("-n",), "zpool-reopen(8)", program="zpool"),
    ZfsCommand("sync", ("-f",), "zpool-sync(8)", program="zpool"),
)
"""The subcommands that `zfs_core` may run, with all options that it passes."""


def find_command_line(argv: Sequence[str]) -> CommandLine | ZfsCommand | None:
    return next((each for each in (*COMMAND_LINES, *ZFS_COMMANDS) if each.matches(argv)), None)


@dataclass
class Recording:
    """The command lines that were issued. ``unknown_argvs``: those that are not listed."""

    known_lines: set[CommandLine | ZfsCommand]
    zfs_subcommands: set[str]
    unknown_argvs: list[list[str]]

    def add(self, argv: Sequence[str]) -> None:
        if argv[0].endswith("/nsenter"):  # A test whose shim has a network namespace of its own.
            argv = argv[2:]
        line = find_command_line(argv)
        if line is None:
            self.unknown_argvs.append(list(argv))
            return
        self.known_lines.add(line)
        if isinstance(line, ZfsCommand):
            self.zfs_subcommands.add(line.subcommand)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the command lines that the jail host and `zfs_core` issue in this process inside the context."""
    recording = Recording(set(), set(), [])
    original_tracked = process.tracked

    def record_first(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run_recorded(argv: Sequence[str], *args: Any, **options: Any) -> Any:
            recording.add(argv)
            return await run(argv, *args, **options)

        return run_recorded

    def tracked(command: Any, *args: Any) -> Any:
        recording.add(command.args)
        return original_tracked(command, *args)

    with (
        mock.patch.object(commands, "run_async", record_first(commands.run_async)),
        mock.patch.object(rootfs, "run_async", record_first(rootfs.run_async)),
        mock.patch.object(rootfs, "run_logged", record_first(rootfs.run_logged)),
        mock.patch.object(process, "tracked", tracked),
    ):
        yield recording


@contextmanager
def checked() -> Iterator[None]:
    """Raise AssertionError at the end of the context if a command line was issued that is not in this list."""
    with recorded() as recording:
        yield
    assert not recording.unknown_argvs, (
        f"add these command lines to {__name__} with the manual page that documents them: {recording.unknown_argvs[:5]}"
    )


_ROLE_PAGES = {
    "ifconfig": "ifconfig(8)",
    "jls": "jls(8)",
    "kldload": "kldload(8)",
    "lzc": "[lzc](lzc.md)",
    "pfctl": "pfctl(8)",
    "sysctl": "sysctl(8)",
    "sysrc": "sysrc(8)",
    "zfs": "zfs-{}(8)",
    "zpool": "zpool-{}(8)",
}
_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.DOTALL)


def list_role_command_lines() -> list[tuple[str, str]]:
    """Return (form, manual page) of each command line in the tasks of the role `jail_zfs_host`, sorted."""
    forms = {
        tuple(_format_words(task["ansible.builtin.command"]["argv"]))
        for path in _ROLE_TASKS.glob("*.yml")
        for task in _list_tasks(yaml.safe_load(path.read_text()))
        if "ansible.builtin.command" in task
    }
    return [(" ".join(words), _ROLE_PAGES[words[0]].format(words[1])) for words in sorted(forms)]


def _list_tasks(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for task in tasks:
        yield task
        for section in ("block", "rescue", "always"):
            yield from _list_tasks(task.get(section, []))


def _format_words(argv: list[Any] | str) -> list[str]:
    """Return words in which placeholders replace expressions, whose names are those of their variables.

    If the list is the result of an expression, `…` stands for what the expression adds to a literal list.
    """
    if isinstance(argv, str):
        literal = re.match(r"\s*\{\{\s*\[([^]]*)\]", argv)
        assert literal, f"the command {argv!r} does not begin with a list"
        words = [word.strip().strip("'") for word in literal[1].split(",")]
        return [*map(_name_lzc, words), "…"]
    return [_EXPRESSION.sub(_choose_placeholder, _name_lzc(str(word))) for word in argv]


def _name_lzc(word: str) -> str:
    return "lzc" if "jail_zfs_host_lzc_path" in word else word


def _choose_placeholder(expression: re.Match[str]) -> str:
    if expression[0].endswith(".split('/')[0] }}"):
        return "POOL"
    if expression[0] == "{{ item }}":
        return "NAME"
    (name, *_) = re.findall(r"jail_zfs_host_\w+|(?:item\.)+\w+", expression[0])
    return str(re.sub(r"^jail_zfs_host_|^(?:item\.)+", "", name).upper())


def format_role_table() -> str:
    """Return the table of the role's command lines in docs/jail_zfs.md."""
    rows = [f"| `{form}` | {page} |\n" for form, page in list_role_command_lines()]
    return "".join(["| command line | page |\n", "|---|---|\n", *rows])


def format_table() -> str:
    """Return the table of docs/jail_zfs.md."""
    rows = [f"| `{each.form}` | {each.page} | {each.section.replace('|', ' or ')} |\n" for each in COMMAND_LINES]
    for each in ZFS_COMMANDS:
        options = ", ".join(option.partition(" ")[0] for option in each.options)
        rows.append(f"| `{each.form}` | {each.page} | {f'DESCRIPTION: {options}' if options else 'SYNOPSIS'} |\n")
    return "".join(["| command line | page | section |\n", "|---|---|---|\n", *rows])
