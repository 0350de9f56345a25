"""Routes of runs that apply a plan.

A request whose path begins with the path of a run, such as ``POST /applied-runs/ID/sandboxes``, acts like the request
without that prefix, but the generations in the response do not include the changes that the run itself has made.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from sandbox_gateway.api.access.auth import get_caller
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.applied_runs import AppliedRun, AppliedRuns

router = APIRouter(tags=["plans"])
RunId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The id of a run that applies a plan.")]


@router.post("/applied-runs", summary="Open a run that applies a plan, or find it if it is open")
async def open_run(request: Request, body: requests.OpenAppliedRun) -> shapes.AppliedRunShape:
    return _describe_run(request, _get_runs(request).open(_get_owner(request), body.run))


@router.get("/applied-runs", summary="List the runs of this key that apply a plan")
async def list_runs(request: Request) -> list[shapes.AppliedRunShape]:
    return [_describe_run(request, each) for each in _get_runs(request).list(_get_owner(request))]


@router.delete("/applied-runs/{id}", status_code=204, summary="End a run that applies a plan")
async def delete(request: Request, id: RunId) -> None:
    _get_runs(request).close(_get_owner(request), id)


def _get_runs(request: Request) -> AppliedRuns:
    runs: AppliedRuns = request.app.state.applied_runs
    return runs


def _get_owner(request: Request) -> str:
    return get_caller(request.scope).name


def _describe_run(request: Request, run: AppliedRun) -> shapes.AppliedRunShape:
    engine: Engine = request.app.state.engine
    return shapes.AppliedRunShape(
        run_id=run.id, opened_at=run.opened_at, objects=len(run.changes), gateway_id=engine.secret.gateway_id
    )
