"""Parameters that routes of both dialects declare."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Request

from sandbox_gateway.api.access.auth import Permission, get_applied_run_id, get_caller, get_plan_id, runs_code
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.own_changes import own_changes
from sandbox_gateway.engine.plans.applied_runs import AppliedRuns
from sandbox_gateway.engine.plans.host import may_read_sources
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.errors import Unsupported
from sandbox_gateway.records import id_source

MAX_REF_LENGTH = 128


async def _get_engine(request: Request) -> Engine:
    """Return the engine for a request. A request in a plan session uses the engine of that session.

    Raises NotFound, Unsupported, OverQuota.
    """
    plan_id = get_plan_id(request.scope)
    if run_id := get_applied_run_id(request.scope):
        runs: AppliedRuns = request.app.state.applied_runs
        own_changes.set(runs.get(get_caller(request.scope).name, run_id).changes)
    if not plan_id:
        engine: Engine = request.app.state.engine
        return engine
    if runs_code(request.method, request.scope["path"]):
        raise Unsupported(
            "a plan session cannot run commands, because its sandboxes have no machines: run commands outside "
            "the session"
        )
    sessions: PlanSessions = request.app.state.plans
    session = sessions.get(get_caller(request.scope).name, plan_id)
    # The parsed strings of a body take up to four times its size. Builds keep them even if they fail.
    sessions.charge(session, 4 * len(await request.body()))
    id_source.set(session.new_id)
    own_changes.set(session.changes)
    may_read_sources.set(get_caller(request.scope).permission >= Permission.ADMIN)
    return session.engine


EngineDep = Annotated[Engine, Depends(_get_engine)]
Ref = Annotated[str, Path(max_length=MAX_REF_LENGTH, description="An id or a name.")]
IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key", max_length=256, description="A request with the same key returns the same sandboxes."
    ),
]
OperationId = Annotated[
    str, Header(alias="X-Operation-Id", max_length=64, description="An id that the events of this request contain.")
]
