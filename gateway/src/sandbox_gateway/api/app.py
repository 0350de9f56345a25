"""The ASGI application with its routes and middleware."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi

from sandbox_gateway import __version__
from sandbox_gateway.api import errors, events, metrics
from sandbox_gateway.api.access.auth import OPEN_PATHS, AuthMiddleware, Keys, is_identified
from sandbox_gateway.api.access.limits import BodyLimitMiddleware
from sandbox_gateway.api.data_plane.pools import Pools
from sandbox_gateway.api.data_plane.proxy import AddressFormats, DataPlane, Elsewhere
from sandbox_gateway.api.dependencies import EngineDep
from sandbox_gateway.api.errors import ErrorMiddleware, ErrorShape
from sandbox_gateway.api.forkd import routes as forkd
from sandbox_gateway.api.native import applied_runs, artifacts, plans, sandboxes, snapshots, templates, volumes
from sandbox_gateway.api.native.shapes import HealthShape, describe_room, describe_slow_command
from sandbox_gateway.api.output import LargeResponseMiddleware
from sandbox_gateway.api.unknown_fields import CheckFields
from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.applied_runs import AppliedRuns
from sandbox_gateway.engine.plans.sessions import PlanSessions
from sandbox_gateway.errors import GatewayError

if TYPE_CHECKING:
    from sandbox_gateway.fleet.fleet import Fleet

_DESCRIPTION = "Capture, fork and roll back sandboxes while they run."
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorShape, "description": description}
    for status, description in {
        400: "Invalid",
        401: "The key is missing or unknown",
        403: "The key's scope is not sufficient",
        404: "Not found",
        409: "In use, name taken, or in the wrong state",
        410: "Deleted during the request, or the run that the request belongs to has finished",
        413: "Too large, or over a quota",
        429: "Busy: try again after the time in Retry-After. Without that header, the request has been carried out",
        500: "A backend failed, or the gateway has a bug",
        503: "In a fleet: etcd or another host does not answer",
        504: "The operation did not finish in time",
        507: "No space left",
    }.items()
}

_ERROR_SCHEMA = {"$ref": "#/components/schemas/ErrorShape"}

_health_router = APIRouter(tags=["gateway"])


@_health_router.get(
    "/health",
    summary="Check that the gateway is running. Needs no key; with one, also shows how much room the host has",
    response_model_exclude_none=True,
)
async def check_health(request: Request, engine: EngineDep) -> HealthShape:
    gateway_id = room = slow_command_shapes = None
    storage_commands = engine.host.get_storage_commands()
    slow_commands = storage_commands.slow_commands if storage_commands else []
    if is_identified(request.scope):
        gateway_id = engine.secret.gateway_id
        slow_command_shapes = [describe_slow_command(each) for each in slow_commands] or None
        with contextlib.suppress(GatewayError):  # The gateway is running even if its host cannot report its room.
            room = describe_room(await engine.room.report())
    return HealthShape(
        status="degraded" if slow_commands else "ok",
        sandboxes=engine.sandboxes.count().total(),
        version=__version__,
        backend=engine.host.kind,
        gateway_id=gateway_id,
        room=room,
        slow_commands=slow_command_shapes,
    )


def create_app(engine: Engine, config: Config, keys: Keys, fleet: Fleet | None = None) -> FastAPI:
    """Create the ASGI application for ``engine``. For the Unix socket, wrap it in ``auth.LocalPeerMiddleware``.

    ``app.state.closing`` (an asyncio.Event) ends the streams that would otherwise never end;
    ``app.state.pools.close()`` closes the connections to sandboxes.
    """
    app = FastAPI(
        title="sandbox-gateway",
        version=__version__,
        description=_DESCRIPTION,
        responses=_ERRORS,
        dependencies=[CheckFields],
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
    )
    app.state.engine = engine
    app.state.plans = PlanSessions(engine)
    app.state.applied_runs = AppliedRuns()
    app.state.config = config
    app.state.closing = asyncio.Event()
    app.state.metrics = metrics.Metrics(engine)
    engine.durations.listener = app.state.metrics.record_operation
    engine.durations.capture_listener = app.state.metrics.record_capture
    app.state.pools = Pools(engine)
    errors.register(app)
    modules = (artifacts, templates, sandboxes, snapshots, volumes, plans, applied_runs, events, metrics, forkd)
    for router in (_health_router, *(module.router for module in modules)):
        app.include_router(router)
    elsewhere = _add_fleet(app, fleet, engine, keys) if fleet else None
    # The middleware added last runs first.
    app.add_middleware(
        BodyLimitMiddleware, seconds=config.server.request_seconds, stalled_seconds=config.server.stalled_seconds
    )
    app.add_middleware(AuthMiddleware, keys=keys, secret=engine.secret)
    app.add_middleware(LargeResponseMiddleware)
    app.add_middleware(
        DataPlane,
        engine=engine,
        keys=keys,
        addresses=AddressFormats(config.server.domain),
        pools=app.state.pools,
        elsewhere=elsewhere,
    )
    app.add_middleware(ErrorMiddleware, metrics=app.state.metrics)
    app.openapi = lambda: _get_openapi_document(app)  # type: ignore[method-assign]
    return app


def _add_fleet(app: FastAPI, fleet: Fleet, engine: Engine, keys: Keys) -> Elsewhere:
    """Add the routes and the middleware of a fleet. Return the sandboxes of its other hosts."""
    from sandbox_gateway.api.fleet import copies, moves
    from sandbox_gateway.api.fleet.data_plane import RemoteSandboxes
    from sandbox_gateway.api.fleet.forwarding import Forwarder
    from sandbox_gateway.api.fleet.hosts import HostCollector, create_router
    from sandbox_gateway.api.fleet.locator import Locator
    from sandbox_gateway.api.fleet.middleware import FleetMiddleware
    from sandbox_gateway.api.fleet.move_requests import MoveServer
    from sandbox_gateway.api.fleet.moves import Mover
    from sandbox_gateway.api.fleet.runs import FleetRuns

    app.state.metrics.registry.register(HostCollector(fleet))
    app.include_router(create_router(fleet))
    forwarder = Forwarder(fleet.peers, keys, engine.config.server.stalled_seconds)
    locator = Locator(fleet, engine)
    app.include_router(copies.create_router(fleet, forwarder, locator))
    runs = FleetRuns(fleet, locator, app.state.plans, app.state.applied_runs)
    mover = Mover(fleet, engine)
    app.include_router(moves.create_router(fleet, mover, forwarder))
    fleet.background.start(mover.recovery.watch())
    app.add_middleware(
        FleetMiddleware,
        fleet=fleet,
        forwarder=forwarder,
        locator=locator,
        runs=runs,
        moves=MoveServer(fleet, engine, mover.recovery.active_ids, mover.recovery.try_to_resolve),
    )
    return RemoteSandboxes(fleet, engine, forwarder, locator)


def _get_openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the authentication schemes, and status 400 in place of the framework's 422."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, item in document["paths"].items():
            for operation in item.values():
                operation["responses"].pop("422", None)
                for status in _ERRORS:
                    # Errors are JSON even where the successful response is not.
                    operation["responses"][str(status)]["content"] = {"application/json": {"schema": _ERROR_SCHEMA}}
                if path in OPEN_PATHS:
                    operation["security"] = []
        components = document["components"]
        for unused_name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused_name, None)
        components["securitySchemes"] = {
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        document["security"] = [{"key": []}, {"bearer": []}]
        app.openapi_schema = document
    return app.openapi_schema
