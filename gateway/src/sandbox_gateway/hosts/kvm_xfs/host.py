"""The KVM/XFS host: virtual machines on reflinks, behind the protocol of hosts.base."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from sandbox_gateway.config import Config
from sandbox_gateway.errors import BackendFailed, Conflict, Unsupported
from sandbox_gateway.hosts.addresses import name_servers
from sandbox_gateway.hosts.base import Abilities, Endpoint, Log, Scan, Usage
from sandbox_gateway.hosts.kvm_xfs import accel, layout, qemu, reflink
from sandbox_gateway.hosts.kvm_xfs.capture import Capture
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.host_volumes import VolumeVerbs
from sandbox_gateway.hosts.kvm_xfs.layout import Instance, Layout
from sandbox_gateway.hosts.kvm_xfs.netns import GUEST_MAC, Slot, SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu import Machine, Platform, Shape
from sandbox_gateway.hosts.kvm_xfs.rootfs import build_rootfs
from sandbox_gateway.hosts.kvm_xfs.volume_server import VolumeServers
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Memory, NetworkPolicy, Sandbox, Snapshot, VolumeSnapshot

_OLD_LOG_SECONDS = 2.0

log = Logger("kvm_xfs")


class KvmXfsHost(VolumeVerbs):
    """Implements hosts.base.Host."""

    kind = "kvm_xfs"
    abilities = Abilities(memory=True, resize_on_fork=False, independent_snapshots=True)

    def __init__(self, config: Config) -> None:
        self._config = config
        self.boot_seconds = config.kvm_xfs.boot_seconds
        self.resume_seconds = config.kvm_xfs.resume_seconds
        self._layout = Layout(config.host.state_root)
        super().__init__(self._layout, VolumeServers(config.network, self._layout.serving))
        self._slots = SlotPool(config.network, uid_base=config.kvm_xfs.uid_base)
        self._cgroups = Cgroups(config.network.prefix)
        self._machines: dict[str, tuple[Machine, Slot]] = {}
        self._placing: dict[str, asyncio.Task[None]] = {}
        self._old_logs: asyncio.Task[None] | None = None
        self._lock_fd = -1
        self._name_lock: socket.socket | None = None
        self._platform: Platform | None = None
        self._exit_callback: Callable[[str], None] = lambda instance: None

    # -- the host itself --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        root = self._config.host.state_root
        try:
            root.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendFailed(f"the state root {root} cannot be made: {error.strerror}") from None
        self._take_lock(root)
        try:
            reflink.require_reflinks(root)
            self._layout.create()
            await asyncio.to_thread(self._layout.close_to_others, self._config.cache_root)
            self._platform = await self._probe()
        except BaseException:
            self._drop_lock()
            raise

    async def close(self) -> None:
        if self._old_logs is not None:
            self._old_logs.cancel()
        if self._placing:
            await asyncio.wait(self._placing.values())
        for machine, _ in self._machines.values():
            await machine.detach()
            machine.forget()
        self._machines.clear()
        await self._close_volumes()
        await self._slots.close()
        self._drop_lock()

    def _take_lock(self, root: Path) -> None:
        """Take the state and the network names for this gateway alone; the kernel gives both back when it dies."""
        self._lock_fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        prefix = self._config.network.prefix
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An abstract socket belongs to the network namespace, as the names do: it is seen from every chroot.
            self._name_lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._name_lock.bind(f"\0sandbox-gateway/{prefix}")
        except BlockingIOError:
            self._drop_lock()
            raise Conflict(f"another gateway runs on {root}: stop it, or give this one another state_root") from None
        except OSError:
            self._drop_lock()
            raise Conflict(
                f"another gateway on this machine uses the network prefix {prefix!r}: give this one another "
                "(network.prefix and network.subnet)"
            ) from None

    def _drop_lock(self) -> None:
        if self._name_lock is not None:
            self._name_lock.close()
            self._name_lock = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def _probe(self, kernel: Path | None = None) -> Platform:
        found = await accel.probe(self._config.kvm_xfs, self._config.host.state_root / "accelerator.json", kernel)
        return Platform(found.name, found.cpu_model, self._config.kvm_xfs.machine, found.qemu_version)

    @property
    def platform(self) -> Platform:
        assert self._platform is not None, "the host is not open"
        return self._platform

    # -- finding things again ---------------------------------------------------------------------------------------

    async def scan(self) -> Scan:
        scan = Scan()
        for parent in (self._layout.templates, self._layout.snapshots, self._layout.sandboxes):
            scan.repaired += [f"removed {name}, which was never finished" for name in layout.sweep(parent)]
        for parent in (self._layout.templates, self._layout.snapshots):
            for directory in layout.directories(parent):
                with self._layout.quarantining(directory, scan.repaired):
                    scan.snapshots.append(_whole(directory, layout.read_manifest(directory, Snapshot)))
        for directory in layout.directories(self._layout.sandboxes):
            if not (directory / layout.MANIFEST).exists():
                continue  # never committed: _remove_strays removes it, when its machine is gone
            with self._layout.quarantining(directory, scan.repaired):
                scan.sandboxes.append(layout.read_manifest(directory, Sandbox))
        scan.unreadable_sandboxes = self._layout.damaged_sandboxes()
        await self._find_volumes(scan)
        await self._adopt(scan)
        await self._adopt_volumes(scan, {instance: slot.host_address for instance, (_, slot) in self._machines.items()})
        self._remove_strays(scan)
        return scan

    async def _adopt(self, scan: Scan) -> None:
        """Take over the machines that still run and are named by a sandbox; end the others."""
        wanted = {sandbox.instance: sandbox for sandbox in scan.sandboxes}
        found = list(qemu.running(str(self._layout.sandboxes)))
        keep = {path.parent.name: (pid, label) for pid, label, path in found if path.parent.name in wanted}
        for pid, _, path in found:
            if path.parent.name not in keep:
                await _end(Machine(pid, Instance(path.parent)))
                scan.repaired.append(f"ended the machine {path.parent.name}, which belonged to nothing")
        await self._slots.open({_slot_of(label) for _, label in keep.values()})
        self._cgroups.sweep(set(keep))
        for instance, (pid, label) in keep.items():
            machine = Machine(pid, self._layout.instance(wanted[instance]))
            self._watch(instance, machine, self._slots.adopt(_slot_of(label)))
            if layout.has_old_log(machine.files.directory):
                scan.repaired.append(
                    f"the machine {instance} is of an older release, its log has no limit and is emptied now and then: "
                    "pause and resume its sandbox"
                )
            # A gateway that died at its start left it without limits; during a capture, standing still.
            self._limit(wanted[instance], pid)
            if await machine.go_on():
                scan.repaired.append(f"the machine {instance} stood still: it goes on")
            scan.alive.add(instance)
        if old := {each for each in scan.alive if layout.has_old_log(self._machines[each][0].files.directory)}:
            self._old_logs = asyncio.create_task(self._empty_old_logs(old))

    async def _empty_old_logs(self, instances: set[str]) -> None:
        """While machines of an older release run: their guests may make them write to their logs without end."""
        while running := instances & self._machines.keys():
            for instance in running:
                with contextlib.suppress(OSError):
                    layout.empty_old_log(self._machines[instance][0].files.directory)
            await asyncio.sleep(_OLD_LOG_SECONDS)

    def _remove_strays(self, scan: Scan) -> None:
        wanted = {sandbox.instance for sandbox in scan.sandboxes}
        for directory in self._layout.instances():
            if directory.name not in wanted:
                shutil.rmtree(directory)
                scan.repaired.append(f"removed the disk {directory.name}, which belonged to nothing")
        for directory in layout.directories(self._layout.sandboxes):
            if not (directory / layout.MANIFEST).exists():
                shutil.rmtree(directory)
                scan.repaired.append(f"removed the sandbox {directory.name}, which was never finished")

    # -- bases ------------------------------------------------------------------------------------------------------

    async def build_base(self, base: Snapshot, recipe: Recipe, log: Log) -> Snapshot:
        partial, final = self._layout.partial(base), self._layout.snapshot(base)
        partial.mkdir(mode=0o700)
        try:
            await build_rootfs(
                recipe,
                partial / "rootfs.img",
                partial / "kernel",
                partial / "initrd",
                cache_root=self._config.cache_root,
                log=log,
            )
            base.disk_bytes_unique = await asyncio.to_thread(reflink.unique_bytes, partial / "rootfs.img")
            await asyncio.to_thread(_commit_snapshot, partial, final, base)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._platform = await self._probe(final / "kernel")
        return base

    # -- fork -------------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        source = self._layout.snapshot(snapshot)
        files = self._layout.instance(sandbox)
        if with_memory:
            self._check_platform(snapshot)
        with layout.explaining():
            try:
                await asyncio.to_thread(_lay_out, source, files, sandbox, with_memory)
                await self._launch(sandbox, files, source / "device.state" if with_memory else None)
                sandbox.host["line"] = with_memory and snapshot.host.get("line", False)
            except BaseException:
                await self.discard(sandbox)
                raise

    async def start(self, sandbox: Sandbox) -> None:
        files = self._layout.instance(sandbox)
        await asyncio.to_thread(_blank_memory, files, sandbox.resources.memory_mb)
        await self._launch(sandbox, files, None)

    def _check_platform(self, snapshot: Snapshot) -> None:
        recorded = snapshot.host.get("platform", {})
        for key, now in asdict(self.platform).items():
            if recorded.get(key) != now:
                raise Unsupported(
                    f"snapshot {snapshot.id} was captured with {key.replace('_', ' ')} {recorded.get(key)!r}, "
                    f"this host has {now!r}: its memory cannot be restored here; ask for a cold start (coldStart)"
                )

    async def _launch(self, sandbox: Sandbox, files: Instance, state: Path | None) -> None:
        slot = await self._slots.take(sandbox.network)
        try:
            if mounts := self._present(sandbox):
                await self._admit(sandbox, mounts, slot.host_address)
            shape = self._shape(sandbox, slot)
            machine = await Machine.spawn(shape, files, state=state)
        except BaseException:
            await self._release(sandbox.instance, slot)
            raise
        self._watch(sandbox.instance, machine, slot)
        sandbox.host = {
            "slot": slot.number,
            "pid": machine.pid,
            "address": slot.host_address,
            "platform": asdict(self.platform),
        }
        self._limit(sandbox, machine.pid)

    async def _release(self, instance: str, slot: Slot) -> None:
        """Give back the slot of a machine that has ended, when no volume knows its address any more."""
        if not self._dismiss(instance, lambda: self._slots.release(slot)):
            await self._slots.release(slot)

    def _limit(self, sandbox: Sandbox, pid: int) -> None:
        """Put a machine under its limits, beside its start: the kernel takes its time to move a process."""
        self._placing[sandbox.instance] = asyncio.create_task(asyncio.to_thread(self._place, sandbox, pid))

    def _place(self, sandbox: Sandbox, pid: int) -> None:
        limit = sandbox.resources.memory_mb + self._config.limits.memory_overhead_mb
        self._cgroups.place(sandbox.instance, pid, memory_mb=limit, cpus=sandbox.resources.cpus)

    def _shape(self, sandbox: Sandbox, slot: Slot) -> Shape:
        base = self._config.kvm_xfs.uid_base
        return Shape(
            label=f"{self._config.network.prefix}-{slot.number}-{sandbox.instance}",
            qemu=self._config.kvm_xfs.qemu,
            platform=self.platform,
            cpus=sandbox.resources.cpus,
            memory_mb=sandbox.resources.memory_mb,
            guest_mac=GUEST_MAC,
            tap=slot.tap,
            netns=slot.path,
            uid=base + slot.number if base else 0,
            generation=str(uuid.uuid4()),
        )

    def _watch(self, instance: str, machine: Machine, slot: Slot) -> None:
        self._machines[instance] = (machine, slot)
        machine.on_end(lambda: self._ended(instance))

    def _ended(self, instance: str) -> None:
        if instance in self._machines:
            self._exit_callback(instance)

    # -- capture ----------------------------------------------------------------------------------------------------

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        machine, _ = self._running(sandbox)
        files = self._layout.instance(sandbox)
        partial, final = self._layout.partial(snapshot), self._layout.snapshot(snapshot)
        work = Capture(machine, files, partial)
        with layout.explaining():
            async with self._recording(volumes) as recordings:
                try:
                    await work.run(memory=memory, beside=recordings.take if volumes else None)
                    snapshot.memory = work.mode if memory else Memory.NONE
                    snapshot.memory_bytes_written = work.memory_bytes
                    snapshot.pause_ms = work.pause_ms
                    snapshot.resources = sandbox.resources
                    snapshot.host = {"platform": sandbox.host["platform"], "phases_ms": work.phases_ms}
                    snapshot.host["line"] = memory and await machine.line_is_open()
                    await recordings.commit()
                    await asyncio.to_thread(_finish_snapshot, partial, final, snapshot)
                except BaseException:
                    await asyncio.to_thread(_undo_snapshot, partial, final)
                    raise
        return snapshot

    # -- records and removal ----------------------------------------------------------------------------------------

    async def save(self, sandbox: Sandbox) -> None:
        with layout.explaining():
            self._layout.sandbox(sandbox).mkdir(mode=0o711, exist_ok=True)
            await asyncio.to_thread(layout.write_manifest, self._layout.sandbox(sandbox), sandbox)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        with layout.explaining():
            await asyncio.to_thread(layout.write_manifest, self._layout.snapshot(snapshot), snapshot)

    async def stop(self, sandbox: Sandbox) -> None:
        found = self._machines.pop(sandbox.instance, None)
        if found is None:
            return
        machine, slot = found
        if placing := self._placing.pop(sandbox.instance, None):
            await asyncio.wait([placing])
        await machine.kill()
        self._cgroups.remove(sandbox.instance)
        await self._release(sandbox.instance, slot)

    async def discard(self, sandbox: Sandbox) -> None:
        await self.stop(sandbox)
        await asyncio.to_thread(_forget_instance, self._layout.instance(sandbox).directory)

    async def remove(self, sandbox: Sandbox) -> None:
        directory = self._layout.sandbox(sandbox)
        await asyncio.to_thread(layout.unlink_manifest, directory)
        await self.stop(sandbox)
        await asyncio.to_thread(layout.remove_tree, directory)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        await asyncio.to_thread(layout.remove_tree, self._layout.snapshot(snapshot))

    # -- asking -----------------------------------------------------------------------------------------------------

    async def diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        disk, then = self._layout.instance(sandbox).disk, self._layout.snapshot(head) / "rootfs.img"
        with _while_there(sandbox):
            return not await asyncio.to_thread(reflink.same_extents, disk, then)

    def places(self, snapshot: Snapshot) -> dict[str, str]:
        place = self._layout.snapshot(snapshot)
        files = {} if snapshot.memory is Memory.NONE else {"memory": "memory.img", "vmstate": "device.state"}
        return {"dir": str(place), **{part: str(place / name) for part, name in files.items()}}

    async def usage(self, sandbox: Sandbox) -> Usage:
        with _while_there(sandbox):
            disk = await asyncio.to_thread(reflink.unique_bytes, self._layout.instance(sandbox).disk)
        found = self._machines.get(sandbox.instance)
        return Usage(disk_bytes=disk, memory_bytes=await asyncio.to_thread(_pss, found[0].pid) if found else 0)

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        _, slot = self._running(sandbox)
        await self._slots.apply(slot, policy)

    def name_servers(self) -> list[str]:
        return name_servers(self._config.network)

    def endpoint(self, sandbox: Sandbox) -> Endpoint:
        machine, slot = self._running(sandbox)
        return Endpoint(slot.host_address, machine.line if sandbox.host.get("line") else None)

    def ended(self, sandbox: Sandbox) -> str:
        """Why the instance's machine is not there any more; empty while it runs."""
        found = self._machines.get(sandbox.instance)
        if found is None:
            return "its machine is not running"
        return f"its machine ended{found[0].log_tail()}" if found[0].ended else ""

    async def console(self, sandbox: Sandbox) -> str:
        machine, _ = self._running(sandbox)
        return await machine.console()

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._exit_callback = callback

    def _running(self, sandbox: Sandbox) -> tuple[Machine, Slot]:
        found = self._machines.get(sandbox.instance)
        if found is None or found[0].ended:
            raise Conflict(f"sandbox {sandbox.id} has no running machine: resume it first")
        return found


