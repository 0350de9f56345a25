"""The view of a large fleet, which takes seconds to load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.records import Holder, MemberRecord, ObjectRecord
from sandbox_gateway.fleet.store import Entry, Store
from sandbox_gateway.fleet.view import FleetView

_KEYS = Keys("/fleet/")
_PAGE_ENTRIES = 2000


class FakeStore:
    """Contains the member h2, and sandboxes, each with a name and an id, alternately on the hosts h1 and h2."""

    def __init__(self, sandboxes: range) -> None:
        self.sandboxes = sandboxes

    async def load_pages(self, prefix: str) -> AsyncGenerator[tuple[list[Entry], int]]:
        assert prefix == _KEYS.prefix
        entries = [Entry(_KEYS.member("h2"), MemberRecord(host_id="2", address="x:1", kind="memory").dump(), 1)]
        for number in self.sandboxes:
            value = ObjectRecord(kind="sandbox", id=f"id-{number}").dump()
            for ref in (f"id-{number}", f"name-{number}"):
                entries.append(Entry(_KEYS.object(ref, f"h{1 + number % 2}"), value, 1))
        for start in range(0, len(entries), _PAGE_ENTRIES):
            yield entries[start : start + _PAGE_ENTRIES], 7


async def test_other_work_goes_on_while_the_view_is_loaded() -> None:
    view = FleetView(cast(Store, FakeStore(range(10_000))), _KEYS, "h1")
    loading = asyncio.create_task(view._load())
    turns = 0
    while not loading.done():
        assert not view.is_current and not view.members
        turns += 1
        await asyncio.sleep(0)
    assert loading.result() == 7
    assert turns >= 20_000 / 500
    assert view.find_holders("id-0") == (Holder("h1", "sandbox", is_id=True),)
    assert view.find_holders("name-9999") == (Holder("h2", "sandbox", is_id=False),)


async def test_the_view_stays_as_it_was_until_it_is_loaded_again() -> None:
    store = FakeStore(range(2000))
    view = FleetView(cast(Store, store), _KEYS, "h1")
    entries_of_host: list[Entry] = []
    view.load_listeners.append(entries_of_host.extend)
    await view._load()
    assert sorted(each.key for each in entries_of_host) == sorted(
        _KEYS.object(f"{kind}-{number}", "h1") for kind in ("id", "name") for number in range(0, 2000, 2)
    )
    store.sandboxes = range(1000, 3000)
    loading = asyncio.create_task(view._load())
    turns = 0
    while not loading.done():
        assert view.find_holders("id-0") and view.find_holders("id-1999") and not view.find_holders("id-2999")
        assert [*view.members] == ["h2"]
        turns += 1
        await asyncio.sleep(0)
    assert turns > 1
    assert view.find_holders("id-2999") and view.find_holders("id-1999") and not view.find_holders("id-0")
