"""Test the preparation of mount points in jails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.jail_zfs.jail.mount_point import prepare


def list_tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_missing_directories_are_created_for_all_users(tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir(mode=0o700)
    old_umask = os.umask(0o077)
    try:
        prepare(tmp_path, "/srv/data/deep")
        prepare(tmp_path, "/srv/data/deep")
    finally:
        os.umask(old_umask)
    modes = [(tmp_path / name).stat().st_mode & 0o7777 for name in ("srv", "srv/data", "srv/data/deep")]
    assert modes == [0o700, 0o755, 0o755]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/link", "/link is a symbolic link"),
        ("/link/new", "/link is a symbolic link"),
        ("/dir/inner/new", "/dir/inner is a symbolic link"),
        ("/loop/new", "/loop is a symbolic link"),
        ("/file", "/file is not a directory"),
        ("/file/new", "/file is not a directory"),
        (f"/new/{'x' * 300}", "File name too long"),
        ("/" + "/".join(["x" * 200] * 6), "too long for a mount point"),
    ],
)
def test_unusable_mount_points_are_refused_and_nothing_is_created(tmp_path: Path, path: str, message: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "dir").mkdir(parents=True)
    outside.mkdir()
    (root / "file").touch()
    (root / "link").symlink_to(outside)
    (root / "dir/inner").symlink_to("../../outside")
    (root / "loop").symlink_to("loop")
    tree_before = list_tree(tmp_path)
    with pytest.raises(Invalid, match=message) as error_info:
        prepare(root, path)
    assert list_tree(tmp_path) == tree_before
    assert str(tmp_path) not in error_info.value.message
    assert len(error_info.value.message) < 300


@pytest.mark.parametrize("path", ["", "/", "data", "/a/../b", "//a", "/a//b", "/a/", "/a/./b", "/.."])
def test_invalid_paths_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(Invalid, match="absolute path"):
        prepare(tmp_path, path)
    assert list_tree(tmp_path) == set()


def test_a_missing_root_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="is not mounted at"):
        prepare(tmp_path / "none", "/data")


def test_all_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    count_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        prepare(tmp_path, "/a/b/c")
        with pytest.raises(Invalid):
            prepare(tmp_path, "/a/b/../x")
        with pytest.raises(Invalid):
            prepare(tmp_path, "/file/x")
    assert len(list(Path("/proc/self/fd").iterdir())) == count_before
