"""A volume server with clients in network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from sandbox_gateway.config import Network
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    VOLUME_PORTS,
    Slot,
)
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.volumes.file_system import format_image
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import NetworkPolicy, new_id
from tests.kvm_xfs.slot_networks import Guest, NetworkNamespace, run_inside
from tests.support import nfs3, session
from tests.support.nfs3 import Mount, Nfs, NfsError

OPEN_POLICY = NetworkPolicy()


LOOP_GET_STATUS64 = 0x4C05
DISCONNECT_ERRORS = (TimeoutError, ConnectionError)


class Volume:
    """A volume with its image, port and server."""

    def __init__(self, setup: Setup, image: Path, port: int) -> None:
        self._setup = setup
        self.id = new_id()
        self.image = image
        self.port = port

    async def serve(self, clients: Mapping[Slot, bool]) -> None:
        read_only_by_address = {slot.host_address: read_only for slot, read_only in clients.items()}
        await self._setup.servers.serve(self.id, self.image, self.port, read_only_by_address)

    def mount_volume(self, guest: NetworkNamespace, path: str = "", *, source: int = 0, seconds: float = 3) -> bytes:
        with run_inside(
            guest.path, lambda: Mount(GATEWAY_ADDRESS, self.port + 1, seconds=seconds, source=source)
        ) as mount:
            return mount.mount(path or f"/{self.id}")

    def connect_nfs(self, guest: NetworkNamespace, *, uid: int = 0, source: int = 0, seconds: float = 3) -> Nfs:
        client = run_inside(
            guest.path, lambda: Nfs(GATEWAY_ADDRESS, self.port, uid=uid, gid=uid, source=source, seconds=seconds)
        )
        self._setup.stack.callback(client.close)
        return client

    @property
    def pid(self) -> int:
        return self._setup.servers._servers[self.id].pid

    def read_contents(self, name: str) -> bytes:
        """Return the contents of a file in the image, without using the server."""
        command = ["debugfs", "-R", f"cat /{name}", str(self.image)]
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


class Setup:
    """The slots and servers of a gateway, which ``setup`` removes at the end."""

    def __init__(self, network: Network, root: Path) -> None:
        self.network = network
        self.root = root
        self.pool = SlotPool(network)
        self.servers = ServerPool(network, root / "servers")
        self.stack = contextlib.ExitStack()
        self._ports = iter(VOLUME_PORTS)

    async def create_volume(self, size_mb: int = 64) -> Volume:
        volume = Volume(self, self.root / f"{new_id()}.img", next(self._ports))
        await format_image(volume.image, volume.id, size_mb)
        return volume

    async def create_guest(self) -> tuple[Slot, Guest]:
        slot = await self.pool.take(OPEN_POLICY)
        guest = Guest(slot)
        self.stack.callback(guest.remove)
        return slot, guest

    async def crash(self) -> None:
        """Simulate SIGKILL of the gateway: only the servers and the kernel's state remain."""
        for server in self.servers._servers.values():
            server.stop_watching()
        self.servers = ServerPool(self.network, self.root / "servers")


@contextlib.asynccontextmanager
async def setup(xfs_root: Path) -> AsyncIterator[Setup]:
    network = Network(**{**session.allocate_network(), "pool": 0})
    root = xfs_root / f"volumes-{network.prefix}"
    root.mkdir()
    new_setup = Setup(network, root)
    await new_setup.pool.open(set())
    await new_setup.servers.open(set())
    try:
        async with asyncio.timeout(90):
            yield new_setup
    finally:
        new_setup.stack.close()
        await new_setup.servers.destroy()
        await new_setup.pool.destroy()
        assert list_files_of_loop_devices(root) == []
        shutil.rmtree(root)


def list_files_of_loop_devices(root: Path) -> list[str]:
    """Return the files under ``root`` that loop devices use.

    The comparison uses device and inode numbers, because the paths of loop devices are relative to a server's root.
    """
    path_by_inode = {(each.stat().st_dev, each.stat().st_ino): str(each) for each in root.rglob("*.img")}
    backing_inodes = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError), Path("/dev", backing.parts[3]).open("rb") as device:
            status = bytearray(232)
            fcntl.ioctl(device, LOOP_GET_STATUS64, status)
            backing_inodes.append(struct.unpack_from("=QQ", status))
    return [path_by_inode[each] for each in backing_inodes if each in path_by_inode]


def run_command(*argv: str) -> str:
    """Run a command that must succeed, and return its output."""
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


async def kill_process(pid: int) -> None:
    """Kill a process and wait until it has exited."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(select.select, [pidfd], [], [], 30)
    os.close(pidfd)


def get_nfs_status(procedure: Callable[..., object], *arguments: object) -> int:
    """Call a procedure and return its NFS status."""
    try:
        procedure(*arguments)
    except NfsError as error:
        return error.status
    return nfs3.OK
