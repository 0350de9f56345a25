"""Test each command of `lzc` on real ZFS: in check mode, in a real run, and in a repetition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zfs_core.capabilities import detect_capabilities

from tests.support import pools

Lzc = Callable[..., tuple[int, dict[str, Any]]]


def list_names(root: str) -> list[str]:
    return pools.run("zfs", "list", "-H", "-r", "-t", "filesystem,snapshot", "-o", "name", root).stdout.split()


def apply_command(lzc: Lzc, root: str, *argv: str) -> dict[str, Any]:
    """Predict a change, make it, and check that the prediction was right and a repetition changes nothing."""
    names = list_names(root)
    predicted_status, prediction = lzc("--check", *argv)
    assert (predicted_status, prediction.pop("check", None)) == (0, True), prediction
    assert list_names(root) == names
    status, result = lzc(*argv)
    assert (status, result["changed"]) == (0, True), result
    assert prediction == {key: value for key, value in result.items() if key != "receiver"}
    status, repetition = lzc(*argv)
    assert (status, repetition["changed"]) == (0, False), repetition
    return result


def test_filesystems_and_snapshots_can_be_managed(lzc: Lzc, root: str, root_path: Path) -> None:
    apply_command(lzc, root, "create", "--if-absent", "--parents", "--set", "atime=off", f"{root}/a/b")
    assert (root_path / "a/b").is_mount()
    (root_path / "a/b/file").write_text("first")
    apply_command(lzc, root, "snapshot", "--if-absent", "--recursive", f"{root}/a@one")
    apply_command(lzc, root, "clone", "--if-absent", f"{root}/a/b@one", f"{root}/c")
    assert (root_path / "c/file").read_text() == "first"
    apply_command(lzc, root, "set", "quota=64M", "backup:keep=yes", f"{root}/c")
    assert lzc("get", "quota", f"{root}/c")[1]["properties"][f"{root}/c"]["quota"]["value"] == str(64 << 20)
    apply_command(lzc, root, "inherit", "backup:keep", f"{root}/c")

    (root_path / "a/b/file").write_text("second")
    apply_command(lzc, root, "snapshot", "--if-absent", f"{root}/a/b@two")
    refused_status, refused = lzc("rollback", f"{root}/a/b@one")
    assert (refused_status, refused["error"]["related"]) == (5, [f"{root}/a/b@two"])
    apply_command(lzc, root, "rollback", "--destroy-newer", f"{root}/a/b@one")
    assert (root_path / "a/b/file").read_text() == "first"
    (root_path / "a/b/file").write_text("third")
    # Check mode only sees what is on disk. Removing a property that is not set waits for that.
    pools.run("zfs", "inherit", "test:sync", f"{root}/a/b")
    assert lzc("--check", "--assume", f"{root}/a/b@x", "rollback", f"{root}/a/b@x")[1]["changed"]
    apply_command(lzc, root, "rollback", f"{root}/a/b@one")
    assert (root_path / "a/b/file").read_text() == "first"

    # zfs-fuse cannot rename a filesystem whose clones are mounted, so this precedes the promotion.
    apply_command(lzc, root, "rename", "--if-present", f"{root}/c", f"{root}/d")
    assert (root_path / "d/file").read_text() == "first"
    apply_command(lzc, root, "promote", f"{root}/d")
    listed = lzc("list", "--type", "snapshot", "--depth", "0", f"{root}/d")[1]
    assert listed["names"] == [f"{root}/d@one"]


def test_held_and_cloned_snapshots_are_not_destroyed(lzc: Lzc, root: str) -> None:
    lzc("create", "--parents", f"{root}/tree/a")
    lzc("snapshot", f"{root}/tree/a@one", f"{root}/tree@one")
    lzc("clone", f"{root}/tree/a@one", f"{root}/tree/clone")
    apply_command(lzc, root, "hold", "--if-absent", "--recursive", "keep", f"{root}/tree@one")
    assert set(lzc("holds", f"{root}/tree/a@one")[1]["holds"][f"{root}/tree/a@one"]) == {"keep"}
    for names in ([f"{root}/tree/a@one"], ["--recursive", f"{root}/tree"]):
        status, result = lzc("destroy", *names)
        assert (status, result["error"]["kind"], result["changed"]) == (5, "in_use", False), result
    apply_command(lzc, root, "destroy", "--if-present", "--defer", f"{root}/tree@one")
    apply_command(lzc, root, "release", "--if-present", "--recursive", "keep", f"{root}/tree@one")
    assert not lzc("exists", f"{root}/tree@one")[1]["exists"], "the hold was its last one"
    status, result = lzc("destroy", "--recursive", f"{root}/tree/a")
    assert (status, result["error"]["related"]) == (5, [f"{root}/tree/clone"])
    result = apply_command(lzc, root, "destroy", "--if-present", "--recursive", f"{root}/tree")
    assert [change["name"].removeprefix(f"{root}/tree") for change in result["changes"]] == [
        "/clone",
        "/a@one",
        "/a",
        "",
    ]


def test_the_snapshots_of_several_filesystems_are_destroyed_or_marked(lzc: Lzc, root: str) -> None:
    lzc("create", "--parents", f"{root}/tree/a")
    for name in ("one", "two"):
        lzc("snapshot", "--recursive", f"{root}/tree@{name}")
    lzc("hold", "keep", f"{root}/tree/a@one")
    names = (f"{root}/tree@one", f"{root}/tree@two")
    result = apply_command(lzc, root, "destroy", "--if-present", "--recursive", "--defer", *names)
    actions = {change["name"].removeprefix(f"{root}/tree"): change["action"] for change in result["changes"]}
    assert actions == {"@one": "destroy", "@two": "destroy", "/a@one": "defer", "/a@two": "destroy"}
    assert list_names(f"{root}/tree") == [f"{root}/tree", f"{root}/tree/a", f"{root}/tree/a@one"]
    lzc("release", "keep", f"{root}/tree/a@one")
    assert list_names(f"{root}/tree") == [f"{root}/tree", f"{root}/tree/a"]


def test_a_bookmark_of_another_snapshot_is_not_accepted(lzc: Lzc, root: str) -> None:
    if not detect_capabilities().bookmarks:
        pytest.skip("zfs-fuse has no bookmarks: this test runs on OpenZFS")
    for name in ("one", "two"):
        lzc("snapshot", f"{root}@{name}")
    apply_command(lzc, root, "bookmark", "--if-absent", f"{root}@one", f"{root}#mark")
    status, result = lzc("bookmark", "--if-absent", f"{root}@two", f"{root}#mark")
    assert (status, result["error"]["kind"], result["error"]["related"]) == (4, "exists", [f"{root}#mark"]), result
    lzc("destroy", f"{root}@one")
    assert lzc("bookmark", "--if-absent", f"{root}@one", f"{root}#mark")[1]["unchanged"] == [f"{root}#mark"]


def test_streams_are_sent_and_received(lzc: Lzc, lzc_path: Path, root: str, root_path: Path, tmp_path: Path) -> None:
    lzc("create", f"{root}/a")
    (root_path / "a/file").write_text("first")
    lzc("snapshot", f"{root}/a@one")
    receiver = ("--", str(lzc_path), "receive", "--if-absent")
    apply_command(lzc, root, "send", f"{root}/a@one", *receiver, f"{root}/copy@one")
    (root_path / "a/file").write_text("second")
    lzc("snapshot", f"{root}/a@two")
    file = tmp_path / "stream"
    assert lzc("send", "--from", f"{root}/a@one", f"{root}/a@two", "--file", str(file))[0] == 0
    apply_command(lzc, root, "receive", "--if-absent", "--file", str(file), f"{root}/copy@two")
    status, result = lzc("receive", "--file", str(file), f"{root}/copy@three")
    assert (status, result["error"]["kind"]) == (7, "stream"), result
    lzc("snapshot", f"{root}/copy@local")
    lzc("snapshot", f"{root}/a@three")
    file = tmp_path / "forced"
    assert lzc("send", "--from", f"{root}/a@one", f"{root}/a@three", "--file", str(file))[0] == 0
    forced = ("receive", "--if-absent", "--force", "--file", str(file), f"{root}/copy@three")
    status, result = lzc(*forced)
    assert (status, result["error"]["related"]) == (5, [f"{root}/copy@two", f"{root}/copy@local"]), result
    if not detect_capabilities().receive_options:
        assert lzc(*forced, "--destroy-newer")[0] == 8
        assert lzc("rollback", "--destroy-newer", f"{root}/copy@one")[0] == 0
    apply_command(lzc, root, *forced, "--destroy-newer")
    status, result = lzc("receive", "--if-absent", "--file", str(file), f"{root}/copy@one")
    assert (status, result["error"]["kind"]) == (4, "exists"), "the file contains another snapshot"
    snapshots = lzc("list", "--type", "snapshot", f"{root}/copy")[1]["names"]
    assert snapshots == [f"{root}/copy@one", f"{root}/copy@three"]
    assert lzc("send", f"{root}/a@two", "--file", str(tmp_path / "whole"))[0] == 0
    file.write_bytes((tmp_path / "whole").read_bytes()[:1000])
    status, result = lzc("receive", "--file", str(file), f"{root}/other@one")
    assert (status, result["error"]["kind"]) == (7, "stream"), result
