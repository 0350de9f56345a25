"""Attacks by the author of an image, or of another file system from which an administrator builds a template.

Everything in the tree of a template is hostile here: its links, its files, and its depth.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts import rootfs_common
from sandbox_gateway.hosts.jail_zfs.jail import rootfs as jail_rootfs
from sandbox_gateway.hosts.jail_zfs.jail.identity import Identities
from sandbox_gateway.hosts.kvm_xfs import commit_protocol
from sandbox_gateway.hosts.kvm_xfs.commit_protocol import PARTIAL_PREFIX
from sandbox_gateway.hosts.kvm_xfs.template import disk
from sandbox_gateway.hosts.kvm_xfs.template.guest_setup import find_boot_files
from sandbox_gateway.hosts.rootfs_common import Tree, add_user
from sandbox_gateway.hosts.tree_removal import remove_tree

pytestmark = pytest.mark.usefixtures("requires_root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a hostile tree. The directory `host` beside it must stay empty."""
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (tmp_path / "host").mkdir()
    return root


def list_host_files(root: Path) -> list[str]:
    return [path.name for path in (root.parent / "host").rglob("*")]


async def test_root_compiles_no_host_files_through_a_link_at_the_agents_directory(root: Path, tmp_path: Path) -> None:
    """A user of the host has put a file there, and the image has a link to it: /opt refers to that directory."""
    (root / "opt").symlink_to(tmp_path / "host")
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "__main__.py").write_text("agent = True\n")
    (tmp_path / "host/sandbox_agent").mkdir()
    (tmp_path / "host/sandbox_agent/planted.py").write_text("planted = True\n")
    tree = Tree(root)
    rootfs_common.install_agent(tree, agent)
    log: list[str] = []
    await rootfs_common.compile_agent_in_foreign_tree(root, log.append)
    assert sorted(list_host_files(root)) == ["planted.py", "sandbox_agent"] and log == []
    (compiled,) = tree.resolve("/opt/sandbox_agent/__pycache__").glob("__main__.*.pyc")
    assert b"/opt/sandbox_agent/__main__.py" in compiled.read_bytes()


