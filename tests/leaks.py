"""Find and remove leftovers of test runs: processes, mounts, loop devices, network namespaces, links, nftables tables,
control groups, zpools and files.

Processes are recognised by an environment variable that they inherit. A gateway starts its processes with a clean
environment, so a path of this run in the command line counts too. Anything else counts if it contains this run's
directory or prefix. With CI set, no one else uses the machine, and everything new counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.jail_zfs import pools
from tests.support import jail_world, session

_SETTLE_SECONDS = 30
_TEMPORARY = "pytest"
_ZPOOLS = ("zpool", "list", "-H", "-o", "name")


@dataclass(frozen=True)
class Inventory:
    """Everything found on the machine: sets with a readable line for each item."""

    processes: frozenset[str]
    mounts: frozenset[str]
    loops: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    tables: frozenset[str]
    cgroups: frozenset[str]
    zpools: frozenset[str]

    def added_since(self, before: Inventory) -> dict[str, list[str]]:
        new = {f.name: sorted(getattr(self, f.name) - getattr(before, f.name)) for f in fields(self)}
        return {kind: lines for kind, lines in new.items() if lines}


def should_check(config: pytest.Config) -> bool:
    """Return whether to check for leftovers. Only root can create them, and only the main process checks."""
    session.run_id()
    return os.geteuid() == 0 and not hasattr(config, "workerinput") and not config.option.collectonly


def take_inventory() -> Inventory:
    return Inventory(
        processes=frozenset(_processes(session.run_path(), os.environ[session.MARK]).values()),
        mounts=frozenset(_mounts()),
        loops=frozenset(_loops()),
        namespaces=frozenset(_names(Path("/run/netns"))),
        links=frozenset(link["ifname"] for link in _json("ip", "-j", "link", "show")),
        tables=frozenset(_lines("nft", "list", "tables")),
        cgroups=frozenset(_cgroups()),
        zpools=frozenset(_lines(*_ZPOOLS)),
    )


def wait_for_leftovers(before: Inventory) -> list[str]:
    """Return the leftovers after a grace period, in which processes can end. Remove the run's directory if possible."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (leftovers := _new_items(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not any(line.startswith(("mounts", "loops", "processes")) for line in leftovers):
        shutil.rmtree(session.run_path(), ignore_errors=True)
    return leftovers


def _new_items(before: Inventory) -> list[str]:
    new = take_inventory().added_since(before)
    if not os.environ.get("CI"):
        marks = (str(session.run_path()), f"t{session.run_id()}")
        for kind in new.keys() - {"processes"}:
            new[kind] = [line for line in new[kind] if any(mark in line for mark in marks)]
    return [f"{kind}: {line}" for kind, lines in new.items() for line in lines]


def record_temporary_directory(temporary: Path) -> None:
    """Record a temporary directory of this run, because it may contain mounts. Only runs of root are cleaned up."""
    if os.geteuid() == 0:
        # One link for each process, because some tests run pytest themselves.
        (session.run_dir() / f"{_TEMPORARY}-{os.getpid()}").symlink_to(temporary)


def sweep_earlier_runs() -> None:
    """Remove the processes, names, pools, mounts and files that killed runs left behind."""
    for path in session.state_dir().glob("run-*"):
        mark = path.name.removeprefix("run-")
        pid, _, code = mark.partition("-")
        if pid.isdigit() and code and not Path(f"/proc/{pid}").exists():
            _sweep(path, mark, f"t{code}")


def _sweep(path: Path, mark: str, prefix: str) -> None:
    for pid in _processes(path, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for state in path.glob(f"*/{jail_world.SHIM}"):
        jail_world.shim("freebsd-shim", "purge", check=False, state=state)
    for name in _names(Path("/run/netns")):
        if name.startswith(prefix):
            _run_ignoring_errors("ip", "netns", "delete", name)
    # A leftover bridge has a route to addresses that a later run may use.
    for link in _json("ip", "-j", "link", "show"):
        if link["ifname"].startswith(prefix):
            _run_ignoring_errors("ip", "link", "delete", link["ifname"])
    for table in _lines("nft", "list", "tables"):
        if table.split()[-1].startswith(prefix):
            rules = "\n".join(_lines("nft", "list", *table.split()))
            _run_ignoring_errors("nft", "delete", *table.split())
            # The rules contain the address of the volume servers, which is an address of this machine.
            for address in _addresses("lo"):
                if f" {address} " in rules:
                    _run_ignoring_errors("ip", "address", "delete", f"{address}/32", "dev", "lo")
    if pools_to_destroy := [pool for pool in _lines(*_ZPOOLS) if pool.startswith(prefix)]:
        pools.destroy_pools(pools_to_destroy)
    for target in sorted(_mounted_below(_run_directories(path)), reverse=True):
        _run_ignoring_errors("umount", str(target))
    # Removing the directory would also delete the contents of anything that is still mounted there.
    if not _mounted_below([path]):
        shutil.rmtree(path, ignore_errors=True)


def _run_ignoring_errors(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, timeout=60, check=False)


def _mounted_below(places: list[Path]) -> list[Path]:
    targets = [Path(line.rpartition(" (")[0]) for line in _mounts()]
    return [target for target in targets if any(target.is_relative_to(place) for place in places)]


def _run_directories(path: Path) -> list[Path]:
    """Return the directory ``path`` of a run, and its temporary directories."""
    return [path, *(link.resolve() for link in path.glob(f"*/{_TEMPORARY}-*"))]


def _processes(path: Path, mark: str) -> dict[int, str]:
    """Return a description by pid of each process that the run ``mark`` in ``path`` started, even indirectly."""
    processes = {}
    variable = f"{session.MARK}={mark}".encode()
    places = [f"{place}/" for place in _run_directories(path)]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            inherited = variable in (entry / "environ").read_bytes().split(b"\0")
            if inherited or any(place in command for place in places):
                processes[int(entry.name)] = f"{entry.name} {command[:160]}"
        except OSError:
            continue
    return processes


def _mounts() -> list[str]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [f"{target} ({source}, {kind})" for source, target, kind, *_ in lines]


def _loops() -> list[str]:
    devices = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            devices.append(f"/dev/{backing.parent.parent.name} ({backing.read_text().strip()})")
    return devices


def _cgroups() -> list[str]:
    """Return the control groups of this run. Their paths contain the prefix of a gateway."""
    groups = (
        Path(place) for place, _, _ in os.walk("/sys/fs/cgroup")
    )  # ignores groups that are removed during the walk
    return [str(path) for path in groups if _belongs_to_run(path)]


def _belongs_to_run(path: Path) -> bool:
    return f"t{session.run_id()}" in str(path)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _addresses(link: str) -> list[str]:
    return [line.split()[3].partition("/")[0] for line in _lines("ip", "-4", "-o", "address", "show", "dev", link)]


def _lines(*argv: str) -> list[str]:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def _json(*argv: str) -> list[dict[str, str]]:
    items: list[dict[str, str]] = json.loads("".join(_lines(*argv)) or "[]")
    return items
