"""fstat: the processes that have files open on a file system."""

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
def place(shim: Shim, tmp_path: Path) -> Iterator[Path]:
    """A separate file system."""
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(["/usr/bin/mount", "-t", "tmpfs", "own", str(place)], check=True, timeout=30)
    yield place
    subprocess.run(["/usr/bin/umount", "--recursive", str(place)], check=False, timeout=30)


@contextmanager
def process_in(place: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its working directory there."""
    with subprocess.Popen(["sleep", "infinity"], cwd=place, **more) as holder:
        try:
            yield holder
        finally:
            holder.kill()


def test_the_list_of_open_files(shim: Shim, place: Path) -> None:
    assert shim.check_ok("fstat", "-f", str(place)) == f"{HEADER}\n"
    (place / "file").write_text("12345")
    with (place / "file").open("a") as file, process_in(place, stdout=file) as holder:
        own = [line for line in shim.check_ok("fstat", "-f", str(place)).splitlines() if f" {holder.pid} " in line]
    inode = {name: (place / name).stat().st_ino for name in (".", "file")}
    size = place.stat().st_size
    assert own == [
        f"root     sleep      {holder.pid:>5}   wd {place}  {inode['.']:>5} drwxrwxrwt {size:>6}  r",
        f"root     sleep      {holder.pid:>5}    1 {place}  {inode['file']:>5} -rw-r--r--      5  w",
    ]


def test_files_on_a_forcibly_unmounted_file_system_are_dead(shim: Shim, place: Path) -> None:
    with process_in(place):
        shim.check_ok("umount", "-f", str(place))
        assert f" {place} " not in shim.check_ok("fstat", "-f", str(place))


def test_missing_files(shim: Shim, place: Path) -> None:
    shim.check_fails(1, f"fstat: {place}/no: No such file or directory", "fstat", "-f", f"{place}/no")
    done = shim("fstat", "-f", f"{place}/no", str(place))
    assert (done.returncode, done.stdout) == (0, f"{HEADER}\n")


def test_an_unsupported_option_fails(shim: Shim) -> None:
    for options in ((), ("-m", "-f"), ("-p", "1"), ("-n", "-f")):
        assert shim("fstat", *options).returncode == 70
    assert shim("fstat", "-z").returncode == 1
