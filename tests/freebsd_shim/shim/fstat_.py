"""fstat(1), with the messages, columns and omissions of usr.bin/fstat/fstat.c and lib/libprocstat/libprocstat.c."""

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
    devices = {device for name in names or ["."] if (device := find_device(name))}
    if not devices:
        return 1  # "file(s) specified, but none accessible"
    base.print_line(HEADER)
    nodes = {each.identity: each.node for each in mount_.list_mounts()}
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        show_open_files(pid, devices, nodes)
    return 0


def find_device(name: str) -> int:
    """Return the device of a file. If the file does not exist, print an error and return 0. See getfname()."""
    try:
        return os.stat(name).st_dev
    except OSError as error:
        base.warn(name, error.errno or 0)
        return 0


def show_open_files(pid: int, devices: set[int], nodes: dict[int, str]) -> None:
    """Print a line for each file that a process has open on one of the devices. See dofiles()."""
    directory = f"/proc/{pid}"
    try:
        with open(f"{directory}/comm", errors="replace") as file:
            command = file.read().rstrip("\n")
        user = find_user_name(os.stat(directory).st_uid)
        files = [(f"{directory}/{link}", f"{word:>5}") for link, word in LINKS]
        files += [(f"{directory}/fd/{fd}", f" {fd:>4}") for fd in sorted(os.listdir(f"{directory}/fd"), key=int)]
    except OSError:
        return  # The process has exited.
    for path, column in files:
        if fields := format_vnode(path, devices, nodes):
            base.print_line(f"{user:<8.8} {command:<10} {pid:>5}{column}{fields}")


def format_vnode(path: str, devices: set[int], nodes: dict[int, str]) -> str:
    """Return the columns of a file. See print_vnode_info().

    Returns "" for a file on another device, or on a file system that was unmounted by force.
    """
    try:
        status = os.stat(path)
        if status.st_dev not in devices:
            return ""
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        node = nodes.get(mount_.read_mount_number(f"/proc/self/fdinfo/{fd}"))
    finally:
        os.close(fd)
    if node is None:
        return ""
    mode, access_mode = stat.filemode(status.st_mode), read_access_mode(path)
    return f" {node:<8} {status.st_ino:>6} {mode:>10} {status.st_size:>6} {access_mode:>2}"


def read_access_mode(path: str) -> str:
    """Return a file's access mode. Entries that are not descriptors are read-only. See print_access_flags()."""
    if "/fd/" not in path:
        return "r"
    try:
        with open(path.replace("/fd/", "/fdinfo/")) as file:
            flags = next(int(line[6:], 8) for line in file if line.startswith("flags:"))
    except OSError:
        return ""
    return {os.O_RDONLY: "r", os.O_WRONLY: "w"}.get(flags & os.O_ACCMODE, "rw")


def find_user_name(uid: int) -> str:
    """Return the name of a user, or the uid if the user has no name. See user_from_uid()."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
