"""Read plan files, which Ansible's callback `grove.sandbox.plan` writes at the end of a check-mode run.

This module imports pydantic, which loads slowly: import it only where a plan file is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.formats import parse_time

FORMAT = 3
MAX_FILE_BYTES = 64 << 20
PLANNED_ID_PREFIX = "known-after-apply-"
_MAX_NESTING = 40
"""Maximum depth of lists and objects. Functions that walk through a plan are recursive."""
_MAX_PROBLEM_LENGTH = 500
_MAX_VALUE_LENGTH = 80
_MAPPINGS = ("created", "gateways", "reads")
"""Fields whose keys are not fields themselves."""
_TIME_PATTERN = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_MAX_NUMBER = 1 << 53
_NEW_PLAN_HINT = "make a new plan: run `ansible-playbook --check` again"
CREATED, CHANGED, REMOVED, ROLLED_BACK = "+", "~", "-", "↺"


# The messages of these errors say what is allowed. Ansible's plan callback uses the same words.


def _check_text(value: object) -> str:
    # Pydantic's own check of strings refuses lone surrogates, which file names can contain.
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _check_name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def _check_base_name(value: object) -> str:
    if not isinstance(value, str) or not value or "/" in value:
        raise ValueError("a file name without a directory")
    return value


def _check_cost(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= _MAX_NUMBER:
        raise ValueError(f"a number whose absolute value is less than {_MAX_NUMBER}")
    return value


def _check_status(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 100 <= value <= 599:
        raise ValueError("an HTTP status or null")
    return value


def _check_time(value: object) -> str:
    try:
        if not isinstance(value, str) or not _TIME_PATTERN.fullmatch(value):
            raise ValueError
        parse_time(value)
    except ValueError:
        raise ValueError("a time such as 2026-11-24T17:40:00Z") from None
    return value


def _create_pattern_validator(pattern: str, expected: str) -> PlainValidator:
    compiled_pattern = re.compile(pattern)

    def check(value: object) -> str:
        if not isinstance(value, str) or not compiled_pattern.fullmatch(value):
            raise ValueError(expected)
        return value

    return PlainValidator(check)


Text = Annotated[str, PlainValidator(_check_text)]
Name = Annotated[str, PlainValidator(_check_name)]
BaseName = Annotated[str, PlainValidator(_check_base_name)]
Time = Annotated[str, PlainValidator(_check_time)]
Verb = Annotated[str, _create_pattern_validator("[a-z][a-z_]*", "a verb in lower case")]
GatewayId = Annotated[str, _create_pattern_validator("[0-9a-f]{16}", "16 hexadecimal digits")]
PlannedId = Annotated[
    str, _create_pattern_validator(PLANNED_ID_PREFIX + "[0-9a-f]{4}", f"{PLANNED_ID_PREFIX} and 4 digits")
]
Digest = Annotated[str, _create_pattern_validator("[0-9a-f]{64}", "64 hexadecimal digits")]
Kind = Literal["sandbox", "snapshot", "template", "volume"]
HttpStatus = Annotated[int, PlainValidator(_check_status)]
Cost = Annotated[float, PlainValidator(_check_cost)]
CostKey = Literal["memory_mb", "disk_bytes", "pause_ms"]


def _create_field_error(field: str, expected: str, value: object) -> PydanticCustomError:
    """Return an error about a field whose allowed values depend on other fields."""
    return PydanticCustomError("wrong_field", "{expected}", {"field": field, "expected": expected, "value": value})


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
            raise _create_field_error("after", "an object if before is null", None)
        return self


class Action(_Part):
    verb: Verb
    changes: list[Change]
    request: dict[Text, Any]


class PredictedFailure(_Part):
    """The failure of a task in the check-mode run. ``status``: the HTTP status, or None if there was no response."""

    kind: Name
    message: Text
    blockers: list[Text]
    status: HttpStatus | None


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
    failure: PredictedFailure | None

    @model_validator(mode="after")
    def _check_pause(self) -> Self:
        if self.costs.get("pause_ms", 0) < 0:
            raise _create_field_error(
                "costs.pause_ms", f"a number from 0 to less than {_MAX_NUMBER}", self.costs["pause_ms"]
            )
        return self


class Plan(_Part):
    format: Literal[3]
    created_at: Time
    expires_at: Time
    problems: list[Name]
    """Reasons why the plan cannot be applied."""
    playbooks: list[BaseName]
    gateways: dict[GatewayId, Name]
    entries: list[Entry]
    digest: Digest

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if parse_time(self.expires_at) <= parse_time(self.created_at):
            raise _create_field_error("expires_at", "after created_at", self.expires_at)
        for number, entry in enumerate(self.entries):
            if entry.gateway not in self.gateways:
                raise _create_field_error(f"entries[{number}].gateway", "one of the keys in gateways", entry.gateway)
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
    content = _read(path)
    document = _parse(path, content)
    _check_format(path, document)
    if not _is_unedited(document, content):
        raise Failure(
            f"the plan {str(path)!r} has been edited since it was made: its digest does not match",
            ExitCode.USAGE,
            f"restore the original file, or {_NEW_PLAN_HINT}",
        )
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        # Keys of the file can be long and have several lines.
        problem = " ".join(_describe_first_problem(error).split())[:_MAX_PROBLEM_LENGTH]
        raise _create_invalid_failure(path, problem) from None


def serialize(document: Mapping[str, Any]) -> str:
    """Return the canonical text of a plan file, without the line break at its end."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def compute_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all keys except ``digest``, as 64 hexadecimal digits."""
    text = serialize({key: value for key, value in document.items() if key != "digest"})
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _is_unedited(document: Mapping[str, Any], content: bytes) -> bool:
    try:
        # The exact text also differs if a key occurs twice: the digest does not cover all of its values.
        return content == f"{serialize(document)}\n".encode("ascii") and document.get("digest") == compute_digest(
            document
        )
    except ValueError:  # A number such as 1e999 is read as infinity.
        return False


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise Failure(
            f"the plan {str(path)!r} does not exist",
            ExitCode.NOT_FOUND,
            "check the path: `ansible-playbook --check` writes the plan to the file that is set in the option "
            "plan_file of the callback grove.sandbox.plan",
        ) from None
    except OSError as error:
        raise Failure(
            f"the plan {str(path)!r} cannot be read: {error.strerror or error}",
            ExitCode.USAGE,
            "check the path and the file's permissions",
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise Failure(
            f"the file {str(path)!r} is longer than {MAX_FILE_BYTES} bytes, so it cannot be a plan",
            ExitCode.USAGE,
            "check the path",
        )
    return content


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Failure(
            f"the plan {str(path)!r} is truncated, or it is not JSON",
            ExitCode.USAGE,
            f"copy the file again, or {_NEW_PLAN_HINT}",
        ) from None
    if not _is_shallow(document):
        raise _create_invalid_failure(path, f"it is nested more than {_MAX_NESTING} levels deep")
    if not isinstance(document, dict):
        raise _create_invalid_failure(path, _format_wrong_value("the document", "an object", document))
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
    """Raise Failure if a different release made the plan, because its other keys may then differ too."""
    number = document.get("format")
    if type(number) is not int or number < 1:
        raise _create_invalid_failure(path, _format_wrong_value("format", "a positive integer", number))
    if number != FORMAT:
        raise Failure(
            f"the plan {str(path)!r} has format {number}, but this release reads only format {FORMAT}",
            ExitCode.USAGE,
            "use the sandboxctl from the release that wrote the plan",
        )


def _create_invalid_failure(path: Path, problem: str) -> Failure:
    return Failure(
        f"the plan {str(path)!r} is invalid: {problem}", ExitCode.USAGE, f"check the path, or {_NEW_PLAN_HINT}"
    )


def _format_wrong_value(place: str, expected: str, value: object) -> str:
    shown_value = repr(value)
    if len(shown_value) > _MAX_VALUE_LENGTH:
        shown_value = shown_value[:_MAX_VALUE_LENGTH] + "..."
    return f"{place} must be {expected}, not {shown_value}"


def _describe_first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    kind, context = problem["type"], problem.get("ctx", {})
    place = _format_place(problem["loc"])
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden" or (kind == "literal_error" and "costs" in problem["loc"]):
        return f"format {FORMAT} has no key {place}"
    if kind == "wrong_field":
        return _format_wrong_value(
            ".".join(filter(None, (place, context["field"]))), context["expected"], context["value"]
        )
    if kind == "value_error":
        return _format_wrong_value(place, str(context["error"]), problem["input"])
    if kind == "literal_error":
        return _format_wrong_value(place, " or ".join(map(repr, get_args(Kind))), problem["input"])
    return _format_wrong_value(place, "a list" if kind == "list_type" else "an object", problem["input"])


def _format_place(steps: tuple[int | str, ...]) -> str:
    """Return the place of a value in the plan, such as "entries[0].reads['/sandboxes/web']"."""
    place, parent = "", ""
    is_key = steps[-1:] == ("[key]",) and "costs" not in steps
    for step in [each for each in steps if each != "[key]"]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif parent in _MAPPINGS:
            place, step = (f"the key {step!r} of {place}" if is_key else f"{place}[{step!r}]"), ""
        else:
            place += f".{step}" if place else step
        parent = str(step)
    return place
