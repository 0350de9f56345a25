"""Test that an unreadable record does not affect other records and can be restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.records import SandboxState
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, KvmXfsWorld


class RestartableGateway:
    """A gateway that can be closed and reopened on the same state."""

    def __init__(self, world: KvmXfsWorld) -> None:
        self._world = world
        self.config: Config = world.make_config()
        self.runner = self.open()

    def restart(self) -> EngineRunner:
        self.runner.close()
        self.runner = self.open()
        return self.runner

    def open(self) -> EngineRunner:
        return EngineRunner(self._world.make_host(self.config), self.config)

    @property
    def root(self) -> Path:
        return self.config.host.state_root

    def find_quarantine_path(self, kind: str) -> Path:
        """Return the path of the only quarantined object of a kind."""
        (path,) = (self.root / ".damaged").glob(f"{kind}-*")
        return path


@pytest.fixture
def gateway(kvm_xfs_world: KvmXfsWorld) -> Iterator[RestartableGateway]:
    gateway = RestartableGateway(kvm_xfs_world)
    yield gateway
    gateway.runner.remove_all()
    gateway.runner.close()
    kvm_xfs_world.clean_up(gateway.config)


def read_file(runner: EngineRunner, path: str) -> str:
    return runner.shell("box", f"cat {path} 2>/dev/null || true").strip()


def test_a_sandbox_saved_while_its_volume_is_damaged_keeps_the_mount(gateway: RestartableGateway) -> None:
    runner = gateway.runner
    volume = runner.do(runner.engine.volumes.create("data", size_mb=64))
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["box"], mounts=[MountSpec("data", "/data")])))
    runner.shell("box", "echo kept >/data/file && sync")
    runner.do(runner.engine.sandboxes.pause("box"))
    manifest = gateway.root / "volumes" / volume.id / "manifest.json"
    image = manifest.with_name("volume.img")
    record = manifest.read_text()
    runner.close()
    manifest.write_text(record[:40])
    image.rename(gateway.root / "image")
    runner = gateway.runner = gateway.open()
    assert runner.engine.volumes.list() == []
    runner.do(runner.engine.sandboxes.update("box", metadata={"saved": "again"}))
    runner.do(runner.engine.sandboxes.resume("box"))
    assert read_file(runner, "/data/file") == ""
    runner.do(runner.engine.sandboxes.pause("box"))
    runner.close()
    gateway.find_quarantine_path("volumes").rename(manifest.parent)
    manifest.write_text(record)
    (gateway.root / "image").rename(image)
    runner = gateway.runner = gateway.open()
    assert [(each.volume, each.path) for each in runner.get_sandbox("box").mounts] == [(volume.id, "/data")]
    runner.do(runner.engine.sandboxes.resume("box"))
    assert read_file(runner, "/data/file") == "kept"


def test_a_gateway_that_refuses_newer_records_keeps_its_machines_running(gateway: RestartableGateway) -> None:
    runner = gateway.runner
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["box"])))
    runner.do(runner.engine.snapshots.create("box", name="mark"))
    manifest = gateway.root / "snapshots" / runner.engine.snapshots.get("mark").id / "manifest.json"
    runner.close()
    record = manifest.read_text()
    manifest.write_text(record.replace('"kind": "snapshot"', '"kind": "dream"'))
    (gateway.root / "snapshots" / ".partial-0").mkdir()
    paths_before = sorted(gateway.root.rglob("*"))
    with pytest.raises(BackendFailed, match=rf"{manifest} was written by a newer release .*its kind is 'dream'"):
        gateway.open()
    assert sorted(gateway.root.rglob("*")) == paths_before
    manifest.write_text(record)
    runner = gateway.runner = gateway.open()
    assert not (gateway.root / "snapshots" / ".partial-0").exists()
    assert runner.get_sandbox("box").state is SandboxState.RUNNING
    assert runner.shell("box", "echo alive").strip() == "alive"


def test_detach_removes_a_missing_volume_by_its_id(gateway: RestartableGateway) -> None:
    runner = gateway.runner
    volume = runner.do(runner.engine.volumes.create("data", size_mb=64))
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["box"], mounts=[MountSpec("data", "/data")])))
    runner.do(runner.engine.sandboxes.pause("box"))
    runner.close()
    for path in (gateway.root / "volumes" / volume.id).glob("*.*"):
        path.unlink()
    runner = gateway.runner = gateway.open()
    runner.do(runner.engine.attachments.detach("box", volume.id))
    assert runner.get_sandbox("box").mounts == []
    assert gateway.restart().get_sandbox("box").mounts == []


def test_collector_keeps_the_volume_and_the_capture_of_a_damaged_sandbox(gateway: RestartableGateway) -> None:
    """The sandbox is paused and has its own clone of a volume, which is normally removed with the sandbox."""
    runner = gateway.runner
    runner.do(runner.engine.volumes.create("data", size_mb=64))
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], mounts=[MountSpec("data", "/data")])))
    snapshot = runner.do(runner.engine.snapshots.create("source", volumes=["data"]))
    clone_mount = MountSpec("data", "/own", clone=True)
    (box,) = runner.do(runner.engine.forks.fork(snapshot.id, ForkSpec(names=["box"], mounts=[clone_mount])))
    runner.shell("box", "echo kept >/own/file && sync")
    runner.do(runner.engine.sandboxes.pause("box"))
    manifest = gateway.root / "sandboxes" / box.id / "manifest.json"
    record = manifest.read_text()
    runner.close()
    manifest.write_text(record[:40])
    runner = gateway.runner = gateway.open()
    runner.do(runner.engine.sandboxes.delete("source"))
    runner.collect()
    runner = gateway.restart()
    assert [each.name for each in runner.engine.sandboxes.list()] == []
    runner.close()
    gateway.find_quarantine_path("sandboxes").rename(manifest.parent)
    manifest.write_text(record)
    runner = gateway.runner = gateway.open()
    runner.do(runner.engine.sandboxes.resume("box"))
    wait_until(lambda: runner.get_sandbox("box").state is SandboxState.RUNNING)
    assert read_file(runner, "/own/file") == "kept"
