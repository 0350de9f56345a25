# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Volumes as sandboxes have them: what a user may write, and how what is becomes what shall be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import checked_names

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

OPTIONS: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "path": {"type": "str", "required": True},
    "read_only": {"type": "bool", "default": False},
}
"""Of one element of ``volumes``."""

_PATH = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
_LONGEST = 255
_SYSTEM = ("/proc", "/sys", "/dev", "/run")
_TOP = ("/bin", "/boot", "/etc", "/home", "/lib", "/root", "/sbin", "/tmp", "/usr", "/var")


@dataclass(frozen=True)
class Mount:
    """A volume at a path; ``clone``: not the volume, but its own clone of what the snapshot holds of it."""

    volume: str
    path: str
    read_only: bool = False
    clone: bool = False

    def view(self) -> dict[str, Any]:
        """As a sandbox's shape shows it."""
        return {"name": self.volume, "path": self.path, "read_only": self.read_only}

    def words(self) -> dict[str, Any]:
        """As the gateway takes it."""
        body = {"name": self.volume, "path": self.path, "readOnly": self.read_only}
        return {**body, "clone": True} if self.clone else body


def desired_mounts(given: Iterable[Mapping[str, Any]] | None) -> tuple[Mount, ...] | None:
    """The option ``volumes``, in the order of the paths; None: not set. Raises Failure."""
    if given is None:
        return None
    mounts = [
        Mount(each["name"], checked_path(each["path"]), bool(each.get("read_only")), bool(each.get("clone")))
        for each in given
    ]
    if mounts:
        checked_names([mount.volume for mount in mounts], "volume")
    check_apart([mount.path for mount in mounts])
    return tuple(sorted(mounts, key=lambda mount: mount.path))


def checked_path(path: str) -> str:
    """``path``, if a volume may be mounted there; without a slash at its end. Raises Failure."""
    place = path.rstrip("/")
    if len(place) > _LONGEST or not _PATH.fullmatch(place) or {".", ".."}.intersection(place.split("/")):
        shown = path if len(path) <= 80 else path[:77] + "..."
        raise Failure(
            f"a volume cannot be mounted at {shown!r}: write an absolute path without '.' and '..', of letters, digits "
            f"and _ . @ + : = -, at most {_LONGEST} characters long"
        )
    if place in _TOP or any(inside(place, system) for system in _SYSTEM):
        raise Failure(f"a volume cannot be mounted at {place!r}, which the system needs: choose a path below /srv, say")
    return place


def check_apart(paths: Iterable[str]) -> None:
    """Raises Failure where one path is the same as, or inside, another."""
    ordered = sorted(paths, key=lambda path: path.split("/"))
    for outer, inner in zip(ordered, ordered[1:]):
        if inside(inner, outer):
            raise Failure(f"volumes cannot be mounted both at {outer!r} and at {inner!r} in it: choose paths apart")


def inside(path: str, other: str) -> bool:
    """Is ``path`` the same as ``other``, or below it?"""
    return path == other or path.startswith(other + "/")


def find_volumes(
    client: Client, mounts: tuple[Mount, ...] | None, source: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """What the gateway says of each volume, by name; asked only where ``mounts``, or those of ``source``, name any."""
    if not (mounts if mounts is not None else (source or {}).get("mounts")):
        return {}
    return {entry["name"]: entry for entry in client.pages("/volumes")}


def gone(source: Mapping[str, Any], volumes: Mapping[str, Any]) -> list[str]:
    """The volumes of ``source`` that are none of ``volumes``."""
    return [each["name"] for each in source.get("mounts", []) if each["name"] not in volumes]


def check_there(mounts: Iterable[Mount] | None, volumes: Mapping[str, Any]) -> None:
    """Raises Failure for a volume that is none of ``volumes``."""
    for mount in mounts or ():
        if mount.volume not in volumes:
            raise Failure(
                f"volume {mount.volume!r} not found: make it first, with the module grove.sandbox.sandbox_volume",
                "not_found",
            )


def check_running(name: str, sandbox: Mapping[str, Any], ident: str) -> None:
    """Raises the failure that attaching a volume to a paused sandbox would meet."""
    if sandbox["state"] != "running":
        raise Failure(
            f"sandbox {name!r} is paused, and a volume is attached while it runs: resume it first, with the module "
            "grove.sandbox.sandbox and state: running",
            "conflict",
            blockers=[ident],
        )
