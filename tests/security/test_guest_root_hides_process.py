"""Root in a sandbox has taken over QEMU or a volume server, and hides the process from the next gateway.

Everything that these tests do to the process, it can also do itself without privileges: write to its own memory, close
its files and end its main thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.hosts.kvm_xfs import machines as machines_module
from sandbox_gateway.hosts.kvm_xfs import process_checks
from sandbox_gateway.hosts.kvm_xfs.memory import injection
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import start_in_namespace
from sandbox_gateway.hosts.kvm_xfs.volumes import server_pool as server_pool_module
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import ServerSettings, save_settings
from tests.kvm_xfs.volume_clients import kill_process, setup
from tests.security.test_guest_root_disk import find_qemu_pid
from tests.security.test_host_user_processes import machine_setup, running_process, was_killed
from tests.support.gateway import Gateway
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until

requires_root = pytest.mark.usefixtures("requires_root")

_SYS_EXIT, _SYS_UNSHARE, _SYS_SETNS, _SYS_CLONE, _SYS_FORK = 60, 272, 308, 56, 57
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

# The main thread exits. So does each other thread, as soon as it has started the next one.
_RELAY_PROGRAM = f"""
import _thread, ctypes
def relay():
    _thread.start_new_thread(relay, ())
_thread.start_new_thread(relay, ())
ctypes.CDLL(None).syscall({_SYS_EXIT}, 0)
"""


def erase_command_line(pid: int) -> None:
    """Overwrite the arguments in the memory of a process, from which the kernel reads the command line."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(bytes(end - start))
    assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") == b""


def make_system_call(pid: int, number: int, argument: int) -> None:
    """Make the main thread of a process run a system call, which may end the thread."""
    pidfd = os.pidfd_open(pid)
    try:
        injection._run_system_call(pid, pidfd, injection._find_syscall_instruction(pid), number, argument)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def end_main_thread(pid: int) -> None:
    """End the main thread of a process. The kernel then shows no command line, files or namespaces of the process."""
    make_system_call(pid, _SYS_EXIT, 0)
    assert Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) > 1


HIDE_FUNCTIONS = [erase_command_line, end_main_thread]


@pytest.fixture
def sandbox_id(shared_gateway: Gateway, template: str) -> Iterator[str]:
    new_sandbox = shared_gateway.call("POST", "/sandboxes", {"templateID": template, "timeout": 3600})
    yield str(new_sandbox["sandboxID"])
    shared_gateway.client.delete(f"/sandboxes/{new_sandbox['sandboxID']}")


@pytest.mark.parametrize("hide", mark_slow_except((end_main_thread,), HIDE_FUNCTIONS))
def test_a_qemu_that_hides_is_killed(shared_gateway: Gateway, sandbox_id: str, hide: Callable[[int], None]) -> None:
    pid = find_qemu_pid(shared_gateway, sandbox_id)
    pidfd = os.pidfd_open(pid)
    try:
        hide(pid)
        assert not process_checks.wait_for_exit(pidfd, 0)
        shared_gateway.restart()
        assert process_checks.wait_for_exit(pidfd, 0)
    finally:
        process_checks.send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@pytest.mark.parametrize(
    ("number", "argument"),
    [
        (_SYS_UNSHARE, _CLONE_NEWUSER | _CLONE_NEWNET),
        (_SYS_SETNS, 0),
        (_SYS_CLONE, _CLONE_NEWUSER | _CLONE_NEWNET | signal.SIGCHLD),
        (_SYS_FORK, 0),
    ],
)
def test_a_qemu_thread_that_tries_to_leave_its_network_slot_is_killed(
    shared_gateway: Gateway, sandbox_id: str, number: int, argument: int
) -> None:
    """A restarted gateway recognises a machine by its network slot."""
    pidfd = os.pidfd_open(pid := find_qemu_pid(shared_gateway, sandbox_id))
    try:
        make_system_call(pid, number, argument)
        wait_until(lambda: not Path(f"/proc/{pid}/task/{pid}/ns/net").exists(), 10)
    finally:
        process_checks.send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def start_python(slot_path: Path, program: str) -> int:
    command = [sys.executable, "-I", "-S", "-c", program]
    return start_in_namespace(slot_path, command, [], subprocess.DEVNULL)


