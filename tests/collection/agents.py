"""A real gateway with real agents, but without virtual machines.

Each sandbox is an agent process, which listens on a loopback address and uses this machine's files and users. The data
plane works as it does on any host.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import AGENT_PORT, Machine, MemoryHost, _choose_next_address
from tests.support.session import REPOSITORY

GATEWAY_SOURCE = REPOSITORY / "gateway" / "src"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_TIMEOUT_SECONDS = 20


class AgentMachine(Machine):
    """A machine that consists of an agent process. Stopping it kills the agent."""

    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.address = _choose_next_address()
        options = ("--unmanaged", "--bind", self.address, "--port", str(AGENT_PORT))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sandbox_agent", *options),
            env={"PYTHONPATH": str(GATEWAY_SOURCE), "PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr
        startup_log = b""
        async with asyncio.timeout(_START_TIMEOUT_SECONDS):
            while b"listening on" not in startup_log:
                line = await self.process.stderr.readline()
                assert line, f"the agent did not start: {startup_log.decode()}"
                startup_log += line

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


class AgentHost(MemoryHost):
    machine_type = AgentMachine


@contextmanager
def running_gateway(root: Path, **sections: dict[str, Any]) -> Iterator[MemoryGateway]:
    """Serve a gateway with the template `base`. ``sections`` are sections of its configuration."""
    gateway = MemoryGateway(root, AgentHost(), **sections)
    try:
        gateway.build_template("base")
        yield gateway
    finally:
        gateway.end()
