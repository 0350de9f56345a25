"""Routes of snapshots and of the lineage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.access.limits import IMPORT_PATH
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH, EngineDep, IdempotencyKey, OperationId, Ref
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.api.native.sandboxes import describe_forks
from sandbox_gateway.api.native.snapshot_files import (
    FILE_BODY,
    FILE_RESPONSE,
    Offset,
    Resume,
    SkippedBytes,
    SkippedDigest,
    Trust,
    build_continuation,
    respond,
)
from sandbox_gateway.api.native.view import ViewDep, find_ids
from sandbox_gateway.api.paging import Limit, NextToken, paginate
from sandbox_gateway.api.waiting import cancel_on_disconnect, read_file
from sandbox_gateway.engine.creation_order import Key
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import NotFound
from sandbox_gateway.records import Snapshot

router = APIRouter(tags=["snapshots"])
When = Annotated[
    Literal["unused"] | None,
    Query(description="unused: hide the snapshot now, and remove it when the last sandbox made from it is removed"),
]


@router.get("/snapshots", response_model_exclude_unset=True, summary="List snapshots")
async def list_snapshots(
    response: Response,
    engine: EngineDep,
    view: ViewDep,
    limit: Limit = 100,
    next_token: Annotated[NextToken, Query(alias="nextToken")] = "",
    name: str = "",
    sandbox: Annotated[str, Query(alias="sandboxID", description="Only snapshots of this sandbox (id or name)")] = "",
    template: Annotated[
        str, Query(alias="templateID", description="Only snapshots that descend from this template (id or name)")
    ] = "",
) -> list[shapes.SnapshotShape]:
    sources, templates = _find_sandbox_ids(sandbox, engine), find_ids(template, engine)

    def walk(after: Key | None, backwards: bool) -> Iterator[Snapshot]:
        return (
            snapshot
            for snapshot in engine.snapshots.walk(after=after, backwards=backwards)
            if (not name or name in snapshot.names)
            and (not sandbox or snapshot.source_sandbox in sources)
            and (not template or snapshot.template_id in templates)
        )

    items = paginate(walk, lambda snapshot: (snapshot.created_at, snapshot.id), response, limit, next_token)
    return [view.describe_snapshot(snapshot) for snapshot in items]


@router.get(
    "/snapshots/{ref}/export",
    summary="Export a snapshot or template as a file, with all secrets of its guest. Needs the scope admin",
    response_class=Response,
    responses=FILE_RESPONSE,
)
async def export(
    request: Request,
    ref: Ref,
    engine: EngineDep,
    memory: Annotated[Literal["auto", "none"], Query(description="none: export only the disk.")] = "auto",
    since: Annotated[
        str,
        Query(
            max_length=MAX_REF_LENGTH,
            description="A snapshot or template. Export only what differs from it.",
        ),
    ] = "",
    resume_token: Annotated[
        str,
        Query(
            alias="resumeToken",
            max_length=4096,
            description="Export only the rest, to continue the interrupted import that has this token.",
        ),
    ] = "",
    offset: SkippedBytes = 0,
    digest: SkippedDigest = "",
) -> Response:
    """Return the snapshot file, or, if a client has lost its connection, the rest of it.

    The gateway creates the bytes before `offset` again, and compares their digest. A plan session only checks whether
    the snapshot can be exported since `since`.
    """
    if since and get_plan_id(request.scope):
        await engine.transfers.check_export(ref, since=since)
        return Response(status_code=204)
    export = await engine.transfers.export(ref, memory=memory == "auto", since=since, resume_token=resume_token)
    return await respond(request, export, engine.config.server.stalled_seconds, offset, digest)


@router.post(
    IMPORT_PATH,
    status_code=201,
    response_model_exclude_unset=True,
    summary="Import a snapshot or template from a file",
    openapi_extra=FILE_BODY,
)
async def import_(
    request: Request,
    engine: EngineDep,
    view: ViewDep,
    name: Annotated[str, Query(max_length=MAX_REF_LENGTH, description="Replaces the names in the file")] = "",
    trust: Trust = None,
    resume: Resume = "",
    offset: Offset = 0,
) -> shapes.SnapshotShape:
    """Import a file that `GET /snapshots/{ref}/export` returned. The snapshot gets a new id.

    If the memory cannot be restored on this host, only the disk is imported: `imported.omittedMemory` says why.
    """
    # A plan session reads at most the beginning of the file, because that is enough for a prediction.
    is_in_plan = bool(get_plan_id(request.scope))
    snapshot = await engine.transfers.import_(
        read_file(request),
        name=name or None,
        trust=trust or (),
        continuation=build_continuation(resume, offset),
        head_only=is_in_plan,
    )
    return view.describe_snapshot(snapshot)


@router.get("/interrupted-imports", summary="List the interrupted imports that can be continued. Needs the scope admin")
async def list_interrupted_imports(engine: EngineDep) -> list[shapes.InterruptedImportShape]:
    """List interrupted imports.

    To continue one, send the rest of its file, from `receivedBytes`. If it has a `resumeToken` instead, export its
    snapshot again from the gateway that signed the file, with this token, and import the result.
    """
    return [shapes.describe_interrupted_import(each) for each in engine.transfers.interrupted_imports.list()]


@router.delete("/interrupted-imports/{id}", status_code=204, summary="Remove what an interrupted import has received")
async def discard_interrupted_import(id: Annotated[str, Path(max_length=MAX_REF_LENGTH)], engine: EngineDep) -> None:
    await engine.transfers.interrupted_imports.discard(id)


@router.get("/signer", summary="Show the key with which this gateway signs exported snapshots", tags=["gateway"])
async def show_signer(engine: EngineDep) -> shapes.SignerShape:
    return shapes.SignerShape(fingerprint=engine.transfers.get_signer().fingerprint)


@router.get(
    "/snapshots/{ref}", response_model_exclude_unset=True, summary="Show a snapshot, or a template as a snapshot"
)
async def show(ref: Ref, engine: EngineDep, view: ViewDep) -> shapes.SnapshotShape:
    return view.describe_snapshot(engine.snapshots.get(ref), with_users=True)


@router.delete(
    "/snapshots/{ref}",
    status_code=204,
    summary="Remove a snapshot",
    responses={202: {"model": shapes.HiddenShape, "description": "Hidden until its last user is removed"}},
)
async def delete(ref: Ref, engine: EngineDep, when: When = None) -> Response:
    return await remove(engine, engine.snapshots.get(ref), when)


@router.post(
    "/snapshots/{ref}/fork",
    status_code=201,
    response_model_exclude_unset=True,
    summary="Create one sandbox from a snapshot, or several with `count` or `names`",
)
async def fork(
    request: Request,
    ref: Ref,
    engine: EngineDep,
    view: ViewDep,
    body: requests.Fork | None = None,
    idempotency_key: IdempotencyKey = "",
    operation: OperationId = "",
) -> shapes.SandboxShape | shapes.ForksShape:
    body = body or requests.Fork()
    body.check_placement(engine.config)
    spec = body.build_fork_spec(idempotency_key, operation)
    if not body.has_count_or_names:
        return view.describe_sandbox(await cancel_on_disconnect(request, engine.forks.create(ref, spec)))
    return describe_forks(await cancel_on_disconnect(request, engine.forks.fork(ref, spec)), spec.names, view)


@router.post("/snapshots/{ref}/prewarm", summary="Set how many forks of a snapshot or template to keep ready")
async def prewarm(ref: Ref, engine: EngineDep, body: requests.Prewarm) -> shapes.PrewarmShape:
    """Set how many forks to keep ready, for new sandboxes and rollbacks to use.

    Missing forks are started in the background.
    """
    return shapes.describe_prewarm(await engine.prewarm.set_target(ref, body.count))


@router.get("/lineage", summary="Show the lineage of templates, sandboxes, snapshots and forks", tags=["gateway"])
async def show_lineage(
    engine: EngineDep,
    root: Annotated[str, Query(max_length=MAX_REF_LENGTH, description="Only descendants of this object")] = "",
    flat: Annotated[
        bool,
        Query(description="A list instead of trees: each object before its descendants, with `parent` and `depth`"),
    ] = False,
) -> Response:
    nodes = engine.snapshots.walk_lineage(root or None) if flat else engine.snapshots.build_lineage(root or None)
    # There can be many thousands of nodes: FastAPI would copy each, and hold the whole list in memory.
    texts = (json.dumps(node, ensure_ascii=False, separators=(",", ":")) for node in nodes)
    return Response(f"[{','.join(texts)}]", media_type="application/json")


async def remove(engine: Engine, snapshot: Snapshot, when: str | None) -> Response:
    """Delete a snapshot. The status is 204, or 202 if the snapshot is hidden until its last user is removed."""
    if await engine.snapshots.delete(snapshot.id, when_unused=when == "unused"):
        return Response(status_code=204)
    blockers = [blocker.id for blocker in engine.references.find_users(snapshot).blockers]
    shape = shapes.HiddenShape(snapshot_id=snapshot.id, status="hidden", blockers=blockers)
    return JSONResponse(shape.model_dump(), 202)


def _find_sandbox_ids(ref: str, engine: Engine) -> set[str]:
    try:
        return {ref, engine.sandboxes.get(ref).id}
    except NotFound:
        return {ref}
