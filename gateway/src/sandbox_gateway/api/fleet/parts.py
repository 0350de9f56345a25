"""Messages between the gateways of a fleet about a plan session, or a run that applies a plan.

A run has a *home*, the gateway that has opened it, and a *part* on each other host that it changes. The home forwards
each request of the run to the host that carries it out, with the header ``PART_HEADER``. A part ends with its home.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import Scope

from sandbox_gateway.api.access.auth import get_applied_run_id, get_plan_id
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.index import Index
from sandbox_gateway.fleet.records import Holder, ObjectRecord, describe_object

PART_PATH = "/fleet/part"
"""`POST` opens a part, or keeps it open; `DELETE` ends it. Below the path of the run, like the next ones."""
OBJECTS_PATH = "/fleet/objects"
"""`POST` asks a part which of the names and ids in the body it has."""
LOAD_PATH = "/fleet/load"
"""`GET` asks a part how it changes the load of its host."""
CLAIMS_PATH = "/fleet/claims"
"""`POST` asks the home whether an object of a part may get names."""
COUNT_HEADER = b"x-sandbox-gateway-plan-ids"
"""The header of a part's response with the number of ids that it has created."""

RunPath = tuple[Literal["plans", "applied-runs"], str]
"""The kind and the id of a run."""
current_request: ContextVar[str] = ContextVar("current_request", default="")
"""The token of the request of a run that is being carried out."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class PartHeader(_Message):
    """The value of ``PART_HEADER``, as JSON. ``home``: the token of the run. ``host``: the host of its home.

    ``request``: the token of the request. ``numbers``: the first and last numbers of the ids that the part may create.
    """

    home: str
    host: str
    request: str = ""
    numbers: list[tuple[int, int]] = []

    @classmethod
    def try_parse(cls, text: str) -> PartHeader | None:
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


class OpenPart(_Message):
    """``opened_at``: when the run was opened, in seconds since 1970."""

    opened_at: float


class Refs(_Message):
    refs: list[str]


class Objects(_Message):
    """The objects that a part has, by the requested names and ids."""

    objects: dict[str, ObjectRecord]


class LoadChange(_Message):
    """How a part changes the load of its host: memory that it frees, in bytes, and sandboxes that it adds."""

    freed_memory: int = 0
    new_sandboxes: int = 0


class ClaimRequest(_Message):
    """``request``: the token of the request. ``names``: the object that is about to get each name; None: no copies."""

    host: str
    request: str
    names: dict[str, ObjectRecord | None]


def get_run_path(scope: Scope) -> RunPath | None:
    """Return the run in whose path a request is, such as ``/plans/ID/sandboxes``."""
    if plan_id := get_plan_id(scope):
        return "plans", plan_id
    if run_id := get_applied_run_id(scope):
        return "applied-runs", run_id
    return None


def format_run_path(path: RunPath) -> str:
    kind, id = path
    return f"/{kind}/{id}"


def create_holder(host: str, ref: str, record: ObjectRecord) -> Holder:
    return Holder(host, record.kind, record.id == ref, record.content, record.created_at)


def find_object(index: Index, ref: str) -> ObjectRecord | None:
    """Return the object with this name or id, or None."""
    record = index.find_record(ref) or index.find_record(index.find_owner(ref))
    return describe_object(record) if record else None


def list_objects(engine: Engine, refs: list[str]) -> dict[str, ObjectRecord]:
    found = {ref: find_object(engine.index, ref) for ref in refs}
    return {ref: record for ref, record in found.items() if record}
