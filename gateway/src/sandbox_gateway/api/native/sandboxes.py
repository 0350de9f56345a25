"""Routes of sandboxes."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import parse_qsl, unquote

from fastapi import APIRouter, Body, Query, Request, Response

from sandbox_gateway.api import output
from sandbox_gateway.api.dependencies import EngineDep, IdempotencyKey, OperationId, Ref
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.api.native.view import View, ViewDep, find_ids, get_template_or_snapshot
from sandbox_gateway.api.paging import Limit, NextToken, Order, paginate
from sandbox_gateway.api.waiting import cancel_on_disconnect
from sandbox_gateway.engine.creation_order import Key
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import UNSET
from sandbox_gateway.errors import GatewayError, Invalid
from sandbox_gateway.records import Retention, Sandbox, SandboxState, new_id

router = APIRouter(tags=["sandboxes"])


@router.post(
    "/sandboxes",
    status_code=201,
    response_model_exclude_unset=True,
    summary="Create a sandbox from a template or a snapshot",
)
@router.post("/v2/sandboxes", status_code=201, response_model_exclude_unset=True, include_in_schema=False)
async def create(
    request: Request,
    body: requests.CreateSandbox,
    engine: EngineDep,
    view: ViewDep,
    idempotency_key: IdempotencyKey = "",
    operation: OperationId = "",
) -> shapes.SandboxShape:
    body.check_placement(engine.config)
    origin, spec = get_template_or_snapshot(engine, body.template), body.build_create_spec(idempotency_key, operation)
    return view.describe_sandbox(await cancel_on_disconnect(request, engine.forks.create(origin.id, spec)))


@router.get("/sandboxes", response_model_exclude_unset=True, summary="List sandboxes")
@router.get("/v2/sandboxes", response_model_exclude_unset=True, include_in_schema=False)
async def list_sandboxes(
    response: Response,
    engine: EngineDep,
    view: ViewDep,
    limit: Limit = 100,
    next_token: Annotated[NextToken, Query(alias="nextToken")] = "",
    order: Order = "asc",
    name: str = "",
    state: Annotated[str, Query(description="running, paused, or both, separated by a comma")] = "",
    metadata: Annotated[str, Query(description="`key=value&key=value`, URL-encoded; all must match")] = "",
    template: Annotated[str, Query(description="Id or name")] = "",
    forked_from: Annotated[
        str, Query(alias="snapshotID", description="Only sandboxes made from this snapshot or template")
    ] = "",
    started_after: Annotated[datetime | None, Query(alias="startedAfter")] = None,
    diverged: Annotated[bool, Query(description="Report whether each sandbox has diverged from its head")] = False,
) -> list[shapes.SandboxShape]:
    filters = [
        *_create_name_filters(name),
        *_create_state_filters(state),
        *_create_metadata_filters(metadata),
        *_create_template_filters(template, engine),
        *_create_source_filters(forked_from, engine),
        *_create_start_filters(started_after),
    ]

    def walk(after: Key | None, backwards: bool) -> Iterator[Sandbox]:
        sandboxes = engine.sandboxes.walk(after, backwards=backwards)
        return (sandbox for sandbox in sandboxes if all(is_match(sandbox) for is_match in filters))

    items = paginate(walk, lambda sandbox: (sandbox.created_at, sandbox.id), response, limit, next_token, order)
    if diverged:
        return await view.describe_sandboxes_and_divergence(items)
    return [view.describe_sandbox(sandbox, with_secrets=False) for sandbox in items]


@router.get("/sandboxes/{ref}", response_model_exclude_unset=True, summary="Show a sandbox")
async def show(
    ref: Ref,
    engine: EngineDep,
    view: ViewDep,
    diverged: Annotated[
        bool,
        Query(
            description="Report whether the sandbox has diverged from its head. This makes the guest write to its disk"
        ),
    ] = True,
) -> shapes.SandboxShape:
    sandbox = engine.sandboxes.get(ref)
    return await view.describe_sandbox_and_divergence(sandbox) if diverged else view.describe_sandbox(sandbox)


@router.get("/sandboxes/{ref}/usage", summary="Show the disk and memory use of a sandbox")
async def show_usage(ref: Ref, engine: EngineDep) -> shapes.UsageShape:
    return shapes.describe_usage(await engine.sandboxes.get_usage(ref))


EpochSeconds = Annotated[int | None, Query(ge=0, le=1 << 40, description="In seconds since 1970.")]


@router.get("/sandboxes/{ref}/metrics", summary="Show a sandbox's current and recent resource usage")
async def list_metrics(
    ref: Ref, engine: EngineDep, start: EpochSeconds = None, end: EpochSeconds = None
) -> list[shapes.MetricShape]:
    if start is not None and end is not None and start > end:
        raise Invalid(f"the parameter 'start' ({start}) is after 'end' ({end}): swap them")
    sandbox = engine.sandboxes.get(ref)
    # `end` is in whole seconds, and its last second is included completely.
    samples = await engine.loads.get_history(sandbox.id, start or 0, math.inf if end is None else end + 1)
    return [shapes.describe_sample(sandbox, sample) for sample in samples]


@router.patch("/sandboxes/{ref}", response_model_exclude_unset=True, summary="Change name, metadata or timeout")
async def patch(ref: Ref, body: requests.Patch, engine: EngineDep, view: ViewDep) -> shapes.SandboxShape:
    sandbox = engine.sandboxes.get(ref)
    if body.name is not None or body.metadata is not None:
        await engine.sandboxes.update(sandbox.id, metadata=body.metadata, name=body.name)
    if (timeout := body.get_value_or_unset("timeout")) is not UNSET:
        await engine.sandboxes.set_timeout(sandbox.id, timeout)
    return await view.describe_sandbox_and_divergence(engine.sandboxes.get(sandbox.id))


@router.delete("/sandboxes/{ref}", status_code=204, summary="Remove a sandbox")
async def kill(ref: Ref, engine: EngineDep) -> None:
    await engine.sandboxes.delete(ref)


@router.post(
    "/sandboxes/{ref}/connect", response_model_exclude_unset=True, summary="Resume the sandbox if it is paused"
)
@router.post("/v2/sandboxes/{ref}/connect", response_model_exclude_unset=True, include_in_schema=False)
async def connect(
    request: Request, ref: Ref, engine: EngineDep, view: ViewDep, body: requests.Resume | None = None
) -> shapes.SandboxShape:
    """Resume a paused sandbox. The timeout of a running sandbox is extended, but never shortened."""
    body = body or requests.Resume()
    timeout, sandbox = body.get_value_or_unset("timeout"), engine.sandboxes.get(ref)
    if timeout == 0:
        raise Invalid(
            "the timeout must be more than 0 seconds, or -1 for never, because a connection needs a running sandbox"
        )
    if sandbox.state is SandboxState.PAUSED:
        work = engine.sandboxes.resume(sandbox.id, timeout=timeout, cold_start=body.memory is False)
        return view.describe_sandbox(await cancel_on_disconnect(request, work))
    if timeout is not UNSET and _would_extend_lifetime(timeout, sandbox):
        await engine.sandboxes.set_timeout(sandbox.id, timeout)
    return view.describe_sandbox(engine.sandboxes.get(sandbox.id))


@router.post("/sandboxes/{ref}/resume", status_code=201, response_model_exclude_unset=True, summary="Resume")
async def resume(
    request: Request, ref: Ref, engine: EngineDep, view: ViewDep, body: requests.Resume | None = None
) -> shapes.SandboxShape:
    body = body or requests.Resume()
    work = engine.sandboxes.resume(ref, timeout=body.get_value_or_unset("timeout"), cold_start=body.memory is False)
    return view.describe_sandbox(await cancel_on_disconnect(request, work))


@router.post(
    "/sandboxes/{ref}/pause", status_code=204, summary="Pause a sandbox: save its memory on the disk, and stop it"
)
async def pause(request: Request, ref: Ref, engine: EngineDep, body: requests.Pause | None = None) -> None:
    await cancel_on_disconnect(request, engine.sandboxes.pause(ref, memory=(body or requests.Pause()).memory))


@router.post("/sandboxes/{ref}/timeout", status_code=204, summary="Set a sandbox's remaining lifetime")
async def set_timeout(ref: Ref, body: requests.SetTimeout, engine: EngineDep) -> None:
    await engine.sandboxes.set_timeout(ref, body.timeout)


@router.post("/sandboxes/{ref}/refreshes", status_code=204, summary="Extend a sandbox's lifetime, but never shorten it")
async def refresh(ref: Ref, engine: EngineDep, body: requests.Refresh | None = None) -> None:
    duration, sandbox = (body or requests.Refresh()).duration, engine.sandboxes.get(ref)
    if _would_extend_lifetime(duration, sandbox):
        await engine.sandboxes.set_timeout(sandbox.id, duration)


@router.put("/sandboxes/{ref}/network", status_code=204, summary="Replace a sandbox's network policy")
async def set_network(ref: Ref, body: requests.Network, engine: EngineDep) -> None:
    await engine.sandboxes.set_network(ref, body.build_policy(current_policy=engine.sandboxes.get(ref).network))


@router.post(
    "/sandboxes/{ref}/exec",
    response_model=shapes.ExecShape,
    summary="Run a program to completion and return its output",
)
async def execute(request: Request, ref: Ref, body: requests.Exec, engine: EngineDep) -> Response:
    sandbox_id = engine.sandboxes.get(ref).id
    work = engine.commands.exec(
        sandbox_id,
        body.args,
        env=body.env,
        cwd=body.cwd,
        user=body.user,
        timeout=body.timeout,
        stdin=_decode_stdin(body.stdin),
    )
    return output.build_response(sandbox_id, shapes.build_exec_fields(await cancel_on_disconnect(request, work)))


@router.post(
    "/sandboxes/{ref}/snapshots",
    status_code=201,
    response_model_exclude_unset=True,
    summary="Capture a sandbox while it runs",
)
async def snapshot(
    request: Request, ref: Ref, engine: EngineDep, view: ViewDep, body: requests.CreateSnapshot | None = None
) -> shapes.SnapshotShape:
    body = body or requests.CreateSnapshot()
    work = engine.snapshots.create(
        ref,
        name=body.name,
        description=body.description,
        memory=body.memory_mode,
        expires_in=body.expires_in,
        volumes=body.volumes,
        retention=Retention.model_validate(body.retention.model_dump()) if body.retention else None,
        prewarm=body.prewarm,
    )
    snapshot_record = await cancel_on_disconnect(request, work)
    return view.describe_snapshot(snapshot_record)


@router.post("/sandboxes/{ref}/rollback", summary="Roll a sandbox back to a snapshot, under the same id")
async def rollback(
    request: Request, ref: Ref, body: requests.Rollback, engine: EngineDep, operation: OperationId = ""
) -> shapes.RollbackShape:
    target = engine.snapshots.get(body.snapshot)
    sandbox = await cancel_on_disconnect(request, engine.sandboxes.rollback(ref, target.id, cold_start=body.cold_start))
    return shapes.RollbackShape(
        sandbox_id=sandbox.id, snapshot_id=target.id, operation_id=operation or new_id(), status="READY"
    )


@router.post(
    "/sandboxes/{ref}/promote",
    response_model_exclude_unset=True,
    summary="Replace the state of a fork's source with the state of the fork",
)
async def promote(
    request: Request, ref: Ref, engine: EngineDep, view: ViewDep, body: requests.Promote | None = None
) -> shapes.SandboxShape:
    source = body.source if body else None
    return view.describe_sandbox(await cancel_on_disconnect(request, engine.sandboxes.promote(ref, source)))


@router.post(
    "/sandboxes/{ref}/clone",
    status_code=201,
    response_model_exclude_unset=True,
    summary="Fork a running sandbox",
)
async def clone(
    request: Request,
    ref: Ref,
    engine: EngineDep,
    view: ViewDep,
    body: requests.Fork | None = None,
    idempotency_key: IdempotencyKey = "",
    operation: OperationId = "",
) -> shapes.ForksShape:
    body = body or requests.Fork()
    body.check_placement(engine.config, is_clone=True)
    spec = body.build_fork_spec(idempotency_key, operation)
    return describe_forks(await cancel_on_disconnect(request, engine.forks.clone(ref, spec)), spec.names, view)


@router.post(
    "/sandboxes/{ref}/fork",
    status_code=201,
    response_model_exclude_unset=True,
    summary="Fork a running sandbox; return a sandbox or an error for each fork",
)
async def fork(
    request: Request,
    ref: Ref,
    engine: EngineDep,
    view: ViewDep,
    body: Annotated[requests.Fork | None, Body()] = None,
    idempotency_key: IdempotencyKey = "",
    operation: OperationId = "",
) -> list[shapes.ForkResultShape]:
    body = body or requests.Fork()
    body.check_placement(engine.config, is_clone=True)
    spec = body.build_fork_spec(idempotency_key, operation)
    forks = describe_forks(await cancel_on_disconnect(request, engine.forks.clone(ref, spec)), spec.names, view)
    return [
        *(shapes.ForkResultShape(sandbox=sandbox) for sandbox in forks.sandboxes),
        *(shapes.ForkResultShape(error=error) for error in forks.errors),
    ]


def describe_forks(results: list[Sandbox | GatewayError], names: list[str] | None, view: View) -> shapes.ForksShape:
    fork_names = shapes.assign_names(results, names)
    return shapes.ForksShape(
        sandboxes=[view.describe_sandbox(result) for result in results if isinstance(result, Sandbox)],
        errors=[
            shapes.describe_fork_error(result, name)
            for result, name in zip(results, fork_names, strict=True)
            if isinstance(result, GatewayError)
        ],
    )


Filter = Callable[[Sandbox], bool]


def _create_name_filters(name: str) -> list[Filter]:
    return [lambda sandbox: sandbox.name == name] if name else []


def _create_state_filters(states: str) -> list[Filter]:
    if not states:
        return []
    try:
        allowed_states = {SandboxState(word.strip()) for word in states.split(",")}
    except ValueError:
        raise Invalid(
            f"the parameter 'state' must be running, paused, or both, separated by a comma (got {states[:80]!r})"
        ) from None
    return [lambda sandbox: sandbox.state in allowed_states]


def _create_metadata_filters(query: str) -> list[Filter]:
    """Return a filter for each pair in ``query``. One client URL-encodes pairs twice, so both forms match."""
    pairs = parse_qsl(query, keep_blank_values=True)
    if query and not pairs:
        raise Invalid(f"the parameter 'metadata' must be key=value pairs, separated by & (got {query[:80]!r})")

    def create_pair_filter(key: str, value: str) -> Filter:
        decoded_key, decoded_value = unquote(key), unquote(value)
        return lambda sandbox: sandbox.metadata.get(key) == value or sandbox.metadata.get(decoded_key) == decoded_value

    return [create_pair_filter(key, value) for key, value in pairs]


def _create_template_filters(ref: str, engine: Engine) -> list[Filter]:
    if not ref:
        return []
    ids = find_ids(ref, engine)
    return [lambda sandbox: sandbox.template_id in ids]


def _create_source_filters(ref: str, engine: Engine) -> list[Filter]:
    if not ref:
        return []
    ids = find_ids(ref, engine)
    return [lambda sandbox: sandbox.forked_from in ids]


def _create_start_filters(start: datetime | None) -> list[Filter]:
    if start is None:
        return []
    earliest_start = start if start.tzinfo else start.replace(tzinfo=UTC)
    return [lambda sandbox: sandbox.started_at >= earliest_start]


def _would_extend_lifetime(timeout: float | None, sandbox: Sandbox) -> bool:
    if sandbox.end_at is None:
        return False
    return timeout is None or datetime.now(UTC) + timedelta(seconds=timeout) > sandbox.end_at


def _decode_stdin(stdin: str) -> bytes | None:
    try:
        return base64.b64decode(stdin, validate=True) if stdin else None
    except ValueError:
        raise Invalid("the field 'stdin' is not valid base64: encode the program's input as base64") from None
