"""Implement the interface of hosts.base with virtual machines on reflinked files.

Other modules do the work (see the overview in ``__init__``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sandbox_gateway.config import Config
from sandbox_gateway.errors import Conflict, Unsupported
from sandbox_gateway.hosts.base import (
    Abilities,
    Endpoint,
    GuestMount,
    ImportBase,
    ImportTarget,
    Load,
    Log,
    PartSource,
    Room,
    Scan,
    SnapshotPart,
    SnapshotSource,
    StreamEncoding,
    Usage,
    VolumeState,
)
from sandbox_gateway.hosts.disk_queries import DiskQueries
from sandbox_gateway.hosts.import_check import require_compatible_origin, require_same_host_kind
from sandbox_gateway.hosts.kvm_xfs import record_files, transfer
from sandbox_gateway.hosts.kvm_xfs.capture import Capture
from sandbox_gateway.hosts.kvm_xfs.files import instances, memory_roots, reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.files.memory_roots import MemoryRoots
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.host_lock import HostLock
from sandbox_gateway.hosts.kvm_xfs.host_memory import read_memory
from sandbox_gateway.hosts.kvm_xfs.machines import Machines
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import ImageCheck
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import MODES_BEST_FIRST, WriteTrackingRegistry
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu import accel
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import Platform
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.recovery import KvmRecovery
from sandbox_gateway.hosts.kvm_xfs.template import guest_files
from sandbox_gateway.hosts.kvm_xfs.template.build import build_rootfs
from sandbox_gateway.hosts.kvm_xfs.template.oci.registry import resolve_digest
from sandbox_gateway.hosts.kvm_xfs.template.oci.runtime import read_step_programs
from sandbox_gateway.hosts.kvm_xfs.volumes.kvm_volumes import KvmVolumes
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.hosts.network_policy import find_name_servers
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.rootfs_common import remove_tree_in_thread
from sandbox_gateway.hosts.state_root import create_state_root
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.image_references import RegistryLogin, parse_image_reference
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe, Source, compute_source_digest
from sandbox_gateway.records import (
    MemoryMode,
    Mount,
    NetworkPolicy,
    Sandbox,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeSnapshot,
)
from sandbox_gateway.tasks import BackgroundTasks, clean_up, finish_despite_cancellation

_EXTENT_WALK_SECONDS = 2.0
"""Maximum time to examine the extents of a disk, of which a guest can make millions.

