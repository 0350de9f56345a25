"""Test mount and umount with nullfs and devfs, and the output in FreeBSD's format."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.freebsd_shim.harness import Shim


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "inner").mkdir()
    return source, target


def list_nullfs_mounts(shim: Shim) -> list[dict[str, object]]:
    output = json.loads(shim.check_ok("mount", "--libxo", "json", "-v", "-t", "nullfs"))
    return [each for each in output["mount"].get("mounted", []) if each["node"] != f"{shim.root}/usr"]


def test_mount_prints_its_table_like_freebsd(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("mount", "-t", "nullfs", "-o", "ro,nosuid,nocover", str(source), str(target))
    row = list_nullfs_mounts(shim)[0]
    assert (row["special"], row["node"], row["fstype"]) == (str(source), str(target), "nullfs")
    assert row["opts"] == ["local", "nosuid", "read-only", "nocover"]
    fsid = str(row["fsid"])
    assert len(fsid) == 16 and int(fsid, 16)
    lines = shim.check_ok("mount", "-p").splitlines()
    fields = next(line.split() for line in lines if str(target) in line)
    assert fields == [str(source), str(target), "nullfs", "ro,nosuid,nocover", "0", "0"]
    text = shim.check_ok("mount", "-v", "-t", "nullfs")
    assert f"{source} on {target} (nullfs, local, nosuid, read-only, nocover, fsid {fsid})\n" in text
    shim.check_ok("umount", fsid)
    assert list_nullfs_mounts(shim) == []


def test_mount_options_are_enforced(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("mount", "-t", "nullfs", "-o", "ro", str(source), str(target))
    with pytest.raises(OSError, match="Read-only"):
        (target / "file").write_text("x")
    (source / "file").write_text("x")
    assert (target / "file").read_text() == "x"


def test_a_mount_inherits_nothing_from_a_removed_mount(shim: Shim, directories: tuple[Path, Path]) -> None:
    """Linux reuses the number and the device of a removed mount for the next one."""
    unmounted_path, mount_point = directories
    shim.check_ok("mount", "-t", "devfs", "-o", "ruleset=4", "devfs", str(unmounted_path))
    shim.check_ok("umount", str(unmounted_path))
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "other", str(mount_point)], check=True, timeout=30)
    try:
        assert str(unmounted_path) not in shim.check_ok("mount", "-v")
        assert f"other on {mount_point} (tmpfs" in shim.check_ok("mount", "-v")
    finally:
        subprocess.run(["/usr/bin/umount", str(mount_point)], check=True, timeout=30)


def test_conflicting_mounts_are_refused(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("mount", "-t", "nullfs", str(source), str(target))
    shim.expect_failure(
        1, f"mount_nullfs: {target}: Device busy", *("mount", "-t", "nullfs", "-o", "nocover", str(source), str(target))
    )
    shim.expect_failure(
        1, f"mount_nullfs: {target}: Resource deadlock avoided", *("mount", "-t", "nullfs", str(source), str(target))
    )
    shim.check_ok("mount", "-t", "nullfs", f"{source}/inner", f"{target}/inner")
    shim.expect_failure(1, f"umount: unmount of {target} failed: Device busy", "umount", str(target))
    shim.check_ok("umount", f"{target}/inner", str(target))


def test_symlinks_in_the_target_are_resolved(shim: Shim, directories: tuple[Path, Path], tmp_path: Path) -> None:
    """A symbolic link in the target redirects the mount, so callers must check the real path in the mount table."""
    source, target = directories
    (tmp_path / "link").symlink_to(target)
    shim.check_ok("mount", "-t", "nullfs", "-o", "ro", str(source), str(tmp_path / "link"))
    assert list_nullfs_mounts(shim)[0]["node"] == str(target)


def test_a_symlink_created_during_a_mount_is_followed_and_shown(
    shim: Shim, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    """A thread keeps swapping the target. The mount table shows the real path of the mount."""
    source, target = directories
    outside, target = tmp_path / "outside", target / "swapped"
    outside.mkdir()
    target.mkdir()
    stop_event = threading.Event()

    def swap_target() -> None:
        while not stop_event.is_set():
            for change in (
                lambda: target.rename(tmp_path / "aside"),
                lambda: target.symlink_to(outside),
                target.unlink,
                lambda: (tmp_path / "aside").rename(target),
            ):
                with contextlib.suppress(OSError):
                    change()

    thread = threading.Thread(target=swap_target)
    thread.start()
    try:
        for _ in range(20):
            result = shim("mount", "-t", "nullfs", "-o", "ro,nocover", str(source), str(target))
            assert result.returncode in (0, 1), result
            rows = list_nullfs_mounts(shim)
            assert [row["node"] for row in rows] in ([], [str(outside)], [str(target)], [str(tmp_path / "aside")])
            assert len(rows) == (result.returncode == 0), (result, rows)
            for row in rows:
                # The thread still renames the mount point between these two names.
                possible_nodes = (str(target), str(tmp_path / "aside"))
                nodes = possible_nodes if row["node"] in possible_nodes else (str(row["node"]),)
                deadline = time.monotonic() + 30
                while not any(os.path.isdir(f"{node}/inner") for node in nodes):
                    assert time.monotonic() < deadline, row
                shim.check_ok("umount", str(row["fsid"]))
    finally:
        stop_event.set()
        thread.join()


def test_a_mount_keeps_its_name_when_a_parent_is_renamed(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    (target / "above/node").mkdir(parents=True)
    shim.check_ok("mount", "-t", "nullfs", str(source), f"{target}/above/node")
    (target / "above").rename(target / "else")
    row = list_nullfs_mounts(shim)[0]
    assert (row["special"], row["node"]) == (str(source), f"{target}/above/node")
    assert (target / "else/node/inner").is_dir()
    shim.check_ok("umount", str(row["fsid"]))
    assert not (target / "else/node/inner").exists()


def test_a_busy_mount_cannot_be_unmounted_by_force(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("mount", "-t", "nullfs", str(source), str(target))
    shim.check_ok("freebsd-shim", "set", "busy", str(target))
    for options in ([], ["-f"]):
        shim.expect_failure(1, f"umount: unmount of {target} failed: Device busy", "umount", *options, str(target))
    shim.check_ok("freebsd-shim", "set", "busy", "")
    shim.check_ok("umount", str(target))


def test_mount_reports_errors_like_freebsd(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    command = ["mount", "-t", "nullfs"]
    shim.expect_failure(1, f"mount: {target}/none: No such file or directory", *command, str(source), f"{target}/none")
    shim.expect_failure(
        64, f"mount_nullfs: {source}/none: No such file or directory", *command, f"{source}/none", str(target)
    )
    shim.expect_failure(
        1,
        f"mount_nullfs: {target}: mount option <nodev> is unknown: Invalid argument",
        *(*command, "-o", "ro,nodev", str(source), str(target)),
    )
    assert shim("mount", "-Z").returncode == 1
    assert shim("mount", "-t", "ext4", str(source), str(target)).returncode == 70
    shim.expect_failure(1, f"umount: {target}: not a file system root directory", "umount", str(target))
    shim.expect_failure(
        1,
        "umount: /nowhere: statfs: No such file or directory\numount: /nowhere: unknown file system",
        *("umount", "/nowhere"),
    )
    fsid = "00ff00ff00ff00ff"
    shim.expect_failure(
        1, f"umount: {fsid}: statfs: No such file or directory\numount: {fsid}: unknown file system", "umount", fsid
    )


def test_umount_by_special_removes_the_newest_mount(shim: Shim, directories: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = directories
    other_target = tmp_path / "other"
    other_target.mkdir()
    shim.check_ok("mount", "-t", "nullfs", str(source), str(target))
    shim.check_ok("mount", "-t", "nullfs", str(source), str(other_target))
    assert shim.check_ok("umount", "-v", str(source)) == f"{source}: unmount from {other_target}\n"
    with (target / "open").open("w"):
        shim.expect_failure(1, f"umount: unmount of {target} failed: Device busy", "umount", str(target))
        shim.check_ok("umount", "-f", str(target))
    assert list_nullfs_mounts(shim) == []


def test_umount_by_fsid_succeeds_during_renames_of_a_parent(
    shim: Shim, directories: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = directories
    (target / "below").mkdir()
    stop_event = threading.Event()

    def rename_parent() -> None:
        while not stop_event.is_set():
            target.rename(tmp_path / "away")
            target.symlink_to(source)
            target.unlink()
            (tmp_path / "away").rename(target)

    for options in ([], ["-f"]):
        stop_event.clear()
        shim.check_ok("mount", "-t", "nullfs", str(source), str(target / "below"))
        (row,) = list_nullfs_mounts(shim)
        thread = threading.Thread(target=rename_parent)
        thread.start()
        try:
            shim.check_ok("umount", *options, str(row["fsid"]))
        finally:
            stop_event.set()
            thread.join()
        assert list_nullfs_mounts(shim) == []


def test_an_open_file_stays_usable_after_a_forced_unmount(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("/usr/bin/mount", "-t", "tmpfs", "tmpfs", str(source))
    shim.check_ok("mount", "-t", "nullfs", str(source), str(target))
    device = source.stat().st_dev
    with (target / "open").open("w") as file:
        shim.check_ok("umount", "-f", str(target))
        assert list_nullfs_mounts(shim) == []
        shim.check_ok("/usr/bin/umount", str(source))
        file.write("still")
    deadline = time.monotonic() + 30
    while any(has_open_file_on_device(path, device) for path in Path("/proc").iterdir()):
        assert time.monotonic() < deadline, "a process keeps the file system in use"
        time.sleep(0.1)


def has_open_file_on_device(process: Path, device: int) -> bool:
    try:
        return process.name.isdigit() and any(file.stat().st_dev == device for file in (process / "fd").iterdir())
    except OSError:
        return False


def test_a_mount_removed_by_another_program_is_not_listed(shim: Shim, directories: tuple[Path, Path]) -> None:
    source, target = directories
    shim.check_ok("mount", "-t", "nullfs", str(source), str(target))
    shim.check_ok("/usr/bin/umount", str(target))
    assert list_nullfs_mounts(shim) == []
