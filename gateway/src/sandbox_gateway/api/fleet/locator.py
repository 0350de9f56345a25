"""Find the host of an object that a request names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal
from urllib.parse import quote

from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.api.fleet.forwarding import RawHeaders
from sandbox_gateway.api.fleet.route_targets import Kind
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.names import parse_build_id, remove_default_tag, split_tag
from sandbox_gateway.errors import Busy, Conflict, NotFound
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import HostUnavailable
from sandbox_gateway.fleet.records import Holder
from sandbox_gateway.records import Snapshot

KNOWS_PATH = "/fleet/knows/"
"""A path that only gateways request from each other: `/fleet/knows/KIND/REF` asks whether a host has an object.

KIND may also be `transfer`.
"""
_ASK_SECONDS = 5.0
_MAX_KNOWN_TRANSFERS = 1000
_KINDS: Mapping[Kind, tuple[str, ...]] = {
    "sandbox": ("sandbox",),
    "snapshot": ("snapshot", "template"),
    "template": ("template", "snapshot"),
    "volume": ("volume",),
}


class Locator:
    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._transfer_hosts: dict[str, str] = {}
        """Where transfers were found, oldest first."""
        self._finders: Mapping[Kind | Literal["transfer"], Callable[[str], object]] = {
            "transfer": engine.artifacts.get_transfer,
            "sandbox": engine.index.get_sandbox,
            "snapshot": engine.index.get_snapshot,
            "template": self._get_template_or_build,
            "volume": engine.index.get_volume,
        }

    def is_here(self, kind: Kind | Literal["transfer"], ref: str) -> bool:
        """Return whether this host has an object with this name or id."""
        try:
            self._finders[kind](ref)
        except (NotFound, Busy):
            return False  # A sandbox that is still arriving is Busy.
        return True

    def _get_template_or_build(self, ref: str) -> object:
        for find in (
            self._engine.index.get_snapshot,
            self._engine.templates.get_build,
            self._engine.templates.require_known_template,
        ):
            with contextlib.suppress(NotFound):
                return find(ref)
        raise NotFound("template", ref)

    def find_own_snapshot(self, ref: str) -> Snapshot | None:
        """Return this host's snapshot or template with this name or id, or None."""
        try:
            return self._engine.index.get_snapshot(ref)
        except NotFound:
            return None

    async def find_host(self, kind: Kind, ref: str, headers: RawHeaders) -> str:
        """Return the host of an object, or this host if it has the object, or if no host has it.

        ``headers``: those with which other hosts are asked for templates that are being built, and, while etcd is away,
        for objects that this gateway does not know. Empty: they are not asked for the latter. Raises Conflict if the
        name stands for different objects, and HostUnavailable if a host that is asked does not answer.
        """
        if not 0 < len(ref) <= MAX_REF_LENGTH or self.is_here(kind, ref):
            return self._fleet.name
        holders = await self.find_holders(kind, ref)
        if not holders:
            if kind == "template":
                return await self._find_build(ref, headers)
            return await self._find_without_etcd(kind, ref, headers)
        first, *others = sorted(holders, key=self._rank)
        if any(not first.may_share_name(other) for other in others):
            hosts = ", ".join(sorted(holder.host for holder in holders))
            raise Conflict(
                f"the name {ref!r} stands for different objects on the hosts {hosts}: use an id, or rename one of them"
            )
        return first.host

    async def find_holders(self, kind: Kind, ref: str) -> list[Holder]:
        """Return the other hosts with an object that has this name or id."""
        name = remove_default_tag(ref)
        template_id = parse_build_id(split_tag(name)[1])
        for candidate in dict.fromkeys((template_id, name) if template_id else (name,)):
            holders = await self._look_up(candidate, _KINDS[kind])
            if others := [holder for holder in holders if holder.host != self._fleet.name]:
                return others
        return []

    async def list_hosts(self, kind: Kind, ref: str) -> list[str]:
        """Return all hosts with an object that has this name or id: this host first, then the others by name."""
        others = sorted({holder.host for holder in await self.find_holders(kind, ref)})
        return [self._fleet.name, *others] if self.is_here(kind, ref) else others

    async def _look_up(self, ref: str, kinds: Sequence[str]) -> Sequence[Holder]:
        """Return the hosts with an object of one of ``kinds`` that has exactly this name or id."""
        return await self._fleet.directory.find_holders(ref, kinds)

    def _rank(self, holder: Holder) -> tuple[bool, float, str]:
        """Return the order in which hosts with copies are asked: running ones first, and the newest template first."""
        age = -holder.created_at.timestamp() if holder.created_at else 0.0
        return holder.host not in self._fleet.view.members, age, holder.host

    async def _find_without_etcd(self, kind: Kind, ref: str, headers: RawHeaders) -> str:
        """Return the host of an object that the view lacks because etcd is away, or this host if none has it."""
        if not headers or not self._fleet.is_etcd_away:
            return self._fleet.name
        host, silent_hosts = await self._ask_others(kind, ref, headers)
        if not host and silent_hosts:
            raise HostUnavailable(
                f"the {kind} {ref!r} is not known here while etcd is away, and these hosts do not answer: "
                f"{', '.join(silent_hosts)}. Try again later"
            )
        return host or self._fleet.name

    async def _find_build(self, ref: str, headers: RawHeaders) -> str:
        """Return the host that is building a template, which is not in the directory yet, or this host."""
        host, _ = await self._ask_others("template", ref, headers)
        return host or self._fleet.name

    async def find_transfer_host(self, id: str, headers: RawHeaders) -> str:
        """Return the host of a push or a pull, or this host if none knows it.

        Raises HostUnavailable if none knows it, but not all hosts have answered.
        """
        if not 0 < len(id) <= MAX_REF_LENGTH or self.is_here("transfer", id):
            return self._fleet.name
        host = self._transfer_hosts.get(id, "")
        if host in self._fleet.view.members:
            return host
        found_host, silent_hosts = await self._ask_others("transfer", id, headers)
        if not found_host and (silent_hosts or host):
            raise HostUnavailable(
                f"the transfer {id!r} is not known here, and these hosts do not answer: "
                f"{', '.join(silent_hosts or [host])}. Try again later"
            )
        if found_host:
            self._transfer_hosts[id] = found_host
            if len(self._transfer_hosts) > _MAX_KNOWN_TRANSFERS:
                del self._transfer_hosts[next(iter(self._transfer_hosts))]
        return found_host or self._fleet.name

    async def _ask_others(self, kind: str, ref: str, headers: RawHeaders) -> tuple[str, list[str]]:
        """Return the other host that knows an object, or "", and the hosts that did not answer."""
        target = f"{KNOWS_PATH}{kind}/{quote(ref, safe='')}".encode()
        others = sorted(self._fleet.view.members.keys() - {self._fleet.name})

        async def ask(host: str) -> bool | None:
            try:
                answer = await self._fleet.peers.request(host, "GET", target, headers, seconds=_ASK_SECONDS)
            except HostUnavailable:
                return None
            return answer.status == 204

        answers = dict(zip(others, await asyncio.gather(*map(ask, others)), strict=True))
        found_host = next((host for host, knows in answers.items() if knows), "")
        return found_host, [host for host, knows in answers.items() if knows is None]

    def answer(self, path: str) -> bool:
        """Return the answer to a request of another gateway whose path begins with KNOWS_PATH."""
        kind, _, ref = path.removeprefix(KNOWS_PATH).partition("/")
        return any(kind == known_kind and self.is_here(known_kind, ref) for known_kind in self._finders)
