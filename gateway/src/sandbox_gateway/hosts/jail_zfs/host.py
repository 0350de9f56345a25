"""The jail/ZFS host: VNET jails on ZFS clones, behind the protocol of hosts.base.

A jail keeps files, and no memory: what a snapshot holds is a file system, and a fork starts its agent anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from sandbox_gateway.config import Config
from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid, NotFound, Unsupported
from sandbox_gateway.hosts.addresses import AGENT_PORT, name_servers
from sandbox_gateway.hosts.base import Abilities, Endpoint, Log, Scan, Usage
from sandbox_gateway.hosts.connect import open_connection
from sandbox_gateway.hosts.jail_zfs import rootfs
from sandbox_gateway.hosts.jail_zfs.commands import Commands, together
from sandbox_gateway.hosts.jail_zfs.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.holders import holders_of
from sandbox_gateway.hosts.jail_zfs.host_volumes import VolumesOfJails
from sandbox_gateway.hosts.jail_zfs.jail import Jail, Jails, Mounted
from sandbox_gateway.hosts.jail_zfs.jail_mounts import JailMounts
from sandbox_gateway.hosts.jail_zfs.machine import Machine
from sandbox_gateway.hosts.jail_zfs.pf import Pf
from sandbox_gateway.hosts.jail_zfs.rctl import Limits
from sandbox_gateway.hosts.jail_zfs.storage import ZfsStorage
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Memory, NetworkPolicy, Sandbox, Snapshot, VolumeSnapshot

_LOOK_EVERY = 1.0
_PROBE_LOOKS = 5
"""Every how many looks the agents are called as well."""
_PROBES_AT_ONCE = 32
_PROBE_SECONDS = 2.0
_RETRIES = 20
_RETRY_SECONDS = 3.0
_SWEEP_SECONDS = 300.0
_ENDED = "its jail ended with the agent in it"

log = Logger("jail_zfs")


class JailZfsHost(VolumesOfJails):
    """Implements hosts.base.Host. ``environment`` is added to that of FreeBSD's commands."""

    kind = "jail_zfs"
    abilities = Abilities(
        memory=False, resize_on_fork=True, independent_snapshots=False, atomic_capture=True, atomic_append=True
    )

    def __init__(self, config: Config, *, environment: Mapping[str, str] | None = None) -> None:
        self._config = config
        self.boot_seconds = self.resume_seconds = config.jail_zfs.boot_seconds
        self._prefix = config.network.prefix
        self._storage = ZfsStorage(config.jail_zfs.dataset, lock_directory=config.host.state_root)
        self._run = Commands(environment)
        self._jails = Jails(self._run)
        self._mounts = JailMounts(self._run, self._jails, config.host.state_root, self._later)
        self._bridge = Bridge(
            self._run,
            name=config.jail_zfs.bridge or f"{self._prefix}br",
            prefix=self._prefix,
            subnet=config.network.subnet,
        )
        self._limits = Limits(self._run, config.jail_zfs.processes)
        self._pf = Pf(self._run, self._bridge, self._prefix)
        self._machines: dict[str, Machine] = {}
        self._numbers: set[int] = set()
        self._next = 0
        self._instances: set[str] = set()
        """Those that have a dataset."""
        self._snapshots: dict[str, Snapshot] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._exit_callback: Callable[[str], None] = lambda instance: None
        self._opened = False

    # -- the host itself --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        root = self._config.host.state_root
        try:
            root.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendFailed(f"the state root {root} cannot be made: {error.strerror}") from None
        for note in await asyncio.to_thread(self._storage.open):
            log.warning("storage", what=note)
        try:
            for place in (root, self._storage.mountpoint):
                if len(str(place).split()) != 1:
                    raise Invalid(f"{str(place)!r} has blanks in it, which mounts of jails cannot have: choose another")
            await self._limits.open()
            await self._bridge.open()
            await self._pf.open(self._config.jail_zfs.egress)
            if (await self._run("sysctl", "-n", "net.inet.ip.forwarding")).strip() != "1":
                await self._run("sysctl", "net.inet.ip.forwarding=1")
        except BaseException:
            await asyncio.to_thread(self._storage.close)
            raise
        self._opened = True

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        try:
            if not self._machines:
                await self._pf.close()
                await self._bridge.close()
        except GatewayError as error:
            log.warning("not put back", reason=error.message)
        self._machines.clear()
        await asyncio.to_thread(self._storage.close)

    # -- finding things again ---------------------------------------------------------------------------------------

    @property
    def _place(self) -> Path:
        """Where instances are mounted."""
        return Path(os.path.realpath(self._storage.mountpoint)) / "sandboxes"

    async def scan(self) -> Scan:
        loop = asyncio.get_running_loop()
        jails = await self._our_jails()

        def teardown(instance: str) -> None:
            work = self._clear(instance, jails.pop(instance, []))
            asyncio.run_coroutine_threadsafe(work, loop).result(_SWEEP_SECONDS)

        (found,) = await together(asyncio.to_thread(self._storage.scan, teardown))
        scan = Scan(found.snapshots, found.sandboxes, found.volumes, found.volume_snapshots)
        scan.repaired += found.repaired
        scan.unreadable_sandboxes = found.unreadable_sandboxes
        self._snapshots = {snapshot.id: snapshot for snapshot in found.snapshots}
        self._refresh_places()
        for sandbox in found.sandboxes:
            self._instances.add(sandbox.instance)
            if self._adopt(sandbox, jails.get(sandbox.instance, [])):
                del jails[sandbox.instance]
                scan.alive.add(sandbox.instance)
        for instance, strays in jails.items():
            await self._clear(instance, strays)
            if any(not jail.dying for jail in strays):
                scan.repaired.append(f"ended the jail {strays[0].name}, which belonged to nothing")
        scan.repaired += await self._sweep()
        scan.repaired += await self._find_volumes(found.sandboxes)
        await together(*(self._enforce(sandbox) for sandbox in found.sandboxes if sandbox.instance in scan.alive))
        self._later(self._watch())
        return scan

    async def _our_jails(self) -> dict[str, list[Jail]]:
        """By instance."""
        found: dict[str, list[Jail]] = {}
        for jail in await self._jails.listed():
            path = Path(jail.path)
            if path.parent == self._place:
                found.setdefault(path.name, []).append(jail)
        return found

    def _adopt(self, sandbox: Sandbox, jails: list[Jail]) -> bool:
        name, number = sandbox.host.get("jail"), sandbox.host.get("number")
        alive = [jail for jail in jails if not jail.dying]
        usable = isinstance(number, int) and 2 <= number <= self._bridge.capacity + 1 and number not in self._numbers
        if not usable or [jail.name for jail in alive] != [name]:
            return False
        assert isinstance(number, int)
        self._numbers.add(number)
        self._next = max(self._next, number - 1)
        cable = self._bridge.cable(number)
        self._machines[sandbox.instance] = Machine(str(name), cable, self._root(sandbox), running=True)
        return True

    async def _enforce(self, sandbox: Sandbox) -> None:
        machine = self._machines[sandbox.instance]
        await self._pf.apply(machine.jail, machine.cable, sandbox.network, self.name_servers())

    async def _clear(self, instance: str, jails: list[Jail]) -> None:
        """End the jails of an instance that nobody knows the rest of, and unmount what is mounted in it."""
        for jail in jails:
            await self._jails.end(jail.name)
        for mount in await self._jails.mounts(self._place / instance):
            await self._jails.unmount(mount)

    async def _sweep(self) -> list[str]:
        """Remove what no machine has: cables, limits, rules, mounts, identities."""
        machines = self._machines.values()
        names = {machine.jail for machine in machines}
        cables = await self._bridge.sweep({machine.cable.number for machine in machines})
        limits = await self._limits.sweep(f"{self._prefix}-", names)
        anchors = await self._pf.sweep(names)
        mounts: list[str] = []
        stuck: list[str] = []
        for mount in await self._jails.mounts(self._place):
            if mount.kind in ("nullfs", "devfs") and not self._is_alive(mount.node):
                (mounts if await self._mounts.let_go(mount) else stuck).append(mount.node)
        if self._identities.is_dir():
            for directory in self._identities.iterdir():
                if directory.name not in self._machines:
                    shutil.rmtree(directory, ignore_errors=True)
        swept = {"cable": cables, "limits of the jail": limits, "rules of the jail": anchors, "mount": mounts}
        notes = [
            f"removed the {what} {name}, left by nothing that runs" for what, some in swept.items() for name in some
        ]
        return notes + [f"the mount {name}, left by nothing that runs, is stuck and tried again" for name in stuck]

    def _is_alive(self, node: str) -> bool:
        return Path(node).relative_to(self._place).parts[0] in self._machines

    async def _watch(self) -> None:
        """A jail ends with its agent; nobody tells us, so we look."""
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            asked = [(instance, each) for instance, each in self._machines.items() if each.running and not each.ended]
            looks += 1
            if not asked:
                continue
            try:
                alive = await self._alive()
                mute = await self._mute([each for _, each in asked]) if looks % _PROBE_LOOKS == 0 else set()
            except GatewayError as error:
                log.warning("cannot look after jails", reason=error.message)
                continue
            for instance, machine in asked:
                gone = machine.jail not in alive or machine.jail in mute
                if gone and self._machines.get(instance) is machine:
                    machine.ended = True
                    self._exit_callback(instance)

    async def _mute(self, machines: list[Machine]) -> set[str]:
        """Jails in which something lives on without the agent: only a sandbox's root can bring that about."""
        gate = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def probe(machine: Machine) -> bool:
            async with gate:
                try:
                    async with asyncio.timeout(_PROBE_SECONDS):
                        _, writer = await open_connection(machine.cable.address, AGENT_PORT)
                    writer.close()
                    machine.answered = True
                except ConnectionRefusedError:
                    return machine.answered
                except OSError:
                    return False
                return False

        refused = await asyncio.gather(*(probe(machine) for machine in machines))
        return {machine.jail for machine, mute in zip(machines, refused, strict=True) if mute}

    async def _alive(self) -> set[str]:
        return {jail.name for jail in await self._jails.listed() if not jail.dying}

    # -- bases ------------------------------------------------------------------------------------------------------

    async def build_base(self, base: Snapshot, recipe: Recipe, log: Log) -> Snapshot:
        rootfs.check(recipe)
        loop = asyncio.get_running_loop()
        filling: list[Future[None]] = []

        def fill(root: Path) -> None:
            filling.append(asyncio.run_coroutine_threadsafe(rootfs.build_rootfs(recipe, root, log), loop))
            filling[0].result()

        work = asyncio.ensure_future(asyncio.to_thread(self._storage.create_base, base, fill))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            for each in filling:
                each.cancel()
            await asyncio.wait([work])
            raise
        self._know(base)
        return base

    # -- fork -------------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        if with_memory:
            raise Unsupported("a jail host captures files, not memory: this snapshot has none to go on from")
        machine = self._new_machine(sandbox, self._jail_name(sandbox))
        try:
            await together(self._clone(snapshot.id, sandbox), self._prepare(machine, sandbox))
            await self._launch(machine, sandbox)
        except BaseException:
            await asyncio.shield(self.discard(sandbox))
            raise

    async def start(self, sandbox: Sandbox) -> None:
        machine = self._new_machine(sandbox, await self._free_name(sandbox))
        try:
            await together(self._mount(sandbox.instance), self._prepare(machine, sandbox))
            await self._launch(machine, sandbox)
        except BaseException:
            await asyncio.shield(self.stop(sandbox))
            raise

    async def _mount(self, instance: str) -> None:
        try:
            await asyncio.to_thread(self._storage.mount, instance)
        except Busy:
            raise Busy(
                f"the file system of the sandbox ({self._storage.dataset(instance)}) cannot be mounted: "
                f"{await self._holders_of(instance)}. End what holds it, then try again"
            ) from None

    async def _holders_of(self, instance: str) -> str:
        dataset, root = self._storage.dataset(instance), self._place / instance
        return await holders_of(self._run, self._jails, dataset, root)

    async def _clone(self, snapshot: str, sandbox: Sandbox) -> None:
        disk = sandbox.resources.disk_mb
        await together(asyncio.to_thread(self._storage.clone, snapshot, sandbox.instance, disk_mb=disk))
        self._instances.add(sandbox.instance)

    def _jail_name(self, sandbox: Sandbox) -> str:
        return f"{self._prefix}-{sandbox.instance}"

    async def _free_name(self, sandbox: Sandbox) -> str:
        """A jail that does not finish dying keeps its name: after a while, another is taken."""
        name, taken = self._jail_name(sandbox), {""}
        deadline = asyncio.get_running_loop().time() + self._config.jail_zfs.dying_seconds
        while True:
            taken = {jail.name for jail in (await self._our_jails()).get(sandbox.instance, [])}
            if name not in taken:
                return name
            if asyncio.get_running_loop().time() > deadline:
                return next(other for n in range(2, 1000) if (other := f"{name}-{n}") not in taken)
            await asyncio.sleep(0.05)

    def _new_machine(self, sandbox: Sandbox, jail: str) -> Machine:
        machine = Machine(jail, self._bridge.cable(self._free_number()), self._root(sandbox))
        self._numbers.add(machine.cable.number)
        self._machines[sandbox.instance] = machine
        return machine

    def _root(self, sandbox: Sandbox) -> Path:
        return self._place / sandbox.instance

    def _free_number(self) -> int:
        """The number longest unused: what the world remembers of its address has run out then."""
        for step in range(self._bridge.capacity):
            number = (self._next + step) % self._bridge.capacity + 2
            if number not in self._numbers:
                self._next = number - 1
                return number
        raise Busy(
            f"all {self._bridge.capacity} addresses of {self._bridge.subnet} are taken: "
            "remove sandboxes, or give the gateway a wider [network] subnet"
        )

    async def _prepare(self, machine: Machine, sandbox: Sandbox) -> None:
        """All that a jail needs and that can be there before it."""
        directory, dns = self._identities / sandbox.instance, self.name_servers()
        rootfs.write_identity(directory, sandbox, _asked(dns, sandbox.network))
        rootfs.write_gateway_key(directory)
        await together(
            self._bridge.plug(machine.cable),
            self._limits.apply(machine.jail, sandbox.resources),
            self._pf.apply(machine.jail, machine.cable, sandbox.network, dns),
        )

    async def _launch(self, machine: Machine, sandbox: Sandbox) -> None:
        identity = self._identities / sandbox.instance
        cable = machine.cable
        await self._mount_volumes(machine, sandbox)
        await self._jails.create(
            machine.jail,
            machine.root,
            hostname=sandbox.hostname,
            identity=identity if rootfs.takes_identity(machine.root) else None,
            interface=cable.inner,
        )
        machine.running = True
        prefix, gateway = self._bridge.subnet.prefixlen, self._bridge.gateway
        try:
            await together(
                self._jails.loopback(machine.jail),
                self._jails.connect(machine.jail, cable.inner, address=cable.address, prefix=prefix, gateway=gateway),
            )
        except BackendFailed:
            if machine.jail not in await self._alive():
                raise BackendFailed(f"the sandbox did not start: {_ENDED}") from None
            raise
        sandbox.host = {"jail": machine.jail, "number": cable.number, "address": cable.address}

    @property
    def _identities(self) -> Path:
        return self._config.host.state_root / "run"

    # -- capture ----------------------------------------------------------------------------------------------------

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        if memory:
            raise Unsupported("a jail host captures files, not memory: ask for memory 'none'")
        self._running(sandbox)
        snapshot.memory = Memory.NONE
        snapshot.resources = sandbox.resources
        snapshot.host = {"zfsSnapshot": f"{self._storage.dataset(sandbox.instance)}@{snapshot.id}"}
        await self._record(sandbox, snapshot, volumes)
        self._know(snapshot)
        return snapshot

    def _know(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.id] = snapshot
        self._refresh_places()

    def _refresh_places(self) -> None:
        """A snapshot's name changes when the sandbox goes that it was taken of."""
        for snapshot in self._snapshots.values():
            with contextlib.suppress(NotFound):
                snapshot.host["zfsSnapshot"] = self._storage.snapshot_dataset(snapshot.id)

    # -- records and removal ----------------------------------------------------------------------------------------

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.instance not in self._instances and sandbox.pause_snapshot:
            # Made to be started later: what it will start from is held by a clone, which bears the record.
            await self._clone(sandbox.pause_snapshot, sandbox)
        await together(asyncio.to_thread(self._storage.save, sandbox))

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await together(asyncio.to_thread(self._storage.save_snapshot, snapshot))
        self._know(snapshot)

    async def stop(self, sandbox: Sandbox) -> None:
        machine = self._machines.pop(sandbox.instance, None)
        if machine is not None:
            await together(self._end(machine, sandbox.instance))

    async def _end(self, machine: Machine, instance: str) -> None:
        """In an order in which nothing is taken from under what still runs."""
        if await self._tried(machine, self._jails.end(machine.jail, machine.cable.inner)):
            machine.running = False
        unplugged, *_ = await asyncio.gather(
            self._tried(machine, self._bridge.unplug(machine.cable)),
            self._tried(machine, self._mounts.release(machine.root)),
            self._tried(machine, self._limits.remove(machine.jail)),
            self._tried(machine, self._pf.flush(machine.jail)),
        )
        shutil.rmtree(self._identities / instance, ignore_errors=True)
        if unplugged:
            self._numbers.discard(machine.cable.number)

    async def _tried(self, machine: Machine, work: Awaitable[None]) -> bool:
        """One step that fails must not keep the others from being done; the next scan sweeps what it left."""
        try:
            await work
        except GatewayError as error:
            log.warning("left behind", jail=machine.jail, reason=error.message)
            return False
        return True

    async def discard(self, sandbox: Sandbox) -> None:
        await self.stop(sandbox)
        await self._drop(sandbox.instance)

    async def remove(self, sandbox: Sandbox) -> None:
        await together(asyncio.to_thread(self._storage.forget, sandbox.instance))
        await self.discard(sandbox)

    async def _drop(self, instance: str) -> None:
        """Remove or retire the dataset; now, or, where a jail that does not finish dying holds it, in a while."""
        try:
            if self._mounts.stuck(self._of(instance)):
                raise Busy("a mount in it is stuck")
            await together(asyncio.to_thread(self._storage.discard, instance))
        except Busy as error:
            holders = await self._holders_of(instance)
            log.warning("still in use, removed later", instance=instance, reason=error.message, holders=holders)
            self._later(self._drop_later(instance))
            return
        self._instances.discard(instance)
        self._refresh_places()

    def _of(self, instance: str) -> Callable[[Mounted], bool]:
        return lambda mount: mount.node.startswith(f"{self._place / instance}/")

    async def _drop_later(self, instance: str) -> None:
        await self._mounts.freed(self._of(instance))
        for _ in range(_RETRIES):
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                await together(asyncio.to_thread(self._storage.discard, instance))
            except GatewayError:
                continue
            self._instances.discard(instance)
            self._refresh_places()
            return
        holders = await self._holders_of(instance)
        log.error("could not be removed; the next start of the gateway tries again", instance=instance, holders=holders)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(NotFound):  # somebody was faster, with `zfs destroy`
            await together(asyncio.to_thread(self._storage.destroy_snapshot, snapshot.id))
        self._snapshots.pop(snapshot.id, None)

    # -- asking -----------------------------------------------------------------------------------------------------

    async def diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return await asyncio.to_thread(self._storage.diverged, sandbox.instance, head.id)

    def places(self, snapshot: Snapshot) -> dict[str, str]:
        return {"dir": str(snapshot.host.get("zfsSnapshot", ""))}

    async def usage(self, sandbox: Sandbox) -> Usage:
        disk = await asyncio.to_thread(self._storage.usage, sandbox.instance)
        machine = self._machines.get(sandbox.instance)
        return Usage(disk.unique, await self._limits.memory_bytes(machine.jail) if machine else 0)

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        machine = self._running(sandbox)
        dns = self.name_servers()
        await self._pf.apply(machine.jail, machine.cable, policy, dns)
        await self._pf.cut(machine.cable)
        rootfs.write_identity(self._identities / sandbox.instance, sandbox, _asked(dns, policy))

    def name_servers(self) -> list[str]:
        return name_servers(self._config.network)

    def endpoint(self, sandbox: Sandbox) -> Endpoint:
        address = self._running(sandbox).cable.address
        return Endpoint(address, key=rootfs.gateway_key(self._identities / sandbox.instance))

    def ended(self, sandbox: Sandbox) -> str:
        machine = self._machines.get(sandbox.instance)
        if machine is None:
            return "its jail is not running"
        return _ENDED if machine.ended else ""

    async def console(self, sandbox: Sandbox) -> str:
        """A jail has none."""
        return ""

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._exit_callback = callback


def _asked(dns: list[str], policy: NetworkPolicy) -> list[str]:
    """The name servers that a sandbox of this policy is told of."""
    return dns if policy.allow_internet or policy.allow_out else []
