"""mount, umount: nullfs and devfs as in FreeBSD's mount table."""

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
def places(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "inner").mkdir()
    return source, target


def mounted(shim: Shim) -> list[dict[str, object]]:
    answer = json.loads(shim.ok("mount", "--libxo", "json", "-v", "-t", "nullfs"))
    return [each for each in answer["mount"].get("mounted", []) if each["node"] != f"{shim.root}/usr"]


def test_the_list(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("mount", "-t", "nullfs", "-o", "ro,nosuid,nocover", str(source), str(target))
    row = mounted(shim)[0]
    assert (row["special"], row["node"], row["fstype"]) == (str(source), str(target), "nullfs")
    assert row["opts"] == ["local", "nosuid", "read-only", "nocover"]
    fsid = str(row["fsid"])
    assert len(fsid) == 16 and int(fsid, 16)
    lines = shim.ok("mount", "-p").splitlines()
    fields = next(line.split() for line in lines if str(target) in line)
    assert fields == [str(source), str(target), "nullfs", "ro,nosuid,nocover", "0", "0"]
    text = shim.ok("mount", "-v", "-t", "nullfs")
    assert f"{source} on {target} (nullfs, local, nosuid, read-only, nocover, fsid {fsid})\n" in text
    shim.ok("umount", fsid)
    assert mounted(shim) == []


def test_options_hold(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("mount", "-t", "nullfs", "-o", "ro", str(source), str(target))
    with pytest.raises(OSError, match="Read-only"):
        (target / "file").write_text("x")
    (source / "file").write_text("x")
    assert (target / "file").read_text() == "x"


def test_a_mount_takes_nothing_over_from_one_that_is_gone(shim: Shim, places: tuple[Path, Path]) -> None:
    """Linux reuses the number of a removed mount, and its device, for the next one."""
    gone, place = places
    shim.ok("mount", "-t", "devfs", "-o", "ruleset=4", "devfs", str(gone))
    shim.ok("umount", str(gone))
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "other", str(place)], check=True, timeout=30)
    try:
        assert str(gone) not in shim.ok("mount", "-v")
        assert f"other on {place} (tmpfs" in shim.ok("mount", "-v")
    finally:
        subprocess.run(["/usr/bin/umount", str(place)], check=True, timeout=30)


