"""Copy a snapshot or template to another host of the fleet.

The host that gets the copy exports the snapshot from a host that has it, and imports the file while it arrives. A copy
that was interrupted continues where it ended.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import httpx
from fastapi import APIRouter, Query, Request, Response

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.dependencies import EngineDep, Ref
from sandbox_gateway.api.fleet.forwarding import Forwarder, RawHeaders
from sandbox_gateway.api.fleet.locator import Locator
from sandbox_gateway.api.native import shapes
from sandbox_gateway.api.native.view import ViewDep
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.transfer.interrupted import Continuation, InterruptedImport
from sandbox_gateway.errors import BackendFailed, Busy, Conflict, GatewayError, NoSpace, NotFound, Unsupported
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Snapshot

_MAX_ERROR_BYTES = 64 << 10
_MAX_ANCESTORS = 16
_BODY_HEADERS = frozenset({b"content-length", b"content-type", b"transfer-encoding", b"accept-encoding"})
_Memory = Literal["auto", "none"]

log = Logger("fleet")


def create_router(fleet: Fleet, forwarder: Forwarder, locator: Locator) -> APIRouter:
    router = APIRouter(tags=["fleet"])

    @router.post(
        "/snapshots/{ref}/copy",
        status_code=201,
        response_model_exclude_unset=True,
        summary="Copy a snapshot or template to another host of the fleet. Needs the scope admin",
        responses={200: {"model": shapes.SnapshotShape, "description": "The host already has it"}},
    )
    async def copy(
        request: Request,
        response: Response,
        ref: Ref,
        engine: EngineDep,
        view: ViewDep,
        host: Annotated[str, Query(min_length=1, max_length=64, description="The host that gets the copy.")],
        memory: Annotated[_Memory, Query(description="none: copy only the disk.")] = "auto",
    ) -> shapes.SnapshotShape:
        """Copy a snapshot or template, under the same names. The copy gets its own id.

        If the memory cannot be restored on the other host, only the disk is copied: `imported.omittedMemory` says why.
        """
        if get_plan_id(request.scope):
            raise Unsupported("copies cannot be planned: make the copy without check mode")
        if host != fleet.name:
            raise NotFound(
                "host",
                host,
                message=f"the fleet has no host {host!r}: use one of {', '.join(sorted(fleet.view.hosts))}",
            )
        headers = [pair for pair in forwarder.build_headers(request.scope) if pair[0].lower() not in _BODY_HEADERS]
        source = await locator.find_host("snapshot", ref, headers)
        if source == fleet.name:
            response.status_code = 200
            return view.describe_snapshot(engine.snapshots.get(ref))
        copying = _Copying(fleet, engine, source, ref, headers, memory)
        return view.describe_snapshot(await cancel_on_disconnect(request, copying.run()))

    return router


class _Copying:
    def __init__(
        self, fleet: Fleet, engine: Engine, source: str, ref: str, headers: RawHeaders, memory: _Memory
    ) -> None:
        self._fleet = fleet
        self._engine = engine
        self._source = source
        self._path = f"/snapshots/{quote(ref, safe='')}"
        self._headers = headers
        self._memory = memory

    async def run(self) -> Snapshot:
        """Return the copy. Raises GatewayError."""
        imports = self._engine.transfers.interrupted_imports
        snapshot = await self._describe(self._path)
        snapshot_id = str(snapshot["snapshotID"])
        origin_id = str((snapshot.get("imported") or {}).get("snapshotID", ""))
        interrupted = next((each for each in imports.list() if each.snapshot == snapshot_id), None)
        if interrupted is not None:
            try:
                return await self._import(interrupted, origin_id, interrupted.base)
            except (Conflict, NotFound) as error:
                # The source would now send other bytes, for example with another release of the compression library.
                log.info("a copy begins again", snapshot=snapshot_id, reason=error.message)
                if interrupted in imports.list():
                    await imports.discard(interrupted.id)
        if base := await self._find_base(snapshot):
            try:
                return await self._import(None, origin_id, base)
            except (BackendFailed, Conflict, NoSpace, NotFound, Unsupported) as error:
                # For example, the source has an older release, or one of the two has just removed the base.
                log.info("all data of a snapshot is copied", snapshot=snapshot_id, reason=error.message)
        return await self._import(None, origin_id, "")

    async def _describe(self, path: str) -> dict[str, Any]:
        """Return a snapshot of the source. Raises GatewayError."""
        answer = await self._fleet.peers.request(self._source, "GET", path.encode(), self._headers)
        if answer.status != 200:
            raise _create_error(answer)
        snapshot: dict[str, Any] = json.loads(answer.body)
        return snapshot

    async def _find_base(self, snapshot: Mapping[str, Any]) -> str:
        """Return the id of the nearest ancestor, on the source, of which this host has a copy; "" if there is none."""
        if not self._engine.host.abilities.any_transfer_base:
            return ""
        memory = self._memory == "auto" and snapshot["memory"] != MemoryMode.NONE
        host = self._fleet.view.hosts.get(self._source)
        signer = host.signer if host is not None else ""
        has_copy = partial(self._engine.transfers.bases.has_copy, signer=signer, memory=memory)
        template_id = str(snapshot.get("templateID") or "")
        for _ in range(_MAX_ANCESTORS):
            id = str(snapshot.get("parentSnapshotID") or "")
            if id and has_copy(id):
                return id
            try:
                snapshot = await self._describe(f"/snapshots/{quote(id, safe='')}") if id else {}
            except GatewayError:
                break
        return template_id if template_id and has_copy(template_id) else ""

    async def _import(self, interrupted: InterruptedImport | None, origin_id: str, base: str) -> Snapshot:
        """Import the file, as long as the source answers."""
        return await self._fleet.peers.run_while_answering(
            self._source, self._import_file(interrupted, origin_id, base)
        )

    async def _import_file(self, interrupted: InterruptedImport | None, origin_id: str, base: str) -> Snapshot:
        query: dict[str, str] = {"memory": self._memory, **({"since": base} if base else {})}
        continuation = None
        if interrupted is not None and interrupted.file is not None:
            query |= {"offset": str(interrupted.file.size), "digest": interrupted.file.digest}
            continuation = Continuation(interrupted.id, interrupted.file.size)
        elif interrupted is not None:
            query["resumeToken"] = interrupted.resume_token
        target = f"{self._path}/export?{urlencode(query)}".encode()
        peers = self._fleet.peers
        async with peers.open(self._source, "GET", target, self._headers, None) as response:
            if response.status_code not in (200, 206):
                body = b""
                async for piece in _read_pieces(response):
                    body = (body + piece)[:_MAX_ERROR_BYTES]
                raise _create_error(Answer(self._source, response.status_code, response.headers, body))
            try:
                return await self._engine.transfers.import_(
                    _read_pieces(response), continuation=continuation, origin_id=origin_id
                )
            except httpx.TransportError as error:
                raise peers.create_error(self._source, error) from None


async def _read_pieces(response: httpx.Response) -> AsyncIterator[bytes]:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for piece in response.stream:
        yield piece


def _create_error(answer: Answer) -> GatewayError:
    """Return the error that another gateway has reported, for this gateway's client."""
    try:
        message = str(json.loads(answer.body)["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status}"
    message = f"host {answer.host!r} does not export the snapshot: {message}"
    if answer.status == NotFound.status:
        return NotFound("snapshot", "", message=message)
    errors: dict[int, type[GatewayError]] = {error.status: error for error in (Unsupported, Conflict, Busy, NoSpace)}
    return errors.get(answer.status, BackendFailed)(message)
