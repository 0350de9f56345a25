# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plan files, which hold the plan of a check-mode run as JSON.

Each plan has exactly one valid text (the output of ``_serialize`` and a line break), so every edit is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import PLANNED_ID_PREFIX
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import SANDBOX, SNAPSHOT, TEMPLATE, VOLUME

FORMAT = 3
KINDS = (SANDBOX, SNAPSHOT, TEMPLATE, VOLUME)
MAX_LIFETIME_SECONDS = 365 * 86400
_MAX_FILE_BYTES = 64 << 20
_MAX_NESTING = 40
"""Maximum depth of lists and objects in a plan. Deeper ones exceed the recursion limit of the JSON library."""
_MAX_NUMBER = 1 << 53
"""Costs are less than this number, which every JSON library represents exactly."""
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_TIME_PATTERN = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
_GATEWAY_ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_PLANNED_ID_PATTERN = re.compile(PLANNED_ID_PREFIX + r"[0-9a-f]{4}")
_VERB_PATTERN = re.compile(r"[a-z][a-z_]*")
_NEW_PLAN_HINT = "Make a new plan: run ansible-playbook --check with the same plan_file"

_PLAN_START = b'{"created_at":"'
"""The beginning of all plan files, because their keys are sorted."""

_loaded_plans: dict[str, tuple[_Version, dict[str, Any]]] = {}
"""The plans that this process, or the process that forked it, has loaded, by path."""

if TYPE_CHECKING:
    _Version = tuple[int, ...]
    """Values that differ between two versions of a file."""
    _Check = Callable[[Any, str], None]
    """Raises ``_InvalidValue`` if a value is not allowed. The second argument is the value's location in the plan."""


def make_document(
    entries: Iterable[Mapping[str, Any]],
    *,
    playbooks: Iterable[str],
    problems: Iterable[str],
    created_at: datetime,
    lifetime_seconds: int,
) -> dict[str, Any]:
    """Return the plan that consists of the journal's entries. Raises Failure if the lifetime is not allowed."""
    if not 1 <= lifetime_seconds <= MAX_LIFETIME_SECONDS:
        raise Failure(f"plan_lifetime must be from 1 to {MAX_LIFETIME_SECONDS} seconds, not {lifetime_seconds}")
    gateways, plan_entries = {}, []
    for journal_entry in entries:
        entry = dict(journal_entry)
        gateways[entry["gateway"]] = entry.pop("gateway_url")
        plan_entries.append(entry)
    document = {
        "format": FORMAT,
        "created_at": created_at.strftime(_TIME_FORMAT),
        "expires_at": (created_at + timedelta(seconds=lifetime_seconds)).strftime(_TIME_FORMAT),
        "problems": list(problems),
        "playbooks": list(playbooks),
        "gateways": gateways,
        "entries": plan_entries,
    }
    return {**document, "digest": compute_digest(document)}


def remove(path: str) -> None:
    """Remove the plan of an earlier run, if there is one. Raises Failure if the file is not a plan."""
    try:
        _require_replaceable(Path(path))
        Path(path).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise Failure(
            f"cannot remove the old plan {path!r}: {_describe_error(error)}. Delete the file yourself"
        ) from None


def _require_replaceable(path: Path) -> None:
    """Raise Failure if something exists at ``path`` that is neither a plan, even an incomplete one, nor an empty file.

    Raises OSError.
    """
    if not path.exists():
        return
    start = b""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(_PLAN_START))
    if not path.is_file() or not _PLAN_START.startswith(start):
        raise Failure(f"{str(path)!r} exists, but is not a plan, so it is kept: set plan_file to a different file")


