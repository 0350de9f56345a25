"""Route requests of plan sessions to the engine of their session."""

from __future__ import annotations

from starlette.requests import Request

from sandbox_gateway.api.access.auth import caller_of, plan_of, runs_code
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Unsupported
from sandbox_gateway.records import id_source


def select_engine(request: Request) -> Engine:
    """Return the engine for a request: that of its plan session, if it has one. Raises NotFound, Unsupported."""
    state = request.app.state
    plan_id = plan_of(request.scope)
    if not plan_id:
        engine: Engine = state.engine
        return engine
    if runs_code(request.method, request.scope["path"]):
        raise Unsupported(
            "a plan session runs no commands, because its sandboxes have no machines: run commands only outside it"
        )
    session = state.plans.get(caller_of(request.scope).name, plan_id)
    id_source.set(session.new_id)
    planned_engine: Engine = session.engine
    return planned_engine
