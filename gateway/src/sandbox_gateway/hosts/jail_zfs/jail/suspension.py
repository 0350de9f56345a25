"""Suspend jails while their volumes change or are captured, and resume them, even after a crash of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import finish_despite_cancellation

_STOP_SIGNAL_COUNT = 2
"""The number of times that SIGSTOP is sent: the second one stops processes that were forked during the first."""

log = Logger("volumes")


class JailSuspension:
    """Suspends jails. ``state_root``: the gateway's state directory, in which suspended jails are recorded."""

    def __init__(self, jails: Jails, state_root: Path) -> None:
        self._jails = jails
        self._stopped_directory = state_root / "stopped"

    @asynccontextmanager
    async def suspended(self, jails: Iterable[str]) -> AsyncIterator[None]:
        """Keep the jails suspended inside this context: SIGSTOP has stopped all their processes.

        Each suspended jail is recorded in a file, so that a gateway that restarts after a crash can resume the jail.
        """
        names = sorted(set(jails))
        try:
            for name in names:
                self._stopped_directory.mkdir(mode=0o700, exist_ok=True)
                (self._stopped_directory / name).touch()
                for _ in range(_STOP_SIGNAL_COUNT):
                    await self._jails.signal(name, "STOP")
            yield
        finally:
            await finish_despite_cancellation(self._resume(names))

    async def _resume(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._jails.signal(name, "CONT")
                (self._stopped_directory / name).unlink(missing_ok=True)
            except GatewayError as error:
                log.error(
                    "a suspended jail could not be resumed; the gateway will try again when it next starts",
                    jail=name,
                    reason=error.message,
                )

    async def resume_all(self) -> list[str]:
        """Resume jails that are still suspended after a crash. Returns a sentence for each."""
        names = [path.name for path in self._stopped_directory.iterdir()] if self._stopped_directory.is_dir() else []
        await self._resume(names)
        return [f"resumed the jail {name}, which had been suspended to change or capture its volumes" for name in names]
