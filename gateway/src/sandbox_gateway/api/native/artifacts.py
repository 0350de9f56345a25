"""Routes that push snapshots and templates to OCI registries, and pull them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from sandbox_gateway.api.access.auth import Permission, get_caller, get_plan_id, require_permission
from sandbox_gateway.api.dependencies import EngineDep, Ref
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.image_references import MAX_LENGTH
from sandbox_gateway.records import SnapshotKind

router = APIRouter(tags=["artifacts"])
TransferId = Annotated[str, Path(max_length=64, description="The id of a push or a pull.")]


@router.get("/artifacts", summary="Show what an artifact in a registry contains. Needs the scope admin")
async def show_artifact(
    request: Request,
    engine: EngineDep,
    reference: Annotated[
        str, Query(min_length=1, max_length=MAX_LENGTH, description="REGISTRY/REPOSITORY:TAG, or @DIGEST.")
    ],
) -> shapes.ArtifactShape:
    """Read the manifest and the config, whose signature is valid, with the configured credentials.

    `trusted` says whether this gateway, or another host of its fleet, has pushed the artifact.
    """
    _require_admin(request)
    artifact = await cancel_on_disconnect(request, engine.artifacts.inspect(reference))
    return shapes.describe_artifact(artifact, trusted=engine.transfers.is_trusted(artifact.signer))


@router.post(
    "/snapshots/{ref}/push",
    status_code=202,
    summary="Push a snapshot or template to a registry in the background, with all secrets of its guest",
)
async def push_snapshot(
    request: Request, ref: Ref, body: requests.PushSnapshot, engine: EngineDep
) -> shapes.TransferShape:
    return await _push(request, ref, body, engine)


@router.post(
    "/templates/{ref}/push",
    status_code=202,
    summary="Push a template to a registry in the background, with all secrets of its guest",
)
async def push_template(
    request: Request, ref: Ref, body: requests.PushSnapshot, engine: EngineDep
) -> shapes.TransferShape:
    return await _push(request, ref, body, engine, SnapshotKind.TEMPLATE)


@router.post("/snapshots/pull", status_code=202, summary="Pull a snapshot from a registry in the background")
async def pull_snapshot(request: Request, body: requests.PullSnapshot, engine: EngineDep) -> shapes.TransferShape:
    """Check the manifest, the signature and the names, and fetch the contents in the background.

    The snapshot gets a new id, which the transfer names when it is ready. If the memory cannot be restored on this
    host, only the disk is pulled: `imported.omittedMemory` of the snapshot says why. In a plan session, this needs the
    scope `admin`, because the gateway reads the manifest.
    """
    return await _pull(request, body, engine, SnapshotKind.SNAPSHOT)


@router.post("/templates/pull", status_code=202, summary="Pull a template from a registry in the background")
async def pull_template(request: Request, body: requests.PullTemplate, engine: EngineDep) -> shapes.TransferShape:
    """Pull like a snapshot. If a different template has the name, it loses the name, as when a template is built."""
    return await _pull(request, body, engine, SnapshotKind.TEMPLATE)


@router.get("/transfers", summary="List running and recently finished pushes and pulls")
async def list_transfers(engine: EngineDep) -> list[shapes.TransferShape]:
    return [shapes.describe_transfer(each) for each in engine.artifacts.list_transfers()]


@router.get("/transfers/{transfer}", summary="Show the progress of a push or a pull")
async def show_transfer(transfer: TransferId, engine: EngineDep) -> shapes.TransferShape:
    """Return the progress. A restarted gateway no longer knows earlier transfers: repeat them."""
    return shapes.describe_transfer(engine.artifacts.get_transfer(transfer))


@router.delete("/transfers/{transfer}", status_code=204, summary="Cancel a push or a pull, if it is still running")
async def cancel_transfer(transfer: TransferId, engine: EngineDep) -> None:
    await engine.artifacts.cancel(transfer)


async def _push(
    request: Request, ref: str, body: requests.PushSnapshot, engine: Engine, *kinds: SnapshotKind
) -> shapes.TransferShape:
    transfer = await engine.artifacts.push(
        ref,
        body.reference,
        memory=body.memory == "auto",
        login=body.build_login(),
        kinds=kinds,
        is_planned=bool(get_plan_id(request.scope)),
    )
    return shapes.describe_transfer(transfer)


async def _pull(
    request: Request, body: requests.PullSnapshot | requests.PullTemplate, engine: Engine, kind: SnapshotKind
) -> shapes.TransferShape:
    _require_admin(request)
    pull = engine.artifacts.pull(
        body.reference,
        name=body.name,
        trust=body.trust,
        login=body.build_login(),
        kind=kind,
        is_planned=bool(get_plan_id(request.scope)),
    )
    return shapes.describe_transfer(await cancel_on_disconnect(request, pull))


def _require_admin(request: Request) -> None:
    """Require the scope admin in plan sessions, too: the gateway contacts a registry with its credentials."""
    require_permission(get_caller(request.scope), Permission.ADMIN)
