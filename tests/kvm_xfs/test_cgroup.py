"""Test the control groups of machines with the cgroup versions that this host uses (1, 2 or both)."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.cgroup import CONTROLLERS, Cgroups
from tests.support import session

pytestmark = pytest.mark.usefixtures("requires_root")

INSTANCE, OTHER_INSTANCE = "0123456789ab", "ba9876543210"


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    groups = Cgroups(session.allocate_network()["prefix"])
    assert groups._hierarchies, "this machine has no cgroup controllers, which these tests need"
    yield groups
    groups.sweep(set())
    assert not any(root.exists() for root in groups._list_roots())


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def read_cgroup_file(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def read_limit(groups: Cgroups, controller: str, *files: str) -> str:
    """Return the contents of the first file in ``files`` that exists in the control group of ``INSTANCE``."""
    hierarchy = groups._hierarchies[controller]
    for file in files:
        path = hierarchy.mount / groups._name / INSTANCE / file
        if path.exists():
            return path.read_text().strip()
    raise AssertionError(f"none of the files {files} exists in the hierarchy of the controller {controller}")


def test_limit_applies_to_every_available_resource(groups: Cgroups, sleeper: subprocess.Popen[bytes]) -> None:
    groups.limit(INSTANCE, sleeper.pid, memory_mb=320, cpus=2)
    assert read_cgroup_file(sleeper.pid).count(f"/{groups._name}/{INSTANCE}") >= 1
    if "memory" in groups._hierarchies:
        assert int(read_limit(groups, "memory", "memory.max", "memory.limit_in_bytes")) == 320 << 20
        assert isinstance(groups.read_memory_bytes(INSTANCE), int)
    if "cpu" in groups._hierarchies:
        assert read_limit(groups, "cpu", "cpu.max", "cpu.cfs_quota_us").split()[0] == "125000"
    groups.limit(INSTANCE, sleeper.pid, memory_mb=640, cpus=1)
    if "memory" in groups._hierarchies:
        assert int(read_limit(groups, "memory", "memory.max", "memory.limit_in_bytes")) == 640 << 20
    sleeper.kill()
    sleeper.wait()
    groups.remove(INSTANCE)
    assert not any((root / INSTANCE).exists() for root in groups._list_roots())


def test_a_process_over_its_memory_limit_is_killed(groups: Cgroups) -> None:
    if "memory" not in groups._hierarchies:
        pytest.skip("this machine has no memory controller")
    process = subprocess.Popen(
        ["python3", "-c", "input(); x = bytearray(256 << 20); x[::4096] = b'x' * len(x[::4096])"], stdin=subprocess.PIPE
    )
    groups.limit(INSTANCE, process.pid, memory_mb=64, cpus=1)
    process.communicate(b"\n", timeout=30)
    assert process.returncode == -9
    groups.remove(INSTANCE)


def test_limit_ignores_an_exited_process(groups: Cgroups) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    groups.limit(INSTANCE, process.pid, memory_mb=64, cpus=1)
    groups.remove(INSTANCE)


def test_a_busy_group_is_removed_by_a_later_call(groups: Cgroups, sleeper: subprocess.Popen[bytes]) -> None:
    groups.limit(INSTANCE, sleeper.pid, memory_mb=64, cpus=1)
    start = time.monotonic()
    groups.remove(INSTANCE)
    assert time.monotonic() - start < 0.5
    assert any((root / INSTANCE).exists() for root in groups._list_roots())
    sleeper.kill()
    sleeper.wait()
    groups.remove(OTHER_INSTANCE)
    assert not any((root / INSTANCE).exists() for root in groups._list_roots())


def test_sweep_keeps_listed_groups_and_groups_with_processes(groups: Cgroups, sleeper: subprocess.Popen[bytes]) -> None:
    groups.limit(INSTANCE, sleeper.pid, memory_mb=64, cpus=1)
    for root in groups._list_roots():
        (root / OTHER_INSTANCE).mkdir()
        (root / "cccccccccccc").mkdir()
    groups.sweep({OTHER_INSTANCE})
    names = {path.name for root in groups._list_roots() for path in root.iterdir() if path.is_dir()}
    assert names == {INSTANCE, OTHER_INSTANCE}


def test_two_gateways_have_separate_groups(groups: Cgroups) -> None:
    assert Cgroups(session.allocate_network()["prefix"])._list_roots().isdisjoint(groups._list_roots())


def test_missing_controllers_are_logged_once(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"25 1 0:22 / {tmp_path} rw - tmpfs tmpfs rw\n")
    with caplog.at_level(logging.WARNING):
        groups = Cgroups("none", mountinfo=mountinfo)
        for _ in range(2):
            groups.limit(INSTANCE, sleeper.pid, memory_mb=64, cpus=1)
        groups.remove(INSTANCE)
        groups.sweep(set())
    assert [record.getMessage() for record in caplog.records] == [
        f"sandboxes run without the limits of the controller {controller}" for controller in CONTROLLERS
    ]
    assert groups.read_memory_bytes(INSTANCE) is None


def test_version_2_enables_controllers_and_writes_limits(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Check the files that are written to an ordinary directory with the layout of a version 2 hierarchy."""
    mount_point = tmp_path / "unified"
    root = mount_point / "two-sandboxes"
    root.mkdir(parents=True)
    (mount_point / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    for group in (mount_point, root):
        (group / "cgroup.subtree_control").write_text("")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"30 23 0:26 / {mount_point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    Cgroups("two", mountinfo=mountinfo).limit(INSTANCE, sleeper.pid, memory_mb=128, cpus=1)
    assert (mount_point / "cgroup.subtree_control").read_text().startswith("+")
    assert (root / "cgroup.subtree_control").read_text().startswith("+")
    group = root / INSTANCE
    assert {path.name: path.read_text() for path in group.iterdir()} == {
        "memory.max": str(128 << 20),
        "cpu.max": "75000 50000",
        "pids.max": "512",
        "cgroup.procs": str(sleeper.pid),
    }
