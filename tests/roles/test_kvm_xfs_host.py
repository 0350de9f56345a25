"""Test the kvm_xfs_host role on this machine, with a separate state root."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import session
from tests.support.roles import PlayResult, play

ApplyRole = Callable[..., PlayResult]


@pytest.fixture
def directory(requires_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = session.get_run_dir() / tmp_path_factory.mktemp("host").name
    path.mkdir()
    yield path
    if get_mounted_file_system_type(path / "state"):
        subprocess.run(["umount", str(path / "state")], check=True, timeout=60)


@pytest.fixture
def apply_role(directory: Path) -> ApplyRole:
    def apply_role(check: bool = False, **options: object) -> PlayResult:
        variables = {
            "state_root": str(directory / "state"),
            "loop_size_mb": 2048,
            "min_free_mb": 100,
            "fstab": False,
            "sysctl_file": str(directory / "sysctl.conf"),
            "facts_dir": str(directory / "facts"),
            "accelerator_override": "tcg",
            **options,
        }
        return play("kvm_xfs_host", {f"kvm_xfs_host_{name}": value for name, value in variables.items()}, check=check)

    return apply_role


def get_mounted_file_system_type(path: Path) -> str:
    """Return the type of the file system mounted at ``path``, or "" if there is none."""
    result = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "--mountpoint", str(path)], capture_output=True, text=True, check=False
    )
    return result.stdout.strip()


def create_image(directory: Path, *mkfs: str) -> Path:
    path = directory / "state.xfs"
    with path.open("wb") as file:
        file.truncate(600 << 20)
    subprocess.run([*mkfs, str(path)], check=True, capture_output=True, timeout=60)
    return path


def test_check_mode_changes_nothing(apply_role: ApplyRole, directory: Path) -> None:
    run = apply_role(check=True)
    assert not run.failed, run.output
    assert run.changed_count > 0
    assert list(directory.iterdir()) == []


def test_xfs_with_reflinks_is_created_mounted_and_removed(apply_role: ApplyRole, directory: Path) -> None:
    first_run = apply_role()
    assert not first_run.failed, first_run.output
    assert first_run.changed_count > 0
    assert get_mounted_file_system_type(directory / "state") == "xfs"
    (directory / "state" / "a").write_bytes(b"a" * 100_000)
    subprocess.run(["cp", "--reflink=always", "a", "b"], cwd=directory / "state", check=True)
    assert "net.ipv4.ip_forward = 1" in (directory / "sysctl.conf").read_text()

    second_run = apply_role()
    assert (second_run.failed, second_run.changed_task_names) == (False, []), second_run.output
    check_run = apply_role(check=True)
    assert (check_run.failed, check_run.changed_task_names) == (False, []), check_run.output

    with (directory / "state" / "open").open("w"):
        refused_run = apply_role(state="absent")
    assert refused_run.failed
    assert "busy" in refused_run.message
    assert "Stop the programs that use it first" in refused_run.message
    assert get_mounted_file_system_type(directory / "state") == "xfs"

    unmount_run = apply_role(state="absent")
    assert not unmount_run.failed, unmount_run.output
    assert not get_mounted_file_system_type(directory / "state")
    assert (directory / "state.xfs").exists(), "data are kept by default"
    assert "keeps its sandboxes" in unmount_run.output

    remount_run = apply_role()
    assert not remount_run.failed, remount_run.output
    assert (directory / "state" / "b").read_bytes() == b"a" * 100_000

    removal_run = apply_role(state="absent", remove_data=True)
    assert not removal_run.failed, removal_run.output
    assert not (directory / "state.xfs").exists()
    assert not (directory / "state").exists()
    assert apply_role(state="absent", remove_data=True).changed_task_names == []


def test_xfs_without_reflinks_is_refused(apply_role: ApplyRole, directory: Path) -> None:
    create_image(directory, "mkfs.xfs", "-q", "-m", "reflink=0")
    run = apply_role()
    assert run.failed
    assert "without reflinks" in run.message
    assert "mkfs.xfs -m reflink=1" in run.message


def test_another_file_system_is_not_overwritten(apply_role: ApplyRole, directory: Path) -> None:
    path = create_image(directory, "mkfs.ext4", "-q")
    contents_before = path.read_bytes()[:65536]
    run = apply_role()
    assert run.failed
    assert "contains ext4" in run.message
    assert path.read_bytes()[:65536] == contents_before


def test_a_mount_point_with_files_is_refused(apply_role: ApplyRole, directory: Path) -> None:
    (directory / "state").mkdir()
    (directory / "state" / "precious").touch()
    run = apply_role()
    assert run.failed
    assert "not empty" in run.message
    assert "precious" in run.message


def test_a_disk_that_is_too_small_is_refused(apply_role: ApplyRole, directory: Path) -> None:
    run = apply_role(min_free_mb=1 << 30)
    assert run.failed
    assert "kvm_xfs_host_min_free_mb" in run.message
    assert not (directory / "state.xfs").exists()


def test_a_path_that_is_not_a_device_is_refused(apply_role: ApplyRole, directory: Path) -> None:
    run = apply_role(device="/dev/null")
    assert run.failed
    assert "not a block device" in run.message


def test_the_device_is_formatted_and_wiped(apply_role: ApplyRole, directory: Path) -> None:
    image_path = directory / "disk"
    with image_path.open("wb") as file:
        file.truncate(600 << 20)
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        assert not apply_role(device=device).failed
        assert get_mounted_file_system_type(directory / "state") == "xfs"
        assert not (directory / "state.xfs").exists()
        assert apply_role(device=device).changed_task_names == []
        assert not apply_role(device=device, state="absent", remove_data=True).failed
        assert subprocess.run(["blkid", "--probe", device], capture_output=True, check=False).returncode == 2
    finally:
        subprocess.run(["umount", str(directory / "state")], capture_output=True, check=False)
        subprocess.run(["losetup", "--detach", device], check=True)


def test_the_accelerator_is_determined_once_and_stored(apply_role: ApplyRole, directory: Path) -> None:
    """The accelerator is determined only once per machine. Which accelerator is chosen depends on this machine."""
    apply_with_probe = functools.partial(apply_role, accelerator_override="", probe_seconds=3)
    first_run = apply_with_probe()
    assert not first_run.failed, first_run.output
    fact_file = directory / "facts" / "kvm_xfs_host.fact"
    result = json.loads(fact_file.read_text())
    assert result["accelerator"] in ("kvm", "tcg")
    assert f"accelerator {result['accelerator']}: " in first_run.output

    second_run = apply_with_probe()
    assert second_run.changed_task_names == []
    assert result["reason"][:40] in second_run.output

    fact_file.write_text(json.dumps({**result, "platform": ["another machine"]}))
    assert apply_with_probe().changed_task_names == ["grove.sandbox.kvm_xfs_host : Store the result"]
