# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Snapshots and templates in OCI registries, which the gateway pushes and pulls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

POLL_SECONDS = (0.1, 2.0)
"""The first and the longest delay between two queries of a transfer's status."""


@dataclass(frozen=True)
class Artifact:
    """A snapshot in a registry. ``is_own``: whether the gateway has pushed it. ``sizes``: the sizes of its machine."""

    digest: str
    snapshot_id: str
    kind: str
    description: str
    has_memory: bool
    is_own: bool
    data_bytes: int
    sizes: Mapping[str, int]


def find_artifact(client: Client, reference: str) -> Artifact | None:
    """Return what a registry says about an artifact, or None if it does not exist. Raises Failure."""
    try:
        # Not an object of the gateway on which a plan depends. The planned action contains its digest.
        data = client.call("GET", "/artifacts", query={"reference": reference}).data
    except Failure as failure:
        if failure.kind == "not_found":
            return None
        raise
    return Artifact(
        digest=data["digest"],
        snapshot_id=data["snapshotID"],
        kind=data["kind"],
        description=data["description"],
        has_memory=data["memory"],
        is_own=data["trusted"],
        data_bytes=data["dataBytes"],
        sizes={"cpus": data["cpuCount"], "memory_mb": data["memoryMB"], "disk_mb": data["diskSizeMB"]},
    )


def replace_tag(reference: str, digest: str) -> str:
    """Return REGISTRY/REPOSITORY@DIGEST for REGISTRY/REPOSITORY with a tag or a digest."""
    path, name = reference.partition("@")[0].rsplit("/", 1)
    return f"{path}/{name.partition(':')[0]}@{digest}"


def push(client: Client, path: str, reference: str) -> None:
    """Push the snapshot or template at ``path``, and wait until it has been pushed. Raises Failure."""
    _wait(client, client.post(f"{path}/push", {"reference": reference}))


def pull(client: Client, path: str, reference: str, name: str, trust: list[str]) -> None:
    """Pull into the collection at ``path``, and wait until the object exists. Raises Failure."""
    _wait(client, client.post(f"{path}/pull", {"reference": reference, "name": name, "trust": trust}))


def _wait(client: Client, transfer: Mapping[str, Any]) -> None:
    path = f"/transfers/{quote_segment(transfer['transferID'])}"
    delay, max_delay = POLL_SECONDS
    while transfer["status"] == "running":
        time.sleep(delay)
        delay = min(delay * 1.5, max_delay)
        try:
            transfer = client.call("GET", path).data
        except Failure as failure:
            if failure.kind == "not_found":
                raise Failure(
                    f"the gateway was restarted during the {transfer['action']} of {transfer['reference']}: run the "
                    "task again, which continues where it was",
                    "conflict",
                ) from None
            raise
    if error := transfer["error"]:
        raise Failure(error["message"], error["kind"], blockers=error["blockers"])
