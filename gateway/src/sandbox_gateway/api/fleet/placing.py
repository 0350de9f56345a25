"""Let the right hosts create the sandboxes of a request."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.forwarded import HOLD_HEADER
from sandbox_gateway.api.body import MAX_FORKS
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.api.fleet.forwarding import Forwarder, get_target
from sandbox_gateway.api.fleet.local import replay, run_locally
from sandbox_gateway.api.fleet.locator import Locator
from sandbox_gateway.api.fleet.parts import LoadChange
from sandbox_gateway.api.fleet.route_targets import Placed
from sandbox_gateway.api.fleet.runs import FleetRuns
from sandbox_gateway.api.fleet.spreading import spread
from sandbox_gateway.api.native.requests import MAX_MOUNTS, Placement
from sandbox_gateway.engine.commit_gate import commit_gate
from sandbox_gateway.errors import GatewayError, Invalid, NoSpace, Unsupported
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer
from sandbox_gateway.fleet.placement import Candidate, Strategy, Wishes, place
from sandbox_gateway.fleet.records import Holder, describe_object


class Placer:
    def __init__(self, app: ASGIApp, fleet: Fleet, forwarder: Forwarder, runs: FleetRuns) -> None:
        self._app = app
        self._fleet = fleet
        self._forwarder = forwarder
        self._runs = runs

    async def run(
        self, route: Placed, parameters: Mapping[str, str], body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Carry out a request that creates sandboxes. An invalid one is left to this gateway's route to refuse."""
        data = parse_object(body) if body else {}
        wishes = data is not None and _parse_wishes(data)
        if data is not None and wishes and wishes.hosts:
            data = _group_names_by_host(data, wishes.hosts)
            body = json.dumps(data).encode()
        ref = find_ref(body, route.fields) if route.fields else parameters["ref"]
        holders = await self._list_holders(ref, self._runs.get_locator(scope))
        count = _count_sandboxes(data) if data is not None else 0
        if data is None or not wishes or not holders or not count:
            await self._app(scope, replay(body, receive), send)
            return
        hosts = sorted(holder.host for holder in holders)
        changes = await self._runs.find_load_changes(scope, hosts)
        missing_volumes = await self._find_missing_volumes(data, hosts, self._runs.get_locator(scope))
        candidates = [self._create_candidate(host, changes.get(host), missing_volumes.get(host, "")) for host in hosts]
        shares = place(count, candidates, wishes, self._choose_local(scope, candidates))
        if len(shares) == 1:
            (host,) = shares
            await self._run_on_one(host, count, candidates, wishes, body, scope, receive, send)
            return

        if "idempotency-key" in Headers(scope=scope):
            raise Unsupported(
                "Idempotency-Key: not supported for sandboxes on several hosts: omit the header and use names, or "
                "choose one host with placement.host"
            )

        async def ask(host: str, share: bytes, id: str) -> Answer:
            return await self._ask_for_share(host, share, id, scope, receive)

        response = await spread(self._fleet, data, shares, self._forwarder.build_headers(scope), ask)
        await response(scope, receive, send)

    async def _list_holders(self, ref: str, locator: Locator) -> list[Holder]:
        """Return the hosts with the snapshot. If templates with this name differ, only those with the newest one."""
        if not ref:
            return []
        holders = await locator.find_holders("snapshot", ref)
        if own := locator.find_own_snapshot(ref):
            record = describe_object(own)
            if record is None:
                return []
            holders.append(Holder(self._fleet.name, record.kind, False, record.content, record.created_at))
        if len({holder.content for holder in holders}) > 1:
            newest = max(holders, key=lambda holder: (holder.created_at is not None, holder.created_at))
            holders = [holder for holder in holders if holder.content == newest.content]
        return holders

    async def _find_missing_volumes(
        self, data: Mapping[str, Any], hosts: Sequence[str], locator: Locator
    ) -> dict[str, str]:
        """Return, for each host that lacks a volume that the sandboxes mount, the name of one.

        A volume that no host has is ignored: the chosen host refuses it.
        """
        missing_volumes: dict[str, str] = {}
        for volume in _list_mounted_volumes(data):
            if volume_hosts := await locator.list_hosts("volume", volume):
                missing_volumes |= {host: volume for host in hosts if host not in volume_hosts}
        return missing_volumes

    def _create_candidate(self, name: str, change: LoadChange | None, missing_volume: str) -> Candidate:
        """``change``: how the plan session of the request changes the load of the host, if there is one."""
        view = self._fleet.view
        member = view.members.get(name)
        if member is not None and change is not None:
            load = member.load
            planned_load = {
                "memory_free": load.memory_free + change.freed_memory,
                "sandboxes": load.sandboxes + change.new_sandboxes,
            }
            member = member.model_copy(update={"load": load.model_copy(update=planned_load)})
        return Candidate(name, member, view.hosts.get(name), view.reserved_memory.get(name, 0), missing_volume)

    def _choose_local(self, scope: Scope, candidates: Sequence[Candidate]) -> str:
        """Return the host to prefer. Requests with the same idempotency key prefer the same one at every gateway."""
        key = Headers(scope=scope).get("idempotency-key", "")
        if not key:
            return self._fleet.name
        return max(candidates, key=lambda each: hashlib.sha256(f"{key} {each.name}".encode()).digest()).name

    async def _run_on_one(
        self,
        host: str,
        count: int,
        candidates: list[Candidate],
        wishes: Wishes,
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Let one host create all sandboxes. If it has no room after all, try the next one."""
        while True:
            others = [candidate for candidate in candidates if candidate.name != host]
            attempt = _Attempt(send, functools.partial(self._find_next_host, count, others, wishes, scope))
            if host == self._fleet.name:
                await self._app({**scope}, replay(body, receive), attempt.send)
            else:
                addressed = await self._runs.address(scope, host, body)
                await self._forwarder.forward(host, addressed, receive, attempt.send, body)
            if not attempt.next_host:
                return
            host, candidates = attempt.next_host, others

    def _find_next_host(self, count: int, candidates: Sequence[Candidate], wishes: Wishes, scope: Scope) -> str:
        """Return the next host to try, or "" if no single one can take all sandboxes."""
        if not candidates:
            return ""
        try:
            hosts = [*place(count, candidates, wishes, self._choose_local(scope, candidates))]
        except GatewayError:
            return ""
        return hosts[0] if len(hosts) == 1 else ""

    async def _ask_for_share(self, host: str, share: bytes, id: str, scope: Scope, receive: Receive) -> Answer:
        kept_headers = [
            (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"transfer-encoding")
        ]
        share_scope = {**scope, "headers": [*kept_headers, (b"content-length", str(len(share)).encode())]}
        if host != self._fleet.name:
            addressed = await self._runs.address(share_scope, host, share)
            headers = [*self._forwarder.build_headers(addressed), (HOLD_HEADER.encode(), id.encode())]
            target = get_target(addressed)
            answer = await self._fleet.peers.request(host, scope["method"], target, headers, share, seconds=None)
            self._runs.record(scope, host, answer.headers)
            return answer
        answers: list[Answer] = []

        async def run(gate: Callable[[], Awaitable[None]]) -> None:
            commit_gate.set(gate)
            answers.append(await run_locally(self._app, share_scope, replay(share, receive), host))

        await self._fleet.holds.run(id, run)
        return answers[0]


class _Attempt:
    """Passes a response on, unless it says that the host has no room and there is another host to try."""

    def __init__(self, send: Send, find_next_host: Callable[[], str]) -> None:
        self._send = send
        self._find_next_host = find_next_host
        self.next_host = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == NoSpace.status:
            self.next_host = self._find_next_host()
        if not self.next_host:
            await self._send(message)


def parse_object(body: bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None if ``body`` is not one."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def find_ref(body: bytes, fields: tuple[str, ...]) -> str:
    """Return the first of ``fields`` that a JSON body has, or "" if it has none. The route itself validates it."""
    data = parse_object(body) or {}
    return next((value for field in fields if isinstance(value := data.get(field), str)), "")


def _parse_wishes(data: Mapping[str, Any]) -> Wishes | None:
    """Return the placement of a request, or None if it is invalid."""
    try:
        placement = Placement.model_validate(data.get("placement") or {})
    except ValidationError:
        return None
    default: Strategy = "local" if _count_sandboxes(data) == 1 else "spread"
    return Wishes(
        placement.host or "",
        placement.labels,
        placement.strategy or default,
        placement.anti_affinity,
        placement.hosts or (),
    )


def _group_names_by_host(data: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, Any]:
    """Return a request whose names are in the order of its hosts, because each host gets a series of names.

    ``hosts``: the host of each sandbox. Raises Invalid if there is not exactly one for each.
    """
    if _count_sandboxes(data) != len(hosts):
        raise Invalid("placement.hosts must contain one host for each new sandbox")
    names = data.get("names")
    if not isinstance(names, list):
        return dict(data)
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    pairs = sorted(zip(hosts, names, strict=True), key=lambda pair: order[pair[0]])
    return {**data, "names": [name for _, name in pairs]}


def _list_mounted_volumes(data: Mapping[str, Any]) -> list[str]:
    """Return the volumes that a request names, each once. The route itself validates the mounts."""
    mounts = data.get("volumeMounts")
    if not isinstance(mounts, list):
        return []
    names = [mount.get("name") for mount in mounts[:MAX_MOUNTS] if isinstance(mount, dict)]
    return [name for name in dict.fromkeys(map(str, filter(None, names))) if len(name) <= MAX_REF_LENGTH]


def _count_sandboxes(data: Mapping[str, Any]) -> int:
    """Return how many sandboxes a request creates, or 0 if that is invalid."""
    names = data.get("names")
    if names is not None:
        return len(names) if isinstance(names, list) and len(names) <= MAX_FORKS else 0
    count = data.get("count", data.get("n"))
    if count is None:
        return 1
    return count if isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_FORKS else 0