@contextlib.contextmanager
def _while_there(sandbox: Sandbox) -> Iterator[None]:
    """Who only looks holds no lock."""
    try:
        yield
    except FileNotFoundError:
        raise Conflict(f"sandbox {sandbox.id} is just being paused, rolled back or removed: look again") from None


def _lay_out(source: Path, files: Instance, sandbox: Sandbox, with_memory: bool) -> None:
    """The files a machine starts from; the base image of its memory is a link, alive as long as the machine."""
    files.directory.parent.mkdir(mode=0o711, exist_ok=True)
    files.directory.mkdir(mode=0o711)
    files.run.mkdir(mode=0o700)
    reflink.clone(source / "rootfs.img", files.disk)
    _grow(files.disk, sandbox.resources.disk_mb << 20)
    files.kernel.hardlink_to(source / "kernel")
    files.initrd.hardlink_to(source / "initrd")
    if with_memory:
        files.memory.hardlink_to(source / "memory.img")
    else:
        _blank_memory(files, sandbox.resources.memory_mb)


def _blank_memory(files: Instance, memory_mb: int) -> None:
    files.memory.unlink(missing_ok=True)
    with files.memory.open("xb") as image:
        os.fchmod(image.fileno(), 0o600)
        image.truncate(memory_mb << 20)


