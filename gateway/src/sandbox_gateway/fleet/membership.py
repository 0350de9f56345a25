"""The membership of this gateway: its lease, its record, and the conditions for joining."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from sandbox_gateway import __version__
from sandbox_gateway.config import FleetSection
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.secret import write_durably
from sandbox_gateway.errors import Busy, Conflict, GatewayError, Invalid, NotFound
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.records import FORMAT, FleetRecord, HostRecord, Load, MemberRecord
from sandbox_gateway.fleet.secret import compute_fingerprint, has_own_secret, replace_own_secret
from sandbox_gateway.fleet.store import Store, StoreRefused, StoreUnavailable
from sandbox_gateway.fleet.view import FleetView
from sandbox_gateway.log import Logger

LEASE_SECONDS = 6
"""The time after which the others notice that this gateway has died. etcd checks leases about every half second."""
_RENEW_SECONDS = 2.0
_MAX_RECORD_AGE_SECONDS = 10.0
"""The record is renewed at least this often, so that every watch has something to read."""
_RECORD_AGE_SECONDS_PER_MEMBER = 0.5
"""In a large fleet, the record is renewed less often: each renewal costs etcd some work for each watch."""
_SIGNIFICANT_SHARE = 0.05
"""A change of a free size by this share of the total size is worth a new record."""
_MAX_ATTEMPTS = 5

log = Logger("fleet")


class Membership:
    def __init__(self, settings: FleetSection, engine: Engine, store: Store, keys: Keys, view: FleetView) -> None:
        self._settings = settings
        self._engine = engine
        self._store = store
        self._keys = keys
        self._view = view
        self._host_id = ""
        self.lease = 0
        """The id of the lease; 0 while there is none."""
        self.refusal: GatewayError | None = None
        """Why this gateway cannot be a member."""
        self.join_listeners: list[Callable[[], None]] = []
        """Called whenever a new lease has begun."""
        self._record: MemberRecord | None = None
        self._written_at = 0.0

    @property
    def name(self) -> str:
        return self._settings.name

    def describe_state(self) -> str:
        """Return "joined", or the reason why this gateway is not a member at the moment."""
        if self.refusal is not None:
            return self.refusal.message
        return "joined" if self.lease and not self._store.is_away else "etcd does not answer"

    async def join(self) -> None:
        """Join, or leave it to ``keep_alive`` if etcd is away. Raises Invalid or Conflict if the fleet is not ours."""
        state_root = self._engine.config.host.state_root
        self._host_id = await asyncio.to_thread(_load_host_id, state_root / "fleet-host-id")
        await asyncio.to_thread(self._check_own_secret, state_root)
        try:
            await self._enter()
        except StoreUnavailable as error:
            log.warning("the gateway joins its fleet later", reason=error.message)

    async def keep_alive(self) -> None:
        """Renew the lease; join again if it has ended. Never returns.

        Nothing else may delay this, such as a host that takes its time to measure its memory and disk.
        """
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                if self.lease and not await self._store.renew_lease(self.lease):
                    log.warning("the lease has ended, because etcd was away for too long", host=self.name)
                    self.lease = 0
                if not self.lease:
                    await self._enter()
            except StoreUnavailable:
                pass  # logged by the store
            except StoreRefused as error:
                log.warning("the membership could not be renewed", reason=error.message)
                self.lease = 0
            except (Invalid, Conflict) as error:
                if self.refusal is None:
                    log.error("the gateway cannot join its fleet", reason=error.message)
                self.refusal = error
            except Exception:
                # Such as a value in etcd that cannot be read. Without this task, the membership would end.
                log.error("the membership could not be renewed", exc_info=True)

    async def renew_record(self) -> None:
        """Publish the load of this host. Never returns."""
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                if self.lease:
                    await self._write_record()
            except StoreUnavailable:
                pass  # logged by the store
            except StoreRefused as error:
                log.warning("the load of this host could not be published", reason=error.message)
            except Exception:
                log.error("the load of this host could not be published", exc_info=True)

    async def leave(self) -> None:
        """End the lease, so that the others notice at once."""
        lease, self.lease = self.lease, 0
        if lease:
            try:
                await self._store.revoke_lease(lease)
            except GatewayError as error:
                log.warning("the lease could not be ended", reason=error.message)

    async def set_cordoned(self, name: str, cordoned: bool) -> None:
        """Decide whether a host gets new sandboxes. Raises NotFound, Busy, StoreUnavailable."""
        if name not in self._view.hosts:
            raise NotFound("host", name[:80])
        key = self._keys.host(name)
        for _ in range(_MAX_ATTEMPTS):
            entries = (await self._store.transact([], [etcd.read(key)])).entries
            # The key is a prefix of the keys of other hosts.
            value = next((entry.value for entry in entries if entry.key == key), None)
            if value is None:
                raise NotFound("host", name[:80])
            new_value = HostRecord.parse(value).model_copy(update={"cordoned": cordoned}).dump()
            # Another gateway may cordon the host, or the host may publish its new key, at the same time.
            if (await self._store.transact([etcd.has_value(key, value)], [etcd.put(key, new_value)])).succeeded:
                return
        raise Busy(f"other gateways are changing the record of host {name!r} at the moment: try again")

    async def forget_host(self, name: str) -> None:
        """Remove what a host that will not come back has left. Raises NotFound, Conflict, StoreUnavailable."""
        if name not in self._view.hosts:
            raise NotFound("host", name[:80])
        if name in self._view.members:
            raise Conflict(f"host {name!r} is a running member: stop its gateway first")
        operations = [etcd.delete(self._keys.object(ref, name)) for ref in self._view.list_refs(name)]
        operations.append(etcd.delete(self._keys.host(name)))
        not_running = etcd.is_absent(self._keys.member(name))
        for start in range(0, len(operations), etcd.MAX_TRANSACTION_OPERATIONS):
            batch = operations[start : start + etcd.MAX_TRANSACTION_OPERATIONS]
            if not (await self._store.transact([not_running], batch)).succeeded:
                raise Conflict(f"host {name!r} has just joined again: stop its gateway first")

    # -- joining ----------------------------------------------------------------------------------------------------

    def _check_own_secret(self, state_root: Path) -> None:
        """Raise Invalid if running machines know only tokens that were made from the host's own secret."""
        key = self._engine.secret.key
        if not has_own_secret(state_root, key):
            return
        if running := self._engine.index.list_running_sandboxes():
            raise Invalid(
                f"this host has a secret of its own, and {len(running)} running sandboxes that know only its tokens "
                f"({', '.join(each.name for each in running[:3])}{', …' if len(running) > 3 else ''}): make it the "
                f"fleet's secret ({self._settings.secret_file}) if this is the first host, or start the gateway "
                "without [fleet] and pause these sandboxes first"
            )
        replace_own_secret(state_root, key)

    async def _enter(self) -> None:
        await self._agree()
        await self._register()
        self._record = await self._describe()
        lease = await self._store.grant_lease(LEASE_SECONDS)
        await self._store.put(self._keys.member(self.name), self._record.dump(), lease)
        self._written_at = time.monotonic()
        self.lease, self.refusal = lease, None
        log.info("joined", host=self.name, address=self._settings.address)
        for listener in self.join_listeners:
            listener()

    async def _agree(self) -> None:
        """Found the fleet, or check that it has our secret and domain."""
        own = FleetRecord(secret=compute_fingerprint(self._engine.secret.key), domain=self._engine.config.server.domain)
        key = self._keys.fleet
        outcome = await self._store.transact([etcd.is_absent(key)], [etcd.put(key, own.dump())], [etcd.read(key)])
        if outcome.succeeded:
            return
        fleet = FleetRecord.parse(outcome.entries[0].value)
        if fleet.format > FORMAT:
            raise Invalid("the fleet was founded by a newer release: upgrade this gateway")
        if fleet.secret != own.secret:
            raise Invalid(
                f"the fleet at {self._keys.prefix} has another secret than {self._settings.secret_file}: copy the "
                "secret of a member to this host, because tokens must hold on every host"
            )
        if fleet.domain != own.domain:
            raise Invalid(
                f"server.domain is {own.domain!r}, but the fleet's is {fleet.domain!r}: set the same domain on all "
                "hosts, because every gateway serves the addresses of all sandboxes"
            )

    async def _register(self) -> None:
        """Reserve the name of this host for good."""
        key = self._keys.host(self.name)
        transfers = self._engine.transfers
        signer = transfers.get_signer().fingerprint if self._engine.host.abilities.transfer else ""
        value = HostRecord(host_id=self._host_id, signer=signer).dump()
        outcome = await self._store.transact([etcd.is_absent(key)], [etcd.put(key, value)], [etcd.read(key)])
        # The key is a prefix of the keys of other hosts.
        records = [HostRecord.parse(entry.value) for entry in outcome.entries if entry.key == key]
        owner = records[0] if records else None
        if owner is not None and owner.host_id != self._host_id:
            member = self._view.members.get(self.name)
            location = f" at {member.address}" if member else ""
            raise Conflict(
                f"another host{location} is {self.name!r} in this fleet: choose another fleet.name, or, if that host "
                f"will not come back, remove it with DELETE /fleet/hosts/{self.name}"
            )
        if owner is not None and owner.signer != signer:
            await self._store.put(key, owner.model_copy(update={"signer": signer}).dump())

    async def _write_record(self) -> None:
        record = await self._describe()
        assert self._record is not None
        age = time.monotonic() - self._written_at
        max_age = max(_MAX_RECORD_AGE_SECONDS, _RECORD_AGE_SECONDS_PER_MEMBER * len(self._view.members))
        if age >= max_age or _differs(record.load, self._record.load):
            await self._store.put(self._keys.member(self.name), record.dump(), self.lease)
            self._record, self._written_at = record, time.monotonic()

    async def _describe(self) -> MemberRecord:
        engine, settings = self._engine, self._settings
        load = self._record.load if self._record else Load()
        try:
            room = (await engine.room.report()).room
            load = Load(
                memory_total=room.memory_total,
                memory_free=room.memory_free,
                disk_total=room.disk_total,
                disk_free=room.disk_free,
                sandboxes=len(engine.index.sandboxes),
                max_sandboxes=engine.config.limits.sandboxes,
                memory_reserve=engine.config.limits.free_memory_mb << 20,
            )
        except GatewayError as error:
            log.warning("the load of this host is unknown", reason=error.message)
        return MemberRecord(
            host_id=self._host_id,
            address=settings.address,
            kind=engine.host.kind,
            platform=dict(engine.host.describe_platform()),
            labels=settings.labels,
            version=__version__,
            load=load,
        )


def _differs(new: Load, old: Load) -> bool:
    return (
        new.sandboxes != old.sandboxes
        or abs(new.memory_free - old.memory_free) > _SIGNIFICANT_SHARE * new.memory_total
        or abs(new.disk_free - old.disk_free) > _SIGNIFICANT_SHARE * new.disk_total
    )


def _load_host_id(path: Path) -> str:
    """Return the id of this host, which is created on first use."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        host_id = secrets.token_hex(8)
        write_durably(path, f"{host_id}\n".encode())
        return host_id
