"""Errors of the command line, with a message, a hint on what to do next, and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from sandbox_gateway.cli.option_names import name_options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNREACHABLE = 5
    NO_SPACE = 6


class Failure(Exception):
    """An error that ends the command: ``message`` and ``hint`` go to standard error."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint


class UnusableBody(Failure):
    """The body of an upload turns out to be unusable after a part of it was sent."""


_EXIT_CODE_BY_STATUS = {
    400: ExitCode.USAGE,
    401: ExitCode.UNREACHABLE,
    403: ExitCode.UNREACHABLE,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.CONFLICT,
    410: ExitCode.NOT_FOUND,
    413: ExitCode.USAGE,
    507: ExitCode.NO_SPACE,
}
_EXIT_CODE_BY_KIND = {"unsupported": ExitCode.FAILED, "over_quota": ExitCode.FAILED, "untrusted": ExitCode.FAILED}


def create_failure_from_response(status: int, body: Any, options: Mapping[str, str] | None = None) -> Failure:
    """Create the Failure for an error response of the gateway. ``body`` is its parsed JSON, or None.

    ``options``: the options of the running command, which replace fields in the message.
    """
    if not isinstance(body, dict) or "message" not in body:
        return Failure(
            f"the response is not from a sandbox gateway (HTTP {status})", ExitCode.UNREACHABLE, "check --url"
        )
    kind, message = body.get("kind", ""), name_options(str(body["message"]), options or {})
    code = _EXIT_CODE_BY_KIND.get(kind) or _EXIT_CODE_BY_STATUS.get(status, ExitCode.FAILED)
    if message.startswith(("route ", "unknown field")):
        return Failure(message, code, "upgrade the gateway, which may be older than this command")
    return Failure(message, code, _find_hint(kind, body.get("blockers") or [], body.get("details") or {}))


def _find_hint(kind: str, blockers: Sequence[str], details: Mapping[str, Any]) -> str:
    if kind == "in_use":
        return _find_in_use_hint(blockers, details)
    if kind == "not_found":
        return f"`sandboxctl {_choose_list_command(details)}` lists the existing ones"
    hint_by_kind = {
        "name_taken": "choose a different name, or delete the object that has this name",
        "unauthorized": "set SANDBOX_GATEWAY_TOKEN, or specify a file that contains the key with --token-file",
        "forbidden": "use a key with a wider scope",
        "busy": "try again in a moment",
        "no_space": "delete unused snapshots and templates (`sandboxctl tree`), or enlarge the disk",
        "internal": "look for the incident in the gateway's log",
    }
    return hint_by_kind.get(kind, "")


def _find_in_use_hint(blockers: Sequence[str], details: Mapping[str, Any]) -> str:
    """Return the hint for an object in use. ``details`` is empty in responses from older gateways."""
    user_kinds = {user["kind"] for user in details.get("users", [])}
    if details and not user_kinds:
        return "try again in a moment"
    if details.get("resource") in ("volume", "volume_snapshot"):
        obstacles = {*user_kinds, *details["overrides"]}
        return "; ".join(remedy for obstacle, remedy in _REMEDIES.items() if obstacle in obstacles)
    if details and not user_kinds & {"sandbox", "clone"}:
        # Only the host knows these users, and the message says what to do.
        return ""
    commands = f"sandboxctl kill {' '.join(blockers) or 'them'}"
    if "clone" in user_kinds:
        commands = "sandboxctl kill SANDBOX, sandboxctl volume delete VOLUME"
    return f"delete its users first ({commands}), or delete it with --when-unused"


_REMEDIES = {
    "mount": "`sandboxctl volume detach SANDBOX VOLUME` unmounts it",
    "sandbox_snapshot": "`sandboxctl snapshot delete SNAPSHOT` removes the snapshot that uses it",
    "withSnapshots": "--with-snapshots also removes its snapshots",
    "clone": "`sandboxctl volume delete VOLUME` removes its clone",
    "force": "--force rolls it back anyway",
}
"""The remedy for each kind of user of a volume, and for each parameter that removes an obstacle."""


def _choose_list_command(details: Mapping[str, Any]) -> str:
    resource, parent = details.get("resource"), details.get("parent")
    if resource == "volume_snapshot":
        return f"volume snapshots {parent}" if parent else "volume list"
    if resource == "mount":
        return f"show {parent}"
    return f"{resource} list" if resource in ("template", "snapshot", "volume") else "list"
