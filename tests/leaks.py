"""Find and remove leftovers of test runs: processes, mounts, loop devices, network namespaces, links, nftables tables,
control groups, zpools and files.

Processes are recognised by an environment variable that they inherit. Because a gateway starts its processes with a
clean environment, they are also recognised by a path of this run in their command line. Other resources belong to this
run if their names or paths contain its directory or prefix. If CI is set, nobody else uses the machine, so every new
resource counts as a leftover.
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

from tests.support import jail_world, pools, session

_GRACE_SECONDS = 30
_TEMPORARY_LINK_PREFIX = "pytest"


@dataclass(frozen=True)
class Inventory:
    """The resources on the machine that tests can leak. Each field holds one human-readable line per resource."""

    processes: frozenset[str]
    mounts: frozenset[str]
    loops: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    tables: frozenset[str]
    cgroups: frozenset[str]
    zpools: frozenset[str]

    def difference(self, inventory_before: Inventory) -> dict[str, list[str]]:
        new_lines = {f.name: sorted(getattr(self, f.name) - getattr(inventory_before, f.name)) for f in fields(self)}
        return {kind: lines for kind, lines in new_lines.items() if lines}


def should_check(config: pytest.Config) -> bool:
    """Return whether to check for leftovers. Only root can create leftovers, and only the main process checks."""
    session.get_run_id()
    return os.geteuid() == 0 and not session.STARTED_BY_RUN and not config.option.collectonly


def take_inventory() -> Inventory:
    return Inventory(
        processes=frozenset(_find_processes(session.get_run_path(), os.environ[session.RUN_VARIABLE]).values()),
        mounts=frozenset(_list_mounts()),
        loops=frozenset(_list_loop_devices()),
        namespaces=frozenset(_list_file_names(Path("/run/netns"))),
        links=frozenset(link["ifname"] for link in _run_and_read_json("ip", "-j", "link", "show")),
        tables=frozenset(_run_and_read_lines("nft", "list", "tables")),
        cgroups=frozenset(_list_cgroups()),
        zpools=frozenset(_list_pools()),
    )


def wait_for_cleanup(inventory_before: Inventory) -> list[str]:
    """Wait a grace period for leftovers to disappear, and return those that remain.

    Removes the run's directory unless mounts, loop devices or processes remain.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while (leftovers := _find_new_items(inventory_before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not any(line.startswith(("mounts", "loops", "processes")) for line in leftovers):
        shutil.rmtree(session.get_run_path(), ignore_errors=True)
    return leftovers


def _find_new_items(inventory_before: Inventory) -> list[str]:
    new_lines = take_inventory().difference(inventory_before)
    if not os.environ.get("CI"):
        identifiers = (str(session.get_run_path()), f"t{session.get_run_id()}")
        for kind in new_lines.keys() - {"processes"}:
            new_lines[kind] = [
                line for line in new_lines[kind] if any(identifier in line for identifier in identifiers)
            ]
    return [f"{kind}: {line}" for kind, lines in new_lines.items() for line in lines]


def record_temporary_directory(directory: Path) -> None:
    """Record a temporary directory of this run, so that mounts in it can be removed later. Without root, do nothing."""
    if os.geteuid() == 0:
        # One link for each process, because some tests run pytest themselves.
        (session.get_run_dir() / f"{_TEMPORARY_LINK_PREFIX}-{os.getpid()}").symlink_to(directory)


def sweep_earlier_runs() -> None:
    """Remove the processes, network objects, pools, mounts and files that killed runs left behind."""
    for path in session.get_state_dir().glob("run-*"):
        run_name = path.name.removeprefix("run-")
        pid, _, code = run_name.partition("-")
        if pid.isdigit() and code and not Path(f"/proc/{pid}").exists():
            _sweep_run(path, run_name, f"t{code}")


