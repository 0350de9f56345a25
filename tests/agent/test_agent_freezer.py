"""The freezer makes the right system calls, and thaws the file system automatically."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandbox_agent.machine.freezer import Freezer
from sandbox_agent.machine.system import FIFREEZE, FITHAW

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src"


class FakeKernel:
    """A replacement for the kernel, because the tests must not freeze file systems of this machine."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.thaw_event = threading.Event()
        self.is_frozen = False
        self.error_number = 0

    def ioctl(self, fd: int, request: int, argument: int) -> int:
        self.requests.append(request)
        if self.error_number:
            raise OSError(self.error_number, os.strerror(self.error_number))
        if (request == FIFREEZE) == self.is_frozen:
            raise OSError(errno.EBUSY if self.is_frozen else errno.EINVAL, "already in this state")
        self.is_frozen = not self.is_frozen
        if not self.is_frozen:
            self.thaw_event.set()
        return 0


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


def test_freeze_and_thaw_call_the_kernel(kernel, tmp_path):
    freezer = Freezer(str(tmp_path), kernel.ioctl)
    freezer.freeze(60)
    assert kernel.is_frozen
    freezer.thaw()
    freezer.thaw()
    assert not kernel.is_frozen and kernel.requests == [FIFREEZE, FITHAW, FITHAW]


def test_a_frozen_file_system_thaws_after_the_timeout(kernel, tmp_path):
    Freezer(str(tmp_path), kernel.ioctl).freeze(0.05)
    assert kernel.thaw_event.wait(30)


def test_a_second_freeze_restarts_the_timer(kernel, tmp_path):
    freezer = Freezer(str(tmp_path), kernel.ioctl)
    freezer.freeze(0.2)
    freezer.freeze(60)
    assert not kernel.thaw_event.wait(0.5)
    assert kernel.is_frozen
    freezer.thaw()


def test_a_failed_freeze_leaves_no_timer(kernel, tmp_path):
    kernel.error_number = errno.EOPNOTSUPP
    with pytest.raises(OSError):
        Freezer(str(tmp_path), kernel.ioctl).freeze(0.05)
    assert not kernel.thaw_event.wait(0.2)
    assert kernel.requests == [FIFREEZE]


FREEZE_SCRIPT = """
set -e
truncate -s 16M "$1/image"
mkfs.ext4 -q "$1/image"
mkdir "$1/mount"
mount -o loop "$1/image" "$1/mount"
exec "$2" -c '
import sys, time
from sandbox_agent.machine.freezer import Freezer
path = sys.argv[1]
def measure_write():
    start_time = time.monotonic()
    open(path + "/file", "w").close()
    return time.monotonic() - start_time
freezer = Freezer(path)
freezer.freeze(1.0)
seconds = measure_write()
assert 0.5 < seconds < 20, seconds
freezer.freeze(30)
freezer.freeze(30)
freezer.thaw()
assert measure_write() < 5
' "$1/mount"
"""


def test_a_real_file_system_freezes_and_thaws(requires_root, tmp_path):
    """The file system is in a new mount namespace. Both disappear when the process exits."""
    result = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            FREEZE_SCRIPT,
            "sh",
            str(tmp_path),
            sys.executable,
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "loop" in result.stderr:
        pytest.skip(f"no loop device: {result.stderr}")
    assert result.returncode == 0, result.stderr
