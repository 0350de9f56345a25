"""Test that an unreadable record does not affect other records and can be restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.records import SandboxState
from tests.support.live import Live
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, KvmXfsWorld


class RestartableGateway:
    """A gateway that can be closed and reopened on the same state."""

    def __init__(self, world: KvmXfsWorld) -> None:
        self._world = world
        self.config: Config = world.make_config()
        self.live = self.open()

    def restart(self) -> Live:
        self.live.close()
        self.live = self.open()
        return self.live

    def open(self) -> Live:
        return Live(self._world.make_host(self.config), self.config)

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
    gateway.live.remove_all()
    gateway.live.close()
    kvm_xfs_world.clean_up(gateway.config)


def read_file(live: Live, path: str) -> str:
    return live.shell("box", f"cat {path} 2>/dev/null || true").strip()


def test_a_sandbox_saved_while_its_volume_is_damaged_keeps_the_mount(gateway: RestartableGateway) -> None:
    live = gateway.live
    volume = live.do(live.engine.volumes.create("data", size_mb=64))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["box"], mounts=[MountSpec("data", "/data")])))
    live.shell("box", "echo kept >/data/file && sync")
    live.do(live.engine.sandboxes.pause("box"))
    manifest = gateway.root / "volumes" / volume.id / "manifest.json"
    image = manifest.with_name("volume.img")
    record = manifest.read_text()
    live.close()
    manifest.write_text(record[:40])
    image.rename(gateway.root / "image")
    live = gateway.live = gateway.open()
    assert live.engine.volumes.list() == []
    live.do(live.engine.sandboxes.update("box", metadata={"saved": "again"}))
    live.do(live.engine.sandboxes.resume("box"))
    assert read_file(live, "/data/file") == ""
    live.do(live.engine.sandboxes.pause("box"))
    live.close()
    gateway.find_quarantine_path("volumes").rename(manifest.parent)
    manifest.write_text(record)
    (gateway.root / "image").rename(image)
    live = gateway.live = gateway.open()
    assert [(each.volume, each.path) for each in live.get_sandbox("box").mounts] == [(volume.id, "/data")]
    live.do(live.engine.sandboxes.resume("box"))
    assert read_file(live, "/data/file") == "kept"


def test_a_gateway_that_refuses_newer_records_keeps_its_machines_running(gateway: RestartableGateway) -> None:
    live = gateway.live
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["box"])))
    live.do(live.engine.snapshots.create("box", name="mark"))
    manifest = gateway.root / "snapshots" / live.engine.snapshots.get("mark").id / "manifest.json"
    live.close()
    record = manifest.read_text()
    manifest.write_text(record.replace('"kind": "snapshot"', '"kind": "dream"'))
    (gateway.root / "snapshots" / ".partial-0").mkdir()
    paths_before = sorted(gateway.root.rglob("*"))
    with pytest.raises(BackendFailed, match=rf"{manifest} was written by a newer release .*its kind is 'dream'"):
        gateway.open()
    assert sorted(gateway.root.rglob("*")) == paths_before
    manifest.write_text(record)
    live = gateway.live = gateway.open()
    assert not (gateway.root / "snapshots" / ".partial-0").exists()
    assert live.get_sandbox("box").state is SandboxState.RUNNING
    assert live.shell("box", "echo alive").strip() == "alive"


def test_detach_removes_a_missing_volume_by_its_id(gateway: RestartableGateway) -> None:
    live = gateway.live
    volume = live.do(live.engine.volumes.create("data", size_mb=64))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["box"], mounts=[MountSpec("data", "/data")])))
    live.do(live.engine.sandboxes.pause("box"))
    live.close()
    for path in (gateway.root / "volumes" / volume.id).glob("*.*"):
        path.unlink()
    live = gateway.live = gateway.open()
    live.do(live.engine.attachments.detach("box", volume.id))
    assert live.get_sandbox("box").mounts == []
    assert gateway.restart().get_sandbox("box").mounts == []


def test_collector_keeps_the_volume_and_the_capture_of_a_damaged_sandbox(gateway: RestartableGateway) -> None:
    """The sandbox is paused and has its own clone of a volume, which is normally removed with the sandbox."""
    live = gateway.live
    live.do(live.engine.volumes.create("data", size_mb=64))
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], mounts=[MountSpec("data", "/data")])))
    snapshot = live.do(live.engine.snapshots.create("source", volumes=["data"]))
    clone_mount = MountSpec("data", "/own", clone=True)
    (box,) = live.do(live.engine.forks.fork(snapshot.id, ForkSpec(names=["box"], mounts=[clone_mount])))
    live.shell("box", "echo kept >/own/file && sync")
    live.do(live.engine.sandboxes.pause("box"))
    manifest = gateway.root / "sandboxes" / box.id / "manifest.json"
    record = manifest.read_text()
    live.close()
    manifest.write_text(record[:40])
    live = gateway.live = gateway.open()
    live.do(live.engine.sandboxes.delete("source"))
    live.collect()
    live = gateway.restart()
    assert [each.name for each in live.engine.sandboxes.list()] == []
    live.close()
    gateway.find_quarantine_path("sandboxes").rename(manifest.parent)
    manifest.write_text(record)
    live = gateway.live = gateway.open()
    live.do(live.engine.sandboxes.resume("box"))
    wait_until(lambda: live.get_sandbox("box").state is SandboxState.RUNNING)
    assert read_file(live, "/own/file") == "kept"
