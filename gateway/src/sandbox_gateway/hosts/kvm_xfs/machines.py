"""Start, limit and stop the machines of a gateway, and adopt them after the gateway restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from sandbox_gateway.config import Config
from sandbox_gateway.errors import BackendFailed, Conflict, Timeout, Unsupported
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.kvm_xfs import bounded_log, process_checks
from sandbox_gateway.hosts.kvm_xfs.cgroup import Cgroups
from sandbox_gateway.hosts.kvm_xfs.files import instances
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GUEST_MAC, Slot
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.process_checks import send_signal, wait_for_exit
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import MachineSpec, Platform
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import MachineProcess, list_running_processes
from sandbox_gateway.hosts.kvm_xfs.volumes.kvm_volumes import KvmVolumes
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot

_OLD_LOG_INTERVAL_SECONDS = 2.0
_MAX_CONCURRENT_QUERIES = 16
_DISK_TIMEOUT_SECONDS = 5.0
"""How long to wait until machines that the earlier gateway has just started open their disks."""
_DISK_INTERVAL_SECONDS = 0.01
_KILL_TIMEOUT_SECONDS = 10.0

log = Logger("kvm_xfs")


class StartedMachine(NamedTuple):
    """A machine, which may have stopped, and its network slot."""

    machine: Machine
    slot: Slot


class Machines:
    """Starts, adopts and stops machines. Each gets a network slot, its sandbox's volumes, and limits."""

    def __init__(self, config: Config, layout: Layout, slots: SlotPool, volumes: KvmVolumes) -> None:
        self._config = config
        self._layout = layout
        self._network_slots = slots
        self._volumes = volumes
        self._cgroups = Cgroups(config.network.prefix)
        self._started_machines: dict[str, StartedMachine] = {}
        """Machines by instance, until they are stopped."""
        self._limit_tasks: dict[str, asyncio.Task[None]] = {}
        self._old_logs: asyncio.Task[None] | None = None
        self._platform: Platform | None = None
        self.on_exit: Callable[[str], None] = lambda instance: None
        """A function that is called with the instance of each machine that stops unexpectedly."""

    @property
    def platform(self) -> Platform:
        assert self._platform is not None, "the host is not open"
        return self._platform

    @platform.setter
    def platform(self, platform: Platform) -> None:
        self._platform = platform

    async def close(self) -> None:
        """Stop watching the machines, but leave them running."""
        if self._old_logs is not None:
            self._old_logs.cancel()
        if self._limit_tasks:
            await asyncio.wait(self._limit_tasks.values())
        for started_machine in self._started_machines.values():
            await started_machine.machine.detach()
            started_machine.machine.forget()
        self._started_machines.clear()

    # -- started machines -------------------------------------------------------------------------------------------

    def find(self, sandbox: Sandbox) -> StartedMachine | None:
        """Return the machine of ``sandbox.instance``, even if it has stopped, or None if none was started."""
        return self._started_machines.get(sandbox.instance)

    def require_running(self, sandbox: Sandbox) -> StartedMachine:
        """Return the running machine of ``sandbox.instance``. Raises Conflict if there is none."""
        started_machine = self.find(sandbox)
        if started_machine is None or started_machine.machine.has_ended:
            raise Conflict(f"sandbox {sandbox.id} has no running machine: resume it first")
        return started_machine

    async def list_stalled_instances(self) -> set[str]:
        """Return the instances that QEMU has stopped because the disk is full. Skips machines that do not answer."""
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

        async def is_stalled(machine: Machine) -> bool:
            async with semaphore:
                with contextlib.suppress(BackendFailed, Timeout):
                    return not machine.has_ended and await machine.is_stalled()
            return False

        machines = {instance: started_machine.machine for instance, started_machine in self._started_machines.items()}
        answers = await asyncio.gather(*map(is_stalled, machines.values()))
        return {instance for instance, answer in zip(machines, answers, strict=True) if answer}

    def list_addresses(self) -> dict[str, str]:
        """Return the host-side address of each machine, keyed by instance."""
        return {
            instance: started_machine.slot.host_address for instance, started_machine in self._started_machines.items()
        }

    async def adopt(self, scan: Scan) -> None:
        """Adopt the running machines of the sandboxes in ``scan``, and stop all other machines."""
        sandboxes = {sandbox.instance: sandbox for sandbox in scan.sandboxes}
        known_processes: dict[str, tuple[MachineProcess, int]] = {}
        deadline = time.monotonic() + _DISK_TIMEOUT_SECONDS
        for process in list_running_processes(self._layout.sandboxes, self._config.network.prefix):
            sandbox = sandboxes.get(process.instance)
            if (
                sandbox is None
                or process.instance in known_processes
                or not await _has_opened_disk(process, self._layout.instance(sandbox), deadline)
            ):
                if process.slot_number is None:
                    os.close(process.pidfd)
                elif await _stop_stray_process(process):
                    name = f"the machine {process.instance}" if process.instance else "an unknown machine"
                    scan.repaired.append(f"stopped {name}, which belonged to no sandbox")
            elif process.slot_number is None:
                os.close(process.pidfd)
                raise BackendFailed(
                    f"process {process.pid} of sandbox {sandbox.id} is not in a network slot of this gateway: restore "
                    "network.prefix, or kill the process"
                )
            else:
                known_processes[process.instance] = (process, process.slot_number)
        await self._network_slots.open({slot_number for _, slot_number in known_processes.values()})
        self._cgroups.sweep(set(known_processes))
        for instance, (process, slot_number) in known_processes.items():
            if wait_for_exit(process.pidfd, 0):
                os.close(process.pidfd)
                continue
            machine = Machine(process.pid, self._layout.instance(sandboxes[instance]), pidfd=process.pidfd)
            slot = await self._network_slots.adopt(slot_number, sandboxes[instance].network)
            self._watch(instance, machine, slot)
            if bounded_log.has_old_log(machine.files.directory):
                scan.repaired.append(
                    f"an older release started the machine {instance}, whose log has no limit and is "
                    "emptied regularly: pause and resume its sandbox to fix this"
                )
            # The earlier gateway may have died before it set the limits, or during a capture.
            self._start_limiting(sandboxes[instance], machine.pid)
            try:
                was_stopped = await machine.resume_if_stopped()
            except Exception as error:  # A guest that controls QEMU can cause any error.
                log.warning("machine stopped", pid=machine.pid, reason=str(error) or type(error).__name__)
                scan.repaired.append(f"stopped the machine {instance}, which did not respond like QEMU")
                await self.stop(sandboxes[instance])
                continue
            if was_stopped:
                scan.repaired.append(f"the machine {instance} was stopped and has been resumed")
            scan.running_instances.add(instance)
        if instances_with_old_logs := {
            each
            for each in scan.running_instances
            if bounded_log.has_old_log(self._started_machines[each].machine.files.directory)
        }:
            self._old_logs = asyncio.create_task(self._empty_old_logs(instances_with_old_logs))

    # -- starting and stopping --------------------------------------------------------------------------------------

    async def launch(self, sandbox: Sandbox, files: InstanceFiles, state: Path | None, *, hold: bool = False) -> None:
        """Start ``sandbox.instance`` from its files and set ``sandbox.host``. Without ``state``, the machine boots.

        With ``hold``, the machine loads the state and stays stopped until it is claimed.
        """
        slot = await self._network_slots.take(sandbox.network)
        try:
            if mounts := self._volumes.list_available_mounts(sandbox):
                await self._volumes.allow(sandbox, mounts, slot.host_address)
            machine = await Machine.spawn(self._build_machine_spec(sandbox, slot), files, state=state, hold=hold)
        except BaseException:
            await self._release_slot(sandbox.instance, slot)
            raise
        self._watch(sandbox.instance, machine, slot)
        sandbox.host = {
            "slot": slot.number,
            "pid": machine.pid,
            "address": slot.host_address,
            "platform": asdict(self.platform),
        }
        if hold:
            await machine.wait_until_restored()
        self._start_limiting(sandbox, machine.pid)

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        """Transfer the machine of ``fork`` and its files to ``sandbox``, and resume the machine if it is stopped."""
        machine, slot = self.require_running(fork)
        old_files, new_files = machine.files, InstanceFiles(self._layout.sandbox(sandbox) / fork.instance)
        instances.move(old_files, new_files)  # not in a thread: a rename takes less time than switching to one
        machine.files = new_files
        sandbox.instance, sandbox.host = fork.instance, fork.host
        if sandbox.network.egress != fork.network.egress:
            await self._network_slots.apply(slot, sandbox.network)
        if machine.is_held:
            await machine.cont()

    async def stop(self, sandbox: Sandbox) -> None:
        """Stop the machine of ``sandbox.instance``, if there is one, and release its slot."""
        started_machine = self._started_machines.pop(sandbox.instance, None)
        if started_machine is None:
            return
        if limit_task := self._limit_tasks.pop(sandbox.instance, None):
            await asyncio.wait([limit_task])
        try:
            await started_machine.machine.kill()
        except BaseException:
            self._started_machines.setdefault(sandbox.instance, started_machine)  # so that it can be stopped again
            raise
        self._cgroups.remove(sandbox.instance)
        await self._release_slot(sandbox.instance, started_machine.slot)

    def check_platform(self, snapshot: Snapshot) -> None:
        """Raise Unsupported if the snapshot's memory cannot be restored on this host."""
        recorded_platform = snapshot.host.get("platform", {})
        for key, value in asdict(self.platform).items():
            if recorded_platform.get(key) != value:
                raise Unsupported(
                    f"snapshot {snapshot.id} was captured with {key.replace('_', ' ')} "
                    f"{recorded_platform.get(key)!r}, but this host has {value!r}, so its memory cannot be restored "
                    "here: boot it from its disk with 'coldStart: true'"
                )

    async def _release_slot(self, instance: str, slot: Slot) -> None:
        """Release the slot of a stopped machine, once no volume server accepts its address any longer."""
        if not self._volumes.revoke_all(instance, lambda: self._network_slots.release(slot)):
            await self._network_slots.release(slot)

    def _start_limiting(self, sandbox: Sandbox, pid: int) -> None:
        """Apply a machine's limits in the background, because the kernel is slow to move processes between cgroups."""
        self._limit_tasks[sandbox.instance] = asyncio.create_task(asyncio.to_thread(self._apply_limits, sandbox, pid))

    def _apply_limits(self, sandbox: Sandbox, pid: int) -> None:
        memory_limit_mb = sandbox.resources.memory_mb + self._config.limits.memory_overhead_mb
        self._cgroups.limit(sandbox.instance, pid, memory_mb=memory_limit_mb, cpus=sandbox.resources.cpus)

    def _build_machine_spec(self, sandbox: Sandbox, slot: Slot) -> MachineSpec:
        return MachineSpec(
            label=f"{self._config.network.prefix}-{slot.number}-{sandbox.instance}",
            qemu=self._config.kvm_xfs.qemu,
            platform=self.platform,
            cpus=sandbox.resources.cpus,
            memory_mb=sandbox.resources.memory_mb,
            guest_mac=GUEST_MAC,
            tap=slot.tap,
            netns=slot.path,
            uid=slot.uid,
            generation=str(uuid.uuid4()),
        )

    def _watch(self, instance: str, machine: Machine, slot: Slot) -> None:
        self._started_machines[instance] = StartedMachine(machine, slot)
        machine.on_end(lambda: self._report_end(instance))

    def _report_end(self, instance: str) -> None:
        if instance in self._started_machines:
            self.on_exit(instance)

    async def _empty_old_logs(self, instances: set[str]) -> None:
        """Regularly empty the log files of machines that an older release started.

        Guests can make these files grow without limit.
        """
        while remaining := instances & self._started_machines.keys():
            for instance in remaining:
                with contextlib.suppress(OSError):
                    bounded_log.empty_old_log(self._started_machines[instance].machine.files.directory)
            await asyncio.sleep(_OLD_LOG_INTERVAL_SECONDS)


