"""Queries about the disk of a sandbox cannot fill the host, however long its guest makes them take."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.disk_queries import DiskQueries
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.records import Sandbox, Snapshot


class _Query:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.running_count = self.call_count = 0

    async def run(self, *_: object) -> int:
        self.call_count += 1
        self.running_count += 1
        await self.may_end.wait()
        self.running_count -= 1
        return self.call_count


async def test_a_query_that_continues_delays_only_others_of_its_instance() -> None:
    queries, query, other = DiskQueries(), _Query(), _Query()
    other.may_end.set()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queries.run("a", query.run), 0.02)
    assert query.call_count == 1
    assert await queries.run("b", other.run) == 1
    waiting = asyncio.create_task(queries.run("a", query.run))
    await asyncio.sleep(0)
    query.may_end.set()
    assert await waiting == 2, "the result is that of a query that began after the call"
    assert queries._running == {}


async def test_only_16_queries_run_at_a_time() -> None:
    queries, query = DiskQueries(), _Query()
    tasks = [asyncio.create_task(queries.run(str(number), query.run)) for number in range(20)]
    await asyncio.sleep(0.02)
    assert query.running_count == 16
    query.may_end.set()
    await asyncio.gather(*tasks)
    assert query.call_count == 20
    assert query.running_count == 0


async def test_an_error_reaches_the_caller_and_ends_the_query() -> None:
    async def fail() -> None:
        raise ValueError("no disk")

    queries = DiskQueries()
    for _ in range(2):
        with pytest.raises(ValueError, match="no disk"):
            await queries.run("a", fail)


@pytest.mark.parametrize("name", ["has_diverged", "measure_usage"])
async def test_a_jail_has_one_query_at_a_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host = JailZfsHost(Config.model_validate({"host": {"kind": "jail_zfs"}}))
    query = _Query()
    monkeypatch.setattr(Disks, "has_diverged", query.run)
    monkeypatch.setattr(Disks, "count_unique_bytes", query.run)
    sandbox = Sandbox(name="a")
    args = (sandbox, Snapshot()) if name == "has_diverged" else (sandbox,)
    call = partial(getattr(host, name), *args)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(), 0.02)
    assert query.call_count == 1
