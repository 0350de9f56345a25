"""Implement the host interface of hosts.base with VNET jails on ZFS clones.

A jail's memory cannot be captured: a snapshot contains only a file system, and a fork starts a new agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import zfs_core

from sandbox_gateway.config import Config
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
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
    SlowCommand,
    SnapshotPart,
    SnapshotSource,
    StorageCommands,
    StreamEncoding,
    Usage,
    VolumeState,
)
from sandbox_gateway.hosts.disk_queries import DiskQueries
from sandbox_gateway.hosts.import_check import require_compatible_origin, require_same_host_kind
from sandbox_gateway.hosts.jail_zfs import transfer
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.disk_usage import DiskUsage
from sandbox_gateway.hosts.jail_zfs.disks import Disks
from sandbox_gateway.hosts.jail_zfs.host_memory import read_memory
from sandbox_gateway.hosts.jail_zfs.jail import rootfs
from sandbox_gateway.hosts.jail_zfs.jail.holders import Holders
from sandbox_gateway.hosts.jail_zfs.jail.identity import Identities, read_gateway_key
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountTable
from sandbox_gateway.hosts.jail_zfs.jail.mounts import JailMounts
from sandbox_gateway.hosts.jail_zfs.jail.names import JailNames
from sandbox_gateway.hosts.jail_zfs.jail.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.jail.suspension import JailSuspension
from sandbox_gateway.hosts.jail_zfs.linux_images import create_image_refusal
from sandbox_gateway.hosts.jail_zfs.machine_register import Machine, MachineRegister
from sandbox_gateway.hosts.jail_zfs.network.jail_network import JailNetwork
from sandbox_gateway.hosts.jail_zfs.network.pf import require_enforceable_policy
from sandbox_gateway.hosts.jail_zfs.recovery import JailRecovery
from sandbox_gateway.hosts.jail_zfs.runner import END_REASON, JailRunner
from sandbox_gateway.hosts.jail_zfs.storage.slow_commands import list_slow_commands
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.hosts.jail_zfs.storage_calls import StorageCalls
from sandbox_gateway.hosts.jail_zfs.volumes import JailVolumes
from sandbox_gateway.hosts.jail_zfs.watcher import JailWatcher
from sandbox_gateway.hosts.state_root import create_state_root
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe, Source, compute_source_digest
from sandbox_gateway.records import MemoryMode, Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

log = Logger("jail_zfs")


_CAN_TRANSFER = all(find_spec(library) is not None for library in ("cryptography", "zstandard"))
"""On FreeBSD, these libraries must be compiled, so they are not installed with the gateway."""


class JailZfsHost:
    """Implements hosts.base.Host. ``environment``: variables to set for FreeBSD's commands."""

    kind = "jail_zfs"
    abilities = Abilities(
        memory=False,
        resize_on_fork=True,
        independent_snapshots=False,
        atomic_capture=True,
        atomic_append=True,
        transfer=_CAN_TRANSFER,
        incremental_transfer=_CAN_TRANSFER,
    )

    def __init__(self, config: Config, *, environment: Mapping[str, str] | None = None) -> None:
        self._config = config
        self.boot_seconds = self.resume_seconds = config.jail_zfs.boot_seconds
        state_root, prefix = config.host.state_root, config.network.prefix
        self._is_open = False
        self._has_scanned = False
        self._background = BackgroundTasks(log)
        self._run = CommandRunner(environment)
        self._storage = ZfsStorage(config.jail_zfs.dataset, state_root=state_root)
        self._network = JailNetwork(self._run, config)
        # jails and their mounts
        self._register = MachineRegister(self._network.bridge)
        self._jails = Jails(self._run)
        self._names = JailNames(self._jails, prefix=prefix, dying_seconds=config.jail_zfs.dying_seconds)
        self._limits = Limits(self._run, prefix, config.jail_zfs.processes)
        self._identities = Identities(state_root / "run")
        table = MountTable(self._run)
        mounts = JailMounts(self._run, table, self._background)
        suspension = JailSuspension(self._jails, state_root)
        # operations
        self._calls = StorageCalls(self._storage.root, Holders(self._run, self._jails, table))
        self._disks = Disks(self._storage, self._calls, mounts, self._background)
        self._disk_usage = DiskUsage()
        self._disk_queries = DiskQueries()
        self._volumes = JailVolumes(self._storage, self._calls, self._register, mounts, suspension, self._background)
        self._runner = JailRunner(
            self._register, self._jails, self._identities, self._limits, self._network, mounts, self._volumes
        )
        self._watcher = JailWatcher(self._register, self._jails)
        self._recovery = JailRecovery(self._register, self._disks, self._jails, mounts, self._runner, self._volumes)

    # -- the host ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        root = self._config.host.state_root
        create_state_root(root)
        for note in await self._calls.run(self._storage.open):
            log.warning("storage", what=note)
        try:
            for path in (root, self._storage.root.mountpoint):
                if len(str(path).split()) != 1:
                    raise Invalid(
                        f"the path {str(path)!r} contains whitespace, so it cannot be mounted in jails: "
                        "choose a different path"
                    )
            await run_in_thread(self._identities.open)
            await self._limits.open()
            await self._network.open()
            if (await self._run("sysctl", "-n", "net.inet.ip.forwarding")).strip() != "1":
                await self._run("sysctl", "net.inet.ip.forwarding=1")
        except BaseException:
            await self._calls.run(self._storage.close)
            raise
        self._is_open = True

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._background.cancel()
        try:
            if self._has_scanned and not self._register:  # Before the scan, unregistered jails may be running.
                await self._network.close()
        except GatewayError as error:
            log.warning("the bridge or the packet filter's rules could not be removed", reason=error.message)
        self._register.clear()
        await self._calls.run(self._storage.close)

    async def scan(self) -> Scan:
        scan = await self._recovery.scan()
        self._has_scanned = True
        self._background.start(self._watcher.run())
        return scan

    def describe_platform(self) -> Mapping[str, str]:
        return {}

    async def measure_room(self) -> Room:
        (disk_free, disk_total), memory = await asyncio.gather(
            self._calls.run(self._storage.measure_space), read_memory(self._run)
        )
        return Room(disk_free, disk_total, *memory)

    def get_storage_commands(self) -> StorageCommands:
        slow_commands = [
            SlowCommand(each.command, each.name, each.started_at, each.was_killed) for each in list_slow_commands()
        ]
        return StorageCommands(slow_commands, zfs_core.count_timeouts())

    async def find_stalled_instances(self) -> set[str]:
        """Return an empty set, because the processes of a jail keep running when a write fails for lack of space."""
        return set()

    async def resume_stalled(self, sandbox: Sandbox) -> None:
        pass

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._watcher.on_exit = callback

    # -- templates --------------------------------------------------------------------------------------------------

    def compute_guest_digest(self) -> str:
        return rootfs.compute_guest_digest()

    async def check_recipe(self, recipe: Recipe) -> None:
        if recipe.source is Source.IMAGE:
            raise await create_image_refusal(self._run)

    async def compute_source_digest(self, recipe: Recipe, login: RegistryLogin | None = None) -> str:
        await self.check_recipe(recipe)
        return await run_in_thread(compute_source_digest, recipe)

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        await self.check_recipe(recipe)
        rootfs.check_recipe(recipe)
        loop = asyncio.get_running_loop()
        builds: list[Future[None]] = []

        def fill(root: Path) -> None:
            builds.append(asyncio.run_coroutine_threadsafe(rootfs.build_rootfs(recipe, root, log), loop))
            builds[0].result()

        creation_task = asyncio.ensure_future(self._calls.run(self._storage.snapshots.create_base, base, fill))
        try:
            await asyncio.shield(creation_task)
        except asyncio.CancelledError:
            for build in builds:
                build.cancel()
            await asyncio.wait([creation_task])
            raise
        self._disks.add_snapshot(base)
        return ""

    def read_step_programs(self) -> Mapping[str, str]:
        raise Unsupported(
            "a jail host cannot run the steps of E2B's client: build the template with POST /templates, with "
            "'from: template' and the commands in 'setup'"
        )

    # -- sandboxes --------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        if with_memory or hold:
            raise Unsupported("a jail host captures only files, not memory: fork the snapshot without memory")
        machine = self._reserve_address(sandbox, self._names.build_default_name(sandbox.instance))
        try:
            await self._runner.start(machine, sandbox, self._disks.clone(snapshot.id, sandbox))
        except BaseException:
            await finish_despite_cancellation(self.discard(sandbox))
            raise

    async def flush_fork(self, fork: Sandbox) -> None:
        raise Unsupported("a jail host cannot prepare forks in advance: fork the snapshot when you need a sandbox")

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        raise Unsupported("a jail host cannot prepare forks in advance: fork the snapshot when you need a sandbox")

    async def boot(self, sandbox: Sandbox) -> None:
        root = self._disks.path(sandbox.instance)
        machine = self._reserve_address(sandbox, await self._names.choose_unused_name(sandbox.instance, root))
        try:
            await self._runner.start(machine, sandbox, self._disks.mount(sandbox.instance))
        except BaseException:
            await finish_despite_cancellation(self.stop(sandbox))
            raise

    def _reserve_address(self, sandbox: Sandbox, jail: str) -> Machine:
        """Reserve an address for a jail that is about to start. Raises Busy if all addresses are in use."""
        return self._register.reserve(sandbox.instance, jail, self._disks.path(sandbox.instance))

    async def stop(self, sandbox: Sandbox) -> None:
        await self._runner.stop(sandbox)

    async def save(self, sandbox: Sandbox) -> None:
        await self._disks.save(sandbox)

    async def discard(self, sandbox: Sandbox) -> None:
        await self._runner.stop(sandbox)
        await self._disks.discard(sandbox.instance)

    async def remove(self, sandbox: Sandbox) -> None:
        await self._disks.remove_record(sandbox)
        await self.discard(sandbox)

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        if memory:
            raise Unsupported("a jail host captures only files, not memory: set memory to 'none'")
        if volumes:
            self._register.require_running(sandbox)
        snapshot.memory = MemoryMode.NONE
        snapshot.resources = sandbox.resources
        snapshot.host = {"zfsSnapshot": self._disks.predict_name(sandbox, snapshot)}
        async with self._volumes.writers_suspended(sandbox, volumes):
            await self._disks.capture(sandbox, snapshot, volumes)
        self._disks.add_snapshot(snapshot)
        return snapshot

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await self._disks.save_snapshot(snapshot)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        await self._disks.remove_snapshot(snapshot)

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        return {"dir": str(snapshot.host.get("zfsSnapshot", ""))}

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        return ""

    async def find_export_bases(self, snapshot: Snapshot) -> Mapping[str, int]:
        return await self._calls.run(self._storage.streams.find_export_bases, snapshot.id)

    async def open_snapshot(
        self, snapshot: Snapshot, *, memory: bool, base: Snapshot | None = None, resume_token: str = ""
    ) -> SnapshotSource:
        streams = self._storage.streams
        base_id = "" if base is None else base.id
        return await finish_despite_cancellation(
            self._calls.run(
                transfer.open_source,
                self._config.host.state_root,
                self._reserve_bytes,
                measure=partial(streams.measure, snapshot.id, base_id=base_id),
                send=partial(streams.send, snapshot.id, base_id=base_id, resume_token=resume_token),
            )
        )

    def find_import_problem(self, host_kind: str, architecture: str, platform: Mapping[str, str]) -> str:
        require_compatible_origin(host_kind, architecture, kind=self.kind)
        return ""

    def check_encoding(self, encoding: StreamEncoding) -> None:
        if encoding is not StreamEncoding.PLAIN and not zfs_core.detect_capabilities().receive_options:
            raise Unsupported(
                f"the stream of the snapshot is {encoding}, but this host has zfs-fuse, which can receive only plain "
                "streams: use a host with OpenZFS"
            )

    async def find_import_bases(self, guid: int, origin_id: str) -> Sequence[str]:
        return await self._calls.run(self._storage.streams.find_by_guid, guid)

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> ImportTarget:
        if authentic and zfs_core.detect_capabilities().receive_options:
            return transfer.ReceivingTarget(
                self._storage.streams,
                snapshot,
                sizes[SnapshotPart.STREAM],
                on_commit=self._disks.add_snapshot,
                base=base,
            )
        target = transfer.StreamTarget(
            self._config.host.state_root,
            self._calls,
            receive=partial(self._storage.streams.receive, snapshot, base=base),
            discard=partial(self._storage.streams.discard, snapshot),
            on_commit=partial(self._disks.add_snapshot, snapshot),
        )
        await finish_despite_cancellation(run_in_thread(target.create, sizes[SnapshotPart.STREAM], self._reserve_bytes))
        return target

    @property
    def _reserve_bytes(self) -> int:
        return self._config.limits.free_disk_mb << 20

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
        streams = self._storage.volume_streams
        return await finish_despite_cancellation(
            self._calls.run(
                transfer.open_source,
                self._config.host.state_root,
                self._reserve_bytes,
                measure=partial(streams.measure, snapshot.id),
                send=partial(streams.send, snapshot.id),
            )
        )

    def check_volume_origin(self, host_kind: str) -> None:
        require_same_host_kind(host_kind, kind=self.kind)

    async def begin_volume_import(self, volume: Volume, part: SnapshotPart, size: int) -> ImportTarget:
        target = transfer.StreamTarget(
            self._config.host.state_root,
            self._calls,
            receive=partial(self._storage.volume_streams.receive, volume),
            discard=partial(self._storage.volume_streams.discard, volume),
        )
        await finish_despite_cancellation(run_in_thread(target.create, size, self._reserve_bytes))
        return target

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        await self._volumes.attach(sandbox, mount)

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        await self._volumes.detach(sandbox, mount)

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        """Return an empty list, because the host mounts volumes in jails."""
        return []

    # -- network ----------------------------------------------------------------------------------------------------

    def check_network(self, policy: NetworkPolicy) -> None:
        require_enforceable_policy(policy)

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        await self._runner.change_policy(sandbox, policy)

    def list_name_servers(self) -> list[str]:
        return self._network.list_name_servers()

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        address = self._register.require_running(sandbox).epair.address
        return Endpoint(address, key=read_gateway_key(self._identities.path(sandbox.instance)))

    # -- state of sandboxes -----------------------------------------------------------------------------------------

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return await self._disk_queries.run(sandbox.instance, lambda: self._disks.has_diverged(sandbox, head))

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        disk_bytes = 0
        if with_disk:
            disk_bytes = await self._disk_queries.run(sandbox.instance, lambda: self._disks.count_unique_bytes(sandbox))
        machine = self._register.get(sandbox.instance)
        return Usage(disk_bytes, await self._limits.read_memory_bytes(machine.jail) if machine else 0)

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        machines = {
            sandbox.instance: machine
            for sandbox in sandboxes
            if (machine := self._register.get(sandbox.instance)) and not machine.has_ended
        }
        usages = await self._limits.read_usages([machine.jail for machine in machines.values()])
        disk_bytes = await self._disk_usage.read({each: self._disks.path(each) for each in machines})
        return {
            instance: Load(
                memory_bytes=usages[machine.jail].get("memoryuse"),
                disk_bytes=disk_bytes[instance],
                cpu_percent=usages[machine.jail].get("pcpu"),
            )
            for instance, machine in machines.items()
        }

    async def read_console(self, sandbox: Sandbox) -> str:
        """Return "", because a jail has no console."""
        return ""

    def find_end_reason(self, sandbox: Sandbox) -> str:
        machine = self._register.get(sandbox.instance)
        if machine is None:
            return "its jail is not running"
        return END_REASON if machine.has_ended else ""
