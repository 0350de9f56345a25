"""Create either all sandboxes of a request on several hosts, or none."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from sandbox_gateway.api.fleet.forwarding import RawHeaders
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer

HOLDS_PATH = "/fleet/holds/"
"""`GET /fleet/holds/ID` waits until a share runs, and `POST /fleet/holds/ID` commits it."""
_POLL_SECONDS = 0.05
_RELEASE_SECONDS = 20.0

Ask = Callable[[str, bytes, str], Coroutine[Any, Any, Answer]]
"""Sends a host (first argument) its share: the body of the request, and the id of the fork."""


class ShareFailed(Exception):
    """A host has refused its share, with this response."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.host)
        self.answer = answer


async def spread(
    fleet: Fleet, data: Mapping[str, Any], shares: Mapping[str, int], headers: RawHeaders, ask: Ask
) -> Response:
    """Create sandboxes on all hosts in ``shares``, or on none, and return the joined response.

    ``data``: the body of the request. ``shares``: how many sandboxes each host gets. ``headers``: those of the caller,
    for the hosts.
    """
    id = secrets.token_hex(8)
    bodies = _split_body(data, shares)
    tasks = {host: asyncio.create_task(ask(host, json.dumps(body).encode(), id)) for host, body in bodies.items()}
    try:
        try:
            await _wait_until_all_ready(fleet, id, tasks, headers)
        except ShareFailed as failure:
            answer = failure.answer
            return Response(answer.body, answer.status, media_type=answer.headers.get("content-type"))
        await fleet.holds.commit(id)
        await asyncio.gather(*(_release(fleet, host, id, headers) for host in tasks), return_exceptions=True)
        answers = [await task for task in tasks.values()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if failed := next((answer for answer in answers if answer.status >= 300), None):
        return Response(failed.body, failed.status, media_type=failed.headers.get("content-type"))
    return JSONResponse(_join_bodies([json.loads(answer.body) for answer in answers]), answers[0].status)


def _split_body(data: Mapping[str, Any], shares: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the body of each share: its names, in order, or its count."""
    names, bodies = [*(data.get("names") or [])], {}
    for host, count in shares.items():
        body = {key: value for key, value in data.items() if key not in ("names", "count", "n")}
        if names:
            body["names"], names = names[:count], names[count:]
        else:
            body["n" if "n" in data else "count"] = count
        bodies[host] = body
    return bodies


def _join_bodies(bodies: list[Any]) -> Any:
    """Join lists of sandboxes, or objects that contain such lists."""
    if isinstance(bodies[0], list):
        return [entry for body in bodies for entry in body]
    return {key: [entry for body in bodies for entry in body[key]] for key in bodies[0]}


async def _wait_until_all_ready(
    fleet: Fleet, id: str, tasks: Mapping[str, asyncio.Task[Answer]], headers: RawHeaders
) -> None:
    """Wait until all shares run, or raise the first error."""
    waiters = [asyncio.create_task(_wait_until_ready(fleet, host, id, task, headers)) for host, task in tasks.items()]
    try:
        done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_EXCEPTION)
        for waiter in done:
            waiter.result()
    finally:
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)


async def _wait_until_ready(fleet: Fleet, host: str, id: str, task: asyncio.Task[Answer], headers: RawHeaders) -> None:
    """Wait until a host's share runs. Raises ShareFailed, or the error of its request."""
    while True:
        waiting = asyncio.ensure_future(_ask_whether_ready(fleet, host, id, headers))
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            waiting.cancel()
            raise ShareFailed(task.result())
        if await waiting:
            return
        await asyncio.sleep(_POLL_SECONDS)


async def _ask_whether_ready(fleet: Fleet, host: str, id: str, headers: RawHeaders) -> bool:
    if host == fleet.name:
        try:
            await fleet.holds.wait_until_ready(id)
        except GatewayError:
            return False
        return True
    answer = await fleet.peers.request(host, "GET", f"{HOLDS_PATH}{id}".encode(), headers, seconds=None)
    return answer.status == 204


async def _release(fleet: Fleet, host: str, id: str, headers: RawHeaders) -> None:
    """Tell a host that its share is committed. If it does not answer, it learns that from etcd."""
    if host == fleet.name:
        fleet.holds.release(id)
        return
    await fleet.peers.request(host, "POST", f"{HOLDS_PATH}{id}".encode(), headers, seconds=_RELEASE_SECONDS)
