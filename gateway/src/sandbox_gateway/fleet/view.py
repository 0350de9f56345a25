"""The members, hosts and objects of the fleet, as this gateway knows them. A watch keeps them up to date.

While etcd is away, the view stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.records import Holder, HostRecord, MemberRecord, ObjectRecord
from sandbox_gateway.fleet.store import Change, Entry, Store, StoreRefused, StoreUnavailable
from sandbox_gateway.log import Logger

_RETRY_SECONDS = 1.0
_SLICE_ENTRIES = 500
"""A view may have hundreds of thousands of entries. After so many, other work of the gateway has its turn."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

log = Logger("fleet")


class FleetView:
    def __init__(self, store: Store, keys: Keys, host: str) -> None:
        """``host``: the name of this host."""
        self._store = store
        self._keys = keys
        self._host = host
        self.hosts: dict[str, HostRecord] = {}
        """The hosts that have ever joined, by name."""
        self.members: dict[str, MemberRecord] = {}
        """The gateways that are running, by the name of their host."""
        self.reserved_memory: dict[str, int] = {}
        """The memory, in bytes, that the starting machines of each host will need."""
        self.is_current = False
        """Whether the watch is running."""
        self.loaded = asyncio.Event()
        """Set when the view has been read for the first time."""
        self.load_listeners: list[Callable[[list[Entry]], None]] = []
        """Called with the entries of this host's objects whenever the view has been read again as a whole."""
        self.member_listeners: list[Callable[[str, bool], None]] = []
        """Called with the name of a member, and whether it has come or gone."""
        self.object_listeners: list[Callable[[str], None]] = []
        """Called with a name or an id when another object gets it."""
        self._holders: dict[str, tuple[Holder, ...]] = {}
        """By name or id."""
        self._shared_holders: dict[Holder, tuple[Holder, ...]] = {}

    async def follow(self) -> None:
        """Read everything, and then follow all changes. Never returns."""
        while True:
            try:
                revision = await self._load()
                async with contextlib.aclosing(self._store.watch(self._keys.prefix, revision)) as batches:
                    async for changes in batches:
                        for change in changes:
                            self._apply(change)
            except (StoreUnavailable, StoreRefused) as error:
                if self.is_current:
                    log.warning("the view of the fleet is no longer current", reason=error.message)
                self.is_current = False
            except Exception:
                # Without this task, the gateway would never see another change.
                log.error("the view of the fleet is no longer current", exc_info=True)
                self.is_current = False
            await asyncio.sleep(_RETRY_SECONDS)

    # -- queries ----------------------------------------------------------------------------------------------------

    def find_holders(self, ref: str, kinds: Iterable[str] = ()) -> tuple[Holder, ...]:
        """Return the hosts with an object of one of ``kinds`` (any, if empty) that has this name or id."""
        holders = self._holders.get(ref, ())
        return tuple(holder for holder in holders if holder.kind in kinds) if kinds else holders

    def walk_ids(self, kind: str) -> Iterable[tuple[str, str]]:
        """Yield (id, host) of all objects of a kind."""
        for ref, holders in [*self._holders.items()]:
            for holder in holders:
                if holder.is_id and holder.kind == kind:
                    yield ref, holder.host

    def list_refs(self, host: str) -> list[str]:
        """Return the names and ids of a host's objects."""
        return [ref for ref, holders in self._holders.items() if any(holder.host == host for holder in holders)]

    def list_absent_hosts(self) -> list[str]:
        """Return the hosts that have objects, but no running gateway."""
        return sorted(self.hosts.keys() - self.members.keys())

    # -- changes ----------------------------------------------------------------------------------------------------

    async def _load(self) -> int:
        """Read everything, and return its revision. Until then, the view stays as it was."""
        loaded = FleetView(self._store, self._keys, self._host)
        loaded._shared_holders = self._shared_holders
        own_entries: list[Entry] = []
        revision = 0
        async with contextlib.aclosing(self._store.load_pages(self._keys.prefix)) as pages:
            async for page, page_revision in pages:
                revision = page_revision
                for start in range(0, len(page), _SLICE_ENTRIES):
                    for entry in page[start : start + _SLICE_ENTRIES]:
                        loaded._apply(Change(entry.key, entry.value), notify=False)
                        if entry.key.startswith(self._keys.objects) and entry.key.endswith(f"/{self._host}"):
                            own_entries.append(entry)
                    await asyncio.sleep(0)
        known_members = self.members
        self.hosts, self.members, self.reserved_memory = loaded.hosts, loaded.members, loaded.reserved_memory
        self._holders = loaded._holders
        for name in known_members.keys() ^ self.members.keys():
            self._notify(name, is_member=name in self.members)
        self.is_current = True
        for listener in self.load_listeners:
            listener(own_entries)
        self.loaded.set()
        return revision

    def apply(self, change: Change) -> None:
        """Apply a change that this gateway knows before the watch reports it."""
        self._apply(change)

    def _apply(self, change: Change, *, notify: bool = True) -> None:
        """Apply a change. A value that cannot be read, from a newer release, counts as missing."""
        key, keys = change.key, self._keys
        if key.startswith(keys.objects):
            ref, _, host = key.removeprefix(keys.objects).rpartition("/")
            self._set_holder(ref, host, _parse(ObjectRecord.parse, change))
            if notify and change.value is not None:
                for listener in self.object_listeners:
                    listener(ref)
        elif key.startswith(keys.members):
            name = key.removeprefix(keys.members)
            was_member = name in self.members
            _set(self.members, name, _parse(MemberRecord.parse, change))
            if notify and was_member != (name in self.members):
                self._notify(name, is_member=name in self.members)
        elif key.startswith(keys.reservations):
            _set(self.reserved_memory, key.removeprefix(keys.reservations), _parse(int, change))
        elif key.startswith(keys.hosts):
            _set(self.hosts, key.removeprefix(keys.hosts), _parse(HostRecord.parse, change))

    def _set_holder(self, ref: str, host: str, record: ObjectRecord | None) -> None:
        holders = tuple(holder for holder in self._holders.get(ref, ()) if holder.host != host)
        if record is not None:
            holder = Holder(host, record.kind, record.id == ref, record.content, record.created_at)
            new_holders: tuple[Holder, ...] = (holder,)
            if not record.content:
                new_holders = self._shared_holders.setdefault(holder, new_holders)
            holders = holders + new_holders if holders else new_holders
        _set(self._holders, ref, holders or None)

    def _notify(self, name: str, *, is_member: bool) -> None:
        for listener in self.member_listeners:
            listener(name, is_member)


def _parse(parse: Callable[[bytes], _Value], change: Change) -> _Value | None:
    if change.value is None:
        return None
    try:
        return parse(change.value)
    except (ValueError, GatewayError):
        log.warning("a value in etcd cannot be read", key=change.key)
        return None


def _set(mapping: dict[_Key, _Value], key: _Key, value: _Value | None) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value
