"""Retry changes that failed because a file system was still in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts, MountFilter
from sandbox_gateway.tasks import finish_despite_cancellation

_RETRIES = 20
_RETRY_SECONDS = 3.0


async def retry_later(change: Callable[[], object], mounts: JailMounts, blocking: MountFilter) -> bool:
    """Wait until no ``blocking`` mount is stuck, then call ``change`` in a thread, and repeat it while it fails.

    Returns False if it still fails after about a minute.
    """
    await mounts.wait_until_unmounted(blocking)
    for _ in range(_RETRIES):
        try:
            await finish_despite_cancellation(asyncio.to_thread(change))
            return True
        except GatewayError:
            await asyncio.sleep(_RETRY_SECONDS)
    return False
