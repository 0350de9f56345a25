"""Test fstat, which lists the processes that have files open on a file system."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.freebsd_shim.harness import Shim

HEADER = "USER     CMD          PID   FD MOUNT      INUM MODE         SZ|DV R/W"


@pytest.fixture
def mount_point(shim: Shim, tmp_path: Path) -> Iterator[Path]:
    """Mount a separate file system."""
    mount_point = tmp_path / "place"
    mount_point.mkdir()
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "own", str(mount_point)], check=True, timeout=30)
    yield mount_point
    subprocess.run(["/usr/bin/umount", "--recursive", str(mount_point)], check=False, timeout=30)


@contextmanager
def running_process(mount_point: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process whose working directory is the root of the file system."""
    with subprocess.Popen(["sleep", "infinity"], cwd=mount_point, **options) as holder:
        try:
            yield holder
        finally:
            holder.kill()


def test_open_files_are_listed(shim: Shim, mount_point: Path) -> None:
    assert shim.check_ok("fstat", "-f", str(mount_point)) == f"{HEADER}\n"
    (mount_point / "file").write_text("12345")
    with (mount_point / "file").open("a") as file, running_process(mount_point, stdout=file) as holder:
        lines = [
            line for line in shim.check_ok("fstat", "-f", str(mount_point)).splitlines() if f" {holder.pid} " in line
        ]
    inodes = {name: (mount_point / name).stat().st_ino for name in (".", "file")}
    size = mount_point.stat().st_size
    assert lines == [
        f"root     sleep      {holder.pid:>5}   wd {mount_point}  {inodes['.']:>5} drwxrwxrwt {size:>6}  r",
        f"root     sleep      {holder.pid:>5}    1 {mount_point}  {inodes['file']:>5} -rw-r--r--      5  w",
    ]


def test_files_on_a_forcibly_unmounted_file_system_are_not_listed(shim: Shim, mount_point: Path) -> None:
    with running_process(mount_point):
        shim.check_ok("umount", "-f", str(mount_point))
        assert f" {mount_point} " not in shim.check_ok("fstat", "-f", str(mount_point))


def test_missing_files_are_reported(shim: Shim, mount_point: Path) -> None:
    shim.expect_failure(1, f"fstat: {mount_point}/no: No such file or directory", "fstat", "-f", f"{mount_point}/no")
    result = shim("fstat", "-f", f"{mount_point}/no", str(mount_point))
    assert (result.returncode, result.stdout) == (0, f"{HEADER}\n")


def test_an_unsupported_option_fails(shim: Shim) -> None:
    for options in ((), ("-m", "-f"), ("-p", "1"), ("-n", "-f")):
        assert shim("fstat", *options).returncode == 70
    assert shim("fstat", "-z").returncode == 1