def _grow(disk: Path, size: int) -> None:
    if size > disk.stat().st_size:
        os.truncate(disk, size)


def _forget_instance(directory: Path) -> None:
    layout.remove_tree(directory)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()


def _finish_snapshot(partial: Path, final: Path, snapshot: Snapshot) -> None:
    for name in ("rootfs.img", "memory.img", "device.state"):
        if (partial / name).exists():
            layout.sync_file(partial / name)
    snapshot.disk_bytes_unique = reflink.unique_bytes(partial / "rootfs.img")
    _commit_snapshot(partial, final, snapshot)


def _undo_snapshot(partial: Path, final: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial, ignore_errors=True)
    else:  # Renamed already; what failed came after.
        layout.remove_tree(final)


def _commit_snapshot(partial: Path, final: Path, snapshot: Snapshot) -> None:
    layout.write_manifest(partial, snapshot)
    layout.commit(partial, final)


def _whole(directory: Path, snapshot: Snapshot) -> Snapshot:
    """Check that a snapshot's images are there and as long as they must be; ValueError says what is not."""
    if snapshot.id != directory.name:
        raise ValueError(f"its manifest is of {snapshot.id}")
    needed = {"rootfs.img": 1, "kernel": 1, "initrd": 1}
    if snapshot.memory is not Memory.NONE:
        needed |= {"memory.img": snapshot.resources.memory_mb << 20, "device.state": 1}
    for name, size in needed.items():
        path = directory / name
        if not path.exists() or path.stat().st_size < size:
            raise ValueError(f"{name} is missing or too short")
    return snapshot


def _slot_of(label: str) -> int:
    return int(label.split("-")[1])


def _pss(pid: int) -> int:
    """Memory of the process in bytes, shared pages in proportion."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


async def _end(machine: Machine) -> None:
    started = time.monotonic()
    await machine.kill()
    log.info("ended a stray machine", pid=machine.pid, ms=round((time.monotonic() - started) * 1000))
