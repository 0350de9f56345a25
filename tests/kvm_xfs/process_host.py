"""A KVM/XFS host with simulated machines: the memory of each is a private mapping of its image in this process."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.machines import StartedMachine
from sandbox_gateway.records import Sandbox, Snapshot


class ProcessMachine:
    """A machine whose memory is a private mapping of its image in this process."""

    has_ended = False

    def __init__(self, files: InstanceFiles) -> None:
        self.files = files
        with files.memory.open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    @property
    def pid(self) -> int:
        return os.getpid()

    async def connect(self) -> None: ...

    async def stop(self) -> None: ...

    async def cont(self) -> None: ...

    async def is_line_open(self) -> bool:
        return False

    @contextlib.asynccontextmanager
    async def added_fd(self, descriptor: int) -> AsyncIterator[str]:
        yield str(descriptor)

    async def save_devices(self, filename: str) -> None:
        os.write(int(filename), b"devices")


class ProcessMachines:
    """The running machines of a gateway. A new gateway has none, as after a crash of the whole host."""

    def __init__(self) -> None:
        self.running: dict[str, ProcessMachine] = {}

    def require_running(self, sandbox: Sandbox) -> StartedMachine:
        machine: Any = self.running[sandbox.instance]
        slot: Any = None
        return StartedMachine(machine, slot)

    def check_platform(self, snapshot: Snapshot) -> None: ...

    async def launch(self, sandbox: Sandbox, files: InstanceFiles, state: Path | None, *, hold: bool = False) -> None:
        self.running[sandbox.instance] = ProcessMachine(files)
        sandbox.host = {"platform": {}}

    async def stop(self, sandbox: Sandbox) -> None:
        self.running.pop(sandbox.instance, None)

    async def adopt(self, scan: Any) -> None: ...

    def list_addresses(self) -> dict[str, str]:
        return {}


class NoVolumeServers:
    async def open(self, ids: set[str]) -> list[str]:
        return []


def make_host(config: Config) -> KvmXfsHost:
    host: Any = KvmXfsHost(config)
    host._machines = host._recovery._machines = ProcessMachines()
    host._volumes._servers = NoVolumeServers()
    host._layout.create()
    host._memory_roots.open()
    opened_host: KvmXfsHost = host
    return opened_host