async def _has_opened_disk(process: MachineProcess, files: InstanceFiles, deadline: float) -> bool:
    """Return whether a process is the machine of ``files``, because it has opened their disk.

    Its command line does not prove this: a guest that controls QEMU can change it, but cannot open another sandbox's
    disk. If the process runs in a network slot, wait until ``deadline`` for it to open the disk.
    """
    while True:
        with contextlib.suppress(OSError):
            if process_checks.can_write(process.pid, files.disk):
                return True
        if process.slot_number is None or time.monotonic() > deadline:
            return False
        await asyncio.sleep(_DISK_INTERVAL_SECONDS)


async def _stop_stray_process(process: MachineProcess) -> bool:
    """Kill a process and wait until it has exited. Returns False if it had already exited. Raises Timeout."""
    start = time.monotonic()
    had_ended = wait_for_exit(process.pidfd, 0)
    send_signal(process.pidfd, signal.SIGKILL)
    has_ended = await asyncio.to_thread(wait_for_exit, process.pidfd, _KILL_TIMEOUT_SECONDS)
    os.close(process.pidfd)
    if not has_ended:
        raise Timeout(f"process {process.pid} did not exit within {_KILL_TIMEOUT_SECONDS:g} s of SIGKILL")
    ms = round((time.monotonic() - start) * 1000)
    log.info("stopped a machine that belonged to no sandbox", pid=process.pid, ms=ms)
    return not had_ended
