"""Detect the capabilities of the installed ZFS.

zfs-fuse 0.7 is ZFS in user space with pool version 23. It lacks features of all versions of OpenZFS since 0.8. Only
this module distinguishes the two.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from sandbox_gateway.zfs.exceptions import ZFSGenericError
from sandbox_gateway.zfs.process import execute


@dataclass(frozen=True)
class Capabilities:
    """Abilities that differ between versions of ZFS."""

    version: tuple[int, ...]
    """The version; empty if `zfs version` prints something unknown."""
    atomic_snapshots: bool
    """`zfs snapshot` takes several snapshots, all at one instant."""
    rename_without_unmount: bool
    """`zfs rename -u` leaves clones of the filesystem's snapshots mounted."""
    lists_holds: bool
    """`zfs holds` works."""
    receive_options: bool
    """`zfs receive -o` sets properties and the origin."""
    written_property: bool
    """The properties `written` and `written@SNAPSHOT` exist."""
    concurrent_mounts: bool
    """Two commands may mount at the same time."""


ZFS_FUSE = Capabilities(
    version=(0, 7),
    atomic_snapshots=False,
    rename_without_unmount=False,
    lists_holds=False,
    receive_options=False,
    written_property=False,
    concurrent_mounts=False,
)


def openzfs(version: tuple[int, ...]) -> Capabilities:
    return Capabilities(
        version=version,
        atomic_snapshots=True,
        rename_without_unmount=True,
        lists_holds=True,
        receive_options=True,
        written_property=True,
        concurrent_mounts=True,
    )


_capabilities: Capabilities | None = None


def detect_capabilities() -> Capabilities:
    """Run ``zfs version`` once. OpenZFS since 0.8 has this command, zfs-fuse does not."""
    global _capabilities
    if _capabilities is None:
        outcome = execute(("version",))
        if outcome.cause is None:
            match = re.search(r"^zfs-(\d+)\.(\d+)(?:\.(\d+))?", outcome.out, re.MULTILINE)
            _capabilities = openzfs(tuple(int(part) for part in match.groups() if part) if match else ())
        elif "unrecognized command" in outcome.said:
            _capabilities = ZFS_FUSE
        else:
            raise outcome.explain(ZFSGenericError(errno.EIO, None, "`zfs version` failed"))
    return _capabilities
