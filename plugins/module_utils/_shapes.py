# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Convert the gateway's responses to the *shapes* that modules return. No shape contains a token."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._fields import RECIPE_FIELDS

SANDBOX_KEYS = (
    "id",
    "name",
    "state",
    "state_reason",
    "template_id",
    "forked_from",
    "snapshot_id",
    "parent_sandbox_id",
    "diverged",
    "cpus",
    "memory_mb",
    "disk_mb",
    "metadata",
    "network",
    "volumes",
    "created_at",
    "started_at",
    "end_at",
    "address",
    "backend",
)
SNAPSHOT_KEYS = (
    "id",
    "name",
    "names",
    "description",
    "status",
    "source_sandbox_id",
    "origin_sandbox_id",
    "template_id",
    "parent_snapshot_id",
    "origin_id",
    "memory",
    "memory_problem",
    "memory_bytes_written",
    "disk_bytes_unique",
    "pause_ms",
    "cpus",
    "memory_mb",
    "disk_mb",
    "mounts",
    "volumes",
    "forks",
    "prewarm",
    "imported_from",
    "created_at",
    "expires_at",
    "backend",
)
TEMPLATE_KEYS = (
    "id",
    "name",
    "names",
    "description",
    "status",
    "build_id",
    "digest",
    "outdated",
    "recipe",
    "memory",
    "memory_problem",
    "cpus",
    "memory_mb",
    "disk_mb",
    "forks",
    "prewarm",
    "created_at",
    "updated_at",
)

VOLUME_KEYS = (
    "name",
    "size_mb",
    "used_mb",
    "attachments",
    "snapshots",
    "captured_by",
    "from_snapshot",
    "imported_from",
    "owner_sandbox_id",
    "stuck",
    "created_at",
)

HOST_KEY = "sandbox_host"
"""The key of an object's host. Only shapes of objects in a fleet have it."""
RESERVED_PREFIX = "__ansible_"
"""Prefix of the keys that Ansible reserves for itself in JSON."""
KEYS_BY_KIND = {"sandbox": SANDBOX_KEYS, "snapshot": SNAPSHOT_KEYS, "template": TEMPLATE_KEYS, "volume": VOLUME_KEYS}


def make_sandbox_shape(detail: dict[str, Any]) -> dict[str, Any]:
    network = detail.get("network") or {}
    return {
        "id": detail["sandboxID"],
        "name": detail.get("name", ""),
        "state": detail.get("state"),
        "state_reason": detail.get("stateReason") or "",
        "template_id": detail.get("templateID"),
        "forked_from": detail.get("forkedFrom"),
        "snapshot_id": detail.get("snapshotID"),
        "parent_sandbox_id": detail.get("parentSandboxID") or "",
        "diverged": detail.get("diverged"),
        "cpus": detail.get("cpuCount"),
        "memory_mb": detail.get("memoryMB"),
        "disk_mb": detail.get("diskSizeMB"),
        "metadata": _make_metadata_shape(detail.get("metadata") or {}),
        "network": {
            "allow_internet": network.get("allowInternetAccess", True) is not False,
            "allow_out": list(network.get("allowOut") or []),
            "deny_out": list(network.get("denyOut") or []),
        },
        "volumes": _make_mounts_shape(detail),
        "created_at": detail.get("createdAt"),
        "started_at": detail.get("startedAt"),
        "end_at": None if parse_time(detail.get("endAt")) is None else detail["endAt"],
        "address": detail.get("address"),
        "backend": detail.get("backend"),
        **_make_host_shape(detail),
    }


def make_snapshot_shape(snapshot: dict[str, Any]) -> dict[str, Any]:
    names = list(snapshot.get("names") or [])
    return {
        "id": snapshot["snapshotID"],
        "name": names[0] if names else "",
        "names": names,
        "description": snapshot.get("description") or "",
        "status": snapshot.get("status"),
        "source_sandbox_id": snapshot.get("sourceSandboxID") or "",
        "origin_sandbox_id": snapshot.get("originSandboxID") or "",
        "template_id": snapshot.get("templateID") or "",
        "parent_snapshot_id": snapshot.get("parentSnapshotID") or "",
        "origin_id": snapshot.get("originID") or "",
        "memory": snapshot.get("memory"),
        "memory_problem": snapshot.get("memoryProblem") or "",
        "memory_bytes_written": snapshot.get("memoryBytesWritten"),
        "disk_bytes_unique": snapshot.get("diskBytesUnique"),
        "pause_ms": snapshot.get("pauseMs"),
        "cpus": snapshot.get("cpuCount"),
        "memory_mb": snapshot.get("memoryMB"),
        "disk_mb": snapshot.get("diskSizeMB"),
        "mounts": _make_mounts_shape(snapshot),
        "volumes": sorted(each["name"] for each in snapshot.get("volumes") or []),
        "forks": snapshot.get("forks"),
        "prewarm": _get_prewarm_target(snapshot),
        "imported_from": (snapshot.get("imported") or {}).get("snapshotID") or "",
        "created_at": snapshot.get("createdAt"),
        "expires_at": snapshot.get("expiresAt"),
        "backend": snapshot.get("backend"),
        **_make_host_shape(snapshot),
    }


