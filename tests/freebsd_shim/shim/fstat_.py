"""fstat(1). Messages, columns and omissions: usr.bin/fstat/fstat.c, lib/libprocstat/libprocstat.c."""

from __future__ import annotations

import os
import pwd
import stat

from shim import base, mount_

USAGE = "usage: fstat [-fmnv] [-M core] [-N system] [-p pid] [-u user] [file ...]"
HEADER = "USER     CMD          PID   FD MOUNT      INUM MODE         SZ|DV R/W"
# libprocstat procstat_getfiles_sysctl(): the order of entries that are not descriptors
LINKS = (("exe", "text"), ("cwd", "wd"), ("root", "root"))


def main(argv: list[str]) -> int:
    try:
        options, names = base.getopt(argv, "fmnp:u:vN:M:")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in sorted(option_letters - {"f"}):
        raise base.unsupported(f"-{letter}")
    if "f" not in option_letters:
        raise base.unsupported("all file systems at once")
    systems = {device for name in names or ["."] if (device := device_of(name))}
    if not systems:
        return 1  # "file(s) specified, but none accessible"
    base.say(HEADER)
    nodes = {each.identity: each.node for each in mount_.table()}
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        show(pid, systems, nodes)
    return 0


def device_of(name: str) -> int:
    """getfname(): 0 and an error message if the file does not exist."""
    try:
        return os.stat(name).st_dev
    except OSError as error:
        base.warn(name, error.errno or 0)
        return 0


def show(pid: int, systems: set[int], nodes: dict[int, str]) -> None:
    """dofiles(): a line for each file of a process on one of the file systems."""
    place = f"/proc/{pid}"
    try:
        with open(f"{place}/comm", errors="replace") as file:
            command = file.read().rstrip("\n")
        user = user_name(os.stat(place).st_uid)
        files = [(f"{place}/{link}", f"{word:>5}") for link, word in LINKS]
        files += [(f"{place}/fd/{fd}", f" {fd:>4}") for fd in sorted(os.listdir(f"{place}/fd"), key=int)]
    except OSError:
        return  # it has ended
    for path, column in files:
        if shown := vnode(path, systems, nodes):
            base.say(f"{user:<8.8} {command:<10} {pid:>5}{column}{shown}")


def vnode(path: str, systems: set[int], nodes: dict[int, str]) -> str:
    """print_vnode_info(); "" for a file on none of the file systems, or a dead one, as after a forced unmount."""
    try:
        found = os.stat(path)
        if found.st_dev not in systems:
            return ""
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        node = nodes.get(mount_.mount_of(f"/proc/self/fdinfo/{handle}"))
    finally:
        os.close(handle)
    if node is None:
        return ""
    return f" {node:<8} {found.st_ino:>6} {stat.filemode(found.st_mode):>10} {found.st_size:>6} {access(path):>2}"


def access(path: str) -> str:
    """print_access_flags(); entries that are not descriptors are read-only."""
    if "/fd/" not in path:
        return "r"
    try:
        with open(path.replace("/fd/", "/fdinfo/")) as file:
            flags = next(int(line[6:], 8) for line in file if line.startswith("flags:"))
    except OSError:
        return ""
    return {os.O_RDONLY: "r", os.O_WRONLY: "w"}.get(flags & os.O_ACCMODE, "rw")


def user_name(uid: int) -> str:
    """user_from_uid()."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
