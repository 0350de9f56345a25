"""Enforces rctl rules by cgroups (version 1): one per jail in pids, memory and cpu, only while it has rules."""

from __future__ import annotations

import os

from shim import base

ROOT = "/sys/fs/cgroup"
CONTROLLERS = ("pids", "memory", "cpu")
UNLIMITED = {
    "pids/pids.max": "max",
    "memory/memory.limit_in_bytes": "-1",
    "memory/memory.soft_limit_in_bytes": "-1",
    "cpu/cpu.cfs_quota_us": "-1",
}


def cgroup_path(controller: str, jail: str) -> str:
    return os.path.join(ROOT, controller, "freebsd_shim", base.state_dir().strip("/").replace("/", "-"), jail)


def open_cgroups(jail: str) -> list[int]:
    """Descriptors through which a process joins the jail's limits, even after its root has changed."""
    found = []
    for controller in CONTROLLERS:
        try:
            found.append(
                os.open(os.path.join(cgroup_path(controller, jail), "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
            )
        except FileNotFoundError:
            continue
    return found


def enter_cgroups(doors_: list[int]) -> None:
    """Move the calling process there."""
    for door in doors_:
        os.write(door, b"0")
        os.close(door)


def wanted_limits(rules: list[list[str]]) -> dict[str, str]:
    """The cgroup files for a jail's (resource, action, amount) rules."""
    files = dict(UNLIMITED)
    for resource, action, amount in rules:
        if action != "deny":
            continue
        if resource == "maxproc":
            files["pids/pids.max"] = amount
        elif resource == "vmemoryuse":
            files["memory/memory.limit_in_bytes"] = amount
        elif resource == "memoryuse":
            files["memory/memory.soft_limit_in_bytes"] = amount
        elif resource == "pcpu":
            files["cpu/cpu.cfs_quota_us"] = str(max(1000, int(amount) * 1000))
    return files


def apply(jail: str, rules: list[list[str]], pids: list[int]) -> None:
    """Apply exactly these rules to the jail; without rules, its cgroups are removed."""
    if not rules:
        remove_limits(jail)
        return
    files = wanted_limits(rules)
    for controller in CONTROLLERS:
        if not os.path.exists(os.path.join(ROOT, controller, "cgroup.procs")):
            raise base.unsupported(f"limits without the cgroup (version 1) controller {controller}")
        fresh = not os.path.isdir(cgroup_path(controller, jail))
        os.makedirs(cgroup_path(controller, jail), exist_ok=True)
        for file, value in files.items():
            if file.startswith(controller + "/") and not (fresh and value == UNLIMITED[file]):
                with open(os.path.join(cgroup_path(controller, jail), file.partition("/")[2]), "w") as target:
                    target.write(value)
        if fresh:
            move(os.path.join(cgroup_path(controller, jail), "cgroup.procs"), pids)


def move(procs: str, pids: list[int]) -> None:
    for pid in pids:
        try:
            with open(procs, "w") as file:
                file.write(str(pid))
        except OSError:
            continue  # it has ended


def remove_limits(jail: str) -> None:
    for controller in CONTROLLERS:
        where = cgroup_path(controller, jail)
        try:
            with open(os.path.join(where, "cgroup.procs")) as file:
                pids = [int(line) for line in file]
        except FileNotFoundError:
            continue
        move(os.path.join(ROOT, controller, "cgroup.procs"), pids)
        remove_empty(where)


def purge() -> None:
    """Remove every limit of this state directory."""
    names = set()
    for controller in CONTROLLERS:
        where = cgroup_path(controller, "")
        if os.path.isdir(where):
            names |= {entry.name for entry in os.scandir(where) if entry.is_dir()}
    for name in names:
        remove_limits(name)


def remove_empty(where: str) -> None:
    """Remove the cgroup and its empty ancestors, up to the shim's own."""
    while "freebsd_shim" in where:
        try:
            os.rmdir(where)
        except OSError:
            return
        where = os.path.dirname(where)
