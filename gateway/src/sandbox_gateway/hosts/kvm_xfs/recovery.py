"""Scan the disk, adopt running machines and remove orphaned files at start-up."""

from __future__ import annotations

import asyncio

from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.files.memory_roots import MemoryRoots
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.machines import Machines
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.record_files import RecordReader
from sandbox_gateway.hosts.kvm_xfs.volumes.kvm_volumes import KvmVolumes
from sandbox_gateway.hosts.tree_removal import remove_tree
from sandbox_gateway.records import Sandbox, Snapshot, Volume, VolumeSnapshot, refuse_newer_records


class KvmRecovery:
    def __init__(
        self,
        layout: Layout,
        quarantine: Quarantine,
        memory_roots: MemoryRoots,
        snapshots: Snapshots,
        volumes: KvmVolumes,
        machines: Machines,
    ) -> None:
        self._layout = layout
        self._quarantine = quarantine
        self._memory_roots = memory_roots
        self._snapshots = snapshots
        self._volumes = volumes
        self._machines = machines

    async def scan(self) -> Scan:
        reader = RecordReader()
        self._refuse_newer_records(reader)
        scan = Scan()
        for parent in (self._layout.templates, self._layout.snapshots, self._layout.sandboxes):
            scan.repaired += [f"removed {name}, which was never committed" for name in commit_protocol.sweep(parent)]
        scan.snapshots = self._snapshots.scan(scan.repaired, reader)
        for directory in commit_protocol.list_directories(self._layout.sandboxes):
            if not record_files.has_record(directory):
                continue  # It was never committed. _remove_orphaned_files removes it once its machine is stopped.
            with self._quarantine.quarantined_if_damaged(directory, scan.repaired):
                scan.sandboxes.append(reader.read(directory, Sandbox))
        scan.unreadable_sandboxes = self._quarantine.list_quarantined_paths(self._layout.sandboxes)
        await self._volumes.find(scan, reader)
        await self._machines.adopt(scan)
        await self._volumes.adopt(scan, self._machines.list_addresses())
        self._remove_orphaned_files(scan)
        await asyncio.to_thread(self._memory_roots.sweep, self._quarantine, scan.repaired)
        return scan

    def _refuse_newer_records(self, reader: RecordReader) -> None:
        layout, list_directories = self._layout, commit_protocol.list_directories
        find_newer_records = reader.find_newer_records
        refuse_newer_records(
            find_newer_records([*list_directories(layout.templates), *list_directories(layout.snapshots)], Snapshot)
            | find_newer_records(list_directories(layout.sandboxes), Sandbox)
            | find_newer_records(list_directories(layout.volumes), Volume)
            | find_newer_records(layout.volume_snapshots(), VolumeSnapshot)
        )

    def _remove_orphaned_files(self, scan: Scan) -> None:
        """Remove the files of sandboxes that were never committed. Their machines have already been stopped."""
        committed_instances = {sandbox.instance for sandbox in scan.sandboxes}
        for directory in self._layout.instances():
            if directory.name not in committed_instances:
                remove_tree(directory)
                scan.repaired.append(f"removed the disk {directory.name}, which belonged to no sandbox")
        for directory in commit_protocol.list_directories(self._layout.sandboxes):
            if not record_files.has_record(directory):
                remove_tree(directory)
                scan.repaired.append(f"removed the sandbox {directory.name}, which was never committed")