def compute_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all keys except ``digest``, as 64 hexadecimal digits."""
    text = _serialize({key: value for key, value in document.items() if key != "digest"})
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def save(path: str, document: Mapping[str, Any]) -> None:
    """Write a plan atomically, readable only by its owner. If it raises Failure, the file is unchanged."""
    try:
        _check_nesting(document)
        _check_document(document, "")
    except _InvalidValue as error:
        raise Failure(f"the plan cannot be saved in {path!r}: {error}. Report this bug of grove.sandbox") from None
    data = (_serialize(document) + "\n").encode("ascii")
    if len(data) > _MAX_FILE_BYTES:
        raise Failure(
            f"the plan is {len(data)} bytes long, but a plan file is at most {_MAX_FILE_BYTES} bytes long: split the "
            "playbook"
        )
    try:
        _require_replaceable(Path(path))
        _replace_file(Path(path), data)
    except (OSError, ValueError) as error:
        raise Failure(
            f"the plan cannot be saved in {path!r}: {_describe_error(error)}. Set plan_file to a file in a directory "
            "that exists and that you can write to"
        ) from None


def _replace_file(path: Path, data: bytes) -> None:
    descriptor, temporary_name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary_name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary_name).unlink()
        raise


def load(path: str) -> dict[str, Any]:
    """Return the plan in a file. Raises Failure if the file is not a valid and unedited plan.

    The plan is cached in this process until the file changes. Do not modify the plan.
    """
    version, plan = _loaded_plans.get(path, (None, {}))
    if version is None or version != _find_version(path):
        version, data = _read_file(path)
        plan = check(parse(data, path), path, data)
        _loaded_plans[path] = version, plan
    return plan


def _find_version(path: str) -> _Version | None:
    try:
        return _make_version(Path(path).stat())
    except (OSError, ValueError):
        return None


def _make_version(status: os.stat_result) -> _Version:
    # A program that writes the file in place can restore the time of the last modification, but not st_ctime.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def parse(data: str | bytes, path: str) -> Any:
    """Return the document in JSON text. Raises Failure if it is not JSON."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Failure(f"the plan {path!r} is truncated, or it is not JSON. {_NEW_PLAN_HINT}") from None


def check(document: Any, path: str, data: bytes | None = None) -> dict[str, Any]:
    """Return a plan that was read from ``path``. Raises Failure if it is not a valid and unedited plan.

    ``data``: the contents of the file, if the plan was read from one.
    """
    try:
        _check_nesting(document)
        _check_object(document, "the document")
        _check_format(path, document)
        if not _is_unedited(document, data):
            raise Failure(
                f"the plan {path!r} has been edited since it was made: its digest does not match. {_NEW_PLAN_HINT}"
            )
        _check_document(document, "")
    except _InvalidValue as error:
        raise Failure(f"the plan {path!r} is invalid: {error}. {_NEW_PLAN_HINT}") from None
    return dict(document)


def check_expiry(plan: Mapping[str, Any], path: str) -> None:
    """Raise Failure if a plan that was read from ``path`` has expired."""
    if datetime.now(timezone.utc) >= _parse_time(plan["expires_at"]):
        raise Failure(f"the plan {path!r} expired at {plan['expires_at']}. {_NEW_PLAN_HINT}")


