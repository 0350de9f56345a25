"""Find and remove leftovers of test runs: processes, mounts, loop devices, network namespaces, links, nftables tables,
control groups, zpools and files.

Processes are recognised by an environment variable that they inherit. Because a gateway starts its processes with a
clean environment, they are also recognised by a path of this run in their command line. Other resources belong to this
run if their names or paths contain its directory or prefix. If CI is set, nobody else uses the machine, so every new
resource counts.
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

    def difference(self, before: Inventory) -> dict[str, list[str]]:
        new = {f.name: sorted(getattr(self, f.name) - getattr(before, f.name)) for f in fields(self)}
        return {kind: lines for kind, lines in new.items() if lines}


def should_check(config: pytest.Config) -> bool:
    """Return whether to check for leftovers: only root can create any, and only the main process checks."""
    session.run_id()
    return os.geteuid() == 0 and not hasattr(config, "workerinput") and not config.option.collectonly


def take_inventory() -> Inventory:
    return Inventory(
        processes=frozenset(_processes(session.run_path(), os.environ[session.RUN_VARIABLE]).values()),
        mounts=frozenset(_mounts()),
        loops=frozenset(_loop_devices()),
        namespaces=frozenset(_file_names(Path("/run/netns"))),
        links=frozenset(link["ifname"] for link in _output_json("ip", "-j", "link", "show")),
        tables=frozenset(_output_lines("nft", "list", "tables")),
        cgroups=frozenset(_cgroups()),
        zpools=frozenset(_existing_pools()),
    )


def wait_for_leftovers(before: Inventory) -> list[str]:
    """Wait up to a grace period for leftovers to disappear, and return those that remain.

    Removes the run's directory unless mounts, loop devices or processes remain.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while (leftovers := _new_items(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not any(line.startswith(("mounts", "loops", "processes")) for line in leftovers):
        shutil.rmtree(session.run_path(), ignore_errors=True)
    return leftovers


def _new_items(before: Inventory) -> list[str]:
    new = take_inventory().difference(before)
    if not os.environ.get("CI"):
        marks = (str(session.run_path()), f"t{session.run_id()}")
        for kind in new.keys() - {"processes"}:
            new[kind] = [line for line in new[kind] if any(mark in line for mark in marks)]
    return [f"{kind}: {line}" for kind, lines in new.items() for line in lines]


def record_temporary_directory(temporary: Path) -> None:
    """Record a temporary directory of a run by root, so that mounts in it can be cleaned up later."""
    if os.geteuid() == 0:
        # One link for each process, because some tests run pytest themselves.
        (session.run_dir() / f"{_TEMPORARY_LINK_PREFIX}-{os.getpid()}").symlink_to(temporary)


def sweep_earlier_runs() -> None:
    """Remove the processes, network objects, pools, mounts and files that killed runs left behind."""
    for path in session.state_dir().glob("run-*"):
        mark = path.name.removeprefix("run-")
        pid, _, code = mark.partition("-")
        if pid.isdigit() and code and not Path(f"/proc/{pid}").exists():
            _sweep(path, mark, f"t{code}")


def _sweep(path: Path, mark: str, prefix: str) -> None:
    for pid in _processes(path, mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for state in path.glob(f"*/{jail_world.SHIM_DIRECTORY}"):
        jail_world.shim("freebsd-shim", "purge", check=False, state=state)
    for name in _file_names(Path("/run/netns")):
        if name.startswith(prefix):
            _run_ignoring_errors("ip", "netns", "delete", name)
    # A leftover bridge has a route to addresses that a later run may use.
    for link in _output_json("ip", "-j", "link", "show"):
        if link["ifname"].startswith(prefix):
            _run_ignoring_errors("ip", "link", "delete", link["ifname"])
    for table in _output_lines("nft", "list", "tables"):
        if table.split()[-1].startswith(prefix):
            rules = "\n".join(_output_lines("nft", "list", *table.split()))
            _run_ignoring_errors("nft", "delete", *table.split())
            # The rules contain the address of the volume servers, which is an address of this machine.
            for address in _addresses("lo"):
                if f" {address} " in rules:
                    _run_ignoring_errors("ip", "address", "delete", f"{address}/32", "dev", "lo")
    if pools_to_destroy := [pool for pool in _health_by_pool() if pool.startswith(prefix)]:
        pools.destroy_pools(pools_to_destroy)
    for target in sorted(_mounts_below(_run_directories(path)), reverse=True):
        _run_ignoring_errors("umount", str(target))
    # Removing the directory would also delete the contents of anything that is still mounted there.
    if not _mounts_below([path]):
        shutil.rmtree(path, ignore_errors=True)


def _run_ignoring_errors(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, timeout=60, check=False)


def _mounts_below(directories: list[Path]) -> list[Path]:
    targets = [Path(line.rpartition(" (")[0]) for line in _mounts()]
    return [target for target in targets if any(target.is_relative_to(directory) for directory in directories)]


def _run_directories(path: Path) -> list[Path]:
    """Return a run's directory ``path`` and its temporary directories."""
    return [path, *(link.resolve() for link in path.glob(f"*/{_TEMPORARY_LINK_PREFIX}-*"))]


def _processes(path: Path, mark: str) -> dict[int, str]:
    """Return {pid: description} of all processes started by the run ``mark``, whose directory is ``path``."""
    processes = {}
    variable = f"{session.RUN_VARIABLE}={mark}".encode()
    directories = [f"{directory}/" for directory in _run_directories(path)]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            has_mark = variable in (entry / "environ").read_bytes().split(b"\0")
            if has_mark or any(directory in command for directory in directories):
                processes[int(entry.name)] = f"{entry.name} {command[:160]}"
        except OSError:
            continue
    return processes


def _mounts() -> list[str]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [f"{target} ({source}, {kind})" for source, target, kind, *_ in lines]


def _loop_devices() -> list[str]:
    devices = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            devices.append(f"/dev/{backing.parent.parent.name} ({backing.read_text().strip()})")
    return devices


def _cgroups() -> list[str]:
    """Return this run's control groups, whose paths contain the prefix of its gateways."""
    # os.walk ignores groups that are removed during the walk.
    groups = (Path(directory) for directory, _, _ in os.walk("/sys/fs/cgroup"))
    return [str(path) for path in groups if _belongs_to_run(path)]


def _belongs_to_run(path: Path) -> bool:
    return f"t{session.run_id()}" in str(path)


def _file_names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _addresses(link: str) -> list[str]:
    return [
        line.split()[3].partition("/")[0] for line in _output_lines("ip", "-4", "-o", "address", "show", "dev", link)
    ]


def _existing_pools() -> list[str]:
    """Return the pools, except faulted ones of other runs.

    The cache of zfs-fuse also lists the pool of a killed run, whose file no longer exists.
    """
    own_prefix = f"t{session.run_id()}"
    return [name for name, health in _health_by_pool().items() if health != "FAULTED" or name.startswith(own_prefix)]


def _health_by_pool() -> dict[str, str]:
    return dict(line.split() for line in _output_lines("zpool", "list", "-H", "-o", "name,health"))


def _output_lines(*argv: str) -> list[str]:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def _output_json(*argv: str) -> list[dict[str, str]]:
    items: list[dict[str, str]] = json.loads("".join(_output_lines(*argv)) or "[]")
    return items
