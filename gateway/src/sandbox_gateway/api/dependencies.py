"""Parameters that routes of both dialects declare."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Request

from sandbox_gateway.api.plan_sessions import select_engine
from sandbox_gateway.engine.engine import Engine

MAX_REF_LENGTH = 128


async def _get_engine(request: Request) -> Engine:
    return select_engine(request)


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