def _read_file(path: str) -> tuple[_Version, bytes]:
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Failure(f"the plan {path!r} is not a regular file. Name the file that the check-mode run saved")
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise Failure(
            f"the plan {path!r} does not exist. Make it first: run ansible-playbook --check with the callback "
            "grove.sandbox.plan enabled and its option plan_file set to this path"
        ) from None
    except (OSError, ValueError) as error:
        raise Failure(
            f"the plan {path!r} cannot be read: {_describe_error(error)}. Name the file that the check-mode run saved, "
            "and run as a user who can read it"
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise Failure(
            f"the file {path!r} is longer than {_MAX_FILE_BYTES} bytes, so it cannot be a plan. {_NEW_PLAN_HINT}"
        )
    return _make_version(status), data


def _describe_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _serialize(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_unedited(document: dict[str, Any], data: bytes | None) -> bool:
    try:
        text = _serialize(document)
    except ValueError:  # A number such as 1e999 is read as infinity.
        return False
    return data in (None, f"{text}\n".encode("ascii")) and document.get("digest") == compute_digest(document)


def _check_format(path: str, document: dict[str, Any]) -> None:
    number = document.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _create_wrong_value_error("format", "a positive integer", number)
    if number != FORMAT:
        raise Failure(
            f"the plan {path!r} has format {number}, but this release reads only format {FORMAT}. Use "
            "the release that made the plan, or make a new plan with this release"
        )


# --- the checks of each field ----------------------------------------------------------------------------------------


class _InvalidValue(Exception):
    """A value that the format does not allow. The message names its location in the plan."""


def _create_wrong_value_error(location: str, expected: str, value: Any) -> _InvalidValue:
    shown_value = repr(value)
    if len(shown_value) > 80:
        shown_value = shown_value[:80] + "..."
    return _InvalidValue(f"{location} must be {expected}, not {shown_value}")


def _check_nesting(document: Any) -> None:
    """Raise _InvalidValue if the document is nested too deeply for recursive functions."""
    level = [document]
    for _level_number in range(_MAX_NESTING + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                next_level.extend(value.values())
            elif isinstance(value, (list, tuple)):
                next_level.extend(value)
        if not next_level:
            return
        level = next_level
    raise _InvalidValue(f"it is nested more than {_MAX_NESTING} levels deep")


def _check_text(value: Any, location: str) -> None:
    if not isinstance(value, str):
        raise _create_wrong_value_error(location, "a string", value)


def _check_name(value: Any, location: str) -> None:
    if not isinstance(value, str) or not value:
        raise _create_wrong_value_error(location, "a non-empty string", value)


def _check_base_name(value: Any, location: str) -> None:
    if not isinstance(value, str) or not value or "/" in value:
        raise _create_wrong_value_error(location, "a file name without a directory", value)


def _check_object(value: Any, location: str) -> None:
    if not isinstance(value, dict):
        raise _create_wrong_value_error(location, "an object", value)


def _check_time(value: Any, location: str) -> None:
    try:
        _parse_time(value)
    except ValueError:
        raise _create_wrong_value_error(location, "a time such as 2026-11-24T17:40:00Z", value) from None


def _parse_time(value: Any) -> datetime:
    # strptime alone also accepts other digits and fewer of them.
    if not isinstance(value, str) or not _TIME_PATTERN.fullmatch(value):
        raise ValueError("not a time")
    return datetime.strptime(value, _TIME_FORMAT).replace(tzinfo=timezone.utc)


def _is_number(value: Any, minimum: float) -> bool:
    # Infinity and NaN are not in the range.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value < _MAX_NUMBER


def _check_signed_number(value: Any, location: str) -> None:
    if not _is_number(value, -_MAX_NUMBER):
        raise _create_wrong_value_error(location, f"a number whose absolute value is less than {_MAX_NUMBER}", value)


def _check_duration(value: Any, location: str) -> None:
    if not _is_number(value, 0):
        raise _create_wrong_value_error(location, f"a number from 0 to less than {_MAX_NUMBER}", value)


def _check_status(value: Any, location: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 100 <= value <= 599:
        raise _create_wrong_value_error(location, "an HTTP status or null", value)


def _make_pattern_check(pattern: re.Pattern[str], expected: str) -> _Check:
    def check(value: Any, location: str) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _create_wrong_value_error(location, expected, value)

    return check


def _make_choice_check(values: tuple[Any, ...]) -> _Check:
    def check(value: Any, location: str) -> None:
        if isinstance(value, bool) or value not in values:
            raise _create_wrong_value_error(location, " or ".join(map(repr, values)), value)

    return check


def _make_nullable_check(check_value: _Check) -> _Check:
    def check(value: Any, location: str) -> None:
        if value is not None:
            check_value(value, location)

    return check


def _make_list_check(check_item: _Check) -> _Check:
    def check(value: Any, location: str) -> None:
        if not isinstance(value, list):
            raise _create_wrong_value_error(location, "a list", value)
        for number, item in enumerate(value):
            check_item(item, f"{location}[{number}]")

    return check


def _make_mapping_check(check_key: _Check, check_item: _Check) -> _Check:
    def check(value: Any, location: str) -> None:
        _check_object(value, location)
        for key, item in value.items():
            check_key(key, f"the key {key!r} of {location}")
            check_item(item, f"{location}[{key!r}]")

    return check


def _make_object_check(fields: Mapping[str, _Check], *, optional: bool = False) -> _Check:
    """Return a check for objects with exactly these keys, or, if they are optional, with some of them."""

    def check(value: Any, location: str) -> None:
        _check_object(value, location or "the document")
        prefix = f"{location}." if location else ""
        for name in value:
            if name not in fields:
                raise _InvalidValue(f"format {FORMAT} has no key {prefix}{name}")
        for name, check_field in fields.items():
            if name in value:
                check_field(value[name], f"{prefix}{name}")
            elif not optional:
                raise _InvalidValue(f"{prefix}{name} is missing")

    return check


def _check_change(value: Any, location: str) -> None:
    _check_change_fields(value, location)
    if value["before"] is None and value["after"] is None:
        raise _create_wrong_value_error(f"{location}.after", "an object if before is null", None)


_check_change_fields = _make_object_check(
    {
        "kind": _make_choice_check(KINDS),
        "name": _check_name,
        "before": _make_nullable_check(_check_object),
        "after": _make_nullable_check(_check_object),
    }
)
_check_action_fields = _make_object_check(
    {
        "verb": _make_pattern_check(_VERB_PATTERN, "a verb in lower case"),
        "changes": _make_list_check(_check_change),
        "request": _check_object,
    }
)
_check_failure_fields = _make_object_check(
    {
        "kind": _check_name,
        "message": _check_text,
        "blockers": _make_list_check(_check_text),
        "status": _make_nullable_check(_check_status),
    }
)
_check_gateway_id = _make_pattern_check(_GATEWAY_ID_PATTERN, "16 hexadecimal digits")
_check_entry_fields = _make_object_check(
    {
        "host": _check_name,
        "task": _check_text,
        "path": _check_text,
        "gateway": _check_gateway_id,
        "actions": _make_list_check(_check_action_fields),
        "reads": _make_mapping_check(_check_name, _check_text),
        "created": _make_mapping_check(
            _check_name, _make_pattern_check(_PLANNED_ID_PATTERN, f"{PLANNED_ID_PREFIX} and 4 digits")
        ),
        "costs": _make_object_check(
            {"memory_mb": _check_signed_number, "disk_bytes": _check_signed_number, "pause_ms": _check_duration},
            optional=True,
        ),
        "unknown": _make_list_check(_check_name),
        "failure": _make_nullable_check(_check_failure_fields),
    }
)
_check_document_fields = _make_object_check(
    {
        "format": _make_choice_check((FORMAT,)),
        "created_at": _check_time,
        "expires_at": _check_time,
        "problems": _make_list_check(_check_name),
        "playbooks": _make_list_check(_check_base_name),
        "gateways": _make_mapping_check(_check_gateway_id, _check_name),
        "entries": _make_list_check(_check_entry_fields),
        "digest": _make_pattern_check(_DIGEST_PATTERN, "64 hexadecimal digits"),
    }
)


def _check_document(document: Any, location: str) -> None:
    _check_document_fields(document, location)
    for number, entry in enumerate(document["entries"]):
        if entry["gateway"] not in document["gateways"]:
            raise _create_wrong_value_error(
                f"entries[{number}].gateway", "one of the keys in gateways", entry["gateway"]
            )
    if document["expires_at"] <= document["created_at"]:
        raise _create_wrong_value_error("expires_at", "after created_at", document["expires_at"])
