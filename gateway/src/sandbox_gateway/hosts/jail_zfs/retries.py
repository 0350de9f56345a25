"""Retry changes that failed because a file system was still in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts, MountFilter
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.tasks import finish_despite_cancellation

_MAX_ATTEMPTS = 20
_RETRY_SECONDS = 3.0


async def retry_later(
    change: Callable[[], object], mounts: JailMounts, mount_filter: MountFilter
) -> GatewayError | None:
    """Wait until no mount that matches ``mount_filter`` is stuck, then call ``change`` in a thread until it succeeds.

    Returns the last error if it still fails after about a minute.
    """
    last_error: GatewayError | None = None
    await mounts.wait_until_unmounted(mount_filter)
    for _ in range(_MAX_ATTEMPTS):
        try:
            await finish_despite_cancellation(run_in_thread(change))
            return None
        except GatewayError as error:
            last_error = error
            await asyncio.sleep(_RETRY_SECONDS)
    return last_error
