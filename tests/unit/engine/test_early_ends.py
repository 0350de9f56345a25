"""Machines that stop after they have started but before the record of their sandbox is committed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.records import Sandbox, SandboxState
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    """A host that stops the machines of the sandboxes named in ``names_to_stop`` just before saving their records."""

    def __init__(self) -> None:
        super().__init__()
        self.names_to_stop: set[str] = set()

    async def stop_unexpectedly(self, sandbox: Sandbox) -> None:
        await self.stop(sandbox)
        self._exit(sandbox.instance)

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.name in self.names_to_stop:
            self.names_to_stop.discard(sandbox.name)
            await self.stop_unexpectedly(sandbox)
        await super().save(sandbox)


async def test_a_fork_whose_machine_stops_before_the_commit_can_be_resumed(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        host.names_to_stop = {"b"}
        await engine.forks.fork("t", ForkSpec(names=["b", "c"]))
        await wait_until(lambda: engine.sandboxes.get("b").state is SandboxState.PAUSED)
        assert engine.sandboxes.get("c").state is SandboxState.RUNNING
        await engine.sandboxes.resume("b")


async def test_a_sandbox_whose_new_machine_stops_before_the_commit_can_be_resumed(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")
        host.names_to_stop = {"a"}
        await engine.sandboxes.rollback("a", "s")
        await wait_until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)
        await engine.sandboxes.resume("a")


async def test_a_paused_fork_stays_paused_with_an_empty_reason(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        sandbox = await create(engine, "a", paused=True)
        await asyncio.sleep(0.02)
        assert engine.sandboxes.get("a") == sandbox and sandbox.state_reason == ""


async def test_a_machine_that_stops_during_the_scan_is_detected(tmp_path: Path) -> None:
    """The scan finds the machine running, but the machine stops before the engine watches for exits."""
    sandbox = Sandbox(name="a", forked_from="", head="")

    class _StaleScanHost(_Host):
        async def scan(self) -> Scan:
            self.disks[sandbox.instance] = {}
            return Scan(sandboxes=[sandbox], running_instances={sandbox.instance})

    async with opened_engine(tmp_path, _StaleScanHost()) as engine:
        await wait_until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)
