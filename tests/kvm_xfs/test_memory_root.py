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
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.records import SandboxState, Snapshot
from tests.kvm_xfs.test_memory_modes import MemoryRecorder
from tests.support.live import EngineRunner, engines
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, KvmXfsWorld
from tests.support.xfs import LoopXfs

MIB = 1 << 20


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["reflink", "no-reflink"])
def root(request: pytest.FixtureRequest, tmp_path: Path, requires_root: None) -> Iterator[LoopXfs]:
    """A memory root on its own file system."""
    with LoopXfs(tmp_path / "image", tmp_path / "memory", size_mb=2048, reflink=request.param) as xfs:
        yield xfs


MakeRunner = Callable[..., EngineRunner]


@pytest.fixture
def make_runner(kvm_xfs_world: KvmXfsWorld, root: LoopXfs) -> Iterator[MakeRunner]:
    """A function that starts gateways. Teardown removes their machines before the memory root's file system."""
    with engines(kvm_xfs_world) as make_runner:
        yield make_runner


@pytest.fixture
def runner(make_runner: MakeRunner, root: LoopXfs) -> EngineRunner:
    """A gateway that uses the memory root, with a sandbox `source` whose memory contains a random blob."""
    runner = make_runner(kvm_xfs={"memory_root": root.mount_point})
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "head -c 20000000 /dev/urandom >/dev/shm/blob; echo kept >/root/kept && sync")
    return runner


def reopen(make_runner: MakeRunner, runner: EngineRunner, **kvm_xfs: Any) -> EngineRunner:
    """Restart the gateway with changed settings for KVM/XFS."""
    runner.close()
    section = runner.config.kvm_xfs.model_copy(update=kvm_xfs)
    return make_runner(config=runner.config.model_copy(update={"kvm_xfs": section}))


def read_digest(runner: EngineRunner, ref: str) -> str:
    return runner.shell(ref, "sha256sum /dev/shm/blob")


def capture_source(runner: EngineRunner, name: str) -> Snapshot:
    return runner.do(runner.engine.snapshots.create("source", name=name))


def get_image_path(runner: EngineRunner, snapshot: Snapshot) -> Path:
    return Path(runner.engine.snapshots.get_file_paths(snapshot.id)["memory"])


def list_image_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def find_memory_problem(runner: EngineRunner, ref: str) -> str:
    return runner.engine.host.find_memory_problem(runner.engine.snapshots.get(ref))


