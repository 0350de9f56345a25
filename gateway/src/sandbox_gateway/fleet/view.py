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
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

log = Logger("fleet")


class View:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
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
        """Called with all entries whenever the view has been read again as a whole."""
        self.member_listeners: list[Callable[[str, bool], None]] = []
        """Called with the name of a member, and whether it has come or gone."""
        self.object_listeners: list[Callable[[str], None]] = []
        """Called with a name or an id when another object gets it."""
        self._holders: dict[str, tuple[Holder, ...]] = {}
        """By name or id."""
        self._shared_holders: dict[Holder, Holder] = {}

    async def follow(self) -> None:
        """Read everything, and then follow all changes. Never returns."""
        while True:
            try:
                entries, revision = await self._store.load(self._keys.prefix)
                self._replace(entries)
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

    def _replace(self, entries: list[Entry]) -> None:
        known_members = {**self.members}
        self.hosts.clear()
        self.members.clear()
        self._holders.clear()
        self.reserved_memory.clear()
        for entry in entries:
            self._apply(Change(entry.key, entry.value), notify=False)
        for name in known_members.keys() ^ self.members.keys():
            self._notify(name, is_member=name in self.members)
        self.is_current = True
        for listener in self.load_listeners:
            listener(entries)
        self.loaded.set()

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
            if not record.content:
                holder = self._shared_holders.setdefault(holder, holder)
            holders += (holder,)
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
