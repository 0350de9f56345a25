# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Create the errors for requests that the gateway would refuse.

A task must fail before its first change, and check mode without a plan session sends no requests that change something.
Therefore, modules apply the gateway's rules when they plan, in check mode and in the run. This file contains their
versions of the gateway's refusals, which name options of modules, whereas the gateway names parameters of its API. In a
plan session or in a run, the gateway also refuses requests for reasons that a module cannot foresee. Those errors keep
the gateway's sentence, in which ``name_options`` replaces the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._fields import replace_fields

_MAX_NAMES = 20
"""Maximum number of names in a message."""
_REMEDIES = {
    "when=unused": "remove them first, or set when_unused: true to hide it now and remove it once it is unused",
    "withSnapshots": "detach or remove them first, or set purge: true to remove its snapshots as well",
    "force": "detach it first, or set force: true, which changes the files while programs use them",
}
"""The remedies for an object in use, by the request parameter that the gateway names in ``details.overrides``."""


def name_options(message: str, details: Mapping[str, Any]) -> str:
    """Return the gateway's message with module options in place of request parameters and fields.

    ``details``: as in the gateway's response. For an object in use, it contains the parameters that would make the
    request succeed. Older gateways send none.
    """
    for parameter in details.get("overrides") or ():
        if parameter in _REMEDIES:
            sentence = message.partition(". ")[0]
            return f"{sentence}: {_REMEDIES[parameter]}"
    return replace_fields(message)


def create_name_not_allowed_error(kind: str, name: str) -> Failure:
    return Failure(
        f"the {kind} name {_shorten(name)!r} is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
        "starting with a letter or digit"
    )


def create_name_taken_error(name: str, kind: str) -> Failure:
    return Failure(
        f"the name {name!r} is taken by a {kind}: sandboxes, snapshots, templates and volumes share one "
        "namespace, so choose another name",
        "name_taken",
    )


def create_in_use_error(kind: str, name: str, users: Mapping[str, Sequence[str]]) -> Failure:
    """Return the error for a snapshot or template in use. ``users`` contains names by kind of resource."""
    users_text = " and ".join(
        f"{_format_count(user_kind, len(names))} "
        f"({', '.join(names[:_MAX_NAMES])}{', …' if len(names) > _MAX_NAMES else ''})"
        for user_kind, names in users.items()
    )
    return Failure(
        f"{kind} {name!r} is in use by {users_text}: {_REMEDIES['when=unused']}",
        "in_use",
        blockers=[name for names in users.values() for name in names],
    )


def create_template_not_ready_error(name: str) -> Failure:
    return Failure(
        f"template {name!r} is being built and cannot be removed yet: wait until the build has finished", "conflict"
    )


def create_template_unusable_error(name: str, status: str) -> Failure:
    """Return the error for a template whose build has not finished, or has failed (``status``: error)."""
    if status == "error":
        return Failure(f"template {name!r} does not exist, because its last build failed: build it again", "not_found")
    return Failure(
        f"template {name!r} is being built and cannot be used yet: wait until the build has finished, for example with "
        "grove.sandbox.sandbox_template and wait_timeout",
        "conflict",
    )


def create_sizes_differ_error(source: str, sizes: Iterable[str]) -> Failure:
    """Return the error for sizes that differ from the source's, each as "NAME CURRENT, not REQUESTED"."""
    return Failure(
        f"{source!r} includes the memory of a machine with {' and '.join(sizes)}: do not change the sizes, "
        "or set cold_start: true to boot from its disk instead",
        "unsupported",
    )


def create_disk_too_small_error(size: int, source: int) -> Failure:
    return Failure(f"disk_mb {size} is less than the {source} MiB of the source: set disk_mb to at least {source}")


def create_paused_for_capture_error(name: str, ident: str) -> Failure:
    return Failure(
        f"sandbox {name!r} is paused and cannot be captured: resume it first, with the grove.sandbox.sandbox "
        "module and state: running",
        "conflict",
        blockers=[ident],
    )


def create_paused_for_attach_error(name: str, ident: str) -> Failure:
    return Failure(
        f"sandbox {name!r} is paused, but a volume can be attached only to a running sandbox: resume it "
        "first, with the grove.sandbox.sandbox module and state: running",
        "conflict",
        blockers=[ident],
    )


