# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Parse and check the option ``volumes``, which mounts volumes in sandboxes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._fields import MOUNT_FIELDS
from ansible_collections.grove.sandbox.plugins.module_utils._plan import validate_names

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

MOUNT_OPTIONS: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "path": {"type": "str", "required": True},
    "read_only": {"type": "bool", "default": False},
}
"""The suboptions of ``volumes``."""

_PATH_PATTERN = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
_MAX_PATH_LENGTH = 255
_SYSTEM_DIRECTORIES = ("/proc", "/sys", "/dev", "/run")
_TOP_LEVEL_DIRECTORIES = ("/bin", "/boot", "/etc", "/home", "/lib", "/root", "/sbin", "/tmp", "/usr", "/var")


@dataclass(frozen=True)
class Mount:
    """A volume mounted at a path. ``clone``: whether to mount a private clone of the volume's capture instead."""

    volume: str
    path: str
    read_only: bool = False
    clone: bool = False

    def make_view(self) -> dict[str, Any]:
        """Return the mount as it appears in a sandbox's shape."""
        return {"name": self.volume, "path": self.path, "read_only": self.read_only}

    def build_request_fields(self) -> dict[str, Any]:
        """Return the mount as the gateway's request fields."""
        body = {MOUNT_FIELDS[option]: value for option, value in self.make_view().items()}
        return {**body, "clone": True} if self.clone else body


def parse_mounts(option: Iterable[Mapping[str, Any]] | None) -> tuple[Mount, ...] | None:
    """Return the mounts in the option ``volumes``, sorted by path, or None if it is not set. Raises Failure."""
    if option is None:
        return None
    mounts = [
        Mount(each["name"], validate_path(each["path"]), bool(each.get("read_only")), bool(each.get("clone")))
        for each in option
    ]
    if mounts:
        validate_names([mount.volume for mount in mounts], "volume")
    check_no_overlap([mount.path for mount in mounts])
    return tuple(sorted(mounts, key=lambda mount: mount.path))


def validate_path(path: str) -> str:
    """Return ``path`` without a trailing slash. Raises Failure if no volume can be mounted there."""
    normalized_path = path.rstrip("/")
    if (
        len(normalized_path) > _MAX_PATH_LENGTH
        or not _PATH_PATTERN.fullmatch(normalized_path)
        or {".", ".."}.intersection(normalized_path.split("/"))
    ):
        raise _refusals.create_path_not_allowed_error(path, _MAX_PATH_LENGTH)
    if normalized_path in _TOP_LEVEL_DIRECTORIES or any(
        is_inside(normalized_path, directory) for directory in _SYSTEM_DIRECTORIES
    ):
        raise _refusals.create_system_path_error(normalized_path)
    return normalized_path


def check_no_overlap(paths: Iterable[str]) -> None:
    """Raise Failure if two paths are equal or one is inside the other."""
    sorted_paths = sorted(paths, key=lambda path: path.split("/"))
    for outer_path, inner_path in zip(sorted_paths, sorted_paths[1:]):
        if is_inside(inner_path, outer_path):
            raise _refusals.create_paths_overlap_error(outer_path, inner_path)


def is_inside(path: str, directory: str) -> bool:
    """Return whether ``path`` is ``directory`` or is inside it."""
    return path == directory or path.startswith(directory + "/")


def find_volumes(
    client: Client, mounts: tuple[Mount, ...] | None, source: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return the gateway's volumes by name. Sends no request if the sandboxes mount no volumes."""
    if not (mounts if mounts is not None else (source or {}).get("mounts")):
        return {}
    return {entry["name"]: entry for entry in client.list_all("/volumes")}


def list_mounted_paths(mounts: tuple[Mount, ...] | None, source: Mapping[str, Any] | None) -> list[str]:
    """Return the API paths of the volumes that a fork mounts: the volumes of ``source`` if ``mounts`` is None."""
    if mounts is not None:
        return list_volume_paths(mount.volume for mount in mounts)
    return list_volume_paths(each["name"] for each in (source or {}).get("mounts", ()))


def list_volume_paths(names: Iterable[str]) -> list[str]:
    """Return the API paths of volumes."""
    return [f"/volumes/{quote_segment(name)}" for name in names]


def find_missing_volumes(source: Mapping[str, Any], volumes: Mapping[str, Any]) -> list[str]:
    """Return the names of the volumes of ``source`` that are not in ``volumes``."""
    return [each["name"] for each in source.get("mounts", []) if each["name"] not in volumes]


def check_volumes_exist(mounts: Iterable[Mount] | None, volumes: Mapping[str, Any]) -> None:
    """Raise Failure if a mounted volume is not in ``volumes``."""
    for mount in mounts or ():
        if mount.volume not in volumes:
            raise _refusals.create_volume_not_found_error(mount.volume)


def check_running(name: str, sandbox: Mapping[str, Any], ident: str) -> None:
    """Raise Failure if the sandbox is paused, because volumes can be attached only to running sandboxes."""
    if sandbox["state"] != "running":
        raise _refusals.create_paused_for_attach_error(name, ident)
