# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Mounts of volumes in sandboxes: the option ``volumes`` and path checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._plan import checked_names

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

OPTIONS: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "path": {"type": "str", "required": True},
    "read_only": {"type": "bool", "default": False},
}
"""The suboptions of ``volumes``."""

_PATH = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
_LONGEST = 255
_SYSTEM = ("/proc", "/sys", "/dev", "/run")
_TOP = ("/bin", "/boot", "/etc", "/home", "/lib", "/root", "/sbin", "/tmp", "/usr", "/var")


@dataclass(frozen=True)
class Mount:
    """A volume at a path. ``clone``: mount a private clone of the volume's capture instead of the volume."""

    volume: str
    path: str
    read_only: bool = False
    clone: bool = False

    def view(self) -> dict[str, Any]:
        """Return the mount in the form of a sandbox's shape."""
        return {"name": self.volume, "path": self.path, "read_only": self.read_only}

    def words(self) -> dict[str, Any]:
        """Return the request fields of the gateway."""
        body = {"name": self.volume, "path": self.path, "readOnly": self.read_only}
        return {**body, "clone": True} if self.clone else body


def desired_mounts(given: Iterable[Mapping[str, Any]] | None) -> tuple[Mount, ...] | None:
    """Return the option ``volumes``, sorted by path; None if not set. Raises Failure."""
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
    """Return ``path`` without a trailing slash. Raises Failure if no volume can be mounted there."""
    place = path.rstrip("/")
    if len(place) > _LONGEST or not _PATH.fullmatch(place) or {".", ".."}.intersection(place.split("/")):
        raise _refusals.path_not_allowed(path, _LONGEST)
    if place in _TOP or any(inside(place, system) for system in _SYSTEM):
        raise _refusals.path_of_the_system(place)
    return place


def check_apart(paths: Iterable[str]) -> None:
    """Raise Failure if one path is the same as, or inside, another."""
    ordered = sorted(paths, key=lambda path: path.split("/"))
    for outer, inner in zip(ordered, ordered[1:]):
        if inside(inner, outer):
            raise _refusals.paths_overlap(outer, inner)


def inside(path: str, other: str) -> bool:
    """Return whether ``path`` is ``other`` or below it."""
    return path == other or path.startswith(other + "/")


def find_volumes(
    client: Client, mounts: tuple[Mount, ...] | None, source: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return the gateway's volumes by name. Sends no request if no volumes are requested or inherited."""
    if not (mounts if mounts is not None else (source or {}).get("mounts")):
        return {}
    return {entry["name"]: entry for entry in client.pages("/volumes")}


def missing_volumes(source: Mapping[str, Any], volumes: Mapping[str, Any]) -> list[str]:
    """Return the volumes of ``source`` that are not in ``volumes``."""
    return [each["name"] for each in source.get("mounts", []) if each["name"] not in volumes]


def check_there(mounts: Iterable[Mount] | None, volumes: Mapping[str, Any]) -> None:
    """Raise Failure for a volume that is not in ``volumes``."""
    for mount in mounts or ():
        if mount.volume not in volumes:
            raise _refusals.volume_not_found(mount.volume)


def check_running(name: str, sandbox: Mapping[str, Any], ident: str) -> None:
    """Raise Failure for a paused sandbox, to which no volume can be attached."""
    if sandbox["state"] != "running":
        raise _refusals.paused_for_attach(name, ident)
