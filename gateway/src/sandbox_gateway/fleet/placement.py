"""Choose hosts for new sandboxes: filters, then weights.

This module only computes. The host that is chosen reserves the room itself, in the transaction that claims the names,
and refuses (507) what does not fit; then the next host is tried.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.errors import Conflict, NoSpace
from sandbox_gateway.fleet.records import HostRecord, MemberRecord

Strategy = Literal["local", "spread", "pack"]


@dataclass(frozen=True)
class Wishes:
    """The placement that a request asks for."""

    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: Strategy = "local"
    """local: this host, if it can, or else the one with the most free memory. spread: evenly. pack: few hosts."""
    anti_affinity: bool = False
    """Each sandbox of the request on a host of its own."""
    hosts: Sequence[str] = ()
    """The host of each sandbox, which is then no longer chosen. Empty: the strategy chooses the hosts."""


@dataclass(frozen=True)
class Candidate:
    name: str
    member: MemberRecord | None
    """None if the host's gateway does not run."""
    host: HostRecord | None
    reserved: int
    """Memory, in bytes, that machines that are starting there will need."""
    missing_volume: str = ""
    """A volume that the sandboxes mount and the host does not have."""
    obstacle: str = ""
    """Another reason, as a clause, why the host cannot take the sandboxes."""

    @property
    def is_cordoned(self) -> bool:
        return self.host is not None and self.host.cordoned

    @property
    def free_memory(self) -> int:
        return self.member.load.memory_free - self.reserved if self.member else 0

    def count_room(self) -> int:
        """Return how many more machines the host can start."""
        if self.member is None:
            return 0
        load = self.member.load
        by_memory = (self.free_memory - load.memory_reserve) // MACHINE_START_BYTES
        return max(0, min(by_memory, load.max_sandboxes - load.sandboxes))


def place(count: int, candidates: Sequence[Candidate], wishes: Wishes, local: str) -> dict[str, int]:
    """Return how many of ``count`` sandboxes each host gets.

    ``candidates``: the hosts with the snapshot. ``local``: this host. Raises Conflict if no host fits the wishes, and
    NoSpace if those that fit have no room; both name the reason for each host.
    """
    if any(each.name == wishes.host and each.is_cordoned for each in candidates):
        raise Conflict(
            f"host {wishes.host!r} is cordoned, so it gets no new sandboxes: choose another host, or uncordon it with "
            f"`sandboxctl host uncordon {wishes.host}`"
        )
    reasons = {candidate.name: _find_obstacle(candidate, wishes) for candidate in candidates}
    suitable = [candidate for candidate in candidates if not reasons[candidate.name]]
    if not suitable:
        raise Conflict(f"no host can take the sandbox: {_describe(reasons)}. Change the placement, or the hosts")
    rooms = {candidate.name: candidate.count_room() for candidate in suitable}
    if wishes.hosts:
        return _place_on(wishes.hosts, rooms, reasons)
    if wishes.anti_affinity:
        rooms = {name: min(room, 1) for name, room in rooms.items()}
    if sum(rooms.values()) < count:
        reasons |= {name: f"room for {room}" for name, room in rooms.items()}
        noun = "sandbox" if count == 1 else f"{count} sandboxes"
        one_each = ", each on a host of its own" if wishes.anti_affinity else ""
        raise NoSpace(
            f"the suitable hosts have no room for the {noun}{one_each}: {_describe(reasons)}. Delete or pause "
            "sandboxes, or request fewer"
        )
    free = {candidate.name: candidate.free_memory for candidate in suitable}
    shares: dict[str, int] = {}

    def rank(name: str) -> tuple[int, int, str]:
        if wishes.strategy == "spread":
            return shares.get(name, 0), -free[name], name
        if wishes.strategy == "pack":
            return 0, free[name], name
        return int(name != local), -free[name], name

    # There can be a thousand hosts, and a thousand sandboxes.
    queue = [rank(name) for name, room in rooms.items() if room]
    heapq.heapify(queue)
    for _ in range(count):
        *_, best = queue[0]
        shares[best] = shares.get(best, 0) + 1
        if shares[best] < rooms[best]:
            heapq.heapreplace(queue, rank(best))
        else:
            heapq.heappop(queue)
    return shares


def _place_on(hosts: Sequence[str], rooms: Mapping[str, int], reasons: Mapping[str, str]) -> dict[str, int]:
    """Return how many sandboxes each of the given hosts gets. Raises Conflict or NoSpace if one cannot take its share.

    ``rooms``: the room of the suitable hosts. ``reasons``: why the other hosts are not suitable.
    """
    shares = dict(Counter(hosts))
    if unsuitable := [host for host in shares if host not in rooms]:
        details = {host: reasons.get(host) or "it does not have the snapshot" for host in unsuitable}
        raise Conflict(f"a host cannot run the sandboxes placed on it: {_describe(details)}. Change the placement")
    if full := {host: f"room for {rooms[host]} of {count}" for host, count in shares.items() if rooms[host] < count}:
        raise NoSpace(
            f"a host has no room for its sandboxes: {_describe(full)}. Delete or pause sandboxes, or request fewer"
        )
    return shares


def _find_obstacle(candidate: Candidate, wishes: Wishes) -> str:
    """Return why a host cannot be chosen, as a clause, or "" if it can."""
    if (wishes.host and candidate.name != wishes.host) or (wishes.hosts and candidate.name not in wishes.hosts):
        return "not the requested host"
    if candidate.member is None:
        return "its gateway does not run"
    if candidate.missing_volume:
        return f"it does not have the volume {candidate.missing_volume!r}"
    if candidate.obstacle:
        return candidate.obstacle
    if candidate.is_cordoned:
        return "cordoned"
    for key, value in wishes.labels.items():
        if (actual := candidate.member.labels.get(key)) != value:
            return f"its label {key!r} is {actual!r}" if actual else f"it has no label {key!r}"
    return ""


def _describe(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)