def test_nocover_and_stacking(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("mount", "-t", "nullfs", str(source), str(target))
    shim.fails(
        1, f"mount_nullfs: {target}: Device busy", *("mount", "-t", "nullfs", "-o", "nocover", str(source), str(target))
    )
    shim.fails(
        1, f"mount_nullfs: {target}: Resource deadlock avoided", *("mount", "-t", "nullfs", str(source), str(target))
    )
    shim.ok("mount", "-t", "nullfs", f"{source}/inner", f"{target}/inner")
    shim.fails(1, f"umount: unmount of {target} failed: Device busy", "umount", str(target))
    shim.ok("umount", f"{target}/inner", str(target))


def test_links_are_resolved(shim: Shim, places: tuple[Path, Path], tmp_path: Path) -> None:
    """The danger for the host: a link in the target's path redirects the mount, but the table shows the real place."""
    source, target = places
    (tmp_path / "link").symlink_to(target)
    shim.ok("mount", "-t", "nullfs", "-o", "ro", str(source), str(tmp_path / "link"))
    assert mounted(shim)[0]["node"] == str(target)


def test_a_link_put_in_the_way_in_the_last_moment_is_followed_and_told(
    shim: Shim, places: tuple[Path, Path], tmp_path: Path
) -> None:
    """The table shows the mount's real place, although the target is swapped all the time."""
    source, target = places
    outside, target = tmp_path / "outside", target / "swapped"
    outside.mkdir()
    target.mkdir()
    swapping = [True]

    def swap() -> None:
        while swapping:
            for change in (
                lambda: target.rename(tmp_path / "aside"),
                lambda: target.symlink_to(outside),
                target.unlink,
                lambda: (tmp_path / "aside").rename(target),
            ):
                with contextlib.suppress(OSError):
                    change()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(20):
            done = shim("mount", "-t", "nullfs", "-o", "ro,nocover", str(source), str(target))
            assert done.returncode in (0, 1), done
            rows = mounted(shim)
            assert [row["node"] for row in rows] in ([], [str(outside)], [str(target)], [str(tmp_path / "aside")])
            assert len(rows) == (done.returncode == 0), (done, rows)
            for row in rows:
                # The mount point is still moved between these two during the check.
                moved = (str(target), str(tmp_path / "aside"))
                nodes = moved if row["node"] in moved else (str(row["node"]),)
                deadline = time.monotonic() + 10
                while not any(os.path.isdir(f"{node}/inner") for node in nodes):
                    assert time.monotonic() < deadline, row
                shim.ok("umount", str(row["fsid"]))
    finally:
        swapping.clear()
        thread.join()


def test_a_mount_keeps_its_name_when_what_is_above_it_is_renamed(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    (target / "above/node").mkdir(parents=True)
    shim.ok("mount", "-t", "nullfs", str(source), f"{target}/above/node")
    (target / "above").rename(target / "else")
    row = mounted(shim)[0]
    assert (row["special"], row["node"]) == (str(source), f"{target}/above/node")
    assert (target / "else/node/inner").is_dir()
    shim.ok("umount", str(row["fsid"]))
    assert not (target / "else/node/inner").exists()


def test_a_mount_that_is_busy_for_good(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("mount", "-t", "nullfs", str(source), str(target))
    shim.ok("freebsd-shim", "set", "busy", str(target))
    for options in ([], ["-f"]):
        shim.fails(1, f"umount: unmount of {target} failed: Device busy", "umount", *options, str(target))
    shim.ok("freebsd-shim", "set", "busy", "")
    shim.ok("umount", str(target))


def test_errors(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    words = ["mount", "-t", "nullfs"]
    shim.fails(1, f"mount: {target}/none: No such file or directory", *words, str(source), f"{target}/none")
    shim.fails(64, f"mount_nullfs: {source}/none: No such file or directory", *words, f"{source}/none", str(target))
    shim.fails(
        1,
        f"mount_nullfs: {target}: mount option <nodev> is unknown: Invalid argument",
        *(*words, "-o", "ro,nodev", str(source), str(target)),
    )
    assert shim("mount", "-Z").returncode == 1
    assert shim("mount", "-t", "ext4", str(source), str(target)).returncode == 70
    shim.fails(1, f"umount: {target}: not a file system root directory", "umount", str(target))
    shim.fails(
        1,
        "umount: /nowhere: statfs: No such file or directory\numount: /nowhere: unknown file system",
        *("umount", "/nowhere"),
    )
    fsid = "00ff00ff00ff00ff"
    shim.fails(
        1, f"umount: {fsid}: statfs: No such file or directory\numount: {fsid}: unknown file system", "umount", fsid
    )


def test_umount_by_special_takes_the_newest_and_force(shim: Shim, places: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = places
    other = tmp_path / "other"
    other.mkdir()
    shim.ok("mount", "-t", "nullfs", str(source), str(target))
    shim.ok("mount", "-t", "nullfs", str(source), str(other))
    assert shim.ok("umount", "-v", str(source)) == f"{source}: unmount from {other}\n"
    with (target / "open").open("w"):
        shim.fails(1, f"umount: unmount of {target} failed: Device busy", "umount", str(target))
        shim.ok("umount", "-f", str(target))
    assert mounted(shim) == []


def test_umount_by_number_while_somebody_renames_above_it(
    shim: Shim, places: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = places
    (target / "below").mkdir()
    renaming = [True]

    def rename() -> None:
        while renaming:
            target.rename(tmp_path / "away")
            target.symlink_to(source)
            target.unlink()
            (tmp_path / "away").rename(target)

    for force in ([], ["-f"]):
        renaming.append(True)
        shim.ok("mount", "-t", "nullfs", str(source), str(target / "below"))
        (row,) = mounted(shim)
        thread = threading.Thread(target=rename)
        thread.start()
        try:
            shim.ok("umount", *force, str(row["fsid"]))
        finally:
            renaming.clear()
            thread.join()
        assert mounted(shim) == []


def test_what_is_open_keeps_the_file_system_below_a_forced_unmount(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("/usr/bin/mount", "-t", "tmpfs", "tmpfs", str(source))
    shim.ok("mount", "-t", "nullfs", str(source), str(target))
    device = source.stat().st_dev
    with (target / "open").open("w") as file:
        shim.ok("umount", "-f", str(target))
        assert mounted(shim) == []
        shim.ok("/usr/bin/umount", str(source))
        file.write("still")
    deadline = time.monotonic() + 10
    while any(holds(path, device) for path in Path("/proc").iterdir()):
        assert time.monotonic() < deadline, "something keeps it for ever"
        time.sleep(0.1)


def holds(process: Path, device: int) -> bool:
    try:
        return process.name.isdigit() and any(file.stat().st_dev == device for file in (process / "fd").iterdir())
    except OSError:
        return False


def test_a_mount_that_somebody_else_took_away_is_not_listed(shim: Shim, places: tuple[Path, Path]) -> None:
    source, target = places
    shim.ok("mount", "-t", "nullfs", str(source), str(target))
    shim.ok("/usr/bin/umount", str(target))
    assert mounted(shim) == []
