"""Read everything that a gateway keeps on its machine, so that a test can tell whether something has changed."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from tests.support.worlds import World

_BLOCK_BYTES = 1 << 20
_STORAGE_TYPES = ("xfs", "fuse", "fuse.zfs", "zfs")
"""Types of file systems that contain the data of sandboxes and volumes, unlike proc or devpts in a jail."""


def read_machine(world: World, config: Config) -> dict[str, Any]:
    """Return the state of everything on the machine that belongs to the gateway of ``config``, by kind."""
    traces = world.read_traces(config)
    roots = {config.host.state_root, world.get_writable_directory(config)}
    mounts = list(_list_mounts(roots))
    storage = [Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] in _STORAGE_TYPES]
    return {
        "files": dict(read_files({*roots, *storage})),
        "mounts": [" ".join(fields) for fields in mounts],
        "processes": {pid: _read_start(pid) for pid in traces["processes"]},
        "network": _read_network(config.network.prefix),
        "traces": traces,
        "properties": world.read_properties(config),
    }


def read_files(roots: Iterable[Path]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ``(path, state)`` for everything under some directories. Omits other file systems that are mounted there.

    The state contains the time of the last change to the contents, the owner, the mode or an extended attribute.
    """
    for root in sorted(roots):
        device = root.lstat().st_dev
        for directory, subdirectories, names in os.walk(root):
            subdirectories[:] = [each for each in subdirectories if os.lstat(f"{directory}/{each}").st_dev == device]
            for path in (Path(directory), *(Path(directory, each) for each in [*names, *subdirectories])):
                status = path.lstat()
                yield (
                    str(path),
                    (
                        stat.filemode(status.st_mode),
                        status.st_uid,
                        status.st_gid,
                        status.st_nlink,
                        status.st_ctime_ns,
                        _read_content(path, status),
                    ),
                )


def _read_content(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return str(path.readlink())
    if not stat.S_ISREG(status.st_mode):
        return ""
    digest = hashlib.sha256(str(status.st_size).encode())
    with path.open("rb") as file:
        for offset in _list_blocks(file.fileno()):
            block = os.pread(file.fileno(), _BLOCK_BYTES, offset)
            if any(block):  # otherwise, it makes no difference whether the block is a hole
                digest.update(b"%d " % offset + block)
    return digest.hexdigest()


def _list_blocks(descriptor: int) -> Iterator[int]:
    """Yield the offsets of the blocks of a file that contain data, because disk images are mostly holes."""
    end = 0
    while True:
        try:
            data = os.lseek(descriptor, end, os.SEEK_DATA)
            hole = os.lseek(descriptor, data, os.SEEK_HOLE)
        except OSError:  # no more data
            return
        start = max(end, data // _BLOCK_BYTES * _BLOCK_BYTES)
        end = -(-hole // _BLOCK_BYTES) * _BLOCK_BYTES
        yield from range(start, end, _BLOCK_BYTES)


def _list_mounts(roots: Iterable[Path]) -> Iterator[list[str]]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if any(Path(fields[4]).is_relative_to(root) for root in roots):
            yield fields


def _read_start(pid: str) -> str:
    """Return when a process started, to distinguish it from a later process with the same pid."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _read_network(prefix: str) -> list[str]:
    """Return the namespaces, links and rules whose names begin with ``prefix``."""
    lines = [f"netns {path.name}" for path in Path("/run/netns").glob("*")] if Path("/run/netns").exists() else []
    lines += [f"link {path.name}" for path in Path("/sys/class/net").iterdir()]
    rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=60, check=True).stdout
    for table in rules.splitlines():
        if prefix in table:
            argv = ["nft", "--stateless", "list", *table.split()]
            lines.append(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout)
    return sorted(line for line in lines if prefix in line)
