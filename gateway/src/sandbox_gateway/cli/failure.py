"""Errors of the command line: a message, a hint on what to do next, and an exit code."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNREACHABLE = 5
    NO_SPACE = 6


class Failure(Exception):
    """An error that ends the command: ``message`` and ``hint`` go to standard error."""

    def __init__(self, message: str, code: Exit = Exit.FAILED, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint


_BY_STATUS = {
    400: Exit.USAGE,
    401: Exit.UNREACHABLE,
    403: Exit.UNREACHABLE,
    404: Exit.NOT_FOUND,
    409: Exit.CONFLICT,
    410: Exit.NOT_FOUND,
    413: Exit.USAGE,
    507: Exit.NO_SPACE,
}
_BY_KIND = {"unsupported": Exit.FAILED, "over_quota": Exit.FAILED}


def failure_from_answer(status: int, body: Any) -> Failure:
    """Create the Failure for an error answer of the gateway; ``body`` is its JSON, or None."""
    if not isinstance(body, dict) or "message" not in body:
        return Failure(f"no sandbox gateway sent the answer (HTTP {status})", Exit.UNREACHABLE, "check --url")
    kind, message = body.get("kind", ""), str(body["message"])
    code = _BY_KIND.get(kind) or _BY_STATUS.get(status, Exit.FAILED)
    return Failure(message, code, _hint(status, kind, message, body.get("blockers") or []))


def _hint(status: int, kind: str, message: str, blockers: list[str]) -> str:
    if kind == "in_use" and re.match(r"(snapshot \S+ of )?volume ", message):
        return "; ".join(way for sign, way in _REMEDIES.items() if re.search(sign, message)) or "try again in a moment"
    if kind == "in_use":
        ways = f"sandboxctl kill {' '.join(blockers) or 'them'}"
        if "cloned volume" in message:
            ways = "sandboxctl kill SANDBOX, sandboxctl volume delete VOLUME"
        return f"delete its users first ({ways}), or delete it with --when-unused"
    if kind == "not_found":
        return f"`sandboxctl {_list_command(message)}` shows the existing ones"
    hints = {
        "name_taken": "choose another name, or delete the one that has it",
        "unauthorized": "set SANDBOX_GATEWAY_TOKEN, or name a file that holds the key with --token-file",
        "forbidden": "use a key of a wider scope",
        "busy": "try again in a moment",
        "no_space": "delete unused snapshots and templates (`sandboxctl tree`), or enlarge the disk",
        "internal": "the gateway's log describes the incident",
    }
    return hints.get(kind, "")


_REMEDIES = {
    r"\d (read-write )?mounts? \(": "`sandboxctl volume detach SANDBOX VOLUME` unmounts it",
    r"\d sandbox snapshots? \(": "`sandboxctl snapshot delete SNAPSHOT` removes the snapshot that uses it",
    r"\d snapshots? \(": "--with-snapshots removes its snapshots, too",
    r"\d clones? \(": "`sandboxctl volume delete VOLUME` removes its clone",
    r"or force the rollback": "--force does it anyway",
}
"""The remedy for each obstacle that the gateway's message about a volume can name."""


def _list_command(message: str) -> str:
    if match := re.match(r"snapshot of volume (\S+),", message):
        return f"volume snapshots {match[1]}"
    if match := re.match(r"in sandbox (\S+),", message):
        return f"show {match[1]}"
    if message.startswith("snapshot of a volume"):
        return "volume list"
    for noun in ("template", "snapshot", "volume"):
        if message.startswith(noun):
            return f"{noun} list"
    return "list"
