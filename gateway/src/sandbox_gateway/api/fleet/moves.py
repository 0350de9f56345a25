"""Move a sandbox to another host of the fleet.

The gateway of the source carries out the request. docs/fleets.md ("Move a sandbox") describes the steps.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Literal
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.dependencies import Ref
from sandbox_gateway.api.fleet.forwarding import HOST_HEADER, Forwarder
from sandbox_gateway.api.fleet.move_recovery import MoveRecovery
from sandbox_gateway.api.fleet.move_requests import MoveClient, Order
from sandbox_gateway.api.native import shapes
from sandbox_gateway.api.native.requests import NativeBody
from sandbox_gateway.api.native.view import ViewDep
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Busy, GatewayError, NoSpace, NotFound, Unavailable, Unsupported
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.placement import Candidate, Wishes, place
from sandbox_gateway.fleet.records import MoveRecord
from sandbox_gateway.fleet.store import StoreRefused, StoreUnavailable
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Name, Sandbox, SandboxState
from sandbox_gateway.tasks import finish_despite_cancellation

_BODY_HEADERS = frozenset({b"content-length", b"content-type", b"transfer-encoding"})

log = Logger("fleet")


class MoveSandbox(NativeBody):
    host: Name | None = Field(None, description="The host that gets it. Absent: the suitable one with the most memory.")
    memory: Literal["auto", "none"] = Field(
        "auto",
        description="auto: only hosts of the same platform can get a sandbox with memory. none: move only the disk, "
        "and boot the sandbox.",
    )


def create_router(fleet: Fleet, mover: Mover, forwarder: Forwarder) -> APIRouter:
    router = APIRouter(tags=["fleet"])

    @router.post(
        "/sandboxes/{ref}/move",
        response_model_exclude_unset=True,
        response_model=shapes.SandboxShape,
        summary="Move a sandbox to another host of the fleet. Needs the scope admin",
    )
    async def move(
        request: Request, ref: Ref, view: ViewDep, body: MoveSandbox | None = None
    ) -> shapes.SandboxShape | Response:
        """Move a sandbox, which keeps its id, name, metadata, token and timeout. It is paused for the last part.

        A sandbox that mounts volumes is refused. If the sandbox is on the host already, nothing changes.
        """
        if get_plan_id(request.scope):
            raise Unsupported("moves cannot be planned: move the sandbox without check mode")
        body = body or MoveSandbox()
        sandbox = view.engine.sandboxes.get(ref)
        if body.host == fleet.name:
            return view.describe_sandbox(sandbox)
        host = await cancel_on_disconnect(request, mover.move(sandbox.id, body.host or "", body.memory == "auto"))
        headers = [pair for pair in forwarder.build_headers(request.scope) if pair[0].lower() not in _BODY_HEADERS]
        answer = await fleet.peers.request(host, "GET", f"/sandboxes/{quote(sandbox.id)}".encode(), headers)
        response = Response(answer.body, answer.status, media_type=answer.headers.get("content-type"))
        response.headers[HOST_HEADER.decode()] = answer.host
        return response

    return router


class Mover:
    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._moves = engine.moves
        self._client = MoveClient(fleet.peers)
        self.recovery = MoveRecovery(fleet, engine)

    async def move(self, ref: str, host: str, with_memory: bool) -> str:
        """Move a sandbox of this host to ``host``, or to one that placement chooses, and return its name.

        If the move fails, the sandbox continues here. Raises GatewayError.
        """
        sandbox = self._moves.require_movable(ref)
        if sandbox.id in self.recovery.active_ids:
            raise Busy(f"sandbox {sandbox.id} is already being moved")
        self.recovery.active_ids.add(sandbox.id)
        try:
            order = await self._choose_target(sandbox, host, with_memory)
            try:
                await self._fleet.moves.begin(sandbox.id, order.move)
            except (StoreUnavailable, StoreRefused):
                self.recovery.has_stale_keys = True  # etcd may have carried out the request.
                raise
            await self._carry_out(sandbox, order)
            return order.move.target
        finally:
            self.recovery.active_ids.discard(sandbox.id)

    async def _choose_target(self, sandbox: Sandbox, host: str, with_memory: bool) -> Order:
        """Return the order for a host that would take the sandbox. Raises GatewayError."""
        candidates = self._list_candidates(sandbox, host, with_memory)
        while True:
            ((target, _),) = place(1, candidates, Wishes(host=host, strategy="spread"), self._fleet.name).items()
            order = Order(
                move=MoveRecord(id=secrets.token_hex(8), source=self._fleet.name, target=target),
                resumes=sandbox.state is SandboxState.RUNNING,
                memory=with_memory,
                sandbox=self._moves.describe_for_target(sandbox),
            )
            try:
                await self._client.check(sandbox.id, order)
                return order
            except NoSpace:
                candidates = [each for each in candidates if each.name != target]
                if not candidates:
                    raise

    def _list_candidates(self, sandbox: Sandbox, host: str, with_memory: bool) -> list[Candidate]:
        view = self._fleet.view
        names = sorted({*view.hosts, *view.members} - {self._fleet.name})
        if host and host not in names:
            message = f"the fleet has no host {host!r}: use one of {', '.join(names)}"
            raise NotFound("host", host, message=message)
        needs_platform = with_memory and self._moves.has_memory(sandbox)
        own_kind, own_platform = self._engine.host.kind, dict(self._engine.host.describe_platform())

        def find_obstacle(name: str) -> str:
            member = view.members.get(name)
            if member is None:
                return ""  # place() says so.
            if member.kind != own_kind:
                return f"it is a host of the kind {member.kind}"
            if needs_platform and member.platform != own_platform:
                return "it cannot restore the memory, because its platform differs; 'memory: none' moves only the disk"
            return ""

        return [
            Candidate(
                name,
                view.members.get(name),
                view.hosts.get(name),
                view.reserved_memory.get(name, 0),
                obstacle=find_obstacle(name),
            )
            for name in ([host] if host else names)
        ]

    async def _carry_out(self, sandbox: Sandbox, order: Order) -> None:
        try:
            async with self._first_pass_sent(sandbox, order):
                departing_sandbox = await self._moves.depart(sandbox.id, order.move.id, order.move.target)
                assert departing_sandbox.departure is not None
                changes = {
                    "sandbox": self._moves.describe_for_target(departing_sandbox),
                    # It may have been paused since the move began.
                    "resumes": departing_sandbox.departure.resumes,
                }
                await self._client.send(sandbox.id, order.model_copy(update=changes))
        except BaseException as error:
            if await finish_despite_cancellation(self._settle(sandbox.id, order.move)):
                return  # Only the answer of the target was lost.
            if isinstance(error, GatewayError):
                log.warning("a move has failed", sandbox=sandbox.id, host=order.move.target, reason=error.message)
            raise
        await finish_despite_cancellation(self._settle(sandbox.id, order.move))

    @contextlib.asynccontextmanager
    async def _first_pass_sent(self, sandbox: Sandbox, order: Order) -> AsyncIterator[None]:
        """Send a capture of a running sandbox, so that inside this context, only what differs from it must be sent.

        Without it, such as if the target has an older release, all data is sent.
        """
        first_passes = self._moves.first_passes
        if sandbox.state is not SandboxState.RUNNING or not first_passes.can_send:
            yield
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                captured = first_passes.captured(sandbox.id, order.move.id, memory=order.memory)
                await stack.enter_async_context(captured)
                await self._client.send_first_pass(sandbox.id, order)
            except GatewayError as error:
                log.warning("a move has no first pass", sandbox=sandbox.id, reason=error.message)
            yield

    async def _settle(self, id: str, move: MoveRecord) -> bool:
        """End the attempt of a move, and return whether the sandbox has left.

        Raises Unavailable if that cannot be decided yet.
        """
        try:
            if self._moves.find_departing(id, move.id) is None:
                await self.recovery.try_to_forget(id, move.id)
                return False
            return await self.recovery.resolve_departure(id)
        except GatewayError as error:
            raise Unavailable(
                f"the move of sandbox {id} to host {move.target!r} is not complete: {error.message}. Until it is, the "
                "sandbox stays paused. The gateways complete or undo the move as soon as they can"
            ) from None
