"""Find the snapshots that a command would destroy as a side effect, and refuse that unless an option allows it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from zfs_core.capabilities import detect_capabilities
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import quote
from zfs_core.listing import list_datasets, list_snapshots
from zfs_core.names import get_pool_name
from zfs_core.properties import get_props


def find_receive_losses(filesystem: str, header: Mapping[str, Any], options: Namespace) -> list[dict[str, object]]:
    """Return what `zfs receive -F` destroys in an existing filesystem, besides changes since its newest snapshot.

    ``header``: the fields of the stream's begin record. Raises CommandError unless the options allow the loss.
    """
    snapshots = list_snapshots(filesystem)
    if header["drr_fromguid"] == 0:
        if not options.replace:
            raise CommandError(
                Kind.EXISTS,
                f"the stream contains a whole filesystem and would replace {filesystem!r}: choose another name, or "
                "pass --replace to lose its data",
                [filesystem],
            )
        if snapshots:
            raise CommandError(
                Kind.IN_USE,
                f"{filesystem!r} has snapshots ({quote(snapshots)}), so ZFS cannot replace it: destroy them first "
                "(lzc destroy)",
                snapshots,
            )
        return [{"action": "replace", "name": filesystem}]
    guids = get_props(snapshots, ["guid"]) if snapshots else {}
    bases = [name for name in snapshots if guids[name]["guid"].number == header["drr_fromguid"]]
    # Without its base, ZFS refuses the stream.
    newer_snapshots = snapshots[snapshots.index(bases[0]) + 1 :] if bases else []
    if newer_snapshots and not options.destroy_newer:
        raise CommandError(
            Kind.IN_USE,
            f"{filesystem!r} has snapshots ({quote(newer_snapshots)}) that are newer than the base of the stream, "
            f"{bases[0]!r}: send the changes since the newest one, or pass --destroy-newer to lose them",
            newer_snapshots,
        )
    if newer_snapshots and not detect_capabilities().receive_options:
        raise CommandError(
            Kind.NOT_SUPPORTED,
            "zfs-fuse cannot destroy newer snapshots while it receives: first run lzc rollback --destroy-newer "
            f"{bases[0]}",
            newer_snapshots,
        )
    require_unused(newer_snapshots)
    return [{"action": "destroy", "name": name} for name in newer_snapshots]


def require_unused(snapshots: Sequence[str], alternative: str = "") -> None:
    """Raise CommandError if any of the snapshots is held or has clones.

    ``alternative`` ends the message, such as "or pass --defer".
    """
    held_names = list_held_snapshots(snapshots)
    if held_names:
        remedy = f"Release the holds first (lzc holds, lzc release){alternative}"
        raise CommandError(Kind.IN_USE, f"holds exist on {quote(held_names)}. {remedy}", held_names)
    if clones := list_clones_by_origin(snapshots):
        related = [name for names in clones.values() for name in names]
        remedy = f"Destroy or promote them first{alternative}"
        message = f"clones of {quote(list(clones))} exist: {quote(related)}. {remedy}"
        raise CommandError(Kind.IN_USE, message, related)


def list_held_snapshots(snapshots: Sequence[str]) -> list[str]:
    props = get_props(snapshots, ["userrefs"]) if snapshots else {}
    return [name for name in snapshots if props[name]["userrefs"].number]


def list_clones_by_origin(snapshots: Sequence[str]) -> dict[str, list[str]]:
    """Return the clones of these snapshots, by snapshot. Omits snapshots without clones."""
    wanted_names, result = set(snapshots), dict[str, list[str]]()
    for pool in dict.fromkeys(map(get_pool_name, snapshots)):
        datasets = list_datasets(pool, types="filesystem,volume")
        for name, props in get_props(datasets, ["origin"]).items():
            if props["origin"].value in wanted_names:
                result.setdefault(props["origin"].value, []).append(name)
    return result
