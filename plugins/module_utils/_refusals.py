# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gateway's refusals, worded for playbooks.

Check mode only reads from the gateway, so plans must apply the gateway's rules. The messages are the modules' own: they
name module options, where the gateway's messages name fields of its API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

_SHOWN = 20
"""Maximum number of names in a message."""


def name_not_allowed(what: str, name: str) -> Failure:
    return Failure(
        f"the {what} name {_shortened(name)!r} is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
        "starting with a letter or digit"
    )


def name_taken(name: str, kind: str) -> Failure:
    return Failure(
        f"the name {name!r} is taken by a {kind}: sandboxes, snapshots, templates and volumes share their names, "
        "choose another",
        "name_taken",
    )


def in_use(what: str, name: str, users: Sequence[str]) -> Failure:
    """``users``: names of sandboxes; empty if the gateway does not list them."""
    shown = ", ".join(users[:_SHOWN]) + (", …" if len(users) > _SHOWN else "") if users else "it does not say which"
    return Failure(
        f"{what} {name!r} is in use by sandboxes ({shown}): remove them first, or set when_unused: true to hide it now "
        "and have it removed with the last of them",
        "in_use",
        blockers=users,
    )


def building(name: str) -> Failure:
    return Failure(f"template {name!r} is being built and cannot be removed yet: wait for the build", "conflict")


def other_sizes(source: str, sizes: Iterable[str]) -> Failure:
    """``sizes``: each as "NAME OWN, not WANTED"."""
    return Failure(
        f"{source!r} holds the memory of a machine with {' and '.join(sizes)}: leave the sizes as they are, or set "
        "cold_start: true to boot from its disk instead",
        "unsupported",
    )


def smaller_disk(size: int, source: int) -> Failure:
    return Failure(f"disk_mb {size} is less than the {source} of what it is made from")


def paused_for_capture(name: str, ident: str) -> Failure:
    return Failure(
        f"sandbox {name!r} is paused and cannot be captured: resume it first, with the module "
        "grove.sandbox.sandbox and state: running",
        "conflict",
        blockers=[ident],
    )


def paused_for_attach(name: str, ident: str) -> Failure:
    return Failure(
        f"sandbox {name!r} is paused, and a volume is attached while it runs: resume it first, with the module "
        "grove.sandbox.sandbox and state: running",
        "conflict",
        blockers=[ident],
    )


def volume_not_found(name: str) -> Failure:
    return Failure(
        f"volume {name!r} not found: create it first, with the module grove.sandbox.sandbox_volume", "not_found"
    )


def volumes_lost(source: str, volumes: Sequence[str]) -> Failure:
    return Failure(
        f"{source!r} was captured with volumes that are there no more ({', '.join(volumes)}): "
        "say in volumes what to mount instead; [] is nothing",
        "conflict",
        blockers=volumes,
    )


def volume_not_mounted(volume: str, sandbox: str, ident: str) -> Failure:
    return Failure(
        f"volume {volume!r} is not mounted in sandbox {sandbox!r}, so its snapshot cannot hold it: "
        "attach it first, or take a snapshot of the volume alone with the module grove.sandbox.sandbox_volume",
        blockers=[ident],
    )


def nothing_to_clone(volume: str, source_kind: str, source: str) -> Failure:
    if source_kind == "sandbox":
        return Failure(
            f"volume {volume!r} is not mounted in sandbox {source!r}, and is cloned with it: attach it there first, or "
            "mount the volume itself with clone: false"
        )
    return Failure(
        f"snapshot {source!r} holds nothing of volume {volume!r} to clone: take one that names it in volumes, or mount "
        "the volume itself with clone: false"
    )


def volume_has_writers(name: str, writers: Iterable[Any]) -> Failure:
    """``writers``: attachments in the form of a volume's shape."""
    found = list(writers)
    return Failure(
        f"volume {name!r} is mounted read-write in {', '.join(each['sandbox'] for each in found)}: detach it there "
        "first, or set force: true, and what runs there finds other files than it left",
        "in_use",
        blockers=[each["sandbox_id"] for each in found],
    )


def volume_cannot_shrink(name: str, size: int, wanted: int) -> Failure:
    return Failure(
        f"volume {name!r} has {size} MiB and cannot shrink to {wanted}: leave size_mb as it is, or create a smaller "
        "volume and copy the files of this one",
        "conflict",
    )


def smaller_volume(name: str, size: int, source: int) -> Failure:
    return Failure(f"size_mb {size} is less than the {source} of the snapshot that {name!r} is made from")


def path_not_allowed(path: str, longest: int) -> Failure:
    return Failure(
        f"a volume cannot be mounted at {_shortened(path)!r}: write an absolute path without '.' and '..', of letters, "
        f"digits and _ . @ + : = -, at most {longest} characters long"
    )


def path_of_the_system(path: str) -> Failure:
    return Failure(f"a volume cannot be mounted at {path!r}, which the system needs: choose a path below /srv, say")


def paths_overlap(outer: str, inner: str) -> Failure:
    return Failure(f"volumes cannot be mounted both at {outer!r} and at {inner!r} in it: choose paths apart")


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
