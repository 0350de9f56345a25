"""Merge the lists and the events of all hosts.

Pages are stable, because a token identifies the last entry of a page by its creation time and id, on every host alike.
A header of the response names the hosts that did not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs

import anyio
import httpx
from starlette.responses import JSONResponse, Response

from sandbox_gateway.api.events import EventStream
from sandbox_gateway.api.fleet.forwarding import RawHeaders
from sandbox_gateway.api.fleet.route_targets import Merged
from sandbox_gateway.api.paging import NEXT_TOKEN_HEADER, encode_token
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer, HostUnavailable

MISSING_HEADER = "x-sandbox-hosts-missing"
"""The header that names the hosts whose objects are missing in a list."""
_LIST_SECONDS = 10.0
"""Maximum time that a host may stay silent."""
_FULL_LIST_SECONDS = 60.0
"""Maximum time that a host may take for its list, even if it never stays silent."""
_RECONNECT_SECONDS = 2.0
_DEFAULT_LIMIT = {"name": 1000}
"""By the field that identifies an entry: the default size of a page, if it is not 100."""


@dataclass(frozen=True)
class _List:
    entries: list[dict[str, Any]]
    has_more: bool


async def merge_lists(
    fleet: Fleet,
    route: Merged,
    target: bytes,
    local: Callable[[], Awaitable[Answer]],
    address: Callable[[str], Awaitable[tuple[bytes, RawHeaders]]],
) -> Response:
    """Return the merged lists of all hosts.

    ``target``: path and query of the client's request. ``local`` returns the list of this host. ``address`` returns the
    path, the query and the headers with which another host is asked.

    If a host refuses the request, its response is returned, because the others would refuse it, too. Raises
    HostUnavailable if the list is about one name, whose host does not answer: an empty list would say that it is free.
    """
    others = sorted(fleet.view.members.keys() - {fleet.name})
    requests = [local(), *(_ask(fleet, host, address) for host in others)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    missing = {*fleet.view.list_absent_hosts()}
    answers: list[Answer] = []
    for host, result in zip((fleet.name, *others), results, strict=True):
        if isinstance(result, HostUnavailable):
            missing.add(host)
        elif isinstance(result, BaseException):
            raise result
        elif result.status >= 500:
            missing.add(host)
        else:
            answers.append(result)
    if refusal := next((answer for answer in answers if answer.status != 200), None):
        return _convert_to_response(refusal)
    query = parse_qs(target.partition(b"?")[2].decode("latin-1"))
    if missing and (name := query.get("name", [""])[-1]):
        if silent_hosts := missing & {each.host for each in fleet.view.find_holders(name, route.kinds)}:
            raise HostUnavailable(
                f"{name!r} is on host {', '.join(sorted(silent_hosts))}, whose gateway does not answer: start it, or "
                "try again later"
            )
        missing = set()
    # The order must not depend on which gateway merges the lists.
    answers.sort(key=lambda answer: answer.host)
    lists = [_List(json.loads(answer.body), NEXT_TOKEN_HEADER in answer.headers) for answer in answers]
    if "sandbox" in route.kinds:
        _drop_moved_sandboxes(fleet, route, lists)
    response_headers = {MISSING_HEADER: ",".join(sorted(missing))} if missing else {}
    if not route.time:
        return JSONResponse([entry for each in lists for entry in each.entries], headers=response_headers)
    entries, next_token = _merge_pages(route, lists, query)
    if next_token:
        response_headers[NEXT_TOKEN_HEADER] = next_token
    return JSONResponse(entries, headers=response_headers)


async def _ask(fleet: Fleet, host: str, address: Callable[[str], Awaitable[tuple[bytes, RawHeaders]]]) -> Answer:
    target, headers = await address(host)
    try:
        async with asyncio.timeout(_FULL_LIST_SECONDS):
            return await fleet.peers.request(host, "GET", target, headers, seconds=_LIST_SECONDS)
    except TimeoutError:
        raise HostUnavailable(
            f"host {host!r} has not sent its list within {_FULL_LIST_SECONDS:.0f} s: try again later"
        ) from None


def _drop_moved_sandboxes(fleet: Fleet, route: Merged, lists: list[_List]) -> None:
    """Drop the entries of hosts that sandboxes have just left, and that still have them."""
    counts = Counter(entry[route.id] for each in lists for entry in each.entries)
    current_hosts = {id: fleet.view.find_holders(id)[:1] for id, count in counts.items() if count > 1}
    for each in lists:
        each.entries[:] = [
            entry
            for entry in each.entries
            if not (holders := current_hosts.get(entry[route.id])) or entry["sandboxHost"] == holders[0].host
        ]


def _merge_pages(route: Merged, lists: list[_List], query: dict[str, list[str]]) -> tuple[list[dict[str, Any]], str]:
    """Return the page, and the token of the next page, or "" if there is none."""
    all_entries = [entry for each in lists for entry in each.entries]
    if not route.is_paged:
        # Some of these times are whole seconds. The entries of a host keep their order.
        return sorted(all_entries, key=lambda entry: _get_key(route, entry)[0]), ""
    order = query.get("order", ["asc"])[-1]
    entries = sorted(all_entries, key=lambda entry: _get_key(route, entry), reverse=order == "desc")
    limit = int(query.get("limit", [str(_DEFAULT_LIMIT.get(route.id, 100))])[-1])
    if len(entries) <= limit and not any(each.has_more for each in lists):
        return entries, ""
    created_at, id = _get_key(route, entries[limit - 1])
    return entries[:limit], encode_token((created_at, id), "desc" if order == "desc" else "asc")


def _get_key(route: Merged, entry: dict[str, Any]) -> tuple[Any, str]:
    time = entry[route.time]
    return datetime.fromisoformat(time) if isinstance(time, str) else time, entry[route.id]


def _convert_to_response(answer: Answer) -> Response:
    media_type = answer.headers.get("content-type")
    return Response(answer.body, answer.status, media_type=media_type)


def merge_events(fleet: Fleet, target: bytes, headers: RawHeaders, local: AsyncGenerator[bytes, None]) -> Response:
    """Return a stream with the events of all hosts, of which ``local`` are those of this one.

    It also follows hosts that join later, or come back.
    """
    stream = _EventMerger(fleet, target, headers).run(local)
    return EventStream(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


class _EventMerger:
    def __init__(self, fleet: Fleet, target: bytes, headers: RawHeaders) -> None:
        self._fleet = fleet
        self._target = target
        self._headers = headers
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=100)

    async def run(self, local: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        tasks = {asyncio.create_task(self._follow_local(local)), asyncio.create_task(self._follow_members())}
        try:
            while (block := await self._queue.get()) is not None:
                yield block
        finally:
            for task in tasks:
                task.cancel()
            # A second cancellation would interrupt the closing of connections.
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_local(self, local: AsyncGenerator[bytes, None]) -> None:
        async with contextlib.aclosing(local):
            async for piece in local:
                await self._queue.put(piece)
        await self._queue.put(None)

    async def _follow_members(self) -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for host in self._fleet.view.members.keys() - {self._fleet.name}:
                    if host not in tasks or tasks[host].done():
                        tasks[host] = asyncio.create_task(self._follow_host(host))
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow_host(self, host: str) -> None:
        """Pass on the events of a host, each as a whole, until its stream ends."""
        with contextlib.suppress(HostUnavailable, httpx.TransportError):
            async with self._fleet.peers.open(host, "GET", self._target, self._headers, None) as response:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                unfinished_block = b""
                async for piece in response.stream:
                    *blocks, unfinished_block = (unfinished_block + piece).split(b"\n\n")
                    for block in blocks:
                        if block.startswith(b"event:"):
                            await self._queue.put(block + b"\n\n")
