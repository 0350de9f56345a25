"""Create volumes, and add new volumes and volume snapshots to the index after the host has committed them."""

from __future__ import annotations

from sandbox_gateway.engine.context import Context
from sandbox_gateway.records import Volume, VolumeSnapshot


async def create_volume(context: Context, volume: Volume, source: VolumeSnapshot | None) -> Volume:
    """Create the volume that ``volume`` describes, and add it to the index. The caller has reserved its name."""
    await context.host.create_volume(volume, source)
    context.index.put(volume)
    context.events.publish("volume.created", volumeID=volume.name, sizeMB=volume.size_mb)
    return volume


def add_volume_snapshot(context: Context, volume: Volume, snapshot: VolumeSnapshot) -> None:
    """Add a volume snapshot, which the host has already committed, to the index."""
    context.index.put(snapshot)
    context.events.publish("volume.captured", volumeID=volume.name, snapshotID=snapshot.id, name=snapshot.name)
