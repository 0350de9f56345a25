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
    destroys_lists: bool
    """`zfs destroy FILESYSTEM@A,B` destroys several snapshots of a filesystem atomically."""
    volumes: bool
    """`zfs create -V` creates volumes."""
    create_unmounted: bool
    """`zfs create -u` does not mount the new filesystem."""
    rename_without_unmount: bool
    """`zfs rename -u` does not unmount clones of the filesystem's snapshots."""
    lists_holds: bool
    """`zfs holds` works."""
    exact_hold_times: bool
    """`zfs holds -p` prints the times of holds in seconds."""
    hold_tag_max: int
    """Maximum length of a hold's tag in bytes. It is shorter than ZFS's limit if holds are stored in properties."""
    receive_options: bool
    """`zfs receive -o` sets properties and the origin, and `zfs receive -s` can be resumed."""
    send_options: bool
    """`zfs send` has the options for features of streams (`-e`, `-L`, `-c`, `-w`), sizes (`-n`) and tokens (`-t`)."""
    bookmarks: bool
    """`zfs bookmark` exists, and `zfs destroy -nvp FIRST%LAST` calculates the space used by a range of snapshots."""
    pool_commands: bool
    """`zpool sync`, `zpool reopen`, `zpool checkpoint` and `zfs program` exist."""
    encryption: bool
    """`zfs load-key`, `zfs unload-key` and `zfs change-key` exist."""
    corrective_receive: bool
    """`zfs receive -c` heals corrupted data of a snapshot."""
    written_property: bool
    """The properties `written` and `written@SNAPSHOT` exist."""
    concurrent_mounts: bool
    """Several commands may mount file systems at the same time."""


ZFS_FUSE_CAPABILITIES = Capabilities(
    version=(0, 7),
    atomic_snapshots=False,
    destroys_lists=False,
    volumes=False,
    create_unmounted=False,
    rename_without_unmount=False,
    lists_holds=False,
    exact_hold_times=False,
    hold_tag_max=120,
    receive_options=False,
    send_options=False,
    bookmarks=False,
    pool_commands=False,
    encryption=False,
    corrective_receive=False,
    written_property=False,
    concurrent_mounts=False,
)


def make_openzfs_capabilities(version: tuple[int, ...]) -> Capabilities:
    return Capabilities(
        version=version,
        atomic_snapshots=True,
        destroys_lists=True,
        volumes=True,
        create_unmounted=not version or version >= (2, 0),
        rename_without_unmount=True,
        lists_holds=True,
        exact_hold_times=version >= (2, 3),
        hold_tag_max=255,
        receive_options=True,
        send_options=True,
        bookmarks=True,
        pool_commands=True,
        encryption=True,
        corrective_receive=not version or version >= (2, 2),
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
            _capabilities = make_openzfs_capabilities(
                tuple(int(part) for part in match.groups() if part) if match else ()
            )
        elif "unrecognized command" in outcome.message:
            _capabilities = ZFS_FUSE_CAPABILITIES
        else:
            raise outcome.explain(ZFSGenericError(errno.EIO, None, "`zfs version` failed"))
    return _capabilities