@pytest.mark.parametrize("root", [True, False], ids=["reflink", "no-reflink"], indirect=True)
def test_a_captured_image_in_the_root_equals_the_memory(
    runner: EngineRunner, root: LoopXfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = MemoryRecorder(monkeypatch)
    for number in range(3):
        runner.shell("source", f"head -c 3000000 /dev/urandom >/dev/shm/more-{number}")
        snapshot = capture_source(runner, f"s{number}")
        image = get_image_path(runner, snapshot)
        assert image.is_relative_to(root.mount_point)
        assert recorder.find_differing_pages(image) == []
        assert "degraded" not in snapshot.host
        assert image.stat().st_blocks * 512 < image.stat().st_size, "the image has no holes"
    is_shared = reflink.count_unique_bytes(image) < image.stat().st_blocks * 512 // 2
    assert is_shared == root.reflink


def test_machines_can_start_from_memory_in_every_way_with_a_root(runner: EngineRunner, root: LoopXfs) -> None:
    digest = read_digest(runner, "source")
    capture_source(runner, "mark")
    runner.do(runner.engine.forks.fork("mark", ForkSpec(names=["fork1", "fork2"])))
    runner.do(runner.engine.forks.clone("fork1", ForkSpec(names=["clone"])))
    assert [read_digest(runner, name) for name in ("fork1", "fork2", "clone")] == [digest] * 3
    runner.shell("source", "rm /dev/shm/blob")
    runner.do(runner.engine.sandboxes.rollback("source", "mark"))
    assert read_digest(runner, "source") == digest
    runner.do(runner.engine.sandboxes.pause("fork1"))
    runner.do(runner.engine.sandboxes.resume("fork1"))
    assert read_digest(runner, "fork1") == digest
    capture_source(runner, "later")
    runner.do(runner.engine.snapshots.delete("mark", when_unused=True))
    runner.do(runner.engine.prewarm.set_target("later", 1))
    wait_until(lambda: runner.engine.prewarm.get_total_level().ready == 1, 60)
    runner.do(runner.engine.forks.create("later", ForkSpec(names=["claimed"])))
    assert read_digest(runner, "claimed") == digest
    assert runner.engine.machines.start_counts["prewarmed"] == 1
    runner.do(runner.engine.snapshots.create("claimed", name="of-claimed"))
    fork = runner.do(runner.engine.forks.create("of-claimed", ForkSpec()))
    assert read_digest(runner, fork.id) == digest
    runner.remove_all()
    wait_until(lambda: list_image_names(root.mount_point) == [])


def test_forks_start_cold_until_the_root_is_mounted_again(
    runner: EngineRunner, root: LoopXfs, make_runner: MakeRunner
) -> None:
    digest = read_digest(runner, "source")
    snapshot = capture_source(runner, "mark")
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["sleeper"])))
    runner.do(runner.engine.sandboxes.pause("sleeper"))
    runner.do(runner.engine.sandboxes.delete("source"))
    root.unmount()
    try:
        for _ in range(2):
            assert f"{root.mount_point} is not mounted" in find_memory_problem(runner, "mark")
            with pytest.raises(Conflict, match=rf"{snapshot.id} is not available: .*not mounted.*coldStart"):
                runner.do(runner.engine.forks.create("mark", ForkSpec(names=["refused"])))
            with pytest.raises(Conflict, match=r"not mounted.*memory: false"):
                runner.do(runner.engine.sandboxes.resume("sleeper"))
            assert {each.name for each in runner.engine.sandboxes.list()} == {"sleeper"}
            cold_fork = runner.do(runner.engine.forks.create("mark", ForkSpec(cold_start=True)))
            assert runner.shell(cold_fork.id, "cat /root/kept").strip() == "kept"
            with pytest.raises(Conflict, match=r"the memory root .* is not available: .*snapshot without memory"):
                runner.do(runner.engine.snapshots.create(cold_fork.id))
            runner.do(runner.engine.snapshots.create(cold_fork.id, name="disk", memory="none"))
            assert runner.get_sandbox(cold_fork.id).state is SandboxState.RUNNING
            runner.do(runner.engine.sandboxes.delete(cold_fork.id))
            runner.do(runner.engine.snapshots.delete("disk"))
            assert list(root.mount_point.iterdir()) == [], "a file was created below the mount point"
            runner = reopen(make_runner, runner)
        assert not (runner.config.host.state_root / ".damaged").exists()
    finally:
        root.mount()
    assert find_memory_problem(runner, "mark") == ""
    fork = runner.do(runner.engine.forks.create("mark", ForkSpec(names=["warm"])))
    assert read_digest(runner, fork.id) == digest
    runner.do(runner.engine.sandboxes.resume("sleeper"))
    runner.do(runner.engine.snapshots.create("warm", name="again"))


def test_a_running_machine_survives_the_loss_of_its_root(runner: EngineRunner, root: LoopXfs) -> None:
    digest = read_digest(runner, "source")
    capture_source(runner, "mark")
    runner.do(runner.engine.sandboxes.rollback("source", "mark"))
    with pytest.raises(RuntimeError, match="busy"):
        root.unmount()
    subprocess.run(["umount", "--lazy", str(root.mount_point)], check=True, timeout=30)
    try:
        assert read_digest(runner, "source") == digest
        with pytest.raises(Conflict, match=r"image of the running machine is not available: .*Mount"):
            capture_source(runner, "refused")
        assert runner.get_sandbox("source").state is SandboxState.RUNNING
        runner.do(runner.engine.snapshots.create("source", name="disk", memory="none"))
        runner.do(runner.engine.sandboxes.delete("source"))
    finally:
        wait_until(lambda: not _is_attached(root.image), 20)
        root.mount()
    assert find_memory_problem(runner, "mark") == ""


def _is_attached(image: Path) -> bool:
    result = subprocess.run(["losetup", "--associated", str(image)], capture_output=True, text=True, timeout=30)
    return bool(result.stdout.strip())


