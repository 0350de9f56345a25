"""Valid and invalid plan files, which all readers must accept or refuse alike, with the same message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

GATEWAY, OTHER_GATEWAY = "0123456789abcdef", "fedcba9876543210"
_PAST = "2020-01-02T00:00:00Z"


def make_plan(**fields: Any) -> dict[str, Any]:
    now = datetime.now(UTC)
    change = {"kind": "sandbox", "name": "try-1", "before": None, "after": {"cpus": 1}}
    entry = {
        "host": "localhost",
        "task": "Fork it … again",
        "path": "play.yml:12",
        "gateway": GATEWAY,
        "actions": [{"verb": "fork", "changes": [change], "request": {"count": 1}}],
        "reads": {"/snapshots/before": "id=known-after-apply-0001 generation=1"},
        "created": {"try-1": "known-after-apply-0002"},
        "costs": {"memory_mb": 256, "disk_bytes": -1048576, "pause_ms": 5.5},
        "unknown": ["the size"],
        "failure": {"kind": "in_use", "message": "volume 'data' is in use", "blockers": ["copy"], "status": 409},
    }
    return {
        "format": 3,
        "created_at": (now - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "expires_at": (now + timedelta(hours=23)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "problems": [],
        "playbooks": ["play.yml"],
        "gateways": {GATEWAY: "unix:///run/gateway.sock"},
        "entries": [entry],
        **fields,
    }


def serialize(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def sign(document: dict[str, Any]) -> bytes:
    """Return the contents of a file with the correct digest, whatever the document contains."""
    return serialize({**document, "digest": hashlib.sha256(serialize(document)).hexdigest()}) + b"\n"


@dataclass(frozen=True)
class PlanFile:
    """``sentence``: why the file cannot be applied, with PLAN or FILE in place of the file; "" if it can be applied."""

    name: str
    content: Callable[[], bytes]
    sentence: str = ""
    is_only_expired: bool = False
    """Whether it can be shown nevertheless."""

    def write(self, path: Path) -> str:
        """Write the file, and return its sentence."""
        path.write_bytes(self.content())
        return self.sentence.replace("PLAN", f"the plan {str(path)!r}").replace("FILE", f"the file {str(path)!r}")


NOT_JSON = "PLAN is truncated, or it is not JSON"
EDITED = "PLAN has been edited since it was made: its digest does not match"
REMOVED: Any = object()


def _make_edit(old: bytes, new: bytes) -> Callable[[], bytes]:
    def edit() -> bytes:
        content = sign(make_plan())
        assert old in content
        return content.replace(old, new, 1)

    return edit


def _make_edited_plan(location: str, value: Any) -> Callable[[], bytes]:
    """Return a function that makes a signed plan with ``value`` at ``location``."""
    return lambda: sign(set_value(make_plan(), location, value))


def set_value(plan: dict[str, Any], location: str, value: Any) -> dict[str, Any]:
    """Return a copy of a plan with a different value at a location such as "entries/0/host". ``REMOVED`` removes it.

    In ``location``, "|" stands for a slash in a key.
    """
    changed_plan: dict[str, Any] = json.loads(json.dumps(plan))
    *steps, last = (int(step) if step.isdigit() else step.replace("|", "/") for step in location.split("/"))
    container: Any = changed_plan
    for step in steps:
        container = container[step]
    if value is REMOVED:
        del container[last]
    else:
        container[last] = value
    return changed_plan


def _make_nested_list(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return value


def _make_invalid_file(name: str, location: str, value: Any, problem: str) -> PlanFile:
    return PlanFile(name, _make_edited_plan(location, value), f"PLAN is invalid: {problem}")


_ACTION, _CHANGE = "entries/0/actions/0", "entries/0/actions/0/changes/0"
_AT_ACTION, _AT_CHANGE = "entries[0].actions[0]", "entries[0].actions[0].changes[0]"
_LIMIT = 1 << 53
PLAN_FILES = (
    PlanFile("valid", lambda: sign(make_plan())),
    PlanFile("without changes", lambda: sign(make_plan(entries=[], gateways={}))),
    PlanFile("of another gateway", lambda: sign(make_plan(gateways={GATEWAY: "x", OTHER_GATEWAY: "y"}))),
    PlanFile(
        "expired",
        lambda: sign(make_plan(created_at="2020-01-01T00:00:00Z", expires_at=_PAST)),
        f"PLAN expired at {_PAST}",
        is_only_expired=True,
    ),
    PlanFile("empty", lambda: b"", NOT_JSON),
    PlanFile("truncated", lambda: sign(make_plan())[:-20], NOT_JSON),
    PlanFile("without the line break", lambda: sign(make_plan())[:-1], EDITED),
    PlanFile("not UTF-8", lambda: b"\xff" + sign(make_plan()), NOT_JSON),
    PlanFile("byte order mark", lambda: "\ufeff{}".encode(), NOT_JSON),
    PlanFile("text", lambda: b"[]x", NOT_JSON),
    PlanFile("NaN", _make_edit(b'"count":1', b'"count":NaN'), NOT_JSON),
    PlanFile("deeper than a parser allows", lambda: b"[" * 200_000, NOT_JSON),
    PlanFile("long number", lambda: b"1" * 5000, NOT_JSON),
    PlanFile("edited", _make_edit(b'"count":1', b'"count":2'), EDITED),
    PlanFile("reformatted", lambda: json.dumps(json.loads(sign(make_plan())), indent=1).encode(), EDITED),
    PlanFile("duplicate key", _make_edit(b'"problems":[]', b'"problems":["x"],"problems":[]'), EDITED),
    PlanFile("infinite number", _make_edit(b'"memory_mb":256', b'"memory_mb":1e999'), EDITED),
    PlanFile("without digest", lambda: serialize(make_plan()) + b"\n", EDITED),
    PlanFile("wrong digest and wrong field", lambda: serialize({**make_plan(problems=1), "digest": "0"}), EDITED),
    PlanFile(
        "newer format",
        lambda: b'{"format": 4, "news": [1]}',
        "PLAN has format 4, but this release reads only format 3",
    ),
    PlanFile("not an object", lambda: b"[]", "PLAN is invalid: the document must be an object, not []"),
    PlanFile("null", lambda: b"null", "PLAN is invalid: the document must be an object, not None"),
    PlanFile(
        "older format",
        lambda: sign(make_plan(format=1)),
        "PLAN has format 1, but this release reads only format 3",
    ),
    PlanFile("empty object", lambda: b"{}", "PLAN is invalid: format must be a positive integer, not None"),
    PlanFile(
        "too large",
        lambda: b" " * ((64 << 20) + 1),
        f"FILE is longer than {64 << 20} bytes, so it cannot be a plan",
    ),
    _make_invalid_file(
        "too deep", f"{_ACTION}/request", {"x": _make_nested_list(60)}, "it is nested more than 40 levels deep"
    ),
    _make_invalid_file("format 0", "format", 0, "format must be a positive integer, not 0"),
    _make_invalid_file("format true", "format", True, "format must be a positive integer, not True"),
    _make_invalid_file(
        "time", "created_at", "today", "created_at must be a time such as 2026-11-24T17:40:00Z, not 'today'"
    ),
    _make_invalid_file(
        "month 13",
        "created_at",
        "2026-13-24T17:40:00Z",
        "created_at must be a time such as 2026-11-24T17:40:00Z, not '2026-13-24T17:40:00Z'",
    ),
    _make_invalid_file(
        "expiry before creation", "expires_at", _PAST, f"expires_at must be after created_at, not {_PAST!r}"
    ),
    _make_invalid_file("problems", "problems", "x" * 100, f"problems must be a list, not {'x' * 100!r:.80}..."),
    _make_invalid_file("problem", "problems", [""], "problems[0] must be a non-empty string, not ''"),
    _make_invalid_file(
        "playbook", "playbooks", ["a/b"], "playbooks[0] must be a file name without a directory, not 'a/b'"
    ),
    _make_invalid_file("missing", "entries", REMOVED, "entries is missing"),
    _make_invalid_file("unknown key", "surprise", 1, "format 3 has no key surprise"),
    _make_invalid_file("gateways", "gateways", [], "gateways must be an object, not []"),
    _make_invalid_file(
        "gateway id", "gateways", {"x": "y"}, "the key 'x' of gateways must be 16 hexadecimal digits, not 'x'"
    ),
    _make_invalid_file(
        "gateway URL", f"gateways/{GATEWAY}", 1, f"gateways[{GATEWAY!r}] must be a non-empty string, not 1"
    ),
    _make_invalid_file(
        "unknown gateway",
        "gateways",
        {OTHER_GATEWAY: "y"},
        f"entries[0].gateway must be one of the keys in gateways, not {GATEWAY!r}",
    ),
    _make_invalid_file("entry", "entries/0", 1, "entries[0] must be an object, not 1"),
    _make_invalid_file("host", "entries/0/host", None, "entries[0].host must be a non-empty string, not None"),
    _make_invalid_file("task", "entries/0/task", 5, "entries[0].task must be a string, not 5"),
    _make_invalid_file("no task", "entries/0/task", REMOVED, "entries[0].task is missing"),
    _make_invalid_file("key of an entry", "entries/0/extra", 1, "format 3 has no key entries[0].extra"),
    _make_invalid_file("version", "entries/0/reads/|a", None, "entries[0].reads['/a'] must be a string, not None"),
    _make_invalid_file(
        "path",
        "entries/0/reads",
        {"": "x"},
        "the key '' of entries[0].reads must be a non-empty string, not ''",
    ),
    _make_invalid_file(
        "created id",
        "entries/0/created/a",
        "0123456789ab",
        "entries[0].created['a'] must be known-after-apply- and 4 digits, not '0123456789ab'",
    ),
    _make_invalid_file("kind of cost", "entries/0/costs/gold", 1, "format 3 has no key entries[0].costs.gold"),
    _make_invalid_file(
        "cost",
        "entries/0/costs/memory_mb",
        True,
        f"entries[0].costs.memory_mb must be a number whose absolute value is less than {_LIMIT}, not True",
    ),
    _make_invalid_file(
        "negative pause",
        "entries/0/costs/pause_ms",
        -1,
        f"entries[0].costs.pause_ms must be a number from 0 to less than {_LIMIT}, not -1",
    ),
    _make_invalid_file(
        "verb", f"{_ACTION}/verb", "rm -rf", f"{_AT_ACTION}.verb must be a verb in lower case, not 'rm -rf'"
    ),
    _make_invalid_file("request", f"{_ACTION}/request", [], f"{_AT_ACTION}.request must be an object, not []"),
    _make_invalid_file(
        "kind",
        f"{_CHANGE}/kind",
        "host",
        f"{_AT_CHANGE}.kind must be 'sandbox' or 'snapshot' or 'template' or 'volume', not 'host'",
    ),
    _make_invalid_file("state", f"{_CHANGE}/before", 1, f"{_AT_CHANGE}.before must be an object, not 1"),
    _make_invalid_file(
        "no state", f"{_CHANGE}/after", None, f"{_AT_CHANGE}.after must be an object if before is null, not None"
    ),
    _make_invalid_file("failure", "entries/0/failure", 1, "entries[0].failure must be an object, not 1"),
    _make_invalid_file(
        "kind of failure",
        "entries/0/failure/kind",
        "",
        "entries[0].failure.kind must be a non-empty string, not ''",
    ),
    _make_invalid_file(
        "message", "entries/0/failure/message", None, "entries[0].failure.message must be a string, not None"
    ),
    _make_invalid_file(
        "blockers", "entries/0/failure/blockers", [1], "entries[0].failure.blockers[0] must be a string, not 1"
    ),
    _make_invalid_file(
        "status", "entries/0/failure/status", True, "entries[0].failure.status must be an HTTP status or null, not True"
    ),
)
