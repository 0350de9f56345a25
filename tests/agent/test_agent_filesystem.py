"""filesystem.Filesystem lists and changes directories and their entries."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest


def call_method(agent, method, user="", **message):
    return agent.post(
        f"/filesystem.Filesystem/{method}", {key: str(v) if key != "depth" else v for key, v in message.items()}, user
    )


def list_paths(agent, path, **message):
    status, response = call_method(agent, "ListDir", path=path, **message)
    assert status == 200, response
    return [os.path.relpath(item["path"], path) for item in response["entries"]]


def test_stat_describes_a_file(agent, tmp_path):
    path = tmp_path / "file"
    path.write_text("12345")
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    status, response = call_method(agent, "Stat", path=path)
    entry = response["entry"]
    assert (status, entry["size"], entry["mode"]) == (200, "5", 0o640)
    assert (entry["name"], entry["path"], entry["type"]) == ("file", str(path), "FILE_TYPE_FILE")
    assert (entry["permissions"], entry["modifiedTime"]) == ("-rw-r-----", "2023-11-14T22:13:20.123456789Z")
    assert datetime.fromisoformat(entry["modifiedTime"][:19])
    assert entry["owner"] and entry["group"] and "symlinkTarget" not in entry


def test_stat_describes_symlinks_and_their_targets(agent, tmp_path):
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("dir")
    (tmp_path / "broken").symlink_to("none")
    entry = call_method(agent, "Stat", path=tmp_path / "link")[1]["entry"]
    assert (entry["type"], entry["isSymlink"], entry["symlinkTarget"]) == (
        "FILE_TYPE_DIRECTORY",
        True,
        os.path.realpath(tmp_path / "dir"),
    )
    entry = call_method(agent, "Stat", path=tmp_path / "broken")[1]["entry"]
    assert (entry["type"], entry["isSymlink"]) == ("FILE_TYPE_SYMLINK", True)


def test_listing_is_limited_by_depth(agent, tmp_path):
    (tmp_path / "b/c/d").mkdir(parents=True)
    (tmp_path / "a").write_text("")
    (tmp_path / "loop").symlink_to(".")
    assert list_paths(agent, tmp_path) == ["a", "b", "loop"]
    assert list_paths(agent, tmp_path, depth=0) == ["a", "b", "loop"]
    assert list_paths(agent, tmp_path, depth=2) == ["a", "b", "b/c", "loop"]
    assert list_paths(agent, tmp_path, depth=9) == ["a", "b", "b/c", "b/c/d", "loop"]


def test_make_dir_creates_parents_and_refuses_existing_paths(agent, tmp_path):
    path = tmp_path / "x/y"
    status, response = call_method(agent, "MakeDir", path=path)
    assert (status, response["entry"]["type"]) == (200, "FILE_TYPE_DIRECTORY") and path.is_dir()
    status, response = call_method(agent, "MakeDir", path=path)
    assert (status, response["code"]) == (409, "already_exists")
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        status, response = call_method(agent, "MakeDir", path=tmp_path / name)
        assert (status, response["code"]) == (400, "invalid_argument"), name


def test_move_replaces_files_and_creates_parents(agent, tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    status, response = call_method(agent, "Move", source=tmp_path / "a", destination=tmp_path / "new/c")
    assert (status, response["entry"]["path"]) == (200, str(tmp_path / "new/c"))
    assert call_method(agent, "Move", source=tmp_path / "b", destination=tmp_path / "new/c")[0] == 200
    assert (tmp_path / "new/c").read_text() == "b"
    status, response = call_method(agent, "Move", source=tmp_path / "a", destination=tmp_path / "else/c")
    assert (status, response["code"]) == (404, "not_found")
    assert not (tmp_path / "else").exists()


def test_a_directory_is_moved_to_another_file_system(agent, tmp_path):
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/f").write_text("x")
    other_directory = Path(f"/dev/shm/agent-test-{os.getpid()}")
    try:
        assert call_method(agent, "Move", source=tmp_path / "dir", destination=other_directory)[0] == 200
        assert [path.name for path in other_directory.iterdir()] == ["f"] and not (tmp_path / "dir").exists()
    finally:
        assert call_method(agent, "Remove", path=other_directory)[0] == 200
    assert not other_directory.exists()


def test_remove_accepts_missing_paths(agent, tmp_path):
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_text("")
    (tmp_path / "keep").mkdir()
    (tmp_path / "link").symlink_to("keep")
    for name in ("d", "link", "was-never-there"):
        assert call_method(agent, "Remove", path=tmp_path / name) == (200, {})
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert call_method(agent, "Remove", path="")[0] == 400


def test_errors_have_a_status_and_a_code(agent, tmp_path):
    (tmp_path / "file").write_text("")
    for method, path, status, code in (
        ("Stat", tmp_path / "none", 404, "not_found"),
        ("ListDir", tmp_path / "none", 404, "not_found"),
        ("ListDir", tmp_path / "file", 400, "invalid_argument"),
        ("Stat", tmp_path / "file/below", 400, "invalid_argument"),
        ("Stat", "a\0b", 400, "invalid_argument"),
    ):
        actual_status, response = call_method(agent, method, path=path)
        assert (actual_status, response["code"]) == (status, code), (method, path)
    assert call_method(agent, "ListDir", path=tmp_path, depth=-1)[0] == 400
    assert call_method(agent, "Stat", path=tmp_path, user="no-such-user")[0] == 401


def test_relative_paths_are_resolved_from_the_home_directory(agent):
    assert call_method(agent, "Stat", path="")[1]["entry"]["path"] == str(Path.home())
    assert call_method(agent, "Stat", path="~")[1]["entry"]["path"] == str(Path.home())
    assert call_method(agent, "Stat", path="/tmp/../etc//passwd")[1]["entry"]["path"] == "/etc/passwd"


def test_the_requesting_user_owns_new_directories(agent, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert call_method(agent, "MakeDir", path=tmp_path / "mine", user="nobody")[1]["entry"]["owner"] == "nobody"


def test_names_that_are_not_utf_8_are_usable(agent, tmp_path):
    path = tmp_path / os.fsdecode(b"a\xff")
    path.write_text("x")
    status, response = call_method(agent, "ListDir", path=tmp_path)
    assert (status, [item["name"] for item in response["entries"]]) == (200, ["a\ufffd"])
    # Clients address such names as Python does.
    assert call_method(agent, "Stat", path=path)[1]["entry"]["path"] == f"{tmp_path}/a\ufffd"
    assert call_method(agent, "Remove", path=path) == (200, {}) and not path.exists()
    status, response = call_method(agent, "Stat", path=path)
    assert (status, response["message"].isprintable()) == (404, True)
    assert call_method(agent, "Stat", path="\ud800")[1]["code"] == "invalid_argument"


def test_special_files_have_an_unspecified_type(agent, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    entries = call_method(agent, "ListDir", path=tmp_path)[1]["entries"]
    assert [(item["name"], item["type"]) for item in entries] == [
        ("link", "FILE_TYPE_UNSPECIFIED"),
        ("pipe", "FILE_TYPE_UNSPECIFIED"),
    ]


def test_directories_beyond_the_path_limit_can_be_removed(agent, tmp_path):
    """A listing contains the directories whose paths are within the limit."""
    name = "d" * 20
    parent_fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir(name, dir_fd=parent_fd)
        child_fd = os.open(name, os.O_RDONLY, dir_fd=parent_fd)
        os.close(parent_fd)
        parent_fd = child_fd
    os.close(parent_fd)
    paths = list_paths(agent, tmp_path, depth=10**6)
    assert 150 < len(paths) < 200 and paths[9] == "/".join([name] * 10)
    assert call_method(agent, "Remove", path=tmp_path / name) == (200, {})
    assert not (tmp_path / name).exists()


def test_listing_too_many_entries_is_refused(running, unmanaged_command, tmp_path):
    setup_code = (
        "import sys; from sandbox_agent import agent; from sandbox_agent.files import filesystem; "
        "filesystem.MAX_ENTRIES = 5; sys.argv = sys.argv[1:]"
    )
    with running(
        [unmanaged_command[0], "-c", f"{setup_code}; sys.exit(agent.main())", *unmanaged_command[2:]]
    ) as agent:
        for number in range(3):
            (tmp_path / f"d{number}").mkdir()
        (tmp_path / "d1/below").write_text("")
        assert len(list_paths(agent, tmp_path, depth=2)) == 4
        for number in range(2):
            (tmp_path / f"d2/{number}").write_text("")
        status, response = call_method(agent, "ListDir", path=tmp_path, depth=2)
        assert (status, response["code"]) == (429, "resource_exhausted")
