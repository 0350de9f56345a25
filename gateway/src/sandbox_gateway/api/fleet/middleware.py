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

from sandbox_gateway.api.access.auth import get_caller, get_plan_id
from sandbox_gateway.api.access.forwarded import HOLD_HEADER, assign_request_id, is_forwarded
from sandbox_gateway.api.fleet.forwarding import HOST_HEADER, Forwarder, RawHeaders, get_target
from sandbox_gateway.api.fleet.local import read_body, replay, run_locally
from sandbox_gateway.api.fleet.locator import KNOWS_PATH, Locator
from sandbox_gateway.api.fleet.merging import merge_events, merge_lists
from sandbox_gateway.api.fleet.move_requests import MOVES_PATH, MoveServer
from sandbox_gateway.api.fleet.parts import RunPath, format_run_path, get_run_path
from sandbox_gateway.api.fleet.placing import Placer, find_ref
from sandbox_gateway.api.fleet.route_targets import (
    AllHolders,
    ByBody,
    ByObject,
    ByQuery,
    ByTransfer,
    Kind,
    Merged,
    MergedStream,
    OfRun,
    Placed,
    find_route,
)
from sandbox_gateway.api.fleet.runs import FleetRuns, add_prefix
from sandbox_gateway.api.fleet.spreading import HOLDS_PATH
from sandbox_gateway.engine.commit_gate import commit_gate
from sandbox_gateway.engine.plans.open_runs import derive_id
from sandbox_gateway.errors import NotFound
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer


class FleetMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        fleet: Fleet,
        forwarder: Forwarder,
        locator: Locator,
        runs: FleetRuns,
        moves: MoveServer,
    ) -> None:
        self.app = app
        self._fleet = fleet
        self._forwarder = forwarder
        self._locator = locator
        self._runs = runs
        self._moves = moves
        self._placer = Placer(app, fleet, forwarder, runs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send_with_host = self._name_host(scope, send)
        if await self._runs.carry_out(self._carry_out, scope, receive, send_with_host):
            return
        assign_request_id(scope)
        route, parameters = find_route(scope["method"], scope["path"])
        if path := get_run_path(scope):
            await self._run_at_home(path, scope, receive, send_with_host)
        elif isinstance(route, OfRun):
            await self._run_of_run(route, parameters, scope, receive, send_with_host)
        elif is_forwarded(scope):
            await self._carry_out(scope, receive, send_with_host)
        else:
            await self._dispatch(scope, receive, send_with_host)

    # -- runs -------------------------------------------------------------------------------------------------------

    async def _run_at_home(self, path: RunPath, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request in a run, at the gateway that has opened the run."""
        home = self._fleet.name
        if not is_forwarded(scope):
            home = await self._runs.find_home(path, get_caller(scope).name)
        if home != self._fleet.name:
            await self._forwarder.forward(home, add_prefix(scope, format_run_path(path)), receive, send)
            return
        with self._runs.request(scope) as is_home:
            if is_home:
                await self._dispatch(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    async def _run_of_run(
        self, route: OfRun, parameters: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Open, show or end a run, at the gateway that has opened it, or that opens it now."""
        owner, id, body = get_caller(scope).name, parameters.get("id", ""), None
        if not id:
            body = await read_body(receive)
            name = find_ref(body, ("run",))
            id = derive_id(owner, name) if name else ""
        home = self._fleet.name
        if id and not is_forwarded(scope):
            home = await self._runs.find_home((route.kind, id), owner, may_open=body is not None)
        try:
            await self._run_on(home, scope, receive, send, body)
        finally:
            if body is not None:
                self._runs.release_unopened((route.kind, id), owner)

    # -- requests of other gateways ---------------------------------------------------------------------------------

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
        elif path.startswith(MOVES_PATH):
            await self._moves.answer(scope, receive, send)
        elif id := Headers(scope=scope).get(HOLD_HEADER, ""):
            await self._run_share(id, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _run_share(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        async def run(gate: Callable[[], Awaitable[None]]) -> None:
            commit_gate.set(gate)
            await self.app(scope, receive, send)

        await self._fleet.holds.run(id, run)

    def _name_host(self, scope: Scope, send: Send) -> Send:
        """Add the header with the name of this host, unless the response is another host's."""

        async def send_with_host(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if not any(name == HOST_HEADER for name, _ in headers):
                    message = {**message, "headers": [*headers, (HOST_HEADER, self._fleet.name.encode())]}
                message = self._runs.record_response(scope, message)
            await send(message)

        return send_with_host

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, parameters = find_route(scope["method"], scope["path"])
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
        elif isinstance(route, MergedStream) and get_run_path(scope) is None:
            await self._run_merged_stream(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # -- one host ---------------------------------------------------------------------------------------------------

    async def _run_by_object(self, kind: Kind, ref: str, scope: Scope, receive: Receive, send: Send) -> None:
        locator = self._runs.get_locator(scope)
        host = await locator.find_host(kind, ref, self._forwarder.build_headers(scope))
        # The body says how many ids a plan session needs there.
        body = await read_body(receive) if get_plan_id(scope) and scope["method"] != "GET" else None
        await self._run_on(host, scope, receive, send, body)

    async def _run_by_transfer(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        locator = self._runs.get_locator(scope)
        host = await locator.find_transfer_host(id, self._forwarder.build_headers(scope))
        await self._run_on(host, scope, receive, send)

    async def _run_on(self, host: str, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
        if host == self._fleet.name:
            await self.app(scope, receive if body is None else replay(body, receive), send)
            return
        addressed = await self._runs.address(scope, host, body)
        await self._forwarder.forward(host, addressed, receive, send, body)

    async def _run_by_body(
        self,
        route: ByBody | AllHolders | Placed,
        parameters: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        body = await read_body(receive)
        if isinstance(route, Placed):
            await self._placer.run(route, parameters, body, scope, receive, send)
            return
        kind, locator = route.kind, self._runs.get_locator(scope)
        ref = find_ref(body, route.fields) if route.fields else parameters["ref"]
        if kind == "volume":
            ref = ref.partition("@")[0]
        if isinstance(route, AllHolders) and ref:
            hosts = await locator.list_hosts(kind, ref)
            if len(hosts) > 1:
                await self._run_on_all(hosts, scope, receive, send, body)
                return
        host = self._fleet.name
        if ref:
            host = await locator.find_host(kind, ref, self._forwarder.build_headers(scope))
        await self._run_on(host, scope, receive, send, body)

    # -- several hosts ----------------------------------------------------------------------------------------------

    async def _run_on_all(self, hosts: list[str], scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Let all hosts carry out a request. The response is the first error, or else that of the first host."""
        for host in hosts:
            if host != self._fleet.name:
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
        target, headers = await self._address(scope, host, body)
        answer = await self._fleet.peers.request(host, scope["method"], target, headers, body, seconds=None)
        self._runs.record(scope, host, answer.headers)
        return answer

    async def _address(self, scope: Scope, host: str, body: bytes | None = None) -> tuple[bytes, RawHeaders]:
        """Return the path, the query and the headers with which another host gets a request."""
        addressed = await self._runs.address(scope, host, body)
        return get_target(addressed), self._forwarder.build_headers(addressed)

    async def _run_merged(self, route: Merged, scope: Scope, receive: Receive, send: Send) -> None:
        if route.root_parameter:
            query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
            if root := query.get(route.root_parameter, [""])[-1]:
                await self._run_by_root(root, scope, receive, send)
                return

        async def run_here() -> Answer:
            return await run_locally(self.app, scope, receive, self._fleet.name)

        async def address(host: str) -> tuple[bytes, RawHeaders]:
            return await self._address(scope, host)

        response = await merge_lists(self._fleet, route, get_target(scope), run_here, address)
        await response(scope, receive, send)

    async def _run_by_root(self, ref: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers, locator = self._forwarder.build_headers(scope), self._runs.get_locator(scope)
        kinds: tuple[Kind, ...] = ("sandbox", "snapshot")
        host = self._fleet.name
        if not any(locator.is_here(kind, ref) for kind in kinds):
            for kind in kinds:
                host = await locator.find_host(kind, ref, headers)
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
