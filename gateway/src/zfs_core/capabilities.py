"""Detect the capabilities of the installed ZFS.

zfs-fuse 0.7 is ZFS in user space with pool version 23. It lacks features that all versions of OpenZFS since 0.8 have.
Only this module distinguishes the two.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from zfs_core.exceptions import ZFSGenericError
from zfs_core.process import execute


@dataclass(frozen=True)
class Capabilities:
    """The capabilities that differ between versions of ZFS."""

    version: tuple[int, ...]
    """The version, or () if the output of `zfs version` has an unknown format."""
    atomic_snapshots: bool
    """`zfs snapshot` takes several snapshots atomically."""
    rename_without_unmount: bool
    """`zfs rename -u` does not unmount clones of the filesystem's snapshots."""
    lists_holds: bool
    """`zfs holds` works."""
    receive_options: bool
    """`zfs receive -o` sets properties and the origin."""
    written_property: bool
    """The properties `written` and `written@SNAPSHOT` exist."""
    concurrent_mounts: bool
    """Several commands may mount file systems at the same time."""


ZFS_FUSE_CAPABILITIES = Capabilities(
    version=(0, 7),
    atomic_snapshots=False,
    rename_without_unmount=False,
    lists_holds=False,
    receive_options=False,
    written_property=False,
    concurrent_mounts=False,
)


def openzfs_capabilities(version: tuple[int, ...]) -> Capabilities:
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
    """Return the capabilities of the installed ZFS. The first call determines them with ``zfs version``.

    OpenZFS has had this command since version 0.8; zfs-fuse lacks it.
    """
    global _capabilities
    if _capabilities is None:
        outcome = execute(("version",))
        if outcome.cause is None:
            match = re.search(r"^zfs-(\d+)\.(\d+)(?:\.(\d+))?", outcome.output, re.MULTILINE)
            _capabilities = openzfs_capabilities(tuple(int(part) for part in match.groups() if part) if match else ())
        elif "unrecognized command" in outcome.message:
            _capabilities = ZFS_FUSE_CAPABILITIES
        else:
            raise outcome.explain(ZFSGenericError(errno.EIO, None, "`zfs version` failed"))
    return _capabilities
