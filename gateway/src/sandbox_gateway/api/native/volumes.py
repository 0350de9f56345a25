"""Routes of volumes (storage that outlives sandboxes), their snapshots and mounts."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.access.limits import VOLUME_IMPORT_PATH
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH, EngineDep, Ref
from sandbox_gateway.api.native import requests, shapes
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
from sandbox_gateway.api.native.view import ViewDep
from sandbox_gateway.api.paging import MAX_ITEMS, Limit, NextToken, paginate_list
from sandbox_gateway.api.waiting import cancel_on_disconnect, read_file
from sandbox_gateway.records import new_id

router = APIRouter(tags=["volumes"])
VolumeSnapshotRef = Annotated[
    str, Path(max_length=MAX_REF_LENGTH, description="Id or name of a snapshot of the volume.")
]


@router.post("/volumes", status_code=201, response_model_exclude_unset=True, summary="Create a volume")
async def create(request: Request, body: requests.CreateVolume, engine: EngineDep, view: ViewDep) -> shapes.VolumeShape:
    work = engine.volumes.create(body.name or new_id(), body.size_mb, body.from_snapshot)
    return await view.describe_volume(await cancel_on_disconnect(request, work), with_secrets=True)


@router.get("/volumes", response_model_exclude_unset=True, summary="List volumes")
async def list_volumes(
    response: Response,
    engine: EngineDep,
    view: ViewDep,
    # The published clients request only one page.
    limit: Limit = MAX_ITEMS,
    next_token: Annotated[NextToken, Query(alias="nextToken")] = "",
    name: str = "",
) -> list[shapes.VolumeShape]:
    volumes = [volume for volume in engine.volumes.list() if not name or volume.name == name]
    items = paginate_list(volumes, lambda volume: (volume.created_at, volume.id), response, limit, next_token)
    return list(await asyncio.gather(*(view.describe_volume(volume) for volume in items)))


@router.get("/volumes/{ref}", response_model_exclude_unset=True, summary="Show a volume")
async def show(ref: Ref, engine: EngineDep, view: ViewDep) -> shapes.VolumeShape:
    return await view.describe_volume(engine.volumes.get(ref), with_secrets=True)


@router.patch("/volumes/{ref}", response_model_exclude_unset=True, summary="Grow a volume")
async def grow(
    request: Request, ref: Ref, body: requests.GrowVolume, engine: EngineDep, view: ViewDep
) -> shapes.VolumeShape:
    return await view.describe_volume(await cancel_on_disconnect(request, engine.volumes.grow(ref, body.size_mb)))


@router.delete("/volumes/{ref}", status_code=204, summary="Remove a volume that nothing mounts")
async def delete(
    ref: Ref,
    engine: EngineDep,
    with_snapshots: Annotated[
        bool, Query(alias="withSnapshots", description="Also remove the snapshots of the volume")
    ] = False,
) -> None:
    await engine.volumes.delete(ref, with_snapshots=with_snapshots)


@router.post("/sandboxes/{ref}/volumes", status_code=201, summary="Mount a volume in a running sandbox")
async def attach(
    request: Request, ref: Ref, body: requests.VolumeMount, engine: EngineDep, view: ViewDep
) -> shapes.VolumeMountShape:
    return view.describe_mount(await cancel_on_disconnect(request, engine.attachments.attach(ref, body.build_spec())))


@router.delete("/sandboxes/{ref}/volumes/{volume}", status_code=204, summary="Unmount a volume")
async def detach(ref: Ref, volume: Ref, engine: EngineDep) -> None:
    await engine.attachments.detach(ref, volume)


@router.post("/volumes/{ref}/snapshots", status_code=201, summary="Capture a volume while sandboxes use it")
async def snapshot(
    request: Request, ref: Ref, engine: EngineDep, view: ViewDep, body: requests.CreateVolumeSnapshot | None = None
) -> shapes.VolumeSnapshotShape:
    work = engine.volumes.create_snapshot(ref, (body and body.name) or "")
    return view.describe_volume_snapshots([await cancel_on_disconnect(request, work)])[0]


@router.get("/volumes/{ref}/snapshots", summary="List the snapshots of a volume")
async def list_snapshots(
    ref: Ref,
    response: Response,
    engine: EngineDep,
    view: ViewDep,
    limit: Limit = 100,
    next_token: Annotated[NextToken, Query(alias="nextToken")] = "",
    name: str = "",
) -> list[shapes.VolumeSnapshotShape]:
    matching_snapshots = [
        snapshot for snapshot in engine.volumes.list_snapshots(ref) if not name or snapshot.name == name
    ]
    items = paginate_list(
        matching_snapshots, lambda snapshot: (snapshot.created_at, snapshot.id), response, limit, next_token
    )
    return view.describe_volume_snapshots(items)


@router.get(
    "/volumes/{ref}/snapshots/{snapshot}/export",
    summary="Export a snapshot of a volume as a file, with all secrets in it. Needs the scope admin",
    response_class=Response,
    responses=FILE_RESPONSE,
)
async def export(
    request: Request,
    ref: Ref,
    snapshot: VolumeSnapshotRef,
    engine: EngineDep,
    offset: SkippedBytes = 0,
    digest: SkippedDigest = "",
) -> Response:
    """Return the snapshot file, or the rest of it: see `GET /snapshots/{ref}/export`."""
    export = await engine.transfers.export_volume(ref, snapshot)
    return await respond(request, export, engine.config.server.stalled_seconds, offset, digest)


@router.post(
    VOLUME_IMPORT_PATH,
    status_code=201,
    response_model_exclude_unset=True,
    summary="Create a volume from a file with a snapshot of a volume",
    openapi_extra=FILE_BODY,
)
async def import_(
    request: Request,
    engine: EngineDep,
    view: ViewDep,
    name: Annotated[str, Query(max_length=MAX_REF_LENGTH, description="Replaces the volume's name in the file")] = "",
    trust: Trust = None,
    resume: Resume = "",
    offset: Offset = 0,
) -> shapes.VolumeShape:
    """Import a file that `GET /volumes/{ref}/snapshots/{snapshot}/export` returned."""
    # A plan session reads at most the beginning of the file, because that is enough for a prediction.
    is_in_plan = bool(get_plan_id(request.scope))
    volume = await engine.transfers.import_volume(
        read_file(request),
        name=name or None,
        trust=trust or (),
        continuation=build_continuation(resume, offset),
        head_only=is_in_plan,
    )
    return await view.describe_volume(volume, with_secrets=True)


@router.delete("/volumes/{ref}/snapshots/{snapshot}", status_code=204, summary="Remove a snapshot of a volume")
async def delete_snapshot(ref: Ref, snapshot: VolumeSnapshotRef, engine: EngineDep) -> None:
    await engine.volumes.delete_snapshot(ref, snapshot)


@router.post(
    "/volumes/{ref}/rollback", response_model_exclude_unset=True, summary="Roll a volume back to a snapshot of it"
)
async def rollback(
    request: Request, ref: Ref, body: requests.RollbackVolume, engine: EngineDep, view: ViewDep
) -> shapes.VolumeShape:
    volume = engine.volumes.get(ref)
    await cancel_on_disconnect(request, engine.volumes.rollback(volume.id, body.snapshot, force=body.force))
    return await view.describe_volume(engine.volumes.get(volume.id))