@pytest.fixture
def pw_calls(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The command lines of `pw`, which exists only on FreeBSD."""
    calls: list[Sequence[str]] = []

    async def record(argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(jail_rootfs, "run_async", record)
    return calls


@pytest.mark.parametrize("name", ["etc", "etc/master.passwd", "etc/group", "etc/spwd.db", "etc/pwd.db.tmp"])
async def test_a_link_at_a_jails_accounts_adds_no_user_to_the_host(
    root: Path, pw_calls: list[Sequence[str]], name: str
) -> None:
    """pw resolves links as on the host, not inside the tree. This relative link has the same target either way."""
    for file in ("master.passwd", "group"):
        (root / "etc" / file).write_text("root:x:0:\n")
    path, target = root / name, root / "target"
    if path.is_dir():
        path.rename(target)
    else:
        target.write_text("root:x:0:\n")
        path.unlink(missing_ok=True)
    path.symlink_to(target.name if name == "etc" else f"../{target.name}")
    with pytest.raises(Invalid, match=f"the root file system's /{name} is a symbolic link"):
        await jail_rootfs._add_user(root)
    assert pw_calls == []


async def test_a_link_at_a_jails_home_directories_creates_nothing_on_the_host(
    root: Path, tmp_path: Path, pw_calls: list[Sequence[str]]
) -> None:
    (root / "etc/master.passwd").write_text("root::0:0::0:0::/root:/bin/sh\nother::1000:1000::0:0::/:/bin/sh\n")
    (root / "etc/pw.conf").write_text(f"logfile {tmp_path}/host/log\n")
    (root / "home").symlink_to(tmp_path / "host")
    (root / "usr/share/skel").mkdir(parents=True)
    (root / "usr/share/skel/dot.profile").write_text("hello\n")
    await jail_rootfs._add_user(root)
    (argv,) = pw_calls
    assert "-m" not in argv and argv[argv.index("-C") + 1] == "/dev/null"
    home = Tree(root).resolve("/home/user")
    assert (home / ".profile").read_text() == "hello\n" and (home / ".profile").stat().st_uid == 1001
    assert list_host_files(root) == []


# --- copies that need more room than the tree ----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(101, 1), (2, 600 << 10)])
def test_hard_links_in_the_skeleton_of_home_directories_do_not_fill_the_disk(root: Path, count: int, size: int) -> None:
    (root / "etc/skel").mkdir()
    (root / "etc/skel/0").write_bytes(b"\xff" * size)
    for number in range(1, count):
        os.link(root / "etc/skel/0", root / f"etc/skel/{number}")
    with pytest.raises(Invalid, match=r"/etc/skel has more than 100 files or 1048576 bytes: remove some"):
        add_user(Tree(root))
    assert sum(path.stat().st_size for path in (root / "home/user").iterdir()) <= 1 << 20


def test_the_skeleton_of_home_directories_is_copied_byte_by_byte(root: Path) -> None:
    """The replacement of bytes that are not UTF-8 would triple their number."""
    (root / "etc/skel").mkdir()
    (root / "etc/skel/.binary").write_bytes(b"\xff" * 1000)
    add_user(Tree(root))
    assert (root / "home/user/.binary").read_bytes() == b"\xff" * 1000


@pytest.mark.parametrize("name", ["vmlinuz-6", "initrd.img-6"])
def test_a_sparse_kernel_or_initrd_does_not_fill_the_disk(root: Path, name: str) -> None:
    (root / "boot").mkdir()
    for file in ("vmlinuz-6", "initrd.img-6"):
        (root / "boot" / file).touch()
    os.truncate(root / "boot" / name, 1 << 40)
    with pytest.raises(Invalid, match=f"/boot/{name} is larger than 1024 MiB"):
        find_boot_files(Tree(root))


# --- deep trees ----------------------------------------------------------------------------------------------------

_DEPTH = 1100
"""Deeper than Python's recursion limit; the path is also longer than Linux allows."""


def make_deep_tree(directory: Path) -> Path:
    directory.mkdir(parents=True)
    descriptor = os.open(directory, os.O_RDONLY)
    for _ in range(_DEPTH):
        os.mkdir("aaaa", dir_fd=descriptor)
        child = os.open("aaaa", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)
    return directory


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """A directory in memory, where the creation of a deep tree takes milliseconds."""
    directory = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(directory)
    subprocess.run(["rm", "-rf", "--", directory], check=True, timeout=60)


def test_the_gateway_starts_despite_a_deep_tree_left_by_a_killed_build(
    memory_directory: Path,
) -> None:
    make_deep_tree(memory_directory / f"{PARTIAL_PREFIX}template")
    make_deep_tree(memory_directory / "template" / f"{PARTIAL_PREFIX}rootfs-1")
    assert len(commit_protocol.sweep(memory_directory)) == 2
    assert [path.name for path in memory_directory.rglob("*")] == ["template"]


@pytest.mark.parametrize(
    "remove",
    [
        lambda path: asyncio.run(rootfs_common.remove_tree_in_thread(path)),
        lambda path: Tree(path.parent).remove(f"/{path.name}"),
        lambda path: (path.rename(commit_protocol.get_partial_directory(path)), commit_protocol.undo(path)),
        commit_protocol.remove,
        commit_protocol.remove_durably,
        lambda path: Identities(path.parent).sweep(()),
    ],
)
def test_a_deep_tree_is_removed_wherever_it_is(memory_directory: Path, remove: Callable[[Path], None]) -> None:
    remove(make_deep_tree(memory_directory / "directory"))
    assert list(memory_directory.iterdir()) == []


def test_a_deep_tree_that_does_not_fit_its_disk_is_measured(memory_directory: Path) -> None:
    assert disk._measure_tree_size_mb(make_deep_tree(memory_directory / "directory")) >= 1


def test_removing_a_tree_follows_no_links_and_reports_remaining_entries(root: Path, tmp_path: Path) -> None:
    (tmp_path / "host/kept").touch()
    for directory in ("a/b/c", "a/b2"):
        (root / directory).mkdir(parents=True)
        (root / directory / "link").symlink_to(tmp_path / "host")
        (root / directory / "file").touch()
    with pytest.raises(NotADirectoryError):
        remove_tree(root / "a/b/c/link")
    subprocess.run(["mount", "--bind", str(tmp_path / "host"), str(root / "a/b")], check=True, timeout=30)
    try:
        with pytest.raises(OSError, match="busy"):
            remove_tree(root)
    finally:
        (mount,) = [path for path in root.rglob("*") if path.is_mount() or path.name == "b"]
        subprocess.run(["umount", str(mount)], check=True, timeout=30)
    assert [path.name for path in root.rglob("*") if path.name in ("b2", "etc", "link")] == ["link"]
    remove_tree(root)
    remove_tree(root)
    assert [path.name for path in tmp_path.iterdir()] == ["host"] and list_host_files(root) == ["kept"]
