"""Unpack tarballs of root file systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sandbox_gateway.hosts.rootfs_common import run_logged


async def untar(tarball: Path, tree: Path, excluded: Sequence[str] = ()) -> None:
    """Unpack an untrusted tarball into ``tree``, without writing files elsewhere.

    ``excluded``: patterns of the entries to leave out, such as `./usr/lib/*/gconv`. `*` does not match a slash.
    """
    # GNU tar refuses '..', strips the leading '/', creates symbolic links last, and detects compression.
    argv = [
        *("tar", "--extract", "--file", str(tarball), "--directory", str(tree)),
        *("--numeric-owner", "--same-owner", "--same-permissions", "--delay-directory-restore"),
        *("--xattrs", "--xattrs-include=*"),
        # The kernel fills /dev, so no device nodes are created in the host's file system.
        *("--anchored", "--no-wildcards-match-slash", "--exclude=./dev/*", "--exclude=dev/*"),
        *(f"--exclude={pattern}" for pattern in excluded),
    ]
    await run_logged(argv, lambda line: None)
