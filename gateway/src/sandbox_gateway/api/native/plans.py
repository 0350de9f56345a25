"""Routes of plan sessions, in which a check-mode run sees what its earlier tasks would have done.

A request whose path begins with the path of a session, such as ``POST /plans/ID/sandboxes``, is carried out in that
session instead of on the host.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

from fastapi import APIRouter, Path, Request

from sandbox_gateway.api.access.auth import Permission, get_caller
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.engine.plans.sessions import PlanSession, PlanSessions

router = APIRouter(tags=["plans"])
_BUILD_TIMEOUT_SECONDS = 20.0
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The id of a plan session.")]


@router.post("/plans", summary="Open the plan session of a run, or find it if it is open")
async def open_session(request: Request, body: requests.OpenPlan) -> shapes.PlanShape:
    session = _get_sessions(request).open(_get_owner(request), body.run)
    # Builds in progress end immediately in a session, and the first task must see their templates.
    await session.engine.background.wait(_BUILD_TIMEOUT_SECONDS)
    return _describe_session(request, session)


@router.get("/plans", summary="List the plan sessions of this key")
async def list_sessions(request: Request) -> list[shapes.PlanShape]:
    return [_describe_session(request, each) for each in _get_sessions(request).list(_get_owner(request))]


@router.get("/plans/{id}", summary="Show a plan session")
async def show(request: Request, id: PlanId) -> shapes.PlanShape:
    return _describe_session(request, _get_sessions(request).get(_get_owner(request), id))


@router.delete("/plans/{id}", status_code=204, summary="End a plan session")
async def delete(request: Request, id: PlanId) -> None:
    await _get_sessions(request).close(_get_owner(request), id)


def _get_sessions(request: Request) -> PlanSessions:
    sessions: PlanSessions = request.app.state.plans
    return sessions


def _get_owner(request: Request) -> str:
    return get_caller(request.scope).name


def _describe_session(request: Request, session: PlanSession) -> shapes.PlanShape:
    return shapes.PlanShape(
        plan_id=session.id,
        opened_at=session.opened_at,
        objects=session.id_count + session.part_id_count,
        gateway_id=session.engine.secret.gateway_id,
        may_change=get_caller(request.scope).permission >= Permission.ADMIN,
        typical=_compute_typical_costs(session),
    )


def _compute_typical_costs(session: PlanSession) -> shapes.CaptureCostsShape | None:
    if not (captures := session.recent_captures):
        return None
    return shapes.CaptureCostsShape(
        pause_ms=round(median(each.pause_ms for each in captures), 3),
        memory_bytes_written=int(median(each.memory_bytes_written for each in captures)),
        disk_bytes_unique=int(median(each.disk_bytes_unique for each in captures)),
    )
