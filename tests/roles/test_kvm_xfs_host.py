"""The role kvm_xfs_host, applied to this machine with its own state root."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import session
from tests.support.roles import Played, play

Apply = Callable[..., Played]


@pytest.fixture
def place(need_root: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = session.run_dir() / tmp_path_factory.mktemp("host").name
    path.mkdir()
    yield path
    if mounted_type(path / "state"):
        subprocess.run(["umount", str(path / "state")], check=True, timeout=60)


@pytest.fixture
def apply(place: Path) -> Apply:
    def apply(check: bool = False, **options: object) -> Played:
        variables = {
            "state_root": str(place / "state"),
            "loop_size_mb": 2048,
            "min_free_mb": 100,
            "fstab": False,
            "sysctl_file": str(place / "sysctl.conf"),
            "facts_dir": str(place / "facts"),
            "accelerator_override": "tcg",
            **options,
        }
        return play("kvm_xfs_host", {f"kvm_xfs_host_{name}": value for name, value in variables.items()}, check=check)

    return apply


def mounted_type(path: Path) -> str:
    """Type of the file system mounted there; empty if there is none."""
    found = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "--mountpoint", str(path)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def image(place: Path, *mkfs: str) -> Path:
    path = place / "state.xfs"
    with path.open("wb") as file:
        file.truncate(600 << 20)
    subprocess.run([*mkfs, str(path)], check=True, capture_output=True, timeout=60)
    return path


def test_check_mode_on_a_bare_host_is_clean_and_changes_nothing(apply: Apply, place: Path) -> None:
    done = apply(check=True)
    assert not done.failed, done.output
    assert done.changed > 0
    assert list(place.iterdir()) == []


def test_makes_mounts_and_removes_an_xfs_with_reflinks(apply: Apply, place: Path) -> None:
    first = apply()
    assert not first.failed, first.output
    assert first.changed > 0
    assert mounted_type(place / "state") == "xfs"
    (place / "state" / "a").write_bytes(b"a" * 100_000)
    subprocess.run(["cp", "--reflink=always", "a", "b"], cwd=place / "state", check=True)
    assert "net.ipv4.ip_forward = 1" in (place / "sysctl.conf").read_text()

    again = apply()
    assert (again.failed, again.changed_task_names) == (False, []), again.output
    checked = apply(check=True)
    assert (checked.failed, checked.changed_task_names) == (False, []), checked.output

    with (place / "state" / "open").open("w"):
        used = apply(state="absent")
    assert used.failed
    assert "busy" in used.message
    assert "End the programs that use it first" in used.message
    assert mounted_type(place / "state") == "xfs"

    gone = apply(state="absent")
    assert not gone.failed, gone.output
    assert not mounted_type(place / "state")
    assert (place / "state.xfs").exists(), "data stay unless one asks otherwise"
    assert "keeps its sandboxes" in gone.output

    back = apply()
    assert not back.failed, back.output
    assert (place / "state" / "b").read_bytes() == b"a" * 100_000

    removed = apply(state="absent", remove_data=True)
    assert not removed.failed, removed.output
    assert not (place / "state.xfs").exists()
    assert not (place / "state").exists()
    assert apply(state="absent", remove_data=True).changed_task_names == []


def test_refuses_an_xfs_without_reflinks(apply: Apply, place: Path) -> None:
    image(place, "mkfs.xfs", "-q", "-m", "reflink=0")
    done = apply()
    assert done.failed
    assert "without reflinks" in done.message
    assert "mkfs.xfs -m reflink=1" in done.message


def test_refuses_to_overwrite_another_file_system(apply: Apply, place: Path) -> None:
    path = image(place, "mkfs.ext4", "-q")
    before = path.read_bytes()[:65536]
    done = apply()
    assert done.failed
    assert "contains ext4" in done.message
    assert path.read_bytes()[:65536] == before


def test_refuses_to_hide_files_below_the_mount(apply: Apply, place: Path) -> None:
    (place / "state").mkdir()
    (place / "state" / "precious").touch()
    done = apply()
    assert done.failed
    assert "not empty" in done.message
    assert "precious" in done.message


def test_refuses_a_disk_that_is_too_small(apply: Apply, place: Path) -> None:
    done = apply(min_free_mb=1 << 30)
    assert done.failed
    assert "kvm_xfs_host_min_free_mb" in done.message
    assert not (place / "state.xfs").exists()


def test_refuses_a_path_that_is_not_a_device(apply: Apply, place: Path) -> None:
    done = apply(device="/dev/null")
    assert done.failed
    assert "not a block device" in done.message


def test_uses_a_device(apply: Apply, place: Path) -> None:
    backing = place / "disk"
    with backing.open("wb") as file:
        file.truncate(600 << 20)
    device = subprocess.run(
        ["losetup", "--find", "--show", str(backing)], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        assert not apply(device=device).failed
        assert mounted_type(place / "state") == "xfs"
        assert not (place / "state.xfs").exists()
        assert apply(device=device).changed_task_names == []
        assert not apply(device=device, state="absent", remove_data=True).failed
        assert subprocess.run(["blkid", "--probe", device], capture_output=True, check=False).returncode == 2
    finally:
        subprocess.run(["umount", str(place / "state")], capture_output=True, check=False)
        subprocess.run(["losetup", "--detach", device], check=True)


def test_remembers_the_accelerator(apply: Apply, place: Path) -> None:
    """The answer depends on this machine; the test checks that it is determined once, and again on another machine."""
    asked = functools.partial(apply, accelerator_override="", probe_seconds=3)
    first = asked()
    assert not first.failed, first.output
    fact = place / "facts" / "kvm_xfs_host.fact"
    answer = json.loads(fact.read_text())
    assert answer["accelerator"] in ("kvm", "tcg")
    assert f"accelerator {answer['accelerator']}: " in first.output

    again = asked()
    assert again.changed_task_names == []
    assert answer["reason"][:40] in again.output

    fact.write_text(json.dumps({**answer, "platform": ["another machine"]}))
    assert asked().changed_task_names == ["grove.sandbox.kvm_xfs_host : Store the result"]