Shorter than a lookup waits, so that disks that take so long do not make the state of all others unknown.
"""

logger = Logger("kvm_xfs")


class KvmXfsHost:
    """The KVM/XFS host, an implementation of hosts.base.Host."""

    kind = "kvm_xfs"
    abilities = Abilities(
        memory=True,
        resize_on_fork=False,
        independent_snapshots=True,
        prewarm=True,
        can_stall=True,
        transfer=True,
        incremental_transfer=True,
        any_transfer_base=True,
    )

    def __init__(self, config: Config) -> None:
        self._config = config
        self.boot_seconds = config.kvm_xfs.boot_seconds
        self.resume_seconds = config.kvm_xfs.resume_seconds
        root = config.host.state_root
        self._lock = HostLock(root, config.network.prefix)
        self._layout = Layout(root)
        self._disk_queries = DiskQueries()
        quarantine = Quarantine(root)
        self._memory_roots = MemoryRoots(self._layout, config.kvm_xfs.memory_root)
        self._snapshots = Snapshots(self._layout, quarantine)
        self._network_slots = SlotPool(config.network, uid_base=config.kvm_xfs.uid_base)
        self._volumes = KvmVolumes(self._layout, quarantine, ServerPool(config.network, self._layout.serving))
        self._machines = Machines(config, self._layout, self._network_slots, self._volumes)
        self._tracker = TrackerClient(config.kvm_xfs.page_tracker)
        best_mode = config.kvm_xfs.memory_mode
        self._write_tracking = WriteTrackingRegistry(
            self._tracker, MODES_BEST_FIRST[0] if best_mode == "auto" else MemoryMode(best_mode)
        )
        self._recovery = KvmRecovery(
            self._layout, quarantine, self._memory_roots, self._snapshots, self._volumes, self._machines
        )
        self._reported_reasons: set[str] = set()
        self._removals: dict[str, asyncio.Task[None]] = {}
        """By the id of a template's base: the removal of the trees from which its disk was made."""
        self._background = BackgroundTasks(logger)

    # -- the host ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        root = self._config.host.state_root
        create_state_root(root)
        self._lock.acquire()
        try:
            reflink.require_reflinks(root)
            self._layout.create()
            await asyncio.to_thread(self._memory_roots.open)
            await asyncio.to_thread(self._layout.restrict_access, self._config.cache_root)
            self._machines.platform = await self._probe()
            await asyncio.to_thread(self._tracker.open)
        except BaseException:
            self._lock.release()
            raise

    async def close(self) -> None:
        await self._background.wait()
        await self._machines.close()
        await asyncio.to_thread(self._tracker.close)
        await self._volumes.close()
        await self._network_slots.close()
        self._lock.release()

    @property
    def platform(self) -> Platform:
        """The platform of the machines that this host starts. The host must be open."""
        return self._machines.platform

    async def _probe(self, kernel: Path | None = None) -> Platform:
        accelerator = await accel.probe(self._config.kvm_xfs, self._config.host.state_root / "accelerator.json", kernel)
        return Platform(accelerator.name, accelerator.cpu_model, self._config.kvm_xfs.machine, accelerator.qemu_version)

    async def scan(self) -> Scan:
        return await self._recovery.scan()

    def describe_platform(self) -> Mapping[str, str]:
        return asdict(self.platform)

    async def measure_room(self) -> Room:
        with translated_os_errors():
            return await asyncio.to_thread(_read_room, self._config.host.state_root, self._memory_roots)

    def get_storage_commands(self) -> None:
        """Return None, because this host stores data with system calls, not commands."""

    async def find_stalled_instances(self) -> set[str]:
        return await self._machines.list_stalled_instances()

    async def resume_stalled(self, sandbox: Sandbox) -> None:
        machine = self._machines.require_running(sandbox).machine
        if await machine.is_stalled():
            await machine.cont()

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._machines.on_exit = callback

    # -- templates --------------------------------------------------------------------------------------------------

    def compute_guest_digest(self) -> str:
        return guest_files.compute_guest_digest()

    async def check_recipe(self, recipe: Recipe) -> None:
        pass

    async def compute_source_digest(self, recipe: Recipe, login: RegistryLogin | None = None) -> str:
        if recipe.source is Source.IMAGE:
            return await resolve_digest(parse_image_reference(recipe.image), self._config.kvm_xfs, login)
        return await asyncio.to_thread(compute_source_digest, recipe)

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        partial = self._snapshots.partial_files(base)
        partial.directory.mkdir(mode=0o700)
        work_directory = partial.directory.with_name(f"{partial.directory.name}-rootfs")
        try:
            start_command = await build_rootfs(
                recipe,
                partial.disk,
                partial.kernel,
                partial.initrd,
                cache_root=self._config.cache_root,
                log=log,
                settings=self._config.kvm_xfs,
                work_directory=work_directory,
                image_digest=source_digest,
                login=login,
            )
            await finish_despite_cancellation(asyncio.to_thread(self._snapshots.commit, base))
        except BaseException:
            await clean_up(logger, remove_tree_in_thread(work_directory), asyncio.to_thread(self._snapshots.undo, base))
            raise
        # The machine boots meanwhile.
        self._removals[base.id] = self._background.start(remove_tree_in_thread(work_directory))
        self._machines.platform = await self._probe(self._snapshots.files(base).kernel)
        return start_command

    def read_step_programs(self) -> Mapping[str, str]:
        return read_step_programs()

    # -- sandboxes --------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        source = self._snapshots.files(snapshot)
        files = self._layout.instance(sandbox)
        if with_memory:
            self._machines.check_platform(snapshot)
            await asyncio.to_thread(self._memory_roots.require_memory, snapshot)
        with translated_os_errors():
            try:
                # Wait for the thread even if cancelled: it must not write after the files have been removed.
                await finish_despite_cancellation(
                    asyncio.to_thread(instances.create_files, source, files, sandbox, with_memory)
                )
                state = source.device_state if with_memory else None
                await self._machines.launch(sandbox, files, state, hold=hold)
                sandbox.host["line"] = with_memory and snapshot.host.get("line", False)
                if with_memory and "image" in snapshot.host:
                    sandbox.host["image"] = snapshot.host["image"]
            except BaseException:
                await clean_up(logger, self.discard(sandbox))
                raise

    async def flush_fork(self, fork: Sandbox) -> None:
        with translated_os_errors():
            await asyncio.to_thread(instances.sync, self._layout.instance(fork))

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        with translated_os_errors():
            try:
                await self._machines.claim(fork, sandbox)
            except BaseException:
                await clean_up(logger, self.discard(sandbox), self.discard(fork))
                raise

    async def boot(self, sandbox: Sandbox) -> None:
        files = self._layout.instance(sandbox)
        await finish_despite_cancellation(
            asyncio.to_thread(instances.create_memory_file, files, sandbox.resources.memory_mb)
        )
        await self._machines.launch(sandbox, files, None)

    async def stop(self, sandbox: Sandbox) -> None:
        await self._machines.stop(sandbox)

    async def save(self, sandbox: Sandbox) -> None:
        with translated_os_errors():
            self._layout.sandbox(sandbox).mkdir(mode=0o711, exist_ok=True)
            await asyncio.to_thread(record_files.write_record, self._layout.sandbox(sandbox), sandbox)

    async def discard(self, sandbox: Sandbox) -> None:
        await self._machines.stop(sandbox)
        with translated_os_errors():
            await asyncio.to_thread(instances.remove, self._layout.instance(sandbox))

    async def remove(self, sandbox: Sandbox) -> None:
        directory = self._layout.sandbox(sandbox)
        with translated_os_errors():
            await asyncio.to_thread(record_files.unlink_record, directory)
            await self._machines.stop(sandbox)
            await asyncio.to_thread(instances.remove_all, directory)

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        machine = self._machines.require_running(sandbox).machine
        files = self._layout.instance(sandbox)
        tracking = self._write_tracking.get(machine, _get_boot_image_check(sandbox)) if memory else None
        location = "the state file system"
        if memory and (memory_directory := await asyncio.to_thread(self._find_capture_directory, files)):
            memory_directory.record_location(snapshot)
            location += f" or in the memory root {memory_directory.root}"
        capture = Capture(machine, files, self._snapshots.partial_files(snapshot), tracking)
        with translated_os_errors(location):
            async with self._volumes.pending_snapshots(volumes) as pending_snapshots:
                try:
                    await capture.run(pending_snapshots.clone_images if volumes else None)
                    snapshot.memory = capture.mode
                    snapshot.memory_bytes_written = capture.memory_bytes
                    snapshot.pause_ms = capture.pause_ms
                    snapshot.resources = sandbox.resources
                    snapshot.host |= {"platform": sandbox.host["platform"], "phases_ms": capture.phases_ms}
                    snapshot.host["stops_ms"] = capture.stops_ms
                    if capture.image_check is not None:
                        snapshot.host["image"] = capture.image_check.model_dump(mode="json")
                    if tracking is not None and tracking.reason:
                        snapshot.host["degraded"] = tracking.reason
                        self._report_degraded_mode(tracking.reason, capture.mode)
                    snapshot.host["line"] = memory and await machine.is_line_open()
                    await pending_snapshots.commit()
                    await finish_despite_cancellation(asyncio.to_thread(self._snapshots.commit, snapshot))
                except BaseException:
                    await clean_up(logger, asyncio.to_thread(self._snapshots.undo, snapshot))
                    raise
        if snapshot.kind is SnapshotKind.TRANSIENT:
            self._background.start(asyncio.to_thread(self._snapshots.sync, snapshot))
        return snapshot

    def _find_capture_directory(self, files: InstanceFiles) -> MemoryDirectory | None:
        memory_roots.require_held_image(files.memory)
        return self._memory_roots.find_capture_directory()

    def _report_degraded_mode(self, reason: str, mode: MemoryMode) -> None:
        """Log a warning that captures do not use the best memory mode, once per reason."""
        if reason not in self._reported_reasons:
            self._reported_reasons.add(reason)
            logger.warning("captures do not use the best memory mode", mode=mode.value, reason=reason)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        with translated_os_errors():
            await asyncio.to_thread(self._snapshots.save, snapshot)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if removal := self._removals.pop(snapshot.id, None):
            await asyncio.wait([removal])
        with translated_os_errors():
            await asyncio.to_thread(self._snapshots.remove, snapshot)

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        return self._snapshots.get_file_paths(snapshot)

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        return self._memory_roots.find_memory_problem(snapshot)

    async def find_export_bases(self, snapshot: Snapshot) -> Mapping[str, int]:
        """Return {}. It is not called, because any snapshot can be the base."""
        return {}

    async def open_snapshot(
        self, snapshot: Snapshot, *, memory: bool, base: Snapshot | None = None, resume_token: str = ""
    ) -> SnapshotSource:
        if resume_token:
            raise Unsupported(
                "this host cannot export the rest of a snapshot: export the snapshot without a resume token"
            )
        if memory:
            await asyncio.to_thread(self._memory_roots.require_memory, snapshot)
        base_files = None if base is None else self._snapshots.files(base)
        with translated_os_errors():
            return await asyncio.to_thread(
                transfer.SnapshotFileSource, self._snapshots.files(snapshot), snapshot, memory=memory, base=base_files
            )

    def find_import_problem(self, host_kind: str, architecture: str, platform: Mapping[str, str]) -> str:
        require_compatible_origin(host_kind, architecture, kind=self.kind)
        return transfer.find_platform_problem(asdict(self.platform), platform)

    def check_encoding(self, encoding: StreamEncoding) -> None:
        pass

    async def find_import_bases(self, guid: int, origin_id: str) -> Sequence[str]:
        """Return []. It is not called, because any snapshot can be the base."""
        return []

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> ImportTarget:
        if snapshot.memory is not MemoryMode.NONE and (
            memory_directory := await asyncio.to_thread(self._memory_roots.find_capture_directory)
        ):
            memory_directory.record_location(snapshot)
        target = transfer.SnapshotFileTarget(self._snapshots, snapshot, asdict(self.platform), line=line)
        base_paths = {} if base is None else transfer.list_base_paths(self._snapshots.files(base.snapshot), base.parts)
        try:
            await finish_despite_cancellation(asyncio.to_thread(target.create, sizes, base_paths))
        except BaseException:
            await target.discard()
            raise
        return target

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        await self._volumes.create(volume, source)

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        await self._volumes.grow(volume, size_mb)

    async def remove_volume(self, volume: Volume) -> None:
        await self._volumes.remove(volume)

    async def read_volume_state(self, volume: Volume) -> VolumeState:
        return await self._volumes.state(volume)

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        await self._volumes.capture(snapshot)

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        await self._volumes.remove_snapshot(snapshot)

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        await self._volumes.rollback(volume, snapshot)

    async def open_volume_snapshot(self, snapshot: VolumeSnapshot) -> PartSource:
        return await self._volumes.open_snapshot(snapshot)

    def check_volume_origin(self, host_kind: str) -> None:
        require_same_host_kind(host_kind, kind=self.kind)

    async def begin_volume_import(self, volume: Volume, part: SnapshotPart, size: int) -> ImportTarget:
        return await self._volumes.begin_import(volume, size)

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        await self._volumes.attach(sandbox, mount, self.get_endpoint(sandbox).address)

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        await self._volumes.detach(sandbox, mount)

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        return self._volumes.list_guest_mounts(sandbox)

    # -- network ----------------------------------------------------------------------------------------------------

    def check_network(self, policy: NetworkPolicy) -> None:
        self._network_slots.check(policy)

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        await self._network_slots.apply(self._machines.require_running(sandbox).slot, policy)

    def list_name_servers(self) -> list[str]:
        return find_name_servers(self._config.network)

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        machine, slot = self._machines.require_running(sandbox)
        return Endpoint(slot.host_address, machine.line if sandbox.host.get("line") else None)

    # -- state of sandboxes -----------------------------------------------------------------------------------------

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        disk, head_disk = self._layout.instance(sandbox).disk, self._snapshots.files(head).disk

        async def compare() -> bool:
            return not await run_in_thread(reflink.have_same_extents, disk, head_disk, _EXTENT_WALK_SECONDS)

        with _removal_explained(sandbox):
            return await self._disk_queries.run(sandbox.instance, compare)

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        files = self._layout.instance(sandbox)

        async def measure_disk() -> int:
            return await run_in_thread(reflink.count_unique_bytes, files.disk, _EXTENT_WALK_SECONDS)

        with _removal_explained(sandbox):
            disk_bytes = await self._disk_queries.run(sandbox.instance, measure_disk) if with_disk else 0
            image_bytes = await asyncio.to_thread(instances.measure_image, files)
        started_machine = self._machines.find(sandbox)
        memory_bytes = await asyncio.to_thread(started_machine.machine.read_memory_bytes) if started_machine else 0
        return Usage(disk_bytes=disk_bytes, memory_bytes=memory_bytes, image_bytes=image_bytes)

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        machines = {
            sandbox.instance: started_machine.machine
            for sandbox in sandboxes
            if (started_machine := self._machines.find(sandbox)) and not started_machine.machine.has_ended
        }
        # One thread measures all machines, because each measurement takes only a few microseconds.
        measurements = await asyncio.to_thread(lambda: {key: machine.load() for key, machine in machines.items()})
        return {instance: load for instance, load in measurements.items() if load is not None}

    async def read_console(self, sandbox: Sandbox) -> str:
        started_machine = self._machines.find(sandbox)
        return await started_machine.machine.read_console() if started_machine else ""

    def find_end_reason(self, sandbox: Sandbox) -> str:
        started_machine = self._machines.find(sandbox)
        if started_machine is None:
            return "its machine is not running"
        return f"its machine stopped{started_machine.machine.log_tail()}" if started_machine.machine.has_ended else ""


def _read_room(root: Path, memory_roots: MemoryRoots) -> Room:
    status = os.statvfs(root)
    memory_free, memory_total = read_memory()
    disk_free, disk_total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    return Room(disk_free, disk_total, memory_free, memory_total, memory_roots.measure_disk())


def _get_boot_image_check(sandbox: Sandbox) -> ImageCheck | None:
    """Return the check data of the memory image from which the sandbox's machine was started, or None."""
    check_data = sandbox.host.get("image")
    return None if check_data is None else ImageCheck.model_validate(check_data)


@contextlib.contextmanager
def _removal_explained(sandbox: Sandbox) -> Iterator[None]:
    """Raise Conflict if a file disappears inside this context, which can happen because readers do not take a lock."""
    try:
        yield
    except FileNotFoundError:
        raise Conflict(f"sandbox {sandbox.id} is being paused, rolled back or removed: try again") from None
