"""Root in a sandbox attacks the server of its volume.

The tests check which privileges a compromised server has, that it neither reveals nor serves other volumes, and that it
cannot harm the gateway. Tests in ``tests.kvm_xfs.test_volume_server`` cover invalid paths, names and handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.connect import AGENT_PORT, CODE_PORT
from sandbox_gateway.hosts.kvm_xfs.bounded_log import LOG_BYTES, open_process_log, read_log
from sandbox_gateway.hosts.kvm_xfs.cgroup import CONTROLLERS, Cgroups
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    get_volume_address,
    get_volume_gateway,
    get_volume_namespace,
)
from sandbox_gateway.hosts.kvm_xfs.volumes import launcher, rpc, server_start
from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import ServerProcess, ServerSettings, replace_file
from tests.kvm_xfs.slot_networks import OutsideMachine, run_inside, run_ip
from tests.kvm_xfs.volume_clients import DISCONNECT_ERRORS, get_nfs_status, kill_process, run_command, setup
from tests.support import nfs3
from tests.support.nfs3 import Mount, NfsError, RpcRejected
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("requires_root")


def read_process_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def shares_namespace(pid: int, kind: str) -> bool:
    """Return whether a process shares its namespace of ``kind``, such as `net`, with this process."""
    return Path(f"/proc/{pid}/ns/{kind}").samefile(f"/proc/self/ns/{kind}")


async def test_a_server_has_few_privileges_and_cannot_gain_more(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        status = read_process_status(volume.pid)
        assert status["Seccomp"] == "2"
        assert status["NoNewPrivs"] == "1"
        for capability_set in ("CapEff", "CapPrm", "CapBnd"):
            assert int(status[capability_set], 16) == 0b11011111, "only the capabilities to act for users of the guests"
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        for kind in ("mnt", "pid", "ipc", "uts", "net"):
            assert not shares_namespace(volume.pid, kind), kind


async def test_a_server_is_limited_by_its_control_groups(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, _) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        hierarchies = Cgroups(s.network.prefix, "volumes")._hierarchies
        assert hierarchies, "this machine has no usable cgroup controllers, so limits cannot be tested"
        membership = await asyncio.to_thread(Path(f"/proc/{volume.pid}/cgroup").read_text)
        for controller in CONTROLLERS:
            if hierarchy := hierarchies.get(controller):
                controller_name = controller if hierarchy.version == 1 else ""
                membership_line = next(
                    membership_line
                    for membership_line in membership.splitlines()
                    if controller_name in membership_line.split(":")[1].split(",")
                )
                assert membership_line.split(":")[2].endswith(f"/{s.network.prefix}-volumes/{volume.id}")
        if hierarchy := hierarchies.get("memory"):
            limit_file_name = "memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes"
            group_directory = hierarchy.mount / f"{s.network.prefix}-volumes" / volume.id
            assert int((group_directory / limit_file_name).read_text()) == 1 << 30
        if hierarchy := hierarchies.get("pids"):
            group_directory = hierarchy.mount / f"{s.network.prefix}-volumes" / volume.id
            assert int((group_directory / "pids.max").read_text()) == 512
        if hierarchy := hierarchies.get("cpu"):
            group_directory = hierarchy.mount / f"{s.network.prefix}-volumes" / volume.id
            files = ("cpu.max",) if hierarchy.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = " ".join((group_directory / file).read_text() for file in files).split()
            assert int(quota) == 2 * int(period), "two processors"
        await s.servers.stop(volume.id)
        for hierarchy in hierarchies.values():
            assert not (hierarchy.mount / f"{s.network.prefix}-volumes" / volume.id).exists()


async def test_the_log_of_a_server_is_bounded(xfs_root: Path) -> None:
    """A guest may make a server write messages, and a compromised server can write anything."""
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        log = os.open(f"/proc/{volume.pid}/fd/2", os.O_RDWR | os.O_CLOEXEC)
        s.stack.callback(os.close, log)
        assert os.fstat(log).st_size == LOG_BYTES
        for grow_log in (lambda: os.pwrite(log, b"x", LOG_BYTES), lambda: os.ftruncate(log, LOG_BYTES + 1)):
            with pytest.raises(PermissionError):
                grow_log()
        assert os.pwrite(log, b"x" * (1 << 20), 0) == LOG_BYTES
        assert volume.mount_volume(guest), "a server with a full log does not work"


CONNECT_SCRIPT = """
import json, socket, sys
reachable = []
for address, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((address, port), 1.5).close()
        reachable.append([address, port])
    except OSError:
        pass
