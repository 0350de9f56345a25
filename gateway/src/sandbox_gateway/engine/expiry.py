"""Expire sandboxes and snapshots, apply retention rules, and retry failed removals."""

from __future__ import annotations

import asyncio
from datetime import datetime

from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.sandboxes import Sandboxes
from sandbox_gateway.engine.timeouts import has_expired
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import now

_CHECK_INTERVAL_SECONDS = 0.25

log = Logger("engine")


class Expiry:
    def __init__(self, context: Context, collector: Collector, sandboxes: Sandboxes) -> None:
        self._index = context.index
        self._background = context.background
        self._collector = collector
        self._sandboxes = sandboxes
        self._backoff = Backoff()
        self._expiring_ids: set[str] = set()
        """Ids of the sandboxes that are being paused or deleted, including those that still wait for their lock."""

    async def watch(self) -> None:
        """Expire objects, checking every quarter of a second. Never returns."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            try:
                await self._check(now())
            except Exception as error:
                _log_failure(error)

    async def _check(self, current_time: datetime) -> None:
        self._backoff.retain_only(self._index)
        self._expire_sandboxes(current_time)
        await self._collector.collect_expired_snapshots()
        await self._collector.retry()

    def _expire_sandboxes(self, current_time: datetime) -> None:
        """Expire sandboxes in background tasks, so that a busy one does not delay the other sandboxes."""
        for sandbox in self._index.sandboxes.values():
            if (
                has_expired(sandbox, current_time)
                and sandbox.id not in self._expiring_ids
                and self._backoff.is_due(sandbox.id)
            ):
                self._expiring_ids.add(sandbox.id)
                self._background.start(self._expire_sandbox(sandbox.id))

    async def _expire_sandbox(self, id: str) -> None:
        try:
            await self._sandboxes.expire(id)
        except NotFound:
            pass
        except Exception as error:
            _log_failure(error, sandbox=id)
            self._backoff.delay(id)
        finally:
            self._expiring_ids.discard(id)


def _log_failure(error: Exception, **fields: str) -> None:
    """Log a failure to expire an object. Other objects still expire."""
    if isinstance(error, GatewayError):
        log.warning("expiry failed", reason=error.message, **fields)
    else:
        log.error("expiry failed", exc_info=True, **fields)
