"""Routes of forkd's dialect: `/v1`, `/healthz`, `/version`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from sandbox_gateway import __version__
from sandbox_gateway.api import output
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH, EngineDep, Ref
from sandbox_gateway.api.forkd import shapes
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.builds import Build
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid, NotFound, Unsupported
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind

router = APIRouter(tags=["forkd"])
TagRef = Annotated[str, Path(alias="ref", max_length=MAX_REF_LENGTH, description="A name or an id.")]


@router.get("/healthz", summary="Check that the gateway is running. Needs no key")
async def check_health() -> shapes.HealthInfo:
    return shapes.HealthInfo()


@router.get("/version", summary="Show the versions of the gateway and of these routes")
async def show_version() -> shapes.VersionInfo:
    return shapes.VersionInfo(version=__version__)


@router.get("/v1/snapshots", response_model_exclude_none=True, summary="List snapshots and templates")
async def list_snapshots(engine: EngineDep) -> list[shapes.SnapshotInfo]:
    snapshots = engine.snapshots.list([SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE])
    return [_describe_snapshot(engine, snapshot, tag) for snapshot in snapshots for tag in shapes.list_tags(snapshot)]


@router.post(
    "/v1/snapshots",
    status_code=201,
    response_model_exclude_none=True,
    summary="Build a template from a root file system on the gateway's host, and wait for it",
)
async def create_snapshot(request: Request, body: shapes.BuildSnapshot, engine: EngineDep) -> shapes.SnapshotInfo:
    if not body.rootfs.startswith("/"):
        raise Invalid(
            f"the field 'rootfs' is {body.rootfs[:80]!r}, which is not an absolute path: use the path of a directory "
            "or tarball on the gateway's host"
        )
    build = await engine.templates.build(body.tag, Recipe(source=Source.ROOTFS, path=body.rootfs))
    await cancel_on_disconnect(request, _wait_for_build(build))
    return _describe_snapshot(engine, engine.snapshots.get(body.tag), body.tag)


@router.delete(
    "/v1/snapshots/{ref}", status_code=204, summary="Remove a snapshot or template, or only a tag if it has several"
)
async def delete_snapshot(
    ref: TagRef,
    engine: EngineDep,
    cascade: Annotated[bool, Query(description="Not supported, because each snapshot is complete")] = False,
    force: Annotated[
        bool, Query(description="Hide the snapshot now, and remove it when the last sandbox made from it is removed")
    ] = False,
) -> None:
    snapshot = engine.snapshots.get(ref)
    if cascade:
        raise Unsupported(
            "the parameter 'cascade' is not supported, because each snapshot is complete, and its descendants remain "
            "without it: delete each snapshot separately"
        )
    if not await engine.snapshots.remove_name(ref):
        await engine.snapshots.delete(snapshot.id, when_unused=force)


@router.get("/v1/snapshots/{ref}/info", response_model_exclude_none=True, summary="Show the details of a snapshot")
async def show_snapshot(ref: TagRef, engine: EngineDep) -> shapes.SnapshotDetail:
    snapshot = engine.snapshots.get(ref)
    return shapes.describe_snapshot_in_detail(
        snapshot,
        shapes.choose_tag(snapshot, ref),
        engine.snapshots.get_file_paths(snapshot.id),
        ancestors=engine.snapshots.list_ancestors(snapshot.id),
        children=engine.snapshots.list_children(snapshot.id),
        sandboxes=[sandbox.id for sandbox in engine.references.find_users(snapshot).blocking_sandboxes],
    )


@router.post(
    "/v1/snapshots/{ref}/compact",
    status_code=201,
    response_model_exclude_none=True,
    summary="Give a snapshot or template another tag. Nothing is copied, because each snapshot is complete",
)
async def compact_snapshot(ref: TagRef, body: shapes.CompactSnapshot, engine: EngineDep) -> shapes.SnapshotInfo:
    snapshot = await engine.snapshots.add_name(ref, body.to)
    return _describe_snapshot(engine, snapshot, body.to)


@router.post("/v1/sandboxes", status_code=201, summary="Create n sandboxes from a snapshot or template: all or nothing")
async def create_sandboxes(
    request: Request, body: shapes.CreateSandboxes, engine: EngineDep
) -> list[shapes.SandboxInfo]:
    snapshot = engine.snapshots.get(body.snapshot_tag)
    spec = ForkSpec(count=body.n, memory_mb=body.memory_limit_mib, timeout=body.get_value_or_unset("timeout"))
    results = await cancel_on_disconnect(request, engine.forks.fork(snapshot.id, spec))
    return [_describe_sandbox(engine, sandbox) for sandbox in results if isinstance(sandbox, Sandbox)]


@router.get("/v1/sandboxes", summary="List sandboxes")
async def list_sandboxes(engine: EngineDep) -> list[shapes.SandboxInfo]:
    return [_describe_sandbox(engine, sandbox) for sandbox in engine.sandboxes.list()]


@router.get("/v1/sandboxes/{ref}", summary="Show a sandbox")
async def show_sandbox(ref: Ref, engine: EngineDep) -> shapes.SandboxInfo:
    return _describe_sandbox(engine, engine.sandboxes.get(ref))


@router.delete("/v1/sandboxes/{ref}", status_code=204, summary="Remove a sandbox")
async def kill_sandbox(ref: Ref, engine: EngineDep) -> None:
    await engine.sandboxes.delete(ref)


@router.post(
    "/v1/sandboxes/{ref}/exec",
    response_model=shapes.ExecInfo,
    summary="Run a program to completion and return its output",
)
async def execute(request: Request, ref: Ref, body: shapes.RunCommand, engine: EngineDep) -> Response:
    """Run a program to completion.

    The exit code is 127 if the program does not exist, 126 if it cannot be executed, and 137 if it was killed at its
    timeout. In these cases, `stderr` contains the reason.
    """
    sandbox_id = engine.sandboxes.get(ref).id
    work = engine.commands.exec(sandbox_id, body.args, timeout=body.timeout_secs)
    result = await cancel_on_disconnect(request, work)
    return output.build_response(sandbox_id, shapes.build_exec_fields(result, body.timeout_secs))


@router.post(
    "/v1/sandboxes/{ref}/eval",
    response_model=shapes.EvalInfo,
    summary="Evaluate Python in the sandbox's own interpreter",
)
async def evaluate(request: Request, ref: Ref, body: shapes.EvaluateCode, engine: EngineDep) -> Response:
    """Evaluate Python code in an interpreter that keeps its state between requests.

    Snapshots with memory contain this state, and so do the sandboxes made from them.
    """
    sandbox_id = engine.sandboxes.get(ref).id
    work = engine.commands.eval(sandbox_id, body.code, timeout=body.timeout_secs)
    result = await cancel_on_disconnect(request, work)
    return output.build_response(sandbox_id, shapes.build_eval_fields(result))


@router.post("/v1/sandboxes/{ref}/ping", summary="Check that the sandbox's agent answers")
async def ping(ref: Ref, engine: EngineDep) -> shapes.Pong:
    await engine.commands.ping(ref)
    return shapes.Pong()


@router.post(
    "/v1/sandboxes/{ref}/branch",
    status_code=201,
    response_model_exclude_none=True,
    summary="Capture a sandbox while it runs",
)
async def branch(
    request: Request, ref: Ref, engine: EngineDep, body: shapes.Branch | None = None
) -> shapes.SnapshotInfo:
    """Capture a sandbox while it runs.

    The modes full and diff have the same effect: only changes are written, but every snapshot is complete.
    """
    body, sandbox = body or shapes.Branch(), engine.sandboxes.get(ref)
    _check_mode(body)
    _check_parent(body, sandbox, engine)
    snapshot = await cancel_on_disconnect(request, engine.snapshots.branch(sandbox.id, body.tag))
    return _describe_snapshot(engine, snapshot, shapes.choose_tag(snapshot))


_NO_LIVE_MODE_REASON = "a sandbox is paused for a few milliseconds while it is captured"


def _check_mode(body: shapes.Branch) -> None:
    flags = [word for word in ("diff", "live") if getattr(body, word)]
    if body.mode and flags:
        raise Invalid(f"'mode' and '{flags[0]}' are mutually exclusive: omit '{flags[0]}'")
    if body.diff and body.live:
        raise Invalid("'diff' and 'live' are mutually exclusive: omit one of them")
    if body.measure_diff and (body.diff or body.mode == "diff"):
        raise Invalid("'measure_diff' is valid only with mode full, because mode diff always measures: omit it")
    if body.live or body.mode == "live":
        raise Unsupported(f"mode live is not supported, because {_NO_LIVE_MODE_REASON}: use mode diff")


def _check_parent(body: shapes.Branch, sandbox: Sandbox, engine: Engine) -> None:
    """Raise Invalid if ``parent_tag`` is neither the snapshot that the sandbox was made from nor its head."""
    if body.parent_tag is None:
        return
    if not (body.diff or body.mode == "diff"):
        raise Invalid("'parent_tag' is valid only with mode diff: set the mode, or omit 'parent_tag'")
    if engine.snapshots.get(body.parent_tag).id not in (sandbox.forked_from, sandbox.head):
        origin_tag = _find_tag_or_id(engine, sandbox.forked_from)
        raise Invalid(
            f"'parent_tag' is {body.parent_tag}, but sandbox {sandbox.id} was made from {origin_tag}: set it to "
            f"{origin_tag}, or omit it"
        )


async def _wait_for_build(build: Build) -> None:
    async for _ in build.follow():
        pass
    if build.status != "ready":
        raise BackendFailed(f"the template could not be built: {build.reason}")


def _describe_snapshot(engine: Engine, snapshot: Snapshot, tag: str) -> shapes.SnapshotInfo:
    return shapes.describe_snapshot(snapshot, tag, engine.snapshots.get_file_paths(snapshot.id))


def _describe_sandbox(engine: Engine, sandbox: Sandbox) -> shapes.SandboxInfo:
    try:
        address, _ = engine.agents.get_endpoint(sandbox.id)
    except GatewayError:
        address = ""
    return shapes.describe_sandbox(sandbox, _find_tag_or_id(engine, sandbox.forked_from), address)


def _find_tag_or_id(engine: Engine, id: str) -> str:
    try:
        return shapes.choose_tag(engine.snapshots.get(id))
    except NotFound:
        return id