print(json.dumps(reachable))
"""


async def test_a_compromised_server_cannot_reach_other_services(xfs_root: Path) -> None:
    """The attack runs as root in the server's network namespace, without its seccomp filter."""

    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (slot, guest), (other_slot, neighbour) = await s.create_guest(), await s.create_guest()
        for each in (guest, neighbour):
            for port in (AGENT_PORT, CODE_PORT, 8000):
                s.stack.enter_context(each.listen(port))
        host_server = s.stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        outside_machine = OutsideMachine(s.network.prefix, s.network.subnet)
        s.stack.callback(outside_machine.remove)
        s.stack.enter_context(outside_machine.listen(443))
        assert guest.can_reach(outside_machine.address, 443, timeout=20)
        await volume.serve({slot: False})
        # Both machines could find each other if the host forwarded their packets.
        outside_machine.run_ip("route", "add", "default", "via", outside_machine.host_address)
        servers_namespace = get_volume_namespace(s.network).name
        run_ip("-n", servers_namespace, "route", "add", "default", "via", get_volume_gateway(s.network))
        targets = [[each.host_address, port] for each in (slot, other_slot) for port in (AGENT_PORT, CODE_PORT, 8000)]
        host_addresses = (slot.veth_address, get_volume_gateway(s.network), outside_machine.host_address)
        targets += [[address, host_server.getsockname()[1]] for address in (*host_addresses, "127.0.0.1")]
        targets.append([outside_machine.address, 443])
        command = [
            "nsenter",
            f"--net=/proc/{volume.pid}/ns/net",
            sys.executable,
            "-c",
            CONNECT_SCRIPT,
            json.dumps(targets),
        ]
        assert json.loads(await asyncio.to_thread(run_command, *command)) == []


