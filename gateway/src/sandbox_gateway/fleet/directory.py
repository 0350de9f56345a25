"""The names and ids of this host's objects in etcd.

A name is claimed before its object is committed: in one transaction, which succeeds if no other host has the name. The
claim is under the lease of this gateway, so that it ends with a gateway that dies. After the commit, the key is written
again without a lease, because the objects of a host that is down keep their names.

The index of the engine is the truth. Whatever changes there is published in the background, until etcd has it. Whenever
the view is read again as a whole (at the start, and when etcd is back, perhaps without its data), all objects are
compared with it: missing keys are written, and keys of objects that do not exist are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.index import list_names
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.errors import Busy, GatewayError, NameTaken, NoSpace
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.lookups import Lookups
from sandbox_gateway.fleet.membership import Membership
from sandbox_gateway.fleet.records import Holder, ObjectRecord, describe_object
from sandbox_gateway.fleet.store import (
    Entry,
    Operation,
    Store,
    StoreRefused,
    StoreUnavailable,
)
from sandbox_gateway.fleet.view import FleetView
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

_RETRY_SECONDS = 1.0
_MAX_ATTEMPTS = 5
_MAX_BATCH = etcd.MAX_TRANSACTION_OPERATIONS - 1
"""Each transaction also writes the reservation."""

log = Logger("directory")


@dataclass(frozen=True)
class _Published:
    """A key of this host, as etcd has it."""

    owner: str
    """The id of the object."""
    value: bytes
    is_claim: bool
    """Whether the key is under the lease."""


class Directory:
    """Implements ``engine.name_claims.NameClaims``."""

    def __init__(self, engine: Engine, store: Store, keys: Keys, view: FleetView, membership: Membership) -> None:
        self._engine = engine
        self._store = store
        self._keys = keys
        self._view = view
        self._membership = membership
        self._lookups = Lookups(store, keys)
        self._published: dict[str, _Published] = {}
        """By name or id."""
        self._refs: dict[str, set[str]] = {}
        """The keys of ``_published``, by the id of their object."""
        self._changed_ids: set[str] = set()
        """Ids of the objects whose keys may have to be written."""
        self._change = asyncio.Event()
        self._claimed_ids: Counter[str] = Counter()
        """Ids of the objects that are getting names, so that their keys must not be deleted."""
        self._held_claims: dict[object, Sequence[NameClaim]] = {}
        """The claims of the operations that run."""
        self._refs_in_flight: set[str] = set()
        """Names and ids in a request that publishes them."""
        self._refs_being_claimed: Counter[str] = Counter()
        """Names and ids in requests that claim them. etcd could carry out a request for the same key in any order."""
        self._publishing = asyncio.Lock()
        self._starting_machines: Counter[str] = Counter()
        """By the id of a new sandbox: 1 while it is being created."""
        self._conflicts: dict[tuple[str, str], str] = {}
        """A sentence for each name that another host also has, by the name and that host."""
        self._background = BackgroundTasks(log)

    def attach(self) -> None:
        """Follow the engine and the view from now on."""
        self._engine.index.listener = self._mark_changed
        self._engine.use_name_claims(self)
        self._view.load_listeners.append(self._compare)
        self._view.object_listeners.append(self._check_conflicts)
        self._membership.join_listeners.append(self._renew_claims)

    async def close(self) -> None:
        """Publish what has just been committed, because the lease, which still has its names, is about to end."""
        await self._background.cancel()
        if self._membership.lease and not self._store.is_away:
            try:
                await self._publish_changed()
            except GatewayError as error:
                log.warning("the last changes could not be published", reason=error.message)
        await self._lookups.close()

    def list_conflicts(self) -> list[str]:
        """Return a sentence for each name or id that an object of this host and one of another host have."""
        for ref, host in [*self._conflicts]:
            if host not in (holder.host for holder in self._find_conflicting_holders(ref)):
                del self._conflicts[ref, host]
        return [*self._conflicts.values()]

    async def find_holders(self, ref: str, kinds: Sequence[str] = ()) -> tuple[Holder, ...]:
        """Return the hosts with an object that has this name or id; ask etcd if the view does not know it (yet)."""
        if holders := self._view.find_holders(ref, kinds):
            return holders
        entries = await self._lookups.find(ref)
        holders = tuple(holder for entry in entries if (holder := self._parse_holder(ref, entry)))
        return tuple(holder for holder in holders if not kinds or holder.kind in kinds)

    def _parse_holder(self, ref: str, entry: Entry) -> Holder | None:
        """Return the holder that a key describes, or None if it cannot be read, like a value of a newer release."""
        if (record := ObjectRecord.try_parse(entry.value)) is None:
            return None
        host = entry.key.rpartition("/")[2]
        return Holder(host, record.kind, record.id == ref, record.content, record.created_at)

    # -- claims -----------------------------------------------------------------------------------------------------

    def require_free(self, names: Iterable[str]) -> None:
        if taken := {name: holders for name in names if (holders := self._find_others(name))}:
            raise create_name_taken_error(taken)

    def require_claimable(self, claims: Sequence[NameClaim]) -> None:
        taken: dict[str, list[Holder]] = {}
        for claim in claims:
            record = describe_object(claim.record)
            own = record and Holder(self._membership.name, record.kind, False, record.content)
            for name in claim.names:
                if others := [each for each in self._find_others(name) if not (own and own.may_share_name(each))]:
                    taken[name] = others
        if taken:
            raise create_name_taken_error(taken)

    def _find_others(self, ref: str) -> list[Holder]:
        return [holder for holder in self._view.find_holders(ref) if holder.host != self._membership.name]

    @contextlib.asynccontextmanager
    async def held(self, claims: Sequence[NameClaim], *, may_be_late: bool = False) -> AsyncIterator[None]:
        ids = [claim.record.id for claim in claims]
        self._claimed_ids.update(ids)
        machines = [
            claim.record.id
            for claim in claims
            if isinstance(claim.record, Sandbox) and claim.record.id not in self._engine.index.sandboxes
        ]
        key = object()
        try:
            await self._reserve_room(machines)
            self._held_claims[key] = claims
            try:
                # A thread sends the request, and cannot be cancelled.
                await finish_despite_cancellation(self._claim_all(claims))
            except StoreUnavailable:
                if not may_be_late:
                    raise
            yield
        finally:
            self._held_claims.pop(key, None)
            self._claimed_ids.subtract(ids)
            self._claimed_ids += Counter()
            for id in machines:
                self._starting_machines.pop(id, None)
            for id in ids:
                self._mark_changed(id)

    async def _reserve_room(self, machines: Sequence[str]) -> None:
        """Reserve memory for new machines. Raises NoSpace if it is free, but reserved for others that are starting.

        Only the gateway of a host reserves its memory. The transaction of the claim makes it known to the others.
        """
        if not machines:
            return
        reserve = self._engine.config.limits.free_memory_mb << 20
        free = (await self._engine.host.measure_room()).memory_free
        count = len(self._starting_machines) + len(machines)
        if reserve and free - count * MACHINE_START_BYTES < reserve:
            raise NoSpace(
                f"{len(machines)} more {'machine' if len(machines) == 1 else 'machines'} would need memory that is "
                f"reserved for {len(self._starting_machines)} machines that are starting: the host has {free >> 20} "
                "MiB free. Try again, or request fewer"
            )
        self._starting_machines.update(machines)

    async def _claim_all(self, claims: Sequence[NameClaim]) -> None:
        """Claim all names, in transactions that run at the same time, so that there is one wait."""
        if self._membership.refusal is not None:
            raise StoreUnavailable(
                f"this gateway is not a member of its fleet, so that no new names are given: "
                f"{self._membership.refusal.message}"
            )
        self._require_lease()
        outcomes = await asyncio.gather(
            *(self._claim_batch(batch) for batch in _split_into_batches(claims)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _require_lease(self) -> int:
        """Return the lease. Without one, the names that are claimed would never be released after a crash."""
        if not self._membership.lease:
            raise StoreUnavailable(
                "this gateway is not a member of its fleet at the moment, because etcd does not answer: new sandboxes "
                "and new names must wait until it is back"
            )
        return self._membership.lease

    async def _claim_batch(self, claims: Sequence[NameClaim]) -> None:
        owners = {ref: claim.record.id for claim in claims for ref in (claim.record.id, *claim.names)}
        self._refs_being_claimed.update(owners.keys())
        try:
            if self._refs_in_flight & owners.keys():
                async with self._publishing:
                    pass
            await self._claim_refs(claims, owners)
        finally:
            self._refs_being_claimed.subtract(owners.keys())
            self._refs_being_claimed += Counter()
            for ref, id in owners.items():
                self._mark_changed(id)
                if published := self._published.get(ref):
                    self._mark_changed(published.owner)

    async def _claim_refs(self, claims: Sequence[NameClaim], owners: dict[str, str]) -> None:
        records = {claim.record.id: describe_object(claim.record) for claim in claims}
        new_names = {name for claim in claims for name in claim.names}
        values = {ref: record.dump() for ref, id in owners.items() if (record := records[id])}
        for id in records:
            # The id of an object that gets another name must stay if this gateway dies.
            if id not in new_names and self._published.get(id) == _Published(id, values.get(id, b""), is_claim=False):
                del values[id]
        # No other host can have a name while this host has it.
        compare = [
            etcd.exists(self._keys.object(ref, self._membership.name))
            if ref in self._published
            else etcd.absent(self._keys.holders(ref))
            for ref in sorted(new_names)
        ]
        for _ in range(_MAX_ATTEMPTS):
            lease = self._require_lease()
            success = [etcd.put(self._get_key(ref), value, lease) for ref, value in values.items()]
            success.append(self._put_reservation(lease))
            failure = [etcd.read(self._keys.holders(name)) for name in sorted(new_names)]
            try:
                outcome = await self._store.transact(compare, success, failure)
            except (StoreUnavailable, StoreRefused) as error:
                # The keys may have been written: the end of the claim deletes them.
                for ref in values.keys() - self._published.keys():
                    self._set_published(ref, _Published(owners[ref], values[ref], is_claim=True))
                raise StoreUnavailable(error.message) from None
            if outcome.succeeded:
                for ref, value in values.items():
                    self._set_published(ref, _Published(owners[ref], value, is_claim=True))
                return
            self._require_shareable(outcome.entries, owners, records)
            compare = [etcd.unchanged_since(self._keys.holders(name), outcome.revision) for name in sorted(new_names)]
        raise Busy("other hosts are changing the same names at the moment: try again")

    def _require_shareable(
        self, entries: Iterable[Entry], owners: dict[str, str], records: dict[str, ObjectRecord | None]
    ) -> None:
        """Raise NameTaken unless all other holders of the names are copies of the objects that are getting them."""
        taken: dict[str, list[Holder]] = {}
        for entry in entries:
            ref = entry.key.removeprefix(self._keys.objects).rpartition("/")[0]
            holder, record = self._parse_holder(ref, entry), records[owners[ref]]
            if holder is None:
                holder = Holder(entry.key.rpartition("/")[2], "object", is_id=False)
            own = record and Holder(self._membership.name, record.kind, False, record.content)
            if holder.host != self._membership.name and not (own and own.may_share_name(holder)):
                taken.setdefault(ref, []).append(holder)
        if taken:
            raise create_name_taken_error(taken)

    def _put_reservation(self, lease: int) -> Operation:
        size = len(self._starting_machines) * MACHINE_START_BYTES
        return etcd.put(self._keys.reservation(self._membership.name), str(size).encode(), lease)

    # -- publishing -------------------------------------------------------------------------------------------------

    def _mark_changed(self, id: str) -> None:
        self._changed_ids.add(id)
        self._change.set()

    def _renew_claims(self) -> None:
        """Publish and claim again what may have ended with the previous lease."""
        for published in [*self._published.values()]:
            if published.is_claim:
                self._mark_changed(published.owner)
        for claims in self._held_claims.values():
            self._background.start(self._claim_again(claims))

    async def _claim_again(self, claims: Sequence[NameClaim]) -> None:
        try:
            await self._claim_all(claims)
        except GatewayError as error:
            # The operation goes on. If another host has got the name, the conflict is reported when it is complete.
            log.warning("the names of an operation could not be claimed again", reason=error.message)

    def _compare(self, entries: list[Entry]) -> None:
        """Compare all objects of this host with their keys in etcd."""
        claims = {ref: each for ref, each in self._published.items() if self._claimed_ids[each.owner]}
        self._published.clear()
        self._refs.clear()
        for entry in entries:
            ref = entry.key.removeprefix(self._keys.objects).rpartition("/")[0]
            # A value that cannot be read gets an owner that does not exist, so that it is replaced or deleted.
            record = ObjectRecord.try_parse(entry.value)
            owner = record.id if record else f"unreadable {ref}"
            self._set_published(ref, _Published(owner, entry.value, is_claim=entry.lease != 0))
        for ref, published in claims.items():
            self._set_published(ref, published)
        index = self._engine.index
        self._changed_ids |= self._refs.keys()
        for records in (index.sandboxes, index.snapshots, index.volumes, index.volume_snapshots):
            self._changed_ids |= records.keys()
        self._change.set()
        for ref in self._published:
            self._check_conflicts(ref)

    async def publish_changes(self) -> None:
        """Write and delete keys, until etcd has what the index has. Never returns."""
        while True:
            await self._change.wait()
            if not self._membership.lease:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._change.clear()
            try:
                await self._publish_changed()
            except GatewayError as error:
                log.warning("changes could not be published", count=len(self._changed_ids), reason=error.message)
                await asyncio.sleep(_RETRY_SECONDS)
                self._change.set()
            except Exception:
                # Without this task, no change would ever be published.
                log.error("changes could not be published", exc_info=True)
                await asyncio.sleep(_RETRY_SECONDS)
                self._change.set()

    async def _publish_changed(self) -> None:
        async with self._publishing:
            await self._publish([id for id in self._changed_ids if not self._claimed_ids[id]])

    async def _publish(self, ids: Sequence[str]) -> None:
        for batch in self._plan_batches(ids):
            self._refs_in_flight = {ref for change in batch for ref in change.list_refs()}
            try:
                operations = [operation for change in batch for operation in self._create_operations(change)]
                if operations:
                    if lease := self._membership.lease:
                        operations.append(self._put_reservation(lease))
                    await self._store.transact([], operations)
            finally:
                self._refs_in_flight = set()
            for change in batch:
                for ref, value in change.puts.items():
                    self._set_published(ref, _Published(change.id, value, is_claim=False))
                    self._check_conflicts(ref)
                for ref in change.deletions:
                    self._remove_published(ref, change.id)
                if not self._claimed_ids[change.id] and not self._plan(change.id).list_refs():
                    self._changed_ids.discard(change.id)
                else:
                    self._change.set()

    def _plan_batches(self, ids: Sequence[str]) -> Iterator[list[_KeyChange]]:
        """Yield the changes for these objects, planned when they are due, in batches that fit in a transaction."""
        batch: list[_KeyChange] = []
        size = 0
        for id in ids:
            change = self._plan(id)
            change_size = len(change.list_refs())
            if batch and size + change_size > _MAX_BATCH:
                yield batch
                batch, size, change = [], 0, self._plan(id)
            batch.append(change)
            size += change_size
        if batch:
            yield batch

    def _plan(self, id: str) -> _KeyChange:
        if self._engine.index.is_moving(id):
            return _KeyChange(id, {}, [])  # The commit of the move changes its keys.
        record = self._engine.index.find_record(id)
        value = record and describe_object(record)
        desired_refs = {id, *list_names(record)} if record and value else set()
        data = value.dump() if value else b""
        wanted = {ref: _Published(id, data, is_claim=False) for ref in desired_refs}
        return _KeyChange(
            id,
            {
                ref: data
                for ref, published in wanted.items()
                if self._published.get(ref) != published and not self._refs_being_claimed[ref]
            },
            [ref for ref in self._refs.get(id, ()) if ref not in wanted and not self._refs_being_claimed[ref]],
        )

    def _create_operations(self, change: _KeyChange) -> Iterator[Operation]:
        for ref, value in change.puts.items():
            yield etcd.put(self._get_key(ref), value)
        for ref in change.deletions:
            yield etcd.delete(self._get_key(ref))

    def _get_key(self, ref: str) -> str:
        return self._keys.object(ref, self._membership.name)

    def _set_published(self, ref: str, published: _Published) -> None:
        if (previous := self._published.get(ref)) and previous.owner != published.owner:
            self._remove_published(ref, previous.owner)
        self._published[ref] = published
        self._refs.setdefault(published.owner, set()).add(ref)

    def _remove_published(self, ref: str, owner: str) -> None:
        if (published := self._published.get(ref)) and published.owner == owner:
            del self._published[ref]
        if refs := self._refs.get(owner):
            refs.discard(ref)
            if not refs:
                del self._refs[owner]

    # -- conflicts --------------------------------------------------------------------------------------------------

    def _check_conflicts(self, ref: str) -> None:
        """Report an object of another host that has the name or id of an object of this one. Nothing is removed."""
        for other in self._find_conflicting_holders(ref):
            if (ref, other.host) in self._conflicts:
                continue
            record = ObjectRecord.try_parse(self._published[ref].value)
            own_kind = record.kind if record else "object"
            sentence = (
                f"the {own_kind.replace('_', ' ')} {ref!r} of host {self._membership.name} has the same name as a "
                f"{other.kind.replace('_', ' ')} of host {other.host}: rename or remove one of them. Until then, each "
                "of the two hosts uses its own, and the other hosts refuse the name"
            )
            self._conflicts[ref, other.host] = sentence
            log.warning("name conflict", name=ref, hosts=f"{self._membership.name}, {other.host}", what=sentence)
            hosts = [self._membership.name, other.host]
            self._engine.events.publish("fleet.name_conflict", name=ref, hosts=hosts, message=sentence)

    def _find_conflicting_holders(self, ref: str) -> list[Holder]:
        published = self._published.get(ref)
        if published is None or published.is_claim:
            return []
        index = self._engine.index
        if index.is_moving(published.owner) or published.owner not in index:
            return []  # It is about to be removed, for example because it has moved to another host.
        record = ObjectRecord.try_parse(published.value)
        if record is None:
            return []
        own = Holder(self._membership.name, record.kind, False, record.content)
        return [other for other in self._find_others(ref) if not own.may_share_name(other)]


@dataclass(frozen=True)
class _KeyChange:
    """The keys of one object that have to be written and deleted."""

    id: str
    puts: dict[str, bytes]
    deletions: list[str]

    def list_refs(self) -> list[str]:
        return [*self.puts, *self.deletions]


def _split_into_batches(claims: Sequence[NameClaim]) -> Iterator[list[NameClaim]]:
    batch: list[NameClaim] = []
    size = 0
    for claim in claims:
        claim_size = len({claim.record.id, *claim.names})
        if batch and size + claim_size > _MAX_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(claim)
        size += claim_size
    if batch:
        yield batch


def create_name_taken_error(taken: dict[str, list[Holder]]) -> NameTaken:
    places = ", ".join(
        f"{name!r} (a {holder.kind.replace('_', ' ')} of host {holder.host})"
        for name, holders in taken.items()
        for holder in holders
    )
    return NameTaken(
        f"the name is already in use: {places}. Choose another name, or remove the object that uses it",
        blockers=[*taken],
    )
