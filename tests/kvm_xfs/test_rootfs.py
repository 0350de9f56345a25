"""Test building root file systems from Debian packages and from minimal trees that these tests create."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import subprocess
from pathlib import Path

import pytest

from sandbox_gateway.errors import BackendFailed, GatewayError, Invalid, NoSpace
from sandbox_gateway.hosts import rootfs_common
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS, GUEST_ADDRESS
from sandbox_gateway.hosts.kvm_xfs.template.apt import read_host_sources
from sandbox_gateway.hosts.kvm_xfs.template.build import build_rootfs
from sandbox_gateway.hosts.rootfs_common import Tree
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Resources
from tests.kvm_xfs.conftest import BuiltRootfs, build
from tests.support.xfs import LoopXfs

pytestmark = pytest.mark.usefixtures("requires_root")


def read_file(rootfs: BuiltRootfs, path: str) -> str:
    return _run_debugfs(rootfs, f"cat {path}")


def stat_file(rootfs: BuiltRootfs, path: str) -> str:
    """Return debugfs's output for a path, or "" if the path does not exist."""
    output = _run_debugfs(rootfs, f"stat {path}")
    return output if "Inode:" in output else ""


def _run_debugfs(rootfs: BuiltRootfs, command: str) -> str:
    argv = ["debugfs", "-R", command, str(rootfs.image)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout


def create_recipe(path: Path, disk_mb: int = 64) -> Recipe:
    return Recipe(source=Source.ROOTFS, path=str(path), resources=Resources(disk_mb=disk_mb))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A minimal tree. It has every file that a build requires, but its programs cannot run."""
    root = tmp_path / "tree"
    for directory in ("usr/bin", "usr/sbin", "usr/lib/systemd", "boot", "etc/skel", "dev", "home", "root"):
        (root / directory).mkdir(parents=True)
    for link, target in (("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib")):
        (root / link).symlink_to(target)
    (root / "usr/lib/systemd/systemd").write_text("systemd")
    (root / "usr/sbin/init").symlink_to("/lib/systemd/systemd")
    (root / "usr/bin/python3.11").write_text("python")
    (root / "usr/bin/python3").symlink_to("python3.11")
    (root / "usr/bin/ip").write_text("ip")
    for version in ("6.1.0-9-cloud", "6.1.0-10-cloud"):
        (root / f"boot/vmlinuz-{version}").write_text(f"kernel {version}")
        (root / f"boot/initrd.img-{version}").write_text(f"initrd {version}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/shadow").write_text("root:*:1:0:99999:7:::\n")
    return root


# --- Debian ----------------------------------------------------------------------------------------------------


def test_debian_contains_everything_a_sandbox_needs(debian_rootfs: BuiltRootfs) -> None:
    assert debian_rootfs.kernel.read_bytes()[0x202:0x206] == b"HdrS"
    assert debian_rootfs.initrd.stat().st_size < 1 << 20
    initrd = gzip.decompress(debian_rootfs.initrd.read_bytes())
    assert b"/virtio_blk.ko" in initrd and b"bin/run-init\0" in initrd
    assert b"bin/kmod\0" not in initrd and b"bin/udevadm\0" not in initrd
    assert stat_file(debian_rootfs, "/opt/sandbox_agent/__main__.py")
    assert "cpython-3" in _run_debugfs(debian_rootfs, "ls /opt/sandbox_agent/__pycache__")
    unit_link_stat = stat_file(debian_rootfs, "/etc/systemd/system/multi-user.target.wants/sandbox-agent.service")
    assert "/etc/systemd/system/sandbox-agent.service" in unit_link_stat
    assert GUEST_ADDRESS in read_file(debian_rootfs, "/usr/local/lib/sandbox/network")
    assert GATEWAY_ADDRESS in read_file(debian_rootfs, "/usr/local/lib/sandbox/network")
    assert "user:x:1000:1000::/home/user:/bin/bash" in read_file(debian_rootfs, "/etc/passwd")
    assert "NOPASSWD" in read_file(debian_rootfs, "/etc/sudoers.d/sandbox")
    assert re.search(r"User:\s+1000 ", stat_file(debian_rootfs, "/home/user/.profile"))
    assert "Type: regular" in stat_file(debian_rootfs, "/etc/resolv.conf")
    assert re.fullmatch(r"[0-9a-f]{32}\n", read_file(debian_rootfs, "/etc/machine-id"))
    assert read_file(debian_rootfs, "/etc/hostname") == "sandbox\n"
    assert "/dev/null" in stat_file(debian_rootfs, "/etc/systemd/system/apt-daily.timer")
    assert "Storage=volatile" in read_file(debian_rootfs, "/etc/systemd/journald.conf.d/sandbox.conf")
    assert not stat_file(debian_rootfs, "/dev/console")


def test_debian_image_is_clean_sparse_and_fully_initialised(debian_rootfs: BuiltRootfs) -> None:
    subprocess.run(["e2fsck", "-fn", str(debian_rootfs.image)], check=True, capture_output=True, timeout=60)
    status = debian_rootfs.image.stat()
    assert status.st_size == 2048 << 20
    assert status.st_blocks * 512 < 700 << 20
    dumpe2fs_output = subprocess.run(
        ["dumpe2fs", str(debian_rootfs.image)], capture_output=True, text=True, check=True
    ).stdout
    assert all("ITABLE_ZEROED" in line for line in dumpe2fs_output.splitlines() if re.match(r"Group \d", line))


def test_a_build_leaves_only_its_three_files(debian_rootfs: BuiltRootfs) -> None:
    assert {path.name for path in debian_rootfs.image.parent.iterdir()} == {"rootfs.img", "kernel", "initrd"}


def test_a_second_debian_build_downloads_nothing(debian_rootfs: BuiltRootfs, tmp_path: Path) -> None:
    from tests.support import session

    second_build = build(Recipe(), tmp_path, session.get_cache_dir())
    assert second_build.log_lines[0].startswith("using the cached root file system")
    assert read_file(second_build, "/etc/machine-id") != read_file(debian_rootfs, "/etc/machine-id")


def test_build_failure_contains_the_errors_of_apt() -> None:
    log_tail = ["I: installing", "Reading package lists...", "E: Unable to locate package nonesuch", "W: later"]
    error = rootfs_common._create_step_error(["unshare", "mmdebstrap"], 25, log_tail)
    assert str(error) == "mmdebstrap failed (25): E: Unable to locate package nonesuch"


def test_an_invalid_mirror_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="use a URI"):
        build(Recipe(mirror="--setup-hook=reboot"), tmp_path)
    with pytest.raises(BackendFailed, match="mmdebstrap failed"):
        build(Recipe(mirror="http://127.0.0.1:9/debian"), tmp_path)


@pytest.mark.parametrize("delay", [0.5, 4])
async def test_a_cancelled_build_leaves_no_process_mount_or_file(tmp_path: Path, delay: float) -> None:
    output_paths = (tmp_path / name for name in ("rootfs.img", "kernel", "initrd"))
    directories = {"cache_root": tmp_path / "cache", "work_directory": tmp_path / "work"}
    task = asyncio.ensure_future(
        build_rootfs(Recipe(packages=["cpp"]), *output_paths, **directories, log=lambda line: None)
    )
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list_leftovers(tmp_path) == []


def list_leftovers(directory: Path) -> list[str]:
    """Return the files, mounts and processes that remain after a build."""
    files = [path.name for path in directory.iterdir() if path.name != "cache"]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(directory) in line]
    pgrep = subprocess.run(["pgrep", "-f", str(directory)], capture_output=True, text=True, check=False)
    return [*files, *mounts, *pgrep.stdout.split()]


# --- foreign trees -----------------------------------------------------------------------------------------------


def test_a_directory_becomes_an_image_and_stays_unchanged(tree: Path, tmp_path: Path) -> None:
    paths_before = sorted(str(path) for path in tree.rglob("*"))
    rootfs = build(create_recipe(tree), tmp_path)
    assert rootfs.kernel.read_text() == "kernel 6.1.0-10-cloud", "the build did not choose the newest kernel"
    assert rootfs.initrd.read_text() == "initrd 6.1.0-10-cloud"
    assert read_file(rootfs, "/usr/bin/python3.11") == "python"
    assert stat_file(rootfs, "/opt/sandbox_agent/__main__.py")
    assert "user:x:1000:1000::/home/user:/bin/sh" in read_file(rootfs, "/etc/passwd")
    assert not stat_file(rootfs, "/etc/sudoers.d/sandbox"), "a sudo rule was created, although sudo is missing"
    assert sorted(str(path) for path in tree.rglob("*")) == paths_before


@pytest.mark.parametrize(
    ("suffix", "options"), [(".tar", []), (".tar.gz", ["-z"]), (".tar.xz", ["-J"]), (".tar.zst", ["--zstd"])]
)
@pytest.mark.parametrize("member_pattern", [".", "*"])
def test_tarballs_with_any_compression_are_accepted(
    tree: Path, tmp_path: Path, suffix: str, options: list[str], member_pattern: str
) -> None:
    os.chown(tree / "home", 1234, 1235)
    os.mknod(tree / "dev/zero", 0o600 | 0o020000, os.makedev(1, 5))
    tarball = tmp_path / f"tree{suffix}"
    member_names = [member_pattern] if member_pattern == "." else sorted(path.name for path in tree.iterdir())
    subprocess.run(["tar", *options, "-C", str(tree), "-cf", str(tarball), *member_names], check=True, timeout=60)
    rootfs = build(create_recipe(tarball), tmp_path)
    assert read_file(rootfs, "/usr/bin/python3.11") == "python"
    assert re.search(r"User:\s+1234 +Group:\s+1235", stat_file(rootfs, "/home"))
    assert not stat_file(rootfs, "/dev/zero")


ERRORS_FOR_MISSING_FILES = {
    "usr/bin/python3": "has no /usr/bin/python3: install Python 3.9",
    "usr/sbin/init": "has no /sbin/init: install systemd",
    "usr/bin/ip": "has no 'ip' command: install iproute2",
    "boot/vmlinuz-*": "has no /boot/vmlinuz-",
    "boot/initrd.img-*": r"has kernel 6.1.0-\d+-cloud but no /boot/initrd.img-6.1.0-\d+-cloud",
}


@pytest.mark.parametrize("pattern", ERRORS_FOR_MISSING_FILES)
def test_missing_files_of_a_tree_are_reported(tree: Path, tmp_path: Path, pattern: str) -> None:
    for path in tree.glob(pattern):
        path.unlink()
    with pytest.raises(Invalid, match=ERRORS_FOR_MISSING_FILES[pattern]):
        build(create_recipe(tree), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tree"}


def test_trees_with_a_different_init_or_an_old_python_are_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "usr/bin/python3").unlink()
    (tree / "usr/bin/python3").symlink_to("python3.11")
    (tree / "usr/bin/python3.11").rename(tree / "usr/bin/python3.8")
    (tree / "usr/bin/python3").unlink()
    (tree / "usr/bin/python3").symlink_to("python3.8")
    with pytest.raises(Invalid, match=r"is 3.8: install Python 3.9"):
        build(create_recipe(tree), tmp_path)
    (tree / "usr/bin/busybox").write_text("")
    (tree / "usr/sbin/init").unlink()
    (tree / "usr/sbin/init").symlink_to("../bin/busybox")
    with pytest.raises(Invalid, match="is busybox, but systemd must start the agent: install systemd"):
        build(create_recipe(tree), tmp_path)


def test_a_missing_path_and_an_invalid_tarball_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="does not exist"):
        build(create_recipe(tmp_path / "nothing"), tmp_path)
    (tmp_path / "text").write_text("not a tarball" * 100)
    with pytest.raises(BackendFailed, match="tar failed"):
        build(create_recipe(tmp_path / "text"), tmp_path)


def test_a_tree_that_contains_the_gateways_state_is_not_copied_into_itself(tree: Path) -> None:
    with pytest.raises(Invalid, match="contains the gateway's own state"):
        build(create_recipe(tree), tree)


def test_links_in_a_hostile_tree_cannot_lead_outside(tree: Path, tmp_path: Path) -> None:
    outside_directory = tmp_path / "outside"
    outside_directory.mkdir()
    for name in ("passwd", "resolv.conf", "hostname"):
        (outside_directory / name).write_text("unchanged")
    (tree / "etc/passwd").unlink()
    (tree / "etc/passwd").symlink_to(outside_directory / "passwd")
    (tree / "etc/resolv.conf").symlink_to(outside_directory / "resolv.conf")
    (tree / "etc/hostname").symlink_to("../" * 20 + str(outside_directory / "hostname"))
    (tree / "etc/systemd").symlink_to(outside_directory)
    (tree / "opt").symlink_to("../" * 20 + str(outside_directory))
    (tree / "boot/vmlinuz-9.9").symlink_to("/etc/hostname")
    (tree / "boot/initrd.img-9.9").symlink_to(outside_directory / "hostname")
    rootfs = build(create_recipe(tree), tmp_path)
    assert sorted(path.name for path in outside_directory.iterdir()) == ["hostname", "passwd", "resolv.conf"]
    assert all(path.read_text() == "unchanged" for path in outside_directory.iterdir())
    assert rootfs.kernel.read_text() == "kernel 6.1.0-10-cloud"


def test_a_hostile_tarball_cannot_write_outside_the_tree(tree: Path, tmp_path: Path) -> None:
    outside_directory = tmp_path / "outside"
    outside_directory.mkdir()
    extra_tree = tmp_path / "extra"
    (extra_tree / "way").mkdir(parents=True)
    (extra_tree / "way/in").write_text("evil")
    link_tree = tmp_path / "link"
    link_tree.mkdir()
    (link_tree / "way").symlink_to(outside_directory)
    tarball = tmp_path / "evil.tar"
    subprocess.run(["tar", "-C", str(tree), "-cf", str(tarball), "."], check=True)
    subprocess.run(["tar", "-C", str(link_tree), "-rf", str(tarball), "way"], check=True)
    subprocess.run(["tar", "-C", str(extra_tree), "-rf", str(tarball), "way/in"], check=True)
    subprocess.run(
        [
            "tar",
            "-P",
            "-C",
            str(extra_tree),
            "--transform",
            f"s,^way/in,{outside_directory}/absolute,",
            "-rf",
            str(tarball),
            "way/in",
        ],
        check=True,
    )
    with contextlib.suppress(GatewayError):
        build(create_recipe(tarball), tmp_path)
    assert list(outside_directory.iterdir()) == []


def test_a_tree_that_exceeds_its_disk_is_refused_with_the_required_size(tree: Path, tmp_path: Path) -> None:
    (tree / "usr/large").write_bytes(os.urandom(80 << 20))
    with pytest.raises(
        Invalid, match=r"\(\d\d MiB\) does not fit on a disk of 64 MiB: set 'diskSizeMB' to (\d+) or more"
    ):
        build(create_recipe(tree), tmp_path)
    with pytest.raises(Invalid) as error_info:
        build(create_recipe(tree), tmp_path)
    match = re.search(r"set 'diskSizeMB' to (\d+)", error_info.value.message)
    assert match
    build(create_recipe(tree, int(match[1])), tmp_path)


def test_a_build_on_a_full_disk_fails_and_leaves_no_files(tree: Path, tmp_path: Path) -> None:
    with LoopXfs(tmp_path / "small.xfs", tmp_path / "small", size_mb=320) as small_xfs:
        (tree / "usr/large").write_bytes(os.urandom(300 << 20))
        with pytest.raises(NoSpace, match="disk is full"):
            build(create_recipe(tree, 1024), small_xfs.mount_point)
        assert not list(small_xfs.mount_point.iterdir())


def test_an_existing_user_of_the_tree_stays_unchanged(tree: Path, tmp_path: Path) -> None:
    (tree / "etc/passwd").write_text("user:x:77:77::/srv:/bin/sh")
    rootfs = build(create_recipe(tree), tmp_path)
    assert read_file(rootfs, "/etc/passwd") == "user:x:77:77::/srv:/bin/sh"
    (tree / "etc/passwd").write_text("debian:x:1000:1000::/home/debian:/bin/sh")
    assert (
        read_file(build(create_recipe(tree), tmp_path), "/etc/passwd").splitlines()[1]
        == "user:x:1001:1001::/home/user:/bin/sh"
    )


# --- paths and sources -----------------------------------------------------------------------------------------


def test_paths_resolve_as_in_the_guest(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to("/a/b")
    (tmp_path / "a/up").symlink_to("../../../../a")
    (tmp_path / "loop").symlink_to("loop")
    tree = Tree(tmp_path)
    assert tree.resolve("/absolute/x") == tmp_path / "a/b/x"
    assert tree.resolve("/a/up/b/../../../../etc") == tmp_path / "etc"
    assert tree.resolve("/absolute", follow=False) == tmp_path / "absolute"
    with pytest.raises(Invalid, match="loop"):
        tree.resolve("/loop/x")


def test_host_sources_returns_only_main_sources_of_the_suite(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://commented.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://list.example/debian bookworm main contrib # why\n"
        "deb-src http://source.example/debian bookworm main\n"
        "deb http://list.example/debian trixie main\n"
        "deb http://vendor.example/apt bookworm stable\n"
    )
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "types: deb deb-src\nURIs: http://deb822.example/debian\nSuites: bookworm-updates bookworm-backports\n"
        "# a comment\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"
    )
    (tmp_path / "sources.list.d/old.list.save").write_text("deb http://saved.example/debian bookworm main\n")
    sources = read_host_sources("bookworm", tmp_path)
    assert re.findall(r"http://(\w+)", sources) == ["list", "deb822"]
    assert "Suites: bookworm-updates\n" in sources
    assert "Signed-By: /k.gpg" in sources
    assert " -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n" in sources
    assert "commented" not in sources
    assert read_host_sources("sid", tmp_path) == ""
    assert read_host_sources("bookworm", tmp_path / "nowhere") == ""


def test_run_logged_passes_each_line_to_the_log(tmp_path: Path) -> None:
    async def collect_lines() -> list[str]:
        lines: list[str] = []
        await rootfs_common.run_logged(["sh", "-c", "printf 'a\\rb\\n\\nc'; printf d >&2"], lines.append)
        with pytest.raises(BackendFailed, match=r"did not finish within 0\.2 s"):
            await rootfs_common.run_logged(["sleep", "30"], lines.append, timeout=0.2)
        return lines

    assert asyncio.run(collect_lines()) == ["a", "b", "cd"]
