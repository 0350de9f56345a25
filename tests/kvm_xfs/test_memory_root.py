"""Test machines whose memory images are on a second file system, with and without reflinks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Conflict, NoSpace
from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.records import SandboxState, Snapshot
from tests.kvm_xfs.test_memory_modes import MemoryRecorder
from tests.support.live import Live, engines
from tests.support.waiting import eventually
from tests.support.worlds import TEMPLATE, KvmXfsWorld
from tests.support.xfs import LoopXfs

MIB = 1 << 20


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["reflink", "no-reflink"])
def root(request: pytest.FixtureRequest, tmp_path: Path, need_root: None) -> Iterator[LoopXfs]:
    """A memory root on its own file system."""
    with LoopXfs(tmp_path / "image", tmp_path / "memory", size_mb=2048, reflink=request.param) as xfs:
        yield xfs


MakeLive = Callable[..., Live]


@pytest.fixture
def make_live(kvm_xfs_world: KvmXfsWorld, root: LoopXfs) -> Iterator[MakeLive]:
    """A function that starts gateways. Teardown removes their machines before the memory root's file system."""
    with engines(kvm_xfs_world) as make_live:
        yield make_live


@pytest.fixture
def live(make_live: MakeLive, root: LoopXfs) -> Live:
    """A gateway that uses the memory root, with a sandbox `source` whose memory contains a random blob."""
    live = make_live(kvm_xfs={"memory_root": root.mount_point})
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "head -c 20000000 /dev/urandom >/dev/shm/blob; echo kept >/root/kept && sync")
    return live


def reopen(make_live: MakeLive, live: Live, **kvm_xfs: Any) -> Live:
    """Restart the gateway with changed settings for KVM/XFS."""
    live.close()
    section = live.config.kvm_xfs.model_copy(update=kvm_xfs)
    return make_live(config=live.config.model_copy(update={"kvm_xfs": section}))


def read_digest(live: Live, ref: str) -> str:
    return live.shell(ref, "sha256sum /dev/shm/blob")


def capture_source(live: Live, name: str) -> Snapshot:
    return live.do(live.engine.snapshots.create("source", name=name))


def image_path_of(live: Live, snapshot: Snapshot) -> Path:
    return Path(live.engine.snapshots.files_of(snapshot.id)["memory"])


def list_image_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def find_memory_problem(live: Live, ref: str) -> str:
    return live.engine.host.memory_problem(live.engine.snapshots.get(ref))


