"""The requests between the gateways of the two hosts of a move.

The source sends an ``Order``. While the target carries it out, it gets the snapshot from the source. Both ask each
other how far an interrupted move has come.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal
from urllib.parse import parse_qs, quote

import httpx
from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sandbox_gateway.api.access.auth import Caller, Permission
from sandbox_gateway.api.access.forwarded import CALLER_HEADER, format_caller
from sandbox_gateway.api.fleet.local import read_body
from sandbox_gateway.api.native.snapshot_files import ExportResponse
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import (
    BackendFailed,
    Busy,
    Conflict,
    GatewayError,
    Invalid,
    NameTaken,
    NoSpace,
    NotFound,
    OverQuota,
    Unavailable,
    Unsupported,
)
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer, Peers
from sandbox_gateway.fleet.records import MoveRecord
from sandbox_gateway.fleet.store import StoreRefused, StoreUnavailable
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Arrival, Sandbox
from sandbox_gateway.tasks import finish_despite_cancellation

MOVES_PATH = "/fleet/moves/"
"""The prefix of the paths that only gateways request from each other. The id of the sandbox follows."""
_MAX_ERROR_BYTES = 64 << 10
_ERRORS: dict[str, type[GatewayError]] = {
    error.kind: error for error in (Busy, Conflict, Invalid, NameTaken, NoSpace, OverQuota, Unavailable, Unsupported)
}
Progress = Literal["adopted", "arriving", "none"]
"""How far a move has come on its target: it has the sandbox, or what it needs to create it, or nothing."""

log = Logger("fleet")


class Order(BaseModel):
    """The request of the source that the target take over a sandbox."""

    model_config = ConfigDict(extra="ignore")

    move: MoveRecord
    resumes: bool
    """Whether to start the sandbox."""
    memory: bool
    """Whether the target restores its memory."""
    sandbox: dict[str, Any]


class MoveClient:
    """Sends the requests. All methods raise HostUnavailable, or the error with which the other gateway answers."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def check(self, sandbox: str, order: Order) -> None:
        """Raise the error with which the target would refuse a sandbox."""
        await self._call(order.move.target, "POST", f"{sandbox}/check", order.model_dump_json().encode())

    async def send(self, sandbox: str, order: Order) -> None:
        """Let the target take over a sandbox. Returns when it has adopted it."""
        body = order.model_dump_json().encode()
        await self._call(order.move.target, "POST", sandbox, body, seconds=None)

    async def send_first_pass(self, sandbox: str, order: Order) -> None:
        """Let the target get the capture of a sandbox that still runs. Returns when it has it."""
        body = order.model_dump_json().encode()
        await self._call(order.move.target, "POST", f"{sandbox}/first-pass", body, seconds=None)

    async def ask_target(self, sandbox: str, move: MoveRecord) -> Progress:
        answer = await self._call(move.target, "GET", f"{sandbox}?move={move.id}")
        progress: Progress = json.loads(answer.body)["progress"]
        return progress

    async def discard(self, sandbox: str, move: MoveRecord) -> None:
        """Let the target remove what has arrived, unless it has adopted the sandbox."""
        await self._call(move.target, "DELETE", f"{sandbox}?move={move.id}")

    async def is_departing(self, sandbox: str, move: str, source: str) -> bool:
        """Return whether the source still has a sandbox that departs with this move."""
        answer = await self._call(source, "GET", f"{sandbox}/departure?move={move}")
        is_departing: bool = json.loads(answer.body)["departing"]
        return is_departing

    async def read_first_pass(self, sandbox: str, order: Order) -> AsyncIterator[bytes]:
        """Yield the file with the capture of a sandbox that still runs."""
        async for piece in self._read_file(sandbox, order, "first-pass"):
            yield piece

    async def read_file(self, sandbox: str, order: Order, *, after_first_pass: bool) -> AsyncIterator[bytes]:
        """Yield the file with the snapshot from which the sandbox continues.

        ``after_first_pass``: only what differs from the first pass.
        """
        query = "&after=first-pass" if after_first_pass else ""
        async for piece in self._read_file(sandbox, order, "file", query):
            yield piece

    async def _read_file(self, sandbox: str, order: Order, name: str, query: str = "") -> AsyncIterator[bytes]:
        memory = "auto" if order.memory else "none"
        target = f"{MOVES_PATH}{sandbox}/{name}?move={order.move.id}&memory={memory}{query}".encode()
        async with self._peers.open(order.move.source, "GET", target, _create_headers(None), None) as response:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            try:
                if response.status_code != 200:
                    body = b""
                    async for piece in response.stream:
                        body = (body + piece)[:_MAX_ERROR_BYTES]
                    raise _create_error(Answer(order.move.source, response.status_code, response.headers, body))
                async for piece in response.stream:
                    yield piece
            except httpx.TransportError as error:
                raise self._peers.create_error(order.move.source, error) from None

    async def _call(
        self, host: str, method: str, path: str, body: bytes | None = None, *, seconds: float | None = 20.0
    ) -> Answer:
        target = f"{MOVES_PATH}{quote(path, safe='/?=&')}".encode()
        answer = await self._peers.request(host, method, target, _create_headers(body), body, seconds=seconds)
        if answer.status >= 300:
            raise _create_error(answer)
        return answer