def create_prewarm_without_memory_error(kind: str, name: str) -> Failure:
    return Failure(
        f"{kind} {name!r} has no memory, so its forks boot and cannot be kept ready: omit prewarm, or set it to 0",
        "unsupported",
    )


def create_volume_not_found_error(name: str) -> Failure:
    return Failure(
        f"volume {name!r} not found: create it first, with the grove.sandbox.sandbox_volume module", "not_found"
    )


def create_volumes_lost_error(source: str, volumes: Sequence[str]) -> Failure:
    return Failure(
        f"{source!r} was captured with volumes that no longer exist ({', '.join(volumes)}): set volumes to "
        "the volumes to mount ([] for none)",
        "conflict",
        blockers=volumes,
    )


def create_volume_not_mounted_error(volume: str, sandbox: str, ident: str) -> Failure:
    return Failure(
        f"volume {volume!r} is not mounted in sandbox {sandbox!r}, so a snapshot of the sandbox cannot include it: "
        "attach it first, or take a snapshot of the volume alone with the grove.sandbox.sandbox_volume module",
        blockers=[ident],
    )


def create_nothing_to_clone_error(volume: str, source_kind: str, source: str) -> Failure:
    if source_kind == "sandbox":
        return Failure(
            f"volume {volume!r} is not mounted in sandbox {source!r}, so it cannot be cloned with the "
            "sandbox: attach it to the sandbox first, or mount the volume itself with clone: false"
        )
    return Failure(
        f"snapshot {source!r} does not include volume {volume!r}, so it cannot be cloned: take a snapshot "
        "that includes it, or mount the volume itself with clone: false"
    )


def create_volume_in_use_error(
    name: str, *, attachments: Sequence[Any], snapshots: Sequence[str], captured_by: Sequence[str]
) -> Failure:
    """Return the error for the removal of a volume, which names everything that prevents the removal.

    ``attachments``: as in a volume's shape. ``snapshots``: names. ``captured_by``: ids of snapshots of sandboxes.
    """
    reasons = []
    if attachments:
        sandboxes_text = ", ".join(each["sandbox"] for each in attachments)
        reasons.append(f"is mounted in {sandboxes_text} (set attachments: [] to detach it)")
    if snapshots:
        reasons.append(f"has snapshots: {', '.join(snapshots)} (set purge: true to remove them as well)")
    if captured_by:
        reasons.append(f"is part of snapshots of sandboxes ({', '.join(captured_by)}), which must be removed first")
    return Failure(
        f"volume {name!r} {' and '.join(reasons)}",
        "in_use",
        blockers=[*(each["sandbox_id"] for each in attachments), *snapshots, *captured_by],
    )


def create_volume_has_writers_error(name: str, writers: Iterable[Any]) -> Failure:
    """Return the error for a volume with writers. ``writers`` contains their attachments, as in a volume's shape."""
    attachments = list(writers)
    return Failure(
        f"volume {name!r} is mounted read-write in {', '.join(each['sandbox'] for each in attachments)}: "
        f"{_REMEDIES['force']}",
        "in_use",
        blockers=[each["sandbox_id"] for each in attachments],
    )


def create_volume_cannot_shrink_error(name: str, size: int, requested_size: int) -> Failure:
    return Failure(
        f"volume {name!r} has a size of {size} MiB and cannot shrink to {requested_size} MiB: do not reduce size_mb, "
        "or create a smaller volume and copy the files",
        "conflict",
    )


def create_volume_too_small_error(name: str, size: int, source: int) -> Failure:
    return Failure(
        f"size_mb {size} is less than the {source} MiB of the snapshot for volume {name!r}: "
        f"set size_mb to at least {source}"
    )


def create_path_not_allowed_error(path: str, max_length: int) -> Failure:
    return Failure(
        f"a volume cannot be mounted at {_shorten(path)!r}: use an absolute path without '.' and '..', of "
        f"at most {max_length} letters, digits and _ . @ + : = -"
    )


def create_system_path_error(path: str) -> Failure:
    return Failure(
        f"a volume cannot be mounted at {path!r}, which the system needs: choose a different path, for example under "
        "/srv"
    )


def create_paths_overlap_error(outer_path: str, inner_path: str) -> Failure:
    return Failure(
        f"volumes cannot be mounted both at {outer_path!r} and inside it at {inner_path!r}: choose separate paths"
    )


def _format_count(noun: str, count: int) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('x') else 's'}"


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
