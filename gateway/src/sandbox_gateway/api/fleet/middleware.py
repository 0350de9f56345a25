"""Middleware that lets the right hosts carry out the requests of the control plane.

It runs after authorization, and inside the limits of bodies. A request that another gateway has forwarded is always
carried out here, so that no request can go in circles.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.auth import get_applied_run_id, get_plan_id
from sandbox_gateway.api.access.forwarded import HOLD_HEADER, assign_request_id, is_forwarded
from sandbox_gateway.api.fleet.forwarding import HOST_HEADER, Forwarder, get_target
from sandbox_gateway.api.fleet.local import read_body, replay, run_locally
from sandbox_gateway.api.fleet.locator import KNOWS_PATH, Locator
from sandbox_gateway.api.fleet.merging import merge_events, merge_lists
from sandbox_gateway.api.fleet.placing import Placer, find_ref, parse_object
from sandbox_gateway.api.fleet.routes import (
    AllHolders,
    ByBody,
    ByObject,
    ByQuery,
    ByTransfer,
    Kind,
    Merged,
    MergedStream,
    Placed,
    find_route,
)
from sandbox_gateway.api.fleet.spreading import HOLDS_PATH
from sandbox_gateway.engine.commit_gate import commit_gate
from sandbox_gateway.errors import NotFound, Unsupported
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer


class FleetMiddleware:
    def __init__(self, app: ASGIApp, fleet: Fleet, forwarder: Forwarder, locator: Locator) -> None:
        self.app = app
        self._fleet = fleet
        self._forwarder = forwarder
        self._locator = locator
        self._placer = Placer(app, fleet, forwarder, locator)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send_with_host = self._name_host(send)
        if is_forwarded(scope):
            await self._carry_out(scope, receive, send_with_host)
            return
        assign_request_id(scope)
        await self._dispatch(scope, receive, send_with_host)

    async def _carry_out(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request that another gateway has sent."""
        path = scope["path"]
        if path.startswith(KNOWS_PATH):
            status = 204 if self._locator.answer(path) else 404
            await Response(status_code=status)(scope, receive, send)
        elif path.startswith(HOLDS_PATH):
            id = path.removeprefix(HOLDS_PATH)
            if scope["method"] == "POST":
                self._fleet.holds.release(id)
            else:
                await self._fleet.holds.wait_until_ready(id)
            await Response(status_code=204)(scope, receive, send)
        elif id := Headers(scope=scope).get(HOLD_HEADER, ""):
            await self._run_share(id, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _run_share(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def run(gate: Callable[[], Awaitable[None]]) -> None:
            commit_gate.set(gate)
            await self.app(scope, receive, send)

        await self._fleet.holds.run(id, run)

    def _name_host(self, send: Send) -> Send:
        """Add the header with the name of this host, unless the response is another host's."""

        async def send_with_host(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any(name == HOST_HEADER for name, _ in headers):
                    message = {**message, "headers": [*headers, (HOST_HEADER, self._fleet.name.encode())]}
            await send(message)

        return send_with_host

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, parameters = find_route(scope["method"], scope["path"])
        is_in_run = bool(get_plan_id(scope) or get_applied_run_id(scope))
        if isinstance(route, ByTransfer):
            await self._run_by_transfer(parameters["transfer"], scope, receive, send)
        elif isinstance(route, ByObject):
            await self._run_by_object(route.kind, parameters[route.parameter], scope, receive, send)
        elif isinstance(route, ByQuery):
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            host = query.get(route.parameter, [self._fleet.name])[-1]
            await self._run_on(host if host in self._fleet.view.hosts else self._fleet.name, scope, receive, send)
        elif isinstance(route, ByBody | AllHolders | Placed):
            await self._run_by_body(route, parameters, scope, receive, send)
        elif isinstance(route, Merged):
            await self._run_merged(route, scope, receive, send)
        elif isinstance(route, MergedStream) and not is_in_run:
            await self._run_merged_stream(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # -- one host ---------------------------------------------------------------------------------------------------

    async def _run_by_object(self, kind: Kind, ref: str, scope: Scope, receive: Receive, send: Send) -> None:
        host = await self._locator.find_host(kind, ref, self._forwarder.build_headers(scope))
        await self._run_on(host, scope, receive, send)

    async def _run_by_transfer(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._fleet.name
        # The transfers of a plan session are not real.
        if not get_plan_id(scope):
            host = await self._locator.find_transfer_host(id, self._forwarder.build_headers(scope))
        await self._run_on(host, scope, receive, send)

    async def _run_on(self, host: str, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
        if host == self._fleet.name:
            await self.app(scope, receive if body is None else replay(body, receive), send)
            return
        _require_forwardable(scope, host)
        await self._forwarder.forward(host, scope, receive, send, body)

    async def _run_by_body(
        self,
        route: ByBody | AllHolders | Placed,
        parameters: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        body = await read_body(receive)
        is_in_run = bool(get_plan_id(scope) or get_applied_run_id(scope))
        if isinstance(route, Placed) and is_in_run:
            _require_no_placement(scope, body)
        elif isinstance(route, Placed):
            await self._placer.run(route, parameters, body, scope, receive, send)
            return
        kind: Kind = "snapshot" if isinstance(route, Placed) else route.kind
        ref = find_ref(body, route.fields) if route.fields else parameters["ref"]
        if kind == "volume":
            ref = ref.partition("@")[0]
        if isinstance(route, AllHolders) and ref:
            holders = await self._locator.find_holders(kind, ref)
            hosts = sorted({holder.host for holder in holders})
            if self._locator.is_here(kind, ref):
                hosts.insert(0, self._fleet.name)
            if len(hosts) > 1:
                await self._run_on_all(hosts, scope, receive, send, body)
                return
        host = self._fleet.name
        if ref:
            host = await self._locator.find_host(kind, ref, self._forwarder.build_headers(scope))
        await self._run_on(host, scope, receive, send, body)

    # -- several hosts ----------------------------------------------------------------------------------------------

    async def _run_on_all(self, hosts: list[str], scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Let all hosts carry out a request. The response is the first error, or else that of the first host."""
        for host in hosts:
            if host != self._fleet.name:
                _require_forwardable(scope, host)
                self._fleet.peers.get_member(host)
        answers = [await self._ask(host, scope, receive, body) for host in hosts]
        # A copy may have been removed since the view was updated.
        answers = [each for each in answers if each.status != NotFound.status] or answers
        answer = next((each for each in answers if each.status >= 400), answers[0])
        response = Response(answer.body, answer.status, media_type=answer.headers.get("content-type"))
        response.headers[HOST_HEADER.decode()] = answer.host
        await response(scope, receive, send)

    async def _ask(self, host: str, scope: Scope, receive: Receive, body: bytes) -> Answer:
        if host == self._fleet.name:
            return await run_locally(self.app, scope, replay(body, receive), host)
        headers = self._forwarder.build_headers(scope)
        return await self._fleet.peers.request(host, scope["method"], get_target(scope), headers, body, seconds=None)

    async def _run_merged(self, route: Merged, scope: Scope, receive: Receive, send: Send) -> None:
        target, headers = get_target(scope), self._forwarder.build_headers(scope)
        if route.root_parameter:
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            if root := query.get(route.root_parameter, [""])[-1]:
                await self._run_by_root(root, scope, receive, send)
                return

        async def run_here() -> Answer:
            return await run_locally(self.app, scope, receive, self._fleet.name)

        response = await merge_lists(self._fleet, route, target, headers, run_here)
        await response(scope, receive, send)

    async def _run_by_root(self, ref: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._forwarder.build_headers(scope)
        kinds: tuple[Kind, ...] = ("sandbox", "snapshot")
        host = self._fleet.name
        if not any(self._locator.is_here(kind, ref) for kind in kinds):
            for kind in kinds:
                host = await self._locator.find_host(kind, ref, headers)
                if host != self._fleet.name:
                    break
        await self._run_on(host, scope, receive, send)

    async def _run_merged_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        target, headers = get_target(scope), self._forwarder.build_headers(scope)
        start: dict[str, Any] = {}
        async with contextlib.aclosing(self._stream_locally(scope, start)) as local:
            first_piece = await anext(local, b"")
            if start["status"] == 200:
                response: Response = merge_events(self._fleet, target, headers, _prepend(first_piece, local))
            else:
                # The other hosts would refuse the request, too.
                body = first_piece + b"".join([piece async for piece in local])
                media_type = Headers(raw=start["headers"]).get("content-type")
                response = Response(body, start["status"], media_type=media_type)
            await response(scope, receive, send)

    async def _stream_locally(self, scope: Scope, start: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the body of this gateway's own response, and put the message that starts it into ``start``."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                await queue.put(message.get("body", b""))

        async def wait_for_disconnect() -> Message:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._run_app(scope, wait_for_disconnect, put, queue))
        try:
            while piece := await queue.get():
                yield piece
        finally:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(task, return_exceptions=True)

    async def _run_app(self, scope: Scope, receive: Receive, send: Send, queue: asyncio.Queue[bytes]) -> None:
        await self.app({**scope}, receive, send)
        await queue.put(b"")


async def _prepend(first_piece: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        yield first_piece
        async for piece in pieces:
            yield piece


def _require_forwardable(scope: Scope, host: str) -> None:
    """Raise Unsupported if a request of a plan session or an applied run changes an object of another host.

    Reading is possible: what a run does not change is what it is.
    """
    if (noun := _describe_run(scope)) and scope["method"] != "GET":
        raise Unsupported(
            f"the object is on host {host!r}, but a {noun} can change only the host of its own gateway: use the "
            f"gateway of {host!r} for this task"
        )


def _require_no_placement(scope: Scope, body: bytes) -> None:
    if (parse_object(body) or {}).get("placement") is not None:
        raise Unsupported(
            f"placement: not supported in a {_describe_run(scope)}, whose sandboxes are all on the host of its own "
            "gateway: make this request outside of it (in Ansible, run the task without check mode and without a "
            "plan), or omit this field and use the gateway of the host that you want"
        )


def _describe_run(scope: Scope) -> str:
    return "plan session" if get_plan_id(scope) else "run that applies a plan" if get_applied_run_id(scope) else ""
