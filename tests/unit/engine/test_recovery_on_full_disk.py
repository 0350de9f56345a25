"""The gateway starts, or a machine stops, while the disk is full."""

from __future__ import annotations

from pathlib import Path

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import NoSpace
from sandbox_gateway.hosts.base import Scan
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot, SnapshotKind
from tests.support.memory_engine import create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    def __init__(self, scan: Scan | None = None) -> None:
        super().__init__()
        self.scan_result = scan or Scan()
        self.is_full = scan is not None
        for sandbox in self.scan_result.sandboxes:
            self.disks[sandbox.instance] = {}

    async def scan(self) -> Scan:
        return self.scan_result

    async def save(self, sandbox: Sandbox) -> None:
        if self.is_full:
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if self.is_full:
            raise NoSpace("no space left")
        await super().remove_snapshot(snapshot)

    async def stop(self, sandbox: Sandbox) -> None:
        if sandbox.name == "stuck":
            raise NoSpace("no space left")
        await super().stop(sandbox)


async def test_the_gateway_starts_with_a_full_disk_after_a_reboot(tmp_path: Path) -> None:
    sandboxes = [Sandbox(name=name) for name in ("stuck", "a", "b")]
    orphans = [Snapshot(kind=SnapshotKind.BASE), Snapshot(kind=SnapshotKind.PAUSE)]
    host = _Host(Scan(sandboxes=sandboxes, snapshots=orphans))
    engine = Engine(host, Config.model_validate({"host": {"state_root": str(tmp_path)}, "restart": "stay"}))
    try:
        await engine.open()
        for name in ("a", "b"):
            sandbox = engine.sandboxes.get(name)
            assert sandbox.state is SandboxState.PAUSED and "went down" in sandbox.state_reason
        host.is_full = False
        await engine.sandboxes.resume("a")
        assert host.saved_sandboxes[sandboxes[1].id].state is SandboxState.RUNNING
    finally:
        await engine.close()


async def test_a_sandbox_whose_machine_stops_is_paused_even_if_the_save_fails(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        sandbox = await create(engine, "a")
        host.is_full = True
        await host.stop(sandbox)
        host._exit(sandbox.instance)
        await wait_until(lambda: engine.sandboxes.get("a").state is SandboxState.PAUSED)
        host.is_full = False
        await engine.sandboxes.resume("a")