def _create_headers(body: bytes | None) -> list[tuple[bytes, bytes]]:
    headers = [(CALLER_HEADER.encode(), format_caller(Caller("fleet", Permission.ADMIN)))]
    if body is not None:
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return headers


def _create_error(answer: Answer) -> GatewayError:
    """Return the error that another gateway has reported, for this gateway's client."""
    try:
        data = json.loads(answer.body)
        kind, message = str(data["kind"]), str(data["message"])
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"status {answer.status}"
    return _ERRORS.get(kind, BackendFailed)(f"host {answer.host!r}: {message}")


class MoveServer:
    """Answers the requests.

    ``active_ids``: the sandboxes whose moves are carried out now. ``resolve``: resolves an interrupted move.
    """

    def __init__(
        self, fleet: Fleet, engine: Engine, active_ids: set[str], resolve: Callable[[str], Awaitable[None]]
    ) -> None:
        self._fleet = fleet
        self._engine = engine
        self._moves = engine.moves
        self._active_ids = active_ids
        self._resolve = resolve
        self._client = MoveClient(fleet.peers)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of another gateway whose path begins with MOVES_PATH."""
        id, _, action = scope["path"].removeprefix(MOVES_PATH).partition("/")
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        move = query.get("move", [""])[-1]
        response: Response
        match scope["method"], action:
            case "POST", "check":
                order = Order.model_validate_json(await read_body(receive))
                await self._check(id, order)
                response = Response(status_code=204)
            case "POST", "":
                order = Order.model_validate_json(await read_body(receive))
                await cancel_on_disconnect(Request(scope, receive), self._carry_out(id, order))
                response = Response(status_code=204)
            case "GET", "":
                response = JSONResponse({"progress": self._get_progress(id, move)})
            case "DELETE", "":
                await self._discard(id, move)
                response = Response(status_code=204)
            case "GET", "departure":
                response = JSONResponse({"departing": self._moves.find_departing(id, move) is not None})
            case "POST", "first-pass":
                order = Order.model_validate_json(await read_body(receive))
                await cancel_on_disconnect(Request(scope, receive), self._receive_first_pass(id, order))
                response = Response(status_code=204)
            case "GET", "file" | "first-pass":
                memory = query.get("memory", [""])[-1] == "auto"
                if action == "file":
                    is_rest = query.get("after", [""])[-1] == "first-pass"
                    export = await self._moves.export(id, move, memory=memory, after_first_pass=is_rest)
                else:
                    export = await self._moves.first_passes.export(id, move, memory=memory)
                response = ExportResponse(export, self._engine.config.server.stalled_seconds)
            case _:
                raise NotFound("route", scope["path"])
        await response(scope, receive, send)

    async def _check(self, id: str, order: Order) -> None:
        if id in self._engine.index.arrivals and id not in self._active_ids:
            await self._resolve(id)
        await self._moves.check_arrival(order.sandbox, resumes=order.resumes)

    def _get_progress(self, id: str, move: str) -> Progress:
        if self._moves.find_arriving(id, move):
            return "arriving"
        return "adopted" if id in self._engine.index.sandboxes else "none"

    async def _discard(self, id: str, move: str) -> None:
        if id in self._active_ids:
            raise Busy(f"sandbox {id} is just arriving: try again later")
        await self._moves.discard_arrival(id, move)

    async def _carry_out(self, id: str, order: Order) -> None:
        """Take over a sandbox: import its snapshot, commit the move, and start the sandbox."""
        if id in self._active_ids:
            raise Busy(f"sandbox {id} is just being moved: try again later")
        self._active_ids.add(id)
        try:
            sandbox = await self._moves.check_arrival(order.sandbox, resumes=order.resumes)
            move = order.move
            arrival = Arrival(move=move.id, source=move.source, resumes=order.resumes)
            if not await self._try_to_receive_rest(sandbox, arrival, order):
                pieces = self._client.read_file(id, order, after_first_pass=False)
                await self._fleet.peers.run_while_answering(move.source, self._moves.receive(sandbox, arrival, pieces))
            await finish_despite_cancellation(self._take(sandbox, move))
        finally:
            self._active_ids.discard(id)
            await finish_despite_cancellation(self._moves.first_passes.forget(id, order.move.id))

    async def _try_to_receive_rest(self, sandbox: Sandbox, arrival: Arrival, order: Order) -> bool:
        """Receive what differs from the first pass, if there is one. Returns whether that was possible."""
        if not self._moves.first_passes.has_received(sandbox.id, arrival.move):
            return False
        pieces = self._client.read_file(sandbox.id, order, after_first_pass=True)
        try:
            await self._fleet.peers.run_while_answering(
                arrival.source, self._moves.receive(sandbox.model_copy(), arrival, pieces)
            )
            return True
        except (BackendFailed, Conflict, Invalid, NoSpace, NotFound, Unsupported) as error:
            log.warning("all data of a sandbox is sent again", sandbox=sandbox.id, reason=error.message)
            await self._moves.first_passes.forget(sandbox.id)
            return False

    async def _receive_first_pass(self, id: str, order: Order) -> None:
        pieces = self._client.read_first_pass(id, order)
        receiving = self._moves.first_passes.receive(id, order.move.id, pieces)
        await self._fleet.peers.run_while_answering(order.move.source, receiving)

    async def _take(self, sandbox: Sandbox, move: MoveRecord) -> None:
        """Commit a move, and create the sandbox. If it cannot be started, give it back, and raise the error.

        If etcd does not answer, ``move_recovery`` completes the move later.
        """
        id, names = sandbox.id, [sandbox.name]
        try:
            has_sandbox = await self._fleet.moves.commit(id, move, names)
        except (StoreUnavailable, StoreRefused) as error:
            raise Unavailable(f"whether the sandbox moves is decided later: {error.message}") from None
        if not has_sandbox:
            await self._moves.discard_arrival(id, move.id)
            raise Conflict("the move was aborted")
        committed_move = move.model_copy(update={"state": "committed"})
        try:
            await self._moves.adopt(id, move.id, must_start=True)
        except GatewayError as error:
            log.warning("a sandbox that has arrived cannot be started", sandbox=id, reason=error.message)
            if await self._fleet.moves.give_back(id, committed_move, names):
                await self._moves.discard_arrival(id, move.id)
            raise
        try:
            await self._fleet.moves.confirm(id, committed_move)
        except (StoreUnavailable, StoreRefused) as error:
            # The source asks this host instead.
            log.warning("a move could not be confirmed", sandbox=id, reason=error.message)
