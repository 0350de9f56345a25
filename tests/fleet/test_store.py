"""The store, with real etcd servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_gateway.fleet import store as etcd_store
from sandbox_gateway.fleet.store import Change, Store, StoreRefused, StoreUnavailable, TlsFiles
from tests.support.certificates import Authority, Certificate
from tests.support.etcd import Etcd, running_cluster, running_etcd


@pytest.fixture
async def store(etcd: Etcd) -> AsyncIterator[Store]:
    instance = Store([etcd.endpoint])
    yield instance
    instance.close()


async def test_of_two_transactions_that_create_a_key_only_one_succeeds(store: Store) -> None:
    async def create(host: str) -> etcd_store.Outcome:
        key = f"/names/one/{host}"
        return await store.transact(
            [etcd_store.absent("/names/one/")], [etcd_store.put(key, b"x")], [etcd_store.read("/names/one/")]
        )

    outcomes = await asyncio.gather(*(create(f"h{number}") for number in range(8)))
    assert [outcome.succeeded for outcome in outcomes].count(True) == 1
    entries, _ = await store.load("/names/one/")
    assert len(entries) == 1
    for outcome in outcomes:
        if not outcome.succeeded:
            assert [entry.key for entry in outcome.entries] == [entries[0].key]


async def test_a_transaction_sees_that_a_key_below_a_prefix_has_changed(store: Store) -> None:
    await store.put("/names/one/h1", b"x")
    outcome = await store.transact([], [etcd_store.read("/names/one/")])
    unchanged = etcd_store.unchanged_since("/names/one/", outcome.revision)
    assert (await store.transact([unchanged], [etcd_store.put("/other", b"x")])).succeeded
    await store.put("/names/one/h2", b"y")
    assert not (await store.transact([unchanged], [etcd_store.put("/other", b"x")])).succeeded


async def test_all_keys_of_a_prefix_are_read_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "_PAGE_KEYS", 3)
    for number in range(8):
        await store.put(f"/names/{number}", str(number).encode())
    await store.put("/namesake", b"not below the prefix")
    entries, revision = await store.load("/names/")
    assert [entry.value for entry in entries] == [str(number).encode() for number in range(8)]
    assert revision > max(entry.revision for entry in entries)


async def test_a_lease_ends_with_its_keys_unless_it_is_renewed(store: Store) -> None:
    kept, lost = await store.grant_lease(8), await store.grant_lease(4)
    await store.put("/kept", b"x", kept)
    await store.put("/lost", b"x", lost)
    deadline, started_at = time.monotonic() + 60, time.monotonic()
    while len((await store.load("/"))[0]) > 1 or time.monotonic() < started_at + 10:
        await asyncio.sleep(0.5)
        assert await store.renew_lease(kept)
        assert time.monotonic() < deadline
    assert [entry.key for entry in (await store.load("/"))[0]] == ["/kept"]
    assert not await store.renew_lease(lost)
    with pytest.raises(StoreRefused, match="lease not found"):
        await store.put("/lost", b"x", lost)


async def test_a_watch_begins_after_a_revision(store: Store) -> None:
    await store.put("/names/0", b"before")
    _, revision = await store.load("/names/")
    await store.put("/names/1", b"between")
    seen: list[Change] = []
    async with contextlib.aclosing(store.watch("/names/", revision)) as changes:
        async for batch in changes:
            seen += batch
            if len(seen) == 1:
                await store.put("/names/2", "ä".encode() * 100_000)
                await store.transact([], [etcd_store.delete("/names/1")])
            if len(seen) == 3:
                break
    assert seen == [
        Change("/names/1", b"between"),
        Change("/names/2", "ä".encode() * 100_000),
        Change("/names/1", None),
    ]


async def test_a_watch_ends_with_an_error_when_etcd_is_killed(store: Store, etcd: Etcd) -> None:
    _, revision = await store.load("/names/")
    watch = store.watch("/names/", revision)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    etcd.kill()
    with pytest.raises(StoreUnavailable, match="the watch of etcd has ended"):
        async with asyncio.timeout(30):
            await waiting
    await watch.aclose()


async def test_a_silent_watch_ends_with_an_error(store: Store, etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "_WATCH_SILENCE_SECONDS", 1)
    watch = store.watch("/names/", 1)
    with pytest.raises(StoreUnavailable, match="no answer in time"):
        async with asyncio.timeout(30):
            await anext(watch)
    await watch.aclose()


@pytest.mark.usefixtures("real_times")
async def test_requests_fail_in_time_while_etcd_does_not_answer(store: Store, etcd: Etcd) -> None:
    await store.put("/names/1", b"x")
    etcd.stop_answering()
    started_at = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no answer in time.*must wait until it is back"):
        await store.put("/names/2", b"x")
    assert time.monotonic() - started_at < 10
    assert store.is_away
    etcd.answer_again()
    await store.put("/names/3", b"x")
    assert not store.is_away


async def test_requests_work_again_after_a_restart_of_etcd(store: Store, etcd: Etcd) -> None:
    await store.put("/names/1", b"x")
    etcd.kill()
    with pytest.raises(StoreUnavailable, match="connection refused"):
        await store.put("/names/2", b"x")
    etcd.start()
    await store.put("/names/3", b"x")
    assert [entry.key for entry in (await store.load("/names/"))[0]] == ["/names/1", "/names/3"]


async def test_another_member_answers_when_one_is_killed(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as servers:
        store = Store([server.endpoint for server in servers])
        await store.put("/names/1", b"x")
        servers[0].kill()
        deadline = time.monotonic() + 60
        while True:  # The killed member may have been the leader.
            try:
                await store.put("/names/2", b"x")
                break
            except (StoreUnavailable, StoreRefused):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
        assert len((await store.load("/names/"))[0]) == 2
        store.close()


def _create_tls_store(etcd: Etcd, certificate: Certificate) -> Store:
    return Store([etcd.endpoint], TlsFiles(certificate.ca, certificate.cert, certificate.key))


async def test_the_store_uses_mutual_tls(tmp_path: Path, authority: Authority) -> None:
    with running_etcd(tmp_path / "etcd", authority.issue("etcd")) as etcd:
        store = _create_tls_store(etcd, authority.issue("h1"))
        await store.put("/names/1", b"x")
        assert len((await store.load("/names/"))[0]) == 1
        store.close()
        stranger = Authority(tmp_path / "stranger").issue("h1")
        own = authority.issue("h2")
        for certificate, message in (
            (stranger, "its certificate cannot be verified"),
            (Certificate(own.ca, stranger.cert, stranger.key), "it does not (accept|trust) the client certificate"),
        ):
            store = _create_tls_store(etcd, certificate)
            with pytest.raises(StoreUnavailable, match=message):
                await store.put("/names/2", b"x")
            store.close()


def test_gateways_distribute_their_watches_over_the_members_of_etcd() -> None:
    endpoints = [f"http://127.0.0.1:{number}" for number in (1, 2, 3)]
    assert {Store(endpoints)._preferred for _ in range(100)} == {0, 1, 2}