def _sweep_run(path: Path, run_name: str, prefix: str) -> None:
    for pid in _find_processes(path, run_name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for state in path.glob(f"*/{jail_world.SHIM_DIRECTORY}"):
        jail_world.run_shim("freebsd-shim", "purge", check=False, state=state)
    for name in _list_file_names(Path("/run/netns")):
        if name.startswith(prefix):
            _run_ignoring_errors("ip", "netns", "delete", name)
    # A leftover bridge has a route to addresses that a later run may use.
    for link in _run_and_read_json("ip", "-j", "link", "show"):
        if link["ifname"].startswith(prefix):
            _run_ignoring_errors("ip", "link", "delete", link["ifname"])
    for table in _run_and_read_lines("nft", "list", "tables"):
        if table.split()[-1].startswith(prefix):
            rules = "\n".join(_run_and_read_lines("nft", "list", *table.split()))
            _run_ignoring_errors("nft", "delete", *table.split())
            # The rules contain the address of the volume servers, which is an address of this machine.
            for address in _list_addresses("lo"):
                if f" {address} " in rules:
                    _run_ignoring_errors("ip", "address", "delete", f"{address}/32", "dev", "lo")
    # Before the pools: zpool cannot unmount the file systems of a zfs-fuse that has died.
    for target in sorted(_find_mounts_below(_list_run_directories(path)), reverse=True):
        _run_ignoring_errors("umount", "--lazy", str(target))
    if pools_to_destroy := [pool for pool in _read_health_by_pool() if pool.startswith(prefix)]:
        pools.destroy_pools(pools_to_destroy)
    # Removing the directory would also delete the contents of anything that is still mounted there.
    if not _find_mounts_below([path]):
        shutil.rmtree(path, ignore_errors=True)


def _run_ignoring_errors(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, timeout=60, check=False)


def _find_mounts_below(directories: list[Path]) -> list[Path]:
    targets = [Path(line.rpartition(" (")[0]) for line in _list_mounts()]
    return [target for target in targets if any(target.is_relative_to(directory) for directory in directories)]


def _list_run_directories(path: Path) -> list[Path]:
    """Return a run's directory ``path`` and its temporary directories."""
    return [path, *(link.resolve() for link in path.glob(f"*/{_TEMPORARY_LINK_PREFIX}-*"))]


def _find_processes(path: Path, run_name: str) -> dict[int, str]:
    """Return {pid: description} of all processes started by the run named ``run_name``, whose directory is ``path``."""
    processes = {}
    environment_entry = f"{session.RUN_VARIABLE}={run_name}".encode()
    directories = [f"{directory}/" for directory in _list_run_directories(path)]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            has_run_variable = environment_entry in (entry / "environ").read_bytes().split(b"\0")
            if has_run_variable or any(directory in command for directory in directories):
                processes[int(entry.name)] = f"{entry.name} {command[:160]}"
        except OSError:
            continue
    return processes


def _list_mounts() -> list[str]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [f"{target} ({source}, {kind})" for source, target, kind, *_ in lines]


def _list_loop_devices() -> list[str]:
    devices = []
    for backing_file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            devices.append(f"/dev/{backing_file.parent.parent.name} ({backing_file.read_text().strip()})")
    return devices


def _list_cgroups() -> list[str]:
    """Return this run's control groups, whose paths contain the prefix of its gateways."""
    # os.walk ignores groups that are removed during the walk.
    groups = (Path(directory) for directory, _, _ in os.walk("/sys/fs/cgroup"))
    return [str(path) for path in groups if _belongs_to_this_run(path)]


def _belongs_to_this_run(path: Path) -> bool:
    return f"t{session.get_run_id()}" in str(path)


def _list_file_names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _list_addresses(link: str) -> list[str]:
    return [
        line.split()[3].partition("/")[0]
        for line in _run_and_read_lines("ip", "-4", "-o", "address", "show", "dev", link)
    ]


def _list_pools() -> list[str]:
    """Return the pools, except faulted ones of other runs.

    The cache of zfs-fuse also lists the pool of a killed run, whose file no longer exists.
    """
    own_prefix = f"t{session.get_run_id()}"
    return [
        name for name, health in _read_health_by_pool().items() if health != "FAULTED" or name.startswith(own_prefix)
    ]


def _read_health_by_pool() -> dict[str, str]:
    return dict(line.split() for line in _run_and_read_lines("zpool", "list", "-H", "-o", "name,health"))


def _run_and_read_lines(*argv: str) -> list[str]:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def _run_and_read_json(*argv: str) -> list[dict[str, str]]:
    items: list[dict[str, str]] = json.loads("".join(_run_and_read_lines(*argv)) or "[]")
    return items