@requires_root
async def test_a_machine_whose_threads_exit_quickly_is_killed(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the gateway looks at a thread, the thread has already exited."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        slot = await s.take_slot()
        pid = start_python(slot.path, _RELAY_PROGRAM)
        wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"", 10)
        original_function = process_checks.identify_namespace

        def identify_late(path: Path) -> tuple[int, int]:
            deadline = time.monotonic() + 0.5
            while path.is_relative_to(f"/proc/{pid}") and path.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            return original_function(path)

        monkeypatch.setattr(process_checks, "identify_namespace", identify_late)
        async with s.restarted_gateway([]) as (_, scan):
            assert was_killed(pid)
            assert scan.repaired == ["stopped an unknown machine, which belonged to no sandbox"]


@requires_root
@pytest.mark.parametrize("hide", HIDE_FUNCTIONS)
async def test_a_volume_server_that_hides_is_killed(xfs_root: Path, hide: Callable[[int], None]) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        client = volume.connect_nfs(guest)
        client.write(client.create(volume.mount_volume(guest), "file"), b"data", stable=0)
        pidfd = os.pidfd_open(pid := volume.pid)
        try:
            await s.crash()
            hide(pid)
            assert await s.servers.open({volume.id}) == ["stopped an unknown server that could not be adopted"]
            assert process_checks.wait_for_exit(pidfd, 0)
        finally:
            process_checks.send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        assert volume.read_contents("file") == b"data"


@requires_root
async def test_the_gateway_waits_for_the_image_of_a_server_that_hid(xfs_root: Path) -> None:
    """After the server has exited, the kernel may still be writing to the image."""
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        directory = s.root / "servers" / volume.id
        directory.mkdir()
        save_settings(directory, ServerSettings(str(volume.image), volume.port, {}))
        with volume.image.open("rb") as image:
            fcntl.flock(image, fcntl.LOCK_EX)
            task = asyncio.create_task(s.servers.open({volume.id}))
            await asyncio.sleep(1)
            assert not task.done()
        assert await task == []


def reuse_pid(pid: int) -> subprocess.Popen[bytes]:
    """Start a process of an unrelated service whose pid is ``pid``, as a host user can by starting many processes."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    raise AssertionError(f"no process got the pid {pid}")


@requires_root
async def test_a_process_that_reuses_a_machines_pid_is_not_killed(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine exits after the gateway has identified it and before the gateway kills it."""
    async with machine_setup(xfs_root, monkeypatch) as s:
        sandbox, slot = s.create_sandbox("box"), await s.take_slot()
        pid = s.start_machine(slot, s.get_files(sandbox).disk, s.get_files(sandbox))
        services: list[subprocess.Popen[bytes]] = []

        async def end_first(process: Any, *_: object) -> bool:
            await kill_process(process.pid)
            assert was_killed(process.pid)
            services.append(reuse_pid(process.pid))
            return False

        monkeypatch.setattr(machines_module, "_has_opened_disk", end_first)
        try:
            async with s.restarted_gateway([sandbox]) as (machines, scan):
                assert [service.pid for service in services] == [pid]
                assert services[0].poll() is None
                assert (machines._started_machines, scan.repaired) == ({}, [])
        finally:
            for service in services:
                service.kill()
                service.wait()


@requires_root
async def test_a_process_that_reuses_a_servers_pid_is_not_killed(
    xfs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup(xfs_root) as s:
        command = [f"{s.root}/servers/x/ganesha.nfsd", "60"]
        service: subprocess.Popen[bytes] | None = None
        program = s.root / "ganesha.nfsd"
        shutil.copy("/bin/sleep", program)
        with running_process(command, program, user=0) as server:

            def end_first(directory: Path) -> None:
                nonlocal service
                if service is None:
                    server.kill()
                    server.wait()
                    service = reuse_pid(server.pid)

            monkeypatch.setattr(server_pool_module, "load_settings", end_first)
            try:
                await s.servers.open(set())
                assert service is not None
                assert service.pid == server.pid
                assert service.poll() is None
            finally:
                if service is not None:
                    service.kill()
                    service.wait()
