"""Machines that end between their start and the commit of their record."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.records import Sandbox, SandboxState
from tests.api.memory_host import MemoryHost
from tests.support.memory_engine import create, open_engine, until


class _Host(MemoryHost):
    """Ends the machines of sandboxes in ``dying`` before their record is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.dying: set[str] = set()

    async def end(self, sandbox: Sandbox) -> None:
        await self.stop(sandbox)
        self._exit(sandbox.instance)

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.name in self.dying:
            self.dying.discard(sandbox.name)
            await self.end(sandbox)
        await super().save(sandbox)


def test_a_fork_whose_machine_ends_before_its_commit_can_be_resumed(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            host.dying = {"b"}
            await engine.forks.fork("t", ForkSpec(names=["b", "c"]))
            await until(lambda: engine.sandboxes.get("b").state is SandboxState.PAUSED)
            assert engine.sandboxes.get("c").state is SandboxState.RUNNING
            await engine.sandboxes.resume("b")

    asyncio.run(story())


def test_a_replacement_that_ends_before_its_commit_can_be_resumed(tmp_path: Path) -> None:
    async def story() -> None:
        host = _Host()
        async with open_engine(tmp_path, host) as engine:
            await create(engine, "a")
            await engine.snapshots.create("a", name="s")
            host.dying = {"a"}
            await engine.sandboxes.rollback("a", "s")
            await until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)
            await engine.sandboxes.resume("a")

    asyncio.run(story())


def test_a_paused_fork_stays_paused_without_a_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_engine(tmp_path) as engine:
            sandbox = await create(engine, "a", paused=True)
            await asyncio.sleep(0.02)
            assert engine.sandboxes.get("a") == sandbox and sandbox.state_reason == ""

    asyncio.run(story())


def test_a_machine_that_ends_during_the_scan_is_noticed(tmp_path: Path) -> None:
    """The host sees it running, and its end comes before the engine watches."""
    sandbox = Sandbox(name="a", forked_from="", head="")

    class Host(_Host):
        async def scan(self) -> Scan:
            self.disks[sandbox.instance] = {}
            return Scan(sandboxes=[sandbox], alive={sandbox.instance})

    async def story() -> None:
        async with open_engine(tmp_path, Host()) as engine:
            await until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)

    asyncio.run(story())
