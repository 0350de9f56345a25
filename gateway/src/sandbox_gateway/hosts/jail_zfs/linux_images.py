"""Refuse templates from images, whose programs are built for Linux.

linux(4) lets FreeBSD's kernel run such programs. This release does not build from images even then.
"""

from __future__ import annotations

import sys

from sandbox_gateway.errors import Unsupported
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner

LINUX_FEATURE = "kern.features.linux64" if sys.maxsize > 1 << 32 else "kern.features.linux"
"""The variable that is 1 while linux(4) runs programs of the host's word size. Without linux(4), it does not exist."""
_REMEDY = "use a host with virtual machines (kvm_xfs), or 'from: rootfs' with a FreeBSD file system"


async def create_image_refusal(run: CommandRunner) -> Unsupported:
    """Return the error for a recipe with an image, which depends on whether linux(4) is loaded."""
    if await has_linux(run):
        return Unsupported(
            "a jail host cannot build templates from images in this release, although linux(4) is loaded on this host: "
            f"{_REMEDY}"
        )
    return Unsupported(
        "a jail host cannot build templates from images, because their programs are built for Linux, and linux(4) is "
        f"not loaded on this host ({LINUX_FEATURE} is not 1): {_REMEDY}. `sysrc linux_enable=YES; service linux start` "
        "loads linux(4), but this release does not build from images with it either"
    )


async def has_linux(run: CommandRunner) -> bool:
    """Return whether linux(4) is loaded."""
    return (await run("sysctl", "-ie", LINUX_FEATURE)).strip() == f"{LINUX_FEATURE}=1"
