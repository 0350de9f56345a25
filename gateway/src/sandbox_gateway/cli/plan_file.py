"""Read plan files, which Ansible's callback `grove.sandbox.plan` writes at the end of a check run.

This module imports pydantic, which loads slowly: import it only where a plan file is read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.formats import parse_time

FORMAT = 1
MAX_FILE_BYTES = 64 << 20
PLANNED_ID_PREFIX = "known-after-apply-"
_MAX_NESTING = 40
"""Maximum depth of lists and objects. Functions that walk through a plan are recursive."""
_MAX_PROBLEM_LENGTH = 200
_MAX_NUMBER = 1 << 53
_NEW_PLAN_HINT = "make a new plan: run `ansible-playbook --check` again"
CREATED, CHANGED, REMOVED, ROLLED_BACK = "+", "~", "-", "↺"


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def _check_name(value: object) -> str:
    if not _check_text(value):
        raise ValueError("must not be empty")
    return _check_text(value)


def _check_cost(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= _MAX_NUMBER:
        raise ValueError(f"must be a number whose amount is less than {_MAX_NUMBER}")
    return value


def _check_time(text: str) -> str:
    parse_time(text)
    return text


# Pydantic's own check of strings refuses lone surrogates, which the names of files can contain.
Text = Annotated[str, PlainValidator(_check_text)]
Name = Annotated[str, PlainValidator(_check_name)]
Time = Annotated[
    str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"), AfterValidator(_check_time)
]
GatewayId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
PlannedId = Annotated[str, Field(pattern=rf"^{PLANNED_ID_PREFIX}[0-9a-f]+$")]
Kind = Literal["sandbox", "snapshot", "template", "volume"]
Cost = Annotated[float, PlainValidator(_check_cost)]
CostKey = Literal["memory_mb", "disk_bytes", "pause_ms"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Change(_Part):
    """A change to one resource. ``before`` is None if it is created, and ``after`` is None if it is removed."""

    kind: Kind
    name: Name
    before: dict[Text, Any] | None
    after: dict[Text, Any] | None

    @model_validator(mode="after")
    def _check_views(self) -> Self:
        if self.before is None and self.after is None:
            raise ValueError("before and after are both null")
        return self


class Action(_Part):
    verb: Name
    changes: list[Change]
    request: dict[Text, Any]


class Entry(_Part):
    """One execution of a task."""

    host: Name
    task: Text
    path: Text
    """File and line of the task, such as "site.yml:12"."""
    gateway: GatewayId
    actions: list[Action]
    reads: dict[Name, Text]
    """Version of each object that the task read, by the object's path. Empty if the object did not exist."""
    created: dict[Name, PlannedId]
    costs: dict[CostKey, Cost]
    """Only the known costs. Freed memory and disk space are negative."""
    unknown: list[Name]
    failure: Text | None

    @model_validator(mode="after")
    def _check_pause(self) -> Self:
        if self.costs.get("pause_ms", 0) < 0:
            raise ValueError("costs.pause_ms must not be negative")
        return self


class Plan(_Part):
    format: Literal[1]
    created_at: Time
    expires_at: Time
    problems: list[Name]
    """Reasons why the plan cannot be applied."""
    playbooks: list[Name]
    gateways: dict[GatewayId, Name]
    entries: list[Entry]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if parse_time(self.expires_at) <= parse_time(self.created_at):
            raise ValueError("expires_at must be later than created_at")
        for number, entry in enumerate(self.entries):
            if entry.gateway not in self.gateways:
                raise ValueError(f"entries.{number}.gateway: {entry.gateway} is not a key of gateways")
        return self

    @property
    def is_expired(self) -> bool:
        return datetime.now(UTC) >= parse_time(self.expires_at)

    @property
    def is_applicable(self) -> bool:
        return not self.problems and not self.is_expired


@dataclass(frozen=True)
class PlannedChange:
    """A change with the verb of its action and the task that makes it."""

    entry: Entry
    verb: str
    change: Change

    @property
    def sign(self) -> str:
        if self.change.before is None:
            return CREATED
        if self.verb == "rollback":
            return ROLLED_BACK
        return REMOVED if self.change.after is None else CHANGED


def iterate_changes(entry: Entry) -> Iterator[PlannedChange]:
    for action in entry.actions:
        for change in action.changes:
            yield PlannedChange(entry, action.verb, change)


def load(path: Path) -> Plan:
    """Read a plan, which may have expired. Raises Failure if the file is not a complete, unedited plan."""
    document = _parse(path, _read(path))
    _check_format(path, document)
    try:
        plan = Plan.model_validate(document)
    except ValidationError as error:
        raise _invalid_failure(path, _describe_first_problem(error)) from None
    if plan.digest != compute_digest(document):
        raise Failure(
            f"the plan {path} was edited after it was written: its digest does not match",
            ExitCode.USAGE,
            f"restore the original file, or {_NEW_PLAN_HINT}",
        )
    return plan


def compute_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all keys except ``digest``, as 64 hexadecimal digits."""
    keys = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(keys, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise Failure(
            f"the plan {path} does not exist",
            ExitCode.NOT_FOUND,
            "check the path: `ansible-playbook --check` writes the file that the option plan_file of the callback "
            "grove.sandbox.plan names",
        ) from None
    except OSError as error:
        raise Failure(
            f"the plan {path} cannot be read: {error.strerror or error}",
            ExitCode.USAGE,
            "check the path and the file's permissions",
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise Failure(
            f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB, so it is not a plan", ExitCode.USAGE, "check the path"
        )
    return content


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(
            content.decode(),
            parse_constant=_refuse_constant,
            parse_float=_parse_finite_float,
            object_pairs_hook=_create_object,
        )
    except (ValueError, RecursionError):
        raise Failure(
            f"the plan {path} is truncated, or it is not JSON",
            ExitCode.USAGE,
            f"copy the file again, or {_NEW_PLAN_HINT}",
        ) from None
    if not isinstance(document, dict):
        raise _invalid_failure(path, "it must be an object")
    if not _is_shallow(document):
        raise _invalid_failure(path, f"it is nested more than {_MAX_NESTING} levels deep")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def _create_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The digest does not cover all values of a key that occurs twice.
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice")
    return keys


def _is_shallow(document: Any) -> bool:
    level = [document]
    for _ in range(_MAX_NESTING + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
        if not next_level:
            return True
        level = next_level
    return False


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    """Raise Failure if the format is newer than this program. Its other keys may then differ, too."""
    number = document.get("format")
    if type(number) is not int:
        raise _invalid_failure(path, "format: must be an integer")
    if number > FORMAT:
        raise Failure(
            f"the plan {path} has a format newer than {FORMAT}, the newest that this sandboxctl reads",
            ExitCode.USAGE,
            "use the sandboxctl of the release that wrote the plan",
        )


def _invalid_failure(path: Path, problem: str) -> Failure:
    return Failure(f"{path} is not a plan: {problem}", ExitCode.USAGE, f"check the path, or {_NEW_PLAN_HINT}")


def _describe_first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    steps = [str(step) for step in problem["loc"]]
    reason = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
    # The steps contain keys of the file, which can be long and have several lines.
    text = " ".join(": ".join(filter(None, (".".join(steps), reason))).split())
    return text if len(text) <= _MAX_PROBLEM_LENGTH else f"…{text[-_MAX_PROBLEM_LENGTH:]}"
