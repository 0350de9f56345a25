"""Enforce rctl rules with cgroups version 1: a jail with rules has a cgroup in each of pids, memory and cpu."""

from __future__ import annotations

import os

from shim import base

CGROUP_ROOT = "/sys/fs/cgroup"
CONTROLLERS = ("pids", "memory", "cpu")
UNLIMITED_VALUES = {
    "pids/pids.max": "max",
    "memory/memory.limit_in_bytes": "-1",
    "memory/memory.soft_limit_in_bytes": "-1",
    "cpu/cpu.cfs_quota_us": "-1",
}


def get_cgroup_path(controller: str, jail: str) -> str:
    return os.path.join(
        CGROUP_ROOT, controller, "freebsd_shim", base.get_state_dir().strip("/").replace("/", "-"), jail
    )


def open_cgroups(jail: str) -> list[int]:
    """Open the files with which a process joins the jail's cgroups, even after a chroot."""
    fds = []
    for controller in CONTROLLERS:
        try:
            fds.append(
                os.open(os.path.join(get_cgroup_path(controller, jail), "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
            )
        except FileNotFoundError:
            continue
    return fds


def enter_cgroups(cgroup_fds: list[int]) -> None:
    """Move the calling process to these cgroups, and close the descriptors."""
    for fd in cgroup_fds:
        os.write(fd, b"0")
        os.close(fd)


def make_cgroup_values(rules: list[list[str]]) -> dict[str, str]:
    """Return the contents of the cgroup files that enforce ``rules``. Each rule is [resource, action, amount]."""
    values = dict(UNLIMITED_VALUES)
    for resource, action, amount in rules:
        if action != "deny":
            continue
        if resource == "maxproc":
            values["pids/pids.max"] = amount
        elif resource == "vmemoryuse":
            values["memory/memory.limit_in_bytes"] = amount
        elif resource == "memoryuse":
            values["memory/memory.soft_limit_in_bytes"] = amount
        elif resource == "pcpu":
            values["cpu/cpu.cfs_quota_us"] = str(max(1000, int(amount) * 1000))
    return values


def apply_rules(jail: str, rules: list[list[str]], pids: list[int]) -> None:
    """Replace the limits of a jail with the limits in ``rules``. If there are no rules, remove its cgroups."""
    if not rules:
        remove_limits(jail)
        return
    values = make_cgroup_values(rules)
    for controller in CONTROLLERS:
        if not os.path.exists(os.path.join(CGROUP_ROOT, controller, "cgroup.procs")):
            raise base.unsupported(f"limits without the cgroup (version 1) controller {controller}")
        is_new = not os.path.isdir(get_cgroup_path(controller, jail))
        os.makedirs(get_cgroup_path(controller, jail), exist_ok=True)
        for file, value in values.items():
            if file.startswith(controller + "/") and not (is_new and value == UNLIMITED_VALUES[file]):
                with open(os.path.join(get_cgroup_path(controller, jail), file.partition("/")[2]), "w") as target:
                    target.write(value)
        if is_new:
            move_processes(os.path.join(get_cgroup_path(controller, jail), "cgroup.procs"), pids)


def move_processes(procs: str, pids: list[int]) -> None:
    for pid in pids:
        try:
            with open(procs, "w") as file:
                file.write(str(pid))
        except OSError:
            continue  # The process has exited.


def remove_limits(jail: str) -> None:
    for controller in CONTROLLERS:
        path = get_cgroup_path(controller, jail)
        try:
            with open(os.path.join(path, "cgroup.procs")) as file:
                pids = [int(line) for line in file]
        except FileNotFoundError:
            continue
        move_processes(os.path.join(CGROUP_ROOT, controller, "cgroup.procs"), pids)
        remove_empty_cgroups(path)


def purge() -> None:
    """Remove the limits of all jails of this state directory."""
    names = set()
    for controller in CONTROLLERS:
        path = get_cgroup_path(controller, "")
        if os.path.isdir(path):
            names |= {entry.name for entry in os.scandir(path) if entry.is_dir()}
    for name in names:
        remove_limits(name)


def remove_empty_cgroups(path: str) -> None:
    """Remove a cgroup, and its ancestors that are empty and belong to the shim."""
    while "freebsd_shim" in path:
        try:
            os.rmdir(path)
        except OSError:
            return
        path = os.path.dirname(path)