def make_template_shape(template: dict[str, Any]) -> dict[str, Any]:
    names = list(template.get("names") or template.get("aliases") or [])
    recipe = template.get("recipe") or {}
    if recipe:
        # Older gateways do not have these fields.
        recipe = {"image": "", "setupNetwork": True, **recipe}
    return {
        "id": template["templateID"],
        "name": names[0] if names else "",
        "names": names,
        "description": template.get("description") or "",
        "status": template.get("buildStatus"),
        "build_id": template.get("buildID") or "",
        "digest": template.get("digest") or "",
        "outdated": template.get("outdated"),
        "recipe": {option: recipe[field] for option, field in RECIPE_FIELDS.items() if field in recipe},
        "memory": template.get("memory"),
        "memory_problem": template.get("memoryProblem") or "",
        "cpus": template.get("cpuCount"),
        "memory_mb": template.get("memoryMB"),
        "disk_mb": template.get("diskSizeMB"),
        "forks": template.get("forks"),
        "prewarm": _get_prewarm_target(template),
        "created_at": template.get("createdAt"),
        "updated_at": template.get("updatedAt"),
        **_make_host_shape(template),
    }


def make_volume_shape(volume: dict[str, Any], snapshots: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the shape of a volume. ``snapshots`` are all of its snapshots, as the gateway lists them: oldest first."""
    all_snapshots = list(snapshots)
    attachments = [
        {
            "sandbox": each["sandboxName"],
            "sandbox_id": each["sandboxID"],
            "path": each["path"],
            "read_only": each["readonly"],
            "state": each["state"],
        }
        for each in volume.get("mounts") or []
    ]
    return {
        "name": volume["name"],
        "size_mb": volume.get("sizeMB"),
        "used_mb": volume.get("usedMB"),
        "attachments": sorted(attachments, key=lambda each: (each["sandbox"], each["sandbox_id"])),
        "snapshots": sorted(each["name"] for each in all_snapshots if not each.get("sandboxSnapshotID")),
        "captured_by": [each["sandboxSnapshotID"] for each in all_snapshots if each.get("sandboxSnapshotID")],
        "from_snapshot": volume.get("fromSnapshot") or "",
        "imported_from": (volume.get("imported") or {}).get("snapshotID") or "",
        "owner_sandbox_id": volume.get("ownerSandboxID") or "",
        "stuck": list(volume.get("stuck") or []),
        "created_at": volume.get("createdAt"),
        **_make_host_shape(volume),
    }


def _make_host_shape(resource: dict[str, Any]) -> dict[str, str]:
    """Return the name of the resource's host, or nothing without a fleet."""
    return {HOST_KEY: resource["sandboxHost"]} if resource.get("sandboxHost") else {}


def _get_prewarm_target(snapshot: dict[str, Any]) -> int:
    """Return the number of forks to keep ready, or 0 if the gateway's response does not contain it."""
    target: int = (snapshot.get("prewarm") or {}).get("target", 0)
    return target


def _make_metadata_shape(values: dict[str, Any]) -> dict[str, str]:
    """Return the metadata without reserved keys, which could break module results, caches and inventories."""
    return {str(key): str(value) for key, value in values.items() if not str(key).startswith(RESERVED_PREFIX)}


def _make_mounts_shape(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mounts, sorted by path. Their order has no meaning, because mounts are never nested."""
    mounts = [
        {"name": each["name"], "path": each["path"], "read_only": bool(each.get("readOnly"))}
        for each in resource.get("volumeMounts") or []
    ]
    return sorted(mounts, key=lambda each: each["path"])


def parse_time(text: str | None) -> datetime | None:
    """Parse an RFC 3339 time, ignoring fractions of a second.

    Returns None if ``text`` is not a time, or if it is in the year 9999, which means never.
    """
    match = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", text or "")
    if match is None or match.group(1) == "9999":
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc)
