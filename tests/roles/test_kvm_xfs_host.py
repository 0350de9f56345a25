"""Test the role kvm_xfs_host on this machine, with a separate state root."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import session
from tests.support.roles import PlayResult, play

Apply = Callable[..., PlayResult]


@pytest.fixture
def directory(need_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = session.run_dir() / tmp_path_factory.mktemp("host").name
    path.mkdir()
    yield path
    if mounted_type(path / "state"):
        subprocess.run(["umount", str(path / "state")], check=True, timeout=60)


@pytest.fixture
def apply(directory: Path) -> Apply:
    def apply(check: bool = False, **options: object) -> PlayResult:
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

    return apply


def mounted_type(path: Path) -> str:
    """Return the type of the file system mounted at ``path``, or an empty string."""
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


def test_check_mode_changes_nothing(apply: Apply, directory: Path) -> None:
    run = apply(check=True)
    assert not run.failed, run.output
    assert run.changed > 0
    assert list(directory.iterdir()) == []


def test_xfs_with_reflinks_is_created_mounted_and_removed(apply: Apply, directory: Path) -> None:
    first = apply()
    assert not first.failed, first.output
    assert first.changed > 0
    assert mounted_type(directory / "state") == "xfs"
    (directory / "state" / "a").write_bytes(b"a" * 100_000)
    subprocess.run(["cp", "--reflink=always", "a", "b"], cwd=directory / "state", check=True)
    assert "net.ipv4.ip_forward = 1" in (directory / "sysctl.conf").read_text()

    repeated = apply()
    assert (repeated.failed, repeated.changed_task_names) == (False, []), repeated.output
    predicted = apply(check=True)
    assert (predicted.failed, predicted.changed_task_names) == (False, []), predicted.output

    with (directory / "state" / "open").open("w"):
        refused = apply(state="absent")
    assert refused.failed
    assert "busy" in refused.message
    assert "Stop the programs that use it first" in refused.message
    assert mounted_type(directory / "state") == "xfs"

    unmounted = apply(state="absent")
    assert not unmounted.failed, unmounted.output
    assert not mounted_type(directory / "state")
    assert (directory / "state.xfs").exists(), "data are kept by default"
    assert "keeps its sandboxes" in unmounted.output

    remounted = apply()
    assert not remounted.failed, remounted.output
    assert (directory / "state" / "b").read_bytes() == b"a" * 100_000

    removed = apply(state="absent", remove_data=True)
    assert not removed.failed, removed.output
    assert not (directory / "state.xfs").exists()
    assert not (directory / "state").exists()
    assert apply(state="absent", remove_data=True).changed_task_names == []


def test_xfs_without_reflinks_is_refused(apply: Apply, directory: Path) -> None:
    create_image(directory, "mkfs.xfs", "-q", "-m", "reflink=0")
    run = apply()
    assert run.failed
    assert "without reflinks" in run.message
    assert "mkfs.xfs -m reflink=1" in run.message


def test_another_file_system_is_not_overwritten(apply: Apply, directory: Path) -> None:
    path = create_image(directory, "mkfs.ext4", "-q")
    before = path.read_bytes()[:65536]
    run = apply()
    assert run.failed
    assert "contains ext4" in run.message
    assert path.read_bytes()[:65536] == before


def test_a_mount_point_with_files_is_refused(apply: Apply, directory: Path) -> None:
    (directory / "state").mkdir()
    (directory / "state" / "precious").touch()
    run = apply()
    assert run.failed
    assert "not empty" in run.message
    assert "precious" in run.message


def test_a_disk_that_is_too_small_is_refused(apply: Apply, directory: Path) -> None:
    run = apply(min_free_mb=1 << 30)
    assert run.failed
    assert "kvm_xfs_host_min_free_mb" in run.message
    assert not (directory / "state.xfs").exists()


def test_a_path_that_is_not_a_device_is_refused(apply: Apply, directory: Path) -> None:
    run = apply(device="/dev/null")
    assert run.failed
    assert "not a block device" in run.message


def test_the_device_is_formatted_and_wiped(apply: Apply, directory: Path) -> None:
    image_path = directory / "disk"
    with image_path.open("wb") as file:
        file.truncate(600 << 20)
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image_path)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        assert not apply(device=device).failed
        assert mounted_type(directory / "state") == "xfs"
        assert not (directory / "state.xfs").exists()
        assert apply(device=device).changed_task_names == []
        assert not apply(device=device, state="absent", remove_data=True).failed
        assert subprocess.run(["blkid", "--probe", device], capture_output=True, check=False).returncode == 2
    finally:
        subprocess.run(["umount", str(directory / "state")], capture_output=True, check=False)
        subprocess.run(["losetup", "--detach", device], check=True)


def test_the_accelerator_is_stored(apply: Apply, directory: Path) -> None:
    """Check that the accelerator is determined only once per machine. Which one it is depends on this machine."""
    apply_with_probe = functools.partial(apply, accelerator_override="", probe_seconds=3)
    first = apply_with_probe()
    assert not first.failed, first.output
    fact = directory / "facts" / "kvm_xfs_host.fact"
    result = json.loads(fact.read_text())
    assert result["accelerator"] in ("kvm", "tcg")
    assert f"accelerator {result['accelerator']}: " in first.output

    repeated = apply_with_probe()
    assert repeated.changed_task_names == []
    assert result["reason"][:40] in repeated.output

    fact.write_text(json.dumps({**result, "platform": ["another machine"]}))
    assert apply_with_probe().changed_task_names == ["grove.sandbox.kvm_xfs_host : Store the result"]