@pytest.mark.parametrize("root", [True, False], ids=["reflink", "no-reflink"], indirect=True)
def test_a_captured_image_in_the_root_equals_the_memory(
    live: Live, root: LoopXfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = MemoryRecorder(monkeypatch)
    for number in range(3):
        live.shell("source", f"head -c 3000000 /dev/urandom >/dev/shm/more-{number}")
        snapshot = capture_source(live, f"s{number}")
        image = image_path_of(live, snapshot)
        assert image.is_relative_to(root.mount_point)
        assert recorder.find_differing_pages(image) == []
        assert "degraded" not in snapshot.host
        assert image.stat().st_blocks * 512 < image.stat().st_size, "the image has no holes"
    is_shared = reflink.unique_bytes(image) < image.stat().st_blocks * 512 // 2
    assert is_shared == root.reflink


def test_machines_can_start_from_memory_in_every_way_with_a_root(live: Live, root: LoopXfs) -> None:
    digest = read_digest(live, "source")
    capture_source(live, "mark")
    live.do(live.engine.forks.fork("mark", ForkSpec(names=["fork1", "fork2"])))
    live.do(live.engine.forks.clone("fork1", ForkSpec(names=["clone"])))
    assert [read_digest(live, name) for name in ("fork1", "fork2", "clone")] == [digest] * 3
    live.shell("source", "rm /dev/shm/blob")
    live.do(live.engine.sandboxes.rollback("source", "mark"))
    assert read_digest(live, "source") == digest
    live.do(live.engine.sandboxes.pause("fork1"))
    live.do(live.engine.sandboxes.resume("fork1"))
    assert read_digest(live, "fork1") == digest
    capture_source(live, "later")
    live.do(live.engine.snapshots.delete("mark", when_unused=True))
    live.do(live.engine.prewarm.set_target("later", 1))
    eventually(lambda: live.engine.prewarm.get_total_level().ready == 1, 60)
    live.do(live.engine.forks.create("later", ForkSpec(names=["claimed"])))
    assert read_digest(live, "claimed") == digest
    assert live.engine.machines.starts["prewarmed"] == 1
    live.do(live.engine.snapshots.create("claimed", name="of-claimed"))
    fork = live.do(live.engine.forks.create("of-claimed", ForkSpec()))
    assert read_digest(live, fork.id) == digest
    live.remove_all()
    eventually(lambda: list_image_names(root.mount_point) == [])


def test_forks_start_cold_while_the_root_is_unmounted_and_warm_after_it_is_remounted(
    live: Live, root: LoopXfs, make_live: MakeLive
) -> None:
    digest = read_digest(live, "source")
    snapshot = capture_source(live, "mark")
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["sleeper"])))
    live.do(live.engine.sandboxes.pause("sleeper"))
    live.do(live.engine.sandboxes.delete("source"))
    root.unmount()
    try:
        for _ in range(2):
            assert f"{root.mount_point} is not mounted" in find_memory_problem(live, "mark")
            with pytest.raises(Conflict, match=rf"{snapshot.id} is not available: .*not mounted.*coldStart"):
                live.do(live.engine.forks.create("mark", ForkSpec(names=["refused"])))
            with pytest.raises(Conflict, match=r"not mounted.*memory: false"):
                live.do(live.engine.sandboxes.resume("sleeper"))
            assert {each.name for each in live.engine.sandboxes.list()} == {"sleeper"}
            cold_fork = live.do(live.engine.forks.create("mark", ForkSpec(cold_start=True)))
            assert live.shell(cold_fork.id, "cat /root/kept").strip() == "kept"
            with pytest.raises(Conflict, match=r"the memory root .* is not available: .*snapshot without memory"):
                live.do(live.engine.snapshots.create(cold_fork.id))
            live.do(live.engine.snapshots.create(cold_fork.id, name="disk", memory="none"))
            assert live.sandbox(cold_fork.id).state is SandboxState.RUNNING
            live.do(live.engine.sandboxes.delete(cold_fork.id))
            live.do(live.engine.snapshots.delete("disk"))
            assert list(root.mount_point.iterdir()) == [], "a file was created below the mount point"
            live = reopen(make_live, live)
        assert not (live.config.host.state_root / ".damaged").exists()
    finally:
        root.mount()
    assert find_memory_problem(live, "mark") == ""
    fork = live.do(live.engine.forks.create("mark", ForkSpec(names=["warm"])))
    assert read_digest(live, fork.id) == digest
    live.do(live.engine.sandboxes.resume("sleeper"))
    live.do(live.engine.snapshots.create("warm", name="again"))


def test_a_running_machine_survives_the_loss_of_its_root(live: Live, root: LoopXfs) -> None:
    digest = read_digest(live, "source")
    capture_source(live, "mark")
    live.do(live.engine.sandboxes.rollback("source", "mark"))
    with pytest.raises(RuntimeError, match="busy"):
        root.unmount()
    subprocess.run(["umount", "--lazy", str(root.mount_point)], check=True, timeout=30)
    try:
        assert read_digest(live, "source") == digest
        with pytest.raises(Conflict, match=r"image of the running machine is not available: .*Mount"):
            capture_source(live, "refused")
        assert live.sandbox("source").state is SandboxState.RUNNING
        live.do(live.engine.snapshots.create("source", name="disk", memory="none"))
        live.do(live.engine.sandboxes.delete("source"))
    finally:
        eventually(lambda: not _is_attached(root.image), 20)
        root.mount()
    assert find_memory_problem(live, "mark") == ""


def _is_attached(image: Path) -> bool:
    result = subprocess.run(["losetup", "--associated", str(image)], capture_output=True, text=True, timeout=30)
    return bool(result.stdout.strip())