async def test_a_compromised_server_cannot_reach_the_servers_of_other_volumes(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, other_volume = await s.create_volume(), await s.create_volume()
        slot, guest = await s.create_guest()
        for each in (volume, other_volume):
            await each.serve({slot: False})
            assert each.mount_volume(guest)
        ports = (other_volume.port, other_volume.port + 1)
        targets = [(address, port) for address in (get_volume_address(s.network), "127.0.0.1") for port in ports]
        namespace = f"--net=/proc/{volume.pid}/ns/net"
        command = ["nsenter", namespace, sys.executable, "-c", CONNECT_SCRIPT, json.dumps(targets)]
        assert json.loads(await asyncio.to_thread(run_command, *command)) == []


@pytest.mark.skipif(not launcher.can_restrict_ports(), reason="the kernel cannot restrict ports: Linux 6.7 can")
async def test_a_server_cannot_open_the_port_of_another(xfs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration tells the server to open that port, as a compromised server would."""
    async with setup(xfs_root) as s:
        volume, other_volume, (slot, _) = await s.create_volume(), await s.create_volume(), await s.create_guest()
        original_render = server_start.render_configuration

        def render_for_other_port(address: str, gateway: str, name: str, port: int, *arguments: Any) -> str:
            return original_render(address, gateway, name, other_volume.port if name == volume.id else port, *arguments)

        monkeypatch.setattr(server_start, "render_configuration", render_for_other_port)
        with pytest.raises(BackendFailed, match="Error binding"):
            await volume.serve({slot: False})
        await other_volume.serve({slot: False})


FORBIDDEN_CALLS_SCRIPT = """
import ctypes, os, socket, sys
from sandbox_gateway.hosts.kvm_xfs.volumes import launcher
from sandbox_gateway.hosts.kvm_xfs.volumes.seccomp import build_file_server_filter
import threading
launcher._drop_privileges(build_file_server_filter())
libc = ctypes.CDLL(None, use_errno=True)
def check_refused(what, call):
    try:
        result = call()
    except OSError as error:
        result, number = -1, error.errno
    else:
        number = ctypes.get_errno()
    if result != -1 or number not in (1, 97):
        print(what, result, number)
check_refused("fork", os.fork)
check_refused("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
check_refused("unshare", lambda: libc.unshare(0x10000000))
check_refused("setns", lambda: libc.setns(0, 0))
check_refused("mount", lambda: libc.mount(b"none", b"/", b"none", 0x44000, None))
check_refused("memfd_create", lambda: os.memfd_create("x"))
check_refused("bpf", lambda: libc.syscall(321, 0, 0, 0))
check_refused("io_uring_setup", lambda: libc.syscall(425, 1, 0))
check_refused("perf_event_open", lambda: libc.syscall(298, 0, 0, 0, 0, 0))
check_refused("userfaultfd", lambda: libc.syscall(323, 1))
check_refused("keyctl", lambda: libc.syscall(250, 0, 0))
check_refused("init_module", lambda: libc.syscall(175, 0, 0, 0))
check_refused("pidfd_getfd", lambda: libc.syscall(438, 0, 0, 0))
check_refused("execveat", lambda: libc.syscall(322, 0, 0, 0, 0, 0))
check_refused("clone", lambda: libc.syscall(56, 0x10000 | 0x40000000, 0, 0, 0, 0))
check_refused("netlink", lambda: socket.socket(16, 3, 0) and 0)
check_refused("packet", lambda: socket.socket(17, 3, 0) and 0)
check_refused("vsock", lambda: socket.socket(40, 1, 0) and 0)
opened_sockets = []
thread = threading.Thread(target=lambda: opened_sockets.append(socket.socket()))
thread.start(); thread.join()
print("threads and sockets work" if opened_sockets else "no thread")
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call numbers are those of x86_64")
def test_the_seccomp_filter_blocks_privilege_escalation() -> None:
    result = subprocess.run([sys.executable, "-c", FORBIDDEN_CALLS_SCRIPT], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("threads and sockets work\n", "")


async def test_a_volume_of_another_sandbox_cannot_be_mounted_or_read_by_handle(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        own_volume, other_volume = await s.create_volume(), await s.create_volume()
        (own_slot, guest), (owner_slot, owner) = await s.create_guest(), await s.create_guest()
        await own_volume.serve({own_slot: False})
        await other_volume.serve({owner_slot: False})
        root_handle = other_volume.mount_volume(owner)
        secret_handle = other_volume.connect_nfs(owner).create(root_handle, "secret")
        other_volume.connect_nfs(owner).write(secret_handle, b"secret")
        assert get_nfs_status(own_volume.mount_volume, guest, f"/{other_volume.id}") != nfs3.OK
        with pytest.raises(DISCONNECT_ERRORS):
            other_volume.mount_volume(guest, seconds=0.7)
        with pytest.raises(DISCONNECT_ERRORS):
            other_volume.connect_nfs(guest, seconds=0.7)
        with pytest.raises((NfsError, RpcRejected)):
            own_volume.connect_nfs(guest).read(secret_handle)


async def test_the_export_list_does_not_name_other_sandboxes(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume = await s.create_volume()
        (guest_slot, guest), (reader_slot, reader), (third_slot, _) = (
            await s.create_guest(),
            await s.create_guest(),
            await s.create_guest(),
        )
        await volume.serve({guest_slot: False, reader_slot: True, third_slot: False})
        subnet = ipaddress.IPv4Network(s.network.subnet)
        for each in (guest, reader):
            assert volume.mount_volume(each)
            with run_inside(each.path, lambda: Mount(GATEWAY_ADDRESS, volume.port + 1)) as mount:
                ((path, clients),) = mount.exports()
            assert path == f"/{volume.id}"
            listed_addresses = {ipaddress.IPv4Interface(client).ip for client in clients}
            # From the network of the sandboxes, the list contains only the address of the host on the servers' link.
            assert {str(address) for address in listed_addresses if address in subnet} <= {
                get_volume_gateway(s.network)
            }


async def test_restarts_of_a_crashing_server_are_delayed(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        backoffs = []
        for _ in range(2):
            backoffs.append(s.servers._servers[volume.id].compute_backoff_seconds())
            server = s.servers._servers[volume.id]
            await kill_process(server.pid)
            await asyncio.to_thread(
                wait_until, lambda ended_server=server: s.servers._servers[volume.id] is not ended_server
            )
        current_server = s.servers._servers[volume.id]
        backoffs += [current_server.compute_backoff_seconds()]
        current_server.early_exits = 100
        backoffs += [current_server.compute_backoff_seconds()]
        current_server.start_time -= 3600
        backoffs += [current_server.compute_backoff_seconds()]
        assert backoffs == [0, 1, 2, 30, 0]
        assert volume.connect_nfs(guest).getattr(volume.mount_volume(guest)).kind == 2


async def test_no_other_server_can_answer_for_a_server_that_has_exited(xfs_root: Path) -> None:
    """All servers share a network namespace, so a compromised one can open a port as soon as it is free."""
    async with setup(xfs_root) as s:
        volume, (slot, guest) = await s.create_volume(), await s.create_guest()
        await volume.serve({slot: False})
        server = s.servers._servers[volume.id]
        descriptor = os.open(f"/proc/{server.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        s.stack.callback(os.close, descriptor)

        def can_connect() -> bool:
            try:
                run_inside(guest.path, lambda: socket.create_connection((GATEWAY_ADDRESS, volume.port), 2)).close()
            except OSError:
                return False
            return True

        assert can_connect()
        server.early_exits = 100  # This delays the restart by 30 s.
        await kill_process(server.pid)
        listener_address = (get_volume_address(s.network), volume.port)
        with run_inside(
            Path(f"/proc/self/fd/{descriptor}"), lambda: socket.create_server(listener_address, backlog=4096)
        ):
            await asyncio.to_thread(wait_until, lambda: not can_connect())


def plant_links(directory: Path, target: Path) -> None:
    for name in (launcher.CONFIG_FILE, f"{launcher.CONFIG_FILE}.new"):
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)


async def test_a_server_cannot_make_the_gateway_write_through_a_link(xfs_root: Path, tmp_path: Path) -> None:
    """The server's seccomp filter allows it to create links in its own root."""
    host_file = tmp_path / "file"
    host_file.write_text("unchanged")
    async with setup(xfs_root) as s:
        volume, (slot, guest), (other_slot, other_guest) = (
            await s.create_volume(),
            await s.create_guest(),
            await s.create_guest(),
        )
        await volume.serve({slot: False})
        pid = volume.pid
        plant_links(Path(f"/proc/{pid}/fd/{launcher.ROOT_FD}"), host_file)
        await volume.serve({slot: False, other_slot: False})
        assert host_file.read_text() == "unchanged"
        assert volume.pid == pid
        assert volume.mount_volume(guest) == volume.mount_volume(other_guest)


def test_a_server_cannot_plant_a_file_while_the_gateway_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server creates a link, to an existing or a missing file, after the gateway has removed the last one."""
    directory, existing_file, missing_file = tmp_path / "root", tmp_path / "file", tmp_path / "missing"
    directory.mkdir()
    new_path = directory / f"{launcher.CONFIG_FILE}.new"
    existing_file.write_text("unchanged")
    original_unlink = os.unlink
    directory_fd = os.open(directory, os.O_PATH)
    for plant in (
        lambda: new_path.symlink_to(existing_file),
        lambda: new_path.symlink_to(missing_file),
        lambda: new_path.hardlink_to(existing_file),
    ):

        def unlink_and_plant(path: str, *, dir_fd: int | None = None, plant: Callable[[], None] = plant) -> None:
            with contextlib.suppress(FileNotFoundError):
                original_unlink(path, dir_fd=dir_fd)
            plant()

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", unlink_and_plant)
            with pytest.raises(FileExistsError):
                replace_file(launcher.CONFIG_FILE, "text", dir_fd=directory_fd)
        assert existing_file.read_text() == "unchanged" and not missing_file.exists()
    os.close(directory_fd)


async def test_a_server_that_prevents_the_gateways_writes_is_replaced(xfs_root: Path) -> None:
    async with setup(xfs_root) as s:
        volume, (slot, guest), (other_slot, other_guest) = (
            await s.create_volume(),
            await s.create_guest(),
            await s.create_guest(),
        )
        await volume.serve({slot: False})
        pid = volume.pid
        await asyncio.to_thread(Path(f"/proc/{pid}/fd/{launcher.ROOT_FD}/{launcher.CONFIG_FILE}.new").mkdir)
        await volume.serve({slot: False, other_slot: False})
        assert volume.pid != pid
        assert volume.mount_volume(guest) == volume.mount_volume(other_guest)


@contextlib.contextmanager
def running_process_with_descriptor(path: Path, descriptor: int, flags: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in which ``descriptor`` refers to ``path``, as a compromised process can arrange with dup2(2)."""
    script = f"import os; os.dup2(os.open({str(path)!r}, {flags}), {descriptor}); print(flush=True); input()"
    command = [sys.executable, "-I", "-S", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_server_cannot_choose_the_directory_to_which_the_gateway_writes(tmp_path: Path) -> None:
    with running_process_with_descriptor(tmp_path, launcher.ROOT_FD, os.O_RDONLY) as process:
        server = ServerProcess("volume", process.pid, ServerSettings("", 0, {}), pidfd=os.pidfd_open(process.pid))
        with pytest.raises(BackendFailed, match="has closed its root directory"):
            server.configure("text")
        os.close(server.pidfd)
    assert list(tmp_path.iterdir()) == []


def test_the_gateway_does_not_read_a_file_that_replaces_a_log(tmp_path: Path) -> None:
    """With O_PATH, a process can open even files that it may not read."""
    secret_file = tmp_path / "secret"
    secret_file.write_text("secret")
    for directory in (None, tmp_path):
        with running_process_with_descriptor(secret_file, 2, os.O_PATH) as process, pytest.raises(OSError):
            read_log(open_process_log(process.pid, directory))


@contextlib.asynccontextmanager
async def compromised_server(reply: Iterable[bytes]) -> AsyncIterator[tuple[str, int]]:
    """Answer each connection with ``reply``. Yields the address and port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(4096)
            for part in reply:
                writer.write(part)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ([struct.pack(">I", 1 << 31 | (4 << 20) + 1)], "longer than"),
        ([struct.pack(">I", 1 << 30), *[bytes(1 << 20)] * 8], "longer than"),
        ([struct.pack(">I", 1 << 20) + bytes(1 << 20)] * 8, "longer than"),
        ([struct.pack(">I", 0) * 10_000] * 10, "fragments"),
        ([(struct.pack(">I", 1) + b"x") * 10_000] * 10, "fragments"),
    ],
    ids=["length", "endless", "many-long-fragments", "empty-fragments", "short-fragments"],
)
async def test_a_long_reply_of_a_server_is_refused(reply: list[bytes], problem: str) -> None:
    async with compromised_server(reply) as (address, port):
        with pytest.raises(EOFError, match=problem):
            await rpc.call(address, port, 100003, 0)


async def test_a_reply_in_fragments_is_complete() -> None:
    result = os.urandom(3 << 20)
    data = struct.pack(">6I", 1, 1, 0, 0, 0, 0) + result
    pieces = [data[start : start + 60_000] for start in range(0, len(data), 60_000)]
    last = len(pieces) - 1
    reply = [struct.pack(">I", len(each) | (index == last) << 31) + each for index, each in enumerate(pieces)]
    async with compromised_server(reply) as (address, port):
        assert await rpc.call(address, port, 100003, 0) == result
