"""Find ZFS commands that are hung, or that have run for so long that they probably are."""

from __future__ import annotations

import time

import zfs_core

SLOW_FRACTION = 1 / 6
"""A command is slow after this fraction of its timeout: 10 s for most commands, 10 minutes for a stream transfer."""


def list_slow_commands(*, thread: int | None = None) -> list[zfs_core.RunningCommand]:
    """Return the slow commands, oldest first. With ``thread``, return only those that this thread waits for."""
    now = time.time()
    return [
        command
        for command in zfs_core.list_running_commands()
        if (command.was_killed or now - command.started_at > command.timeout_seconds * SLOW_FRACTION)
        and (thread is None or (command.thread == thread and not command.was_killed))
    ]