def test_snapshots_and_machines_survive_changes_of_the_memory_root(
    live: Live, root: LoopXfs, make_live: MakeLive
) -> None:
    digest = read_digest(live, "source")
    old_snapshot = capture_source(live, "old")
    live.do(live.engine.forks.create("old", ForkSpec(names=["fork"])))
    live = reopen(make_live, live, memory_root=None)
    new_snapshot = capture_source(live, "new")
    fork_snapshot = live.do(live.engine.snapshots.create("fork", name="of-fork"))
    assert image_path_of(live, old_snapshot).is_relative_to(root.mount_point)
    for snapshot in (new_snapshot, fork_snapshot):
        assert image_path_of(live, snapshot).is_relative_to(live.config.host.state_root)
    for name in ("old", "new", "of-fork"):
        fork = live.do(live.engine.forks.create(name, ForkSpec()))
        assert read_digest(live, fork.id) == digest
        live.do(live.engine.sandboxes.delete(fork.id))
    live = reopen(make_live, live, memory_root=root.mount_point)
    last_snapshot = capture_source(live, "back")
    assert image_path_of(live, last_snapshot).is_relative_to(root.mount_point)
    fork = live.do(live.engine.forks.create("back", ForkSpec()))
    assert read_digest(live, fork.id) == digest


def test_an_adopted_machine_is_captured_in_the_root(live: Live, root: LoopXfs, make_live: MakeLive) -> None:
    digest = read_digest(live, "source")
    capture_source(live, "mark")
    live.do(live.engine.sandboxes.rollback("source", "mark"))
    live = reopen(make_live, live)
    snapshot = capture_source(live, "again")
    assert "degraded" not in snapshot.host
    assert read_digest(live, live.do(live.engine.forks.create("again", ForkSpec())).id) == digest


def test_sandboxes_boot_after_a_power_cut_while_the_root_is_not_mounted(
    live: Live, root: LoopXfs, make_live: MakeLive, kvm_xfs_world: KvmXfsWorld
) -> None:
    capture_source(live, "mark")
    live.do(live.engine.sandboxes.rollback("source", "mark"))
    live.close()
    kvm_xfs_world.cut_power(live.config)
    root.unmount()
    try:
        live = make_live(config=live.config)
        eventually(lambda: live.sandbox("source").state is SandboxState.RUNNING, 120)
        assert live.shell("source", "cat /root/kept").strip() == "kept"
        assert "is not mounted" in find_memory_problem(live, "mark")
    finally:
        root.mount()
    live.do(live.engine.sandboxes.delete("source"))
    live.do(live.engine.snapshots.delete("mark"))
    reopen(make_live, live)
    assert list_image_names(root.mount_point) == [], "the previous run's image was not removed"


def test_a_capture_after_a_new_boot_does_not_use_images_of_the_previous_run(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_source(live, "before")
    live.do(live.engine.machines.mark_stopped(live.sandbox("source"), "test"))
    live.do(live.engine.sandboxes.resume("source"))
    recorder = MemoryRecorder(monkeypatch)
    snapshot = capture_source(live, "after")
    assert recorder.find_differing_pages(image_path_of(live, snapshot)) == []


def test_a_capture_to_a_full_root_fails_and_leaves_no_image(root: LoopXfs, make_live: MakeLive) -> None:
    live = make_live(kvm_xfs={"memory_root": root.mount_point}, limits={"free_disk_mb": 0})
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    filler = root.mount_point / "filler"
    free_bytes = shutil.disk_usage(root.mount_point).free
    subprocess.run(["fallocate", "-l", str(free_bytes - 8 * MIB), str(filler)], check=True, timeout=60)
    with pytest.raises(NoSpace, match=rf"in the memory root {root.mount_point}"):
        capture_source(live, "refused")
    assert list_image_names(root.mount_point) == ["filler"]
    filler.unlink()
    assert find_memory_problem(live, capture_source(live, "taken").id) == ""


def test_a_capture_that_would_use_the_reserve_of_the_root_is_refused(root: LoopXfs, make_live: MakeLive) -> None:
    live = make_live(kvm_xfs={"memory_root": root.mount_point}, limits={"free_disk_mb": 1900})
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], cold_start=True)))
    with pytest.raises(NoSpace, match=rf"less than 1900 MiB free in the memory root {root.mount_point}"):
        capture_source(live, "refused")
    live.do(live.engine.snapshots.create("source", name="disk", memory="none"))
