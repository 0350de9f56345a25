"""A user of the host starts processes that imitate the gateway's, and waits for a restart of the gateway.

The tests start no machines: a waiting shell stands in for QEMU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.hosts.kvm_xfs import machines as machines_module
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout
from sandbox_gateway.hosts.kvm_xfs.machines import Machines
from sandbox_gateway.hosts.kvm_xfs.network.addresses import Slot
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import HOST_NAMESPACE
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import start_in_namespace
from sandbox_gateway.hosts.kvm_xfs.volumes import launcher
from sandbox_gateway.records import Sandbox
from tests.kvm_xfs.volume_clients import OPEN_POLICY, Setup, kill_process, setup
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("requires_root")

_NOBODY_UID = 65534


class MachineSetup:
    """The machines of a gateway. Each machine is a process that only waits."""

    def __init__(self, s: Setup) -> None:
        self._s = s
        self.layout = Layout(s.root / "state")
        self.layout.create()
        self.program = s.root / "qemu-system-x86_64"
        shutil.copyfile("/bin/bash", self.program)  # dash supports only descriptors of one digit.
        self.program.chmod(0o755)

    async def take_slot(self) -> Slot:
        return await self._s.pool.take(OPEN_POLICY)

    def create_sandbox(self, name: str) -> Sandbox:
        sandbox = Sandbox(name=name)
        files = self.layout.instance(sandbox)
        files.run.mkdir(mode=0o711, parents=True)
        files.disk.touch(0o600)
        return sandbox

    def get_files(self, sandbox: Sandbox) -> InstanceFiles:
        return self.layout.instance(sandbox)

    def build_command(self, label: str, files: InstanceFiles) -> list[str]:
        memory_option = f"memory-backend-file,id=mem,mem-path={files.memory},share=off"
        script = 'exec 3<&"$5"; read -t 0.2 <&3; exec 4<>"${6:-/dev/null}"; read <&3'
        return [str(self.program), "-c", script, "sh", "-name", label, "-object", memory_option]

    def start_machine(self, slot: Slot, disk: Path, claimed_files: InstanceFiles) -> int:
        """Start a machine that soon opens ``disk``, and whose command line names ``claimed_files``. Returns its pid."""
        label = f"{slot.name}-{claimed_files.directory.name}"
        reader, writer = os.pipe()
        self._s.stack.callback(os.close, writer)
        with os.fdopen(reader):
            command = [*self.build_command(label, claimed_files), str(reader), str(disk)]
            pid = start_in_namespace(slot.path, command, [reader], subprocess.DEVNULL)
        wait_until(lambda: b"mem-path=" in Path(f"/proc/{pid}/cmdline").read_bytes(), 10)
        return pid

    def start_fake(self, label: str, files: InstanceFiles) -> subprocess.Popen[bytes]:
        """Start a process of an unprivileged user that claims to be the machine of ``files``.

        The user can open any file under the state root, but only with O_PATH.
        """
        disk = os.open(files.disk, os.O_PATH)
        try:
            command = [*self.build_command(label, files), "0"]
            return self._s.stack.enter_context(running_process(command, self.program, descriptors=(disk,)))
        finally:
            os.close(disk)

    @contextlib.asynccontextmanager
    async def restarted_gateway(self, sandboxes: list[Sandbox]) -> AsyncIterator[tuple[Machines, Scan]]:
        """Adopt the machines of ``sandboxes``, and stop the adopted machines when the context exits."""
        no_volumes: Any = SimpleNamespace(revoke_all=lambda instance, then: False)
        network, scan = self._s.network, Scan(sandboxes=sandboxes)
        config = Config.model_validate({"host": {"kind": "kvm_xfs"}, "network": network.model_dump()})
        pool = SlotPool(network)
        machines = Machines(config, self.layout, pool, no_volumes)
        try:
            await machines.adopt(scan)
            yield machines, scan
        finally:
            for machine, _ in machines._started_machines.values():
                await machine.kill()
            await machines.close()
            machines._cgroups.sweep(set())
            await pool.close()


@contextlib.asynccontextmanager
async def machine_setup(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MachineSetup]:
    async def resume_if_stopped(machine: Machine) -> bool:
        return False

    monkeypatch.setattr(Machine, "resume_if_stopped", resume_if_stopped)
    async with setup(xfs_root) as s:
        yield MachineSetup(s)


def was_killed(pid: int) -> bool:
    """Return whether a child of this process was killed, and reap it."""
    reaped_pid, status = os.waitpid(pid, os.WNOHANG)
    return reaped_pid == pid and os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@contextlib.contextmanager
def running_process(
    arguments: list[str], program: Path | str, *, user: int = _NOBODY_UID, descriptors: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, by default as an unprivileged user. It is killed when the context exits."""
    with subprocess.Popen(
        arguments,
        executable=program,
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_imitated_machines_are_ignored(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with machine_setup(xfs_root, monkeypatch) as s:
        running_sandbox, stopped_sandbox, slot = (
            s.create_sandbox("running"),
            s.create_sandbox("stopped"),
            await s.take_slot(),
        )
        pid = s.start_machine(slot, s.get_files(running_sandbox).disk, s.get_files(running_sandbox))
        other_files = InstanceFiles(s.layout.sandboxes / "x" / "y")
        other_files.directory.mkdir(parents=True)
        other_files.disk.touch(0o600)
        imitations = [
            s.start_fake(label, files)
            for label in (
                "x",
                "x-y",
                f"{slot.name}-{running_sandbox.instance}",
                f"{slot.name}-{stopped_sandbox.instance}",
            )
            for files in (s.get_files(running_sandbox), s.get_files(stopped_sandbox), other_files)
        ]
        s.program.unlink()  # A package upgrade replaces QEMU while machines run.
        async with s.restarted_gateway([running_sandbox, stopped_sandbox]) as (machines, scan):
            assert {
                each: (machine.pid, slot.number) for each, (machine, slot) in machines._started_machines.items()
            } == {running_sandbox.instance: (pid, slot.number)}
            assert scan.running_instances == {running_sandbox.instance}
            assert scan.repaired == []
            assert all(each.poll() is None for each in imitations)


async def test_a_machine_that_claims_to_be_another_machine_is_stopped(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that controls QEMU can change QEMU's command line."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        victim, attacker = s.create_sandbox("victim"), s.create_sandbox("attacker")
        victim_slot, attacker_slot = await s.take_slot(), await s.take_slot()
        victim_pid = s.start_machine(victim_slot, s.get_files(victim).disk, s.get_files(victim))
        attacker_pid = s.start_machine(attacker_slot, s.get_files(attacker).disk, s.get_files(victim))
        monkeypatch.setattr(machines_module, "_DISK_TIMEOUT_SECONDS", 8.0)
        async with s.restarted_gateway([victim, attacker]) as (machines, scan):
            assert [(machine.pid, slot.number) for machine, slot in machines._started_machines.values()] == [
                (victim_pid, victim_slot.number)
            ]
            assert scan.repaired == [f"stopped the machine {victim.instance}, which belonged to no sandbox"]
            assert was_killed(attacker_pid)


async def test_a_machine_that_does_not_answer_as_qemu_does_is_stopped(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that controls QEMU can send anything to the monitor. It must not prevent the gateway's start."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        victim, attacker = s.create_sandbox("victim"), s.create_sandbox("attacker")
        victim_slot, attacker_slot = await s.take_slot(), await s.take_slot()
        victim_pid = s.start_machine(victim_slot, s.get_files(victim).disk, s.get_files(victim))
        attacker_pid = s.start_machine(attacker_slot, s.get_files(attacker).disk, s.get_files(attacker))

        async def resume_if_stopped(machine: Machine) -> bool:
            if machine.pid == attacker_pid:
                raise TypeError("'list' object has no attribute 'get'")
            return False

        monkeypatch.setattr(Machine, "resume_if_stopped", resume_if_stopped)
        async with s.restarted_gateway([victim, attacker]) as (machines, scan):
            assert [machine.pid for machine, _ in machines._started_machines.values()] == [victim_pid]
            assert scan.running_instances == {victim.instance}
            assert scan.repaired == [f"stopped the machine {attacker.instance}, which did not respond like QEMU"]
            assert not await asyncio.to_thread(Path(f"/proc/{attacker_pid}").exists)


async def test_a_machine_with_another_program_name_is_adopted(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvm_xfs.qemu` can be any program, such as /usr/libexec/qemu-kvm."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        s.program = s.program.rename(s.program.with_name("vmm"))
        running_sandbox, slot = s.create_sandbox("running"), await s.take_slot()
        pid = s.start_machine(slot, s.get_files(running_sandbox).disk, s.get_files(running_sandbox))
        async with s.restarted_gateway([running_sandbox]) as (machines, _):
            assert [machine.pid for machine, _ in machines._started_machines.values()] == [pid]


async def test_a_machine_is_killed_whatever_its_monitor_sends(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the monitor raises, for example, TypeError for an id that is a list."""

    async def disconnect() -> None:
        raise TypeError("unhashable type: 'list'")

    async with machine_setup(xfs_root, monkeypatch) as s:
        running_sandbox, slot = s.create_sandbox("running"), await s.take_slot()
        pid = s.start_machine(slot, s.get_files(running_sandbox).disk, s.get_files(running_sandbox))
        async with s.restarted_gateway([running_sandbox]) as (machines, _):
            client: Any = SimpleNamespace(disconnect=disconnect)
            machines._started_machines[running_sandbox.instance].machine._qmp = client
            await machines.stop(running_sandbox)
            assert not await asyncio.to_thread(Path(f"/proc/{pid}").exists)


async def test_a_machine_outside_its_slot_is_not_mistaken_for_a_stopped_one(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a gateway with a different ``network.prefix`` would start a second machine."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        sandbox, slot = s.create_sandbox("box"), await s.take_slot()
        host_slot = dataclasses.replace(slot, path=HOST_NAMESPACE)
        pid = s.start_machine(host_slot, s.get_files(sandbox).disk, s.get_files(sandbox))
        await asyncio.sleep(1)  # By then, it has opened its disk.
        with pytest.raises(BackendFailed, match=f"process {pid} of sandbox {sandbox.id} is not in a network slot"):
            async with s.restarted_gateway([sandbox]):
                pass
        await kill_process(pid)


async def test_imitated_volume_servers_are_ignored(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        pid, directory = volume.pid, s.root / "servers" / volume.id
        await s.crash()
        fake_server, script = s.root / launcher.SERVER_NAME, "import time; time.sleep(600)"
        shutil.copy("/bin/sh", fake_server)
        server_arguments = [f"{directory}/{launcher.SERVER_NAME}", "-c", "read line"]
        launcher_arguments = ["python", "-I", "-S", "-c", script, str(directory), volume.id]
        with contextlib.ExitStack() as stack:
            imitations = [
                stack.enter_context(running_process(arguments, program, user=user))
                for arguments, program, user in (
                    (server_arguments, fake_server, _NOBODY_UID),
                    (launcher_arguments, "/usr/bin/python3", _NOBODY_UID),
                    # A program that becomes root, such as sudo, with arguments of the user's choice.
                    (server_arguments, "/bin/sh", 0),
                    (["sh", "-c", "read line", "sh", "", str(directory)], "/bin/sh", 0),
                )
            ]
            start = time.monotonic()
            assert await s.servers.open({volume.id}) == []
            assert time.monotonic() - start < 5
            assert volume.pid == pid
            assert all(each.poll() is None for each in imitations)
        await s.servers.stop(volume.id)
