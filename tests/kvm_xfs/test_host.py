"""Test what is specific to the KVM/XFS host: isolation, snapshots that must be refused, and failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, NoSpace, Unsupported
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.memory import listing
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import MemoryMode, SandboxState
from tests.support import session
from tests.support.live import EngineRunner, engines
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, KvmXfsWorld
from tests.support.xfs import LoopXfs


@pytest.fixture
def runner(kvm_xfs_world: KvmXfsWorld) -> Iterator[EngineRunner]:
    with engines(kvm_xfs_world) as make_runner:
        yield make_runner()


def get_qemu_pid(runner: EngineRunner, ref: str) -> int:
    return int(runner.get_sandbox(ref).host["pid"])


def test_qemu_runs_unprivileged_in_a_separate_network_namespace(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    proc_directory = Path(f"/proc/{get_qemu_pid(runner, 'one')}")
    status = dict(
        line.split(":\t", 1) for line in (proc_directory / "status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["Uid"].split()[0]) >= 700_000
    assert int(status["CapEff"], 16) == 0
    assert status["Seccomp"].strip() == "2"
    assert (proc_directory / "ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def test_a_snapshot_of_another_platform_is_refused_and_a_remedy_is_named(
    kvm_xfs_world: KvmXfsWorld, runner: EngineRunner
) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    snapshot = runner.do(runner.engine.snapshots.create("one", name="foreign"))
    runner.engine.index.snapshots[snapshot.id].host["platform"]["qemu_version"] = "1.0"
    with pytest.raises(Unsupported, match=r"qemu version '1.0'.*coldStart"):
        runner.do(runner.engine.forks.create("foreign", ForkSpec()))
    cold_fork = runner.do(runner.engine.forks.create("foreign", ForkSpec(cold_start=True)))
    # The boot handles only a few devices with udev, but the device files that programs need exist.
    assert runner.shell(cold_fork.id, "systemctl is-system-running --wait", timeout=120).strip() == "running"
    assert runner.shell(cold_fork.id, "stat --format %a:%G /dev/fuse /dev/vda").split() == ["666:root", "660:disk"]
    assert "/dev/vda" in runner.shell(cold_fork.id, "readlink -f /dev/disk/by-label/root /dev/rtc")


def test_a_capture_without_a_pagemap_copies_all_memory(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(1, "not permitted")

    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    runner.shell("one", "echo data >/run/data")
    monkeypatch.setattr(listing, "_scan", fail)
    monkeypatch.setattr(listing, "_list_matching_pages", fail)
    snapshot = runner.do(runner.engine.snapshots.create("one", name="whole"))
    monkeypatch.undo()
    assert snapshot.memory is MemoryMode.FULL
    fork = runner.do(runner.engine.forks.create("whole", ForkSpec()))
    assert runner.shell(fork.id, "cat /run/data").strip() == "data"


@pytest.mark.slow
def test_a_template_whose_setup_fails_is_removed(kvm_xfs_world: KvmXfsWorld, runner: EngineRunner) -> None:
    traces_before = kvm_xfs_world.read_traces(runner.config)
    build = runner.do(runner.engine.templates.build("broken", Recipe(setup=["echo so far", "echo no >&2; exit 3"])))
    lines = runner.follow(build, timeout=300)
    assert build.status == "error"
    assert "exit code 3" in build.reason and "so far" in lines and "no" in lines
    assert kvm_xfs_world.read_traces(runner.config) == traces_before
    with pytest.raises(GatewayError, match="not found"):
        runner.engine.templates.get("broken")


def test_building_an_unchanged_recipe_returns_the_existing_template(runner: EngineRunner) -> None:
    template = runner.engine.templates.get(TEMPLATE)
    build = runner.do(runner.engine.templates.build(TEMPLATE, Recipe.model_validate(template.recipe)))
    assert (build.status, build.template_id) == ("ready", template.id)


def start_and_stop_gateway(config: Config) -> None:
    EngineRunner(KvmXfsHost(config), config).close()


def test_a_missing_qemu_is_reported_at_startup(kvm_xfs_world: KvmXfsWorld) -> None:
    config = kvm_xfs_world.make_config(kvm_xfs={"qemu": "/nowhere/qemu"})
    with pytest.raises(BackendFailed, match="not installed"):
        start_and_stop_gateway(config)
    shutil.rmtree(config.host.state_root)


def test_an_xfs_file_system_without_reflinks_is_reported_at_startup(tmp_path: Path, requires_root: None) -> None:
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320, reflink=False) as xfs:
        config = Config.model_validate(
            {"host": {"state_root": xfs.mount_point / "state"}, "network": session.allocate_network()}
        )
        with pytest.raises(Unsupported, match="reflink=1"):
            start_and_stop_gateway(config)


@pytest.fixture
def small_gateway(kvm_xfs_world: KvmXfsWorld, tmp_path: Path) -> Iterator[EngineRunner]:
    """A gateway whose file system has space for the template and little else."""
    original_config = kvm_xfs_world.make_config()
    with LoopXfs(session.get_run_dir() / "small.xfs", session.get_run_dir() / "small", size_mb=1400) as xfs:
        root = xfs.mount_point / "state"
        root.mkdir(mode=0o711)
        for name in ("templates", "accelerator.json"):
            if (original_config.host.state_root / name).exists():
                subprocess.run(
                    ["cp", "-a", "--sparse=always", str(original_config.host.state_root / name), str(root)],
                    check=True,
                    timeout=120,
                )
        shutil.rmtree(original_config.host.state_root)
        host_section = {**original_config.host.model_dump(), "state_root": root}
        limits = {**original_config.limits.model_dump(), "free_disk_mb": 0}
        config = Config.model_validate({**original_config.model_dump(), "host": host_section, "limits": limits})
        runner = EngineRunner(KvmXfsHost(config), config)
        yield runner
        (root / "filler").unlink(missing_ok=True)
        if not runner.is_closed:
            runner.remove_all()
            runner.close()
        kvm_xfs_world.clean_up(config)


def fill_disk(root: Path, free_bytes: int) -> None:
    """Create the file ``filler``, which fills the file system except for ``free_bytes``."""
    status = os.statvfs(root)
    size = status.f_bavail * status.f_frsize - free_bytes
    subprocess.run(["fallocate", "-l", str(size), str(root / "filler")], check=True, timeout=60)


def test_a_second_gateway_with_the_same_network_names_is_refused(
    kvm_xfs_world: KvmXfsWorld, runner: EngineRunner
) -> None:
    other_config = kvm_xfs_world.make_config(network=runner.config.network.model_dump())
    with pytest.raises(Conflict, match="another gateway on this machine uses the network prefix"):
        start_and_stop_gateway(other_config)
    shutil.rmtree(other_config.host.state_root)


def test_capture_on_a_full_disk_fails_and_cleans_up(kvm_xfs_world: KvmXfsWorld, small_gateway: EngineRunner) -> None:
    small_gateway.do(small_gateway.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    small_gateway.shell("one", "head -c 20000000 /dev/urandom >/run/blob")
    root = small_gateway.config.host.state_root
    traces_before = kvm_xfs_world.read_traces(small_gateway.config)
    fill_disk(root, 4 << 20)
    with pytest.raises(NoSpace, match="no space left"):
        small_gateway.do(small_gateway.engine.snapshots.create("one", name="big"))
    assert kvm_xfs_world.read_traces(small_gateway.config) == traces_before
    assert small_gateway.shell("one", "echo alive").strip() == "alive"
    (root / "filler").unlink()
    small_gateway.do(small_gateway.engine.snapshots.create("one", name="big"))


def test_a_machine_that_stalls_on_a_full_disk_is_reported_and_resumes(small_gateway: EngineRunner) -> None:
    runner = small_gateway
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    root = runner.config.host.state_root
    fill_disk(root, 8 << 20)
    runner.shell("one", "(dd if=/dev/zero of=/root/blob bs=1M count=40 conv=fsync; sync) >/dev/null 2>&1 &")
    wait_until(lambda: "no space left" in runner.call(runner.engine.room.get_stall_reason, runner.get_sandbox("one")))
    report = runner.do(runner.engine.room.report())
    assert report.stalled_ids == [runner.get_sandbox("one").id] and report.room.disk_free < 64 << 20
    (root / "filler").unlink()
    wait_until(lambda: runner.call(runner.engine.room.get_stall_reason, runner.get_sandbox("one")) == "")
    wait_until(lambda: runner.shell("one", "stat -c %s /root/blob").strip() == str(40 << 20))
    assert runner.get_sandbox("one").state is SandboxState.RUNNING


def test_operations_that_would_use_the_disk_reserve_are_refused(
    kvm_xfs_world: KvmXfsWorld, small_gateway: EngineRunner
) -> None:
    runner = small_gateway
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    config = runner.config
    runner.close()
    limits = {**config.limits.model_dump(), "free_disk_mb": 100}
    strict_gateway = EngineRunner(
        KvmXfsHost(config), config.model_copy(update={"limits": type(config.limits)(**limits)})
    )
    try:
        traces_before = kvm_xfs_world.read_traces(config)
        fill_disk(config.host.state_root, 90 << 20)
        for operation in (
            strict_gateway.engine.forks.create(TEMPLATE, ForkSpec()),
            strict_gateway.engine.forks.clone("one", ForkSpec()),
            strict_gateway.engine.snapshots.create("one", name="more"),
        ):
            with pytest.raises(NoSpace, match=r"less than 100 MiB of disk space free: the host has [89]"):
                strict_gateway.do(operation)
        assert kvm_xfs_world.read_traces(config) == traces_before
    finally:
        (config.host.state_root / "filler").unlink(missing_ok=True)
        strict_gateway.remove_all()
        strict_gateway.close()


def test_a_reboot_of_the_guest_pauses_the_sandbox(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    runner.shell("one", "(sleep 0.2; echo b >/proc/sysrq-trigger) >/dev/null 2>&1 &")
    wait_until(lambda: runner.get_sandbox("one").state is SandboxState.PAUSED)
    manifest = runner.config.host.state_root / "sandboxes" / runner.get_sandbox("one").id / "manifest.json"
    assert json.loads(manifest.read_text())["state"] == "paused"