def test_snapshots_and_machines_survive_changes_of_the_memory_root(
    runner: EngineRunner, root: LoopXfs, make_runner: MakeRunner
) -> None:
    digest = read_digest(runner, "source")
    old_snapshot = capture_source(runner, "old")
    runner.do(runner.engine.forks.create("old", ForkSpec(names=["fork"])))
    runner = reopen(make_runner, runner, memory_root=None)
    new_snapshot = capture_source(runner, "new")
    fork_snapshot = runner.do(runner.engine.snapshots.create("fork", name="of-fork"))
    assert get_image_path(runner, old_snapshot).is_relative_to(root.mount_point)
    for snapshot in (new_snapshot, fork_snapshot):
        assert get_image_path(runner, snapshot).is_relative_to(runner.config.host.state_root)
    for name in ("old", "new", "of-fork"):
        fork = runner.do(runner.engine.forks.create(name, ForkSpec()))
        assert read_digest(runner, fork.id) == digest
        runner.do(runner.engine.sandboxes.delete(fork.id))
    runner = reopen(make_runner, runner, memory_root=root.mount_point)
    last_snapshot = capture_source(runner, "back")
    assert get_image_path(runner, last_snapshot).is_relative_to(root.mount_point)
    fork = runner.do(runner.engine.forks.create("back", ForkSpec()))
    assert read_digest(runner, fork.id) == digest


def test_an_adopted_machine_is_captured_in_the_root(
    runner: EngineRunner, root: LoopXfs, make_runner: MakeRunner
) -> None:
    digest = read_digest(runner, "source")
    capture_source(runner, "mark")
    runner.do(runner.engine.sandboxes.rollback("source", "mark"))
    runner = reopen(make_runner, runner)
    snapshot = capture_source(runner, "again")
    assert "degraded" not in snapshot.host
    assert read_digest(runner, runner.do(runner.engine.forks.create("again", ForkSpec())).id) == digest


@pytest.mark.slow
def test_sandboxes_boot_after_a_power_cut_while_the_root_is_not_mounted(
    runner: EngineRunner, root: LoopXfs, make_runner: MakeRunner, kvm_xfs_world: KvmXfsWorld
) -> None:
    capture_source(runner, "mark")
    runner.do(runner.engine.sandboxes.rollback("source", "mark"))
    runner.close()
    kvm_xfs_world.cut_power(runner.config)
    root.unmount()
    try:
        runner = make_runner(config=runner.config)
        wait_until(lambda: runner.get_sandbox("source").state is SandboxState.RUNNING, 120)
        assert runner.shell("source", "cat /root/kept").strip() == "kept"
        assert "is not mounted" in find_memory_problem(runner, "mark")
    finally:
        root.mount()
    runner.do(runner.engine.sandboxes.delete("source"))
    runner.do(runner.engine.snapshots.delete("mark"))
    reopen(make_runner, runner)
    assert list_image_names(root.mount_point) == [], "the previous run's image was not removed"


@pytest.mark.slow
def test_a_capture_after_a_new_boot_ignores_images_from_the_previous_run(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_source(runner, "before")
    runner.do(runner.engine.machines.mark_stopped(runner.get_sandbox("source"), "test"))
    runner.do(runner.engine.sandboxes.resume("source"))
    recorder = MemoryRecorder(monkeypatch)
    snapshot = capture_source(runner, "after")
    assert recorder.find_differing_pages(get_image_path(runner, snapshot)) == []


def test_a_capture_to_a_full_root_fails_and_leaves_no_image(root: LoopXfs, make_runner: MakeRunner) -> None:
    runner = make_runner(kvm_xfs={"memory_root": root.mount_point}, limits={"free_disk_mb": 0})
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    filler = root.mount_point / "filler"
    free_bytes = shutil.disk_usage(root.mount_point).free
    subprocess.run(["fallocate", "-l", str(free_bytes - 8 * MIB), str(filler)], check=True, timeout=60)
    with pytest.raises(NoSpace, match=rf"in the memory root {root.mount_point}"):
        capture_source(runner, "refused")
    assert list_image_names(root.mount_point) == ["filler"]
    filler.unlink()
    assert find_memory_problem(runner, capture_source(runner, "taken").id) == ""


def test_a_capture_that_would_use_the_reserve_of_the_root_is_refused(root: LoopXfs, make_runner: MakeRunner) -> None:
    runner = make_runner(kvm_xfs={"memory_root": root.mount_point}, limits={"free_disk_mb": 1900})
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"], cold_start=True)))
    with pytest.raises(NoSpace, match=rf"less than 1900 MiB free in the memory root {root.mount_point}"):
        capture_source(runner, "refused")
    runner.do(runner.engine.snapshots.create("source", name="disk", memory="none"))
