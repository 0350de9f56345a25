"""The freezer: its system calls, and the automatic thaw."""

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

SOURCE = Path(__file__).parents[2] / "gateway/src"


class System:
    """Stands in for the kernel: the test must not freeze anything on this machine."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.thawed = threading.Event()
        self.frozen = False
        self.refusal = 0

    def ioctl(self, fd: int, request: int, argument: int) -> int:
        self.asked.append(request)
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        if (request == FIFREEZE) == self.frozen:
            raise OSError(errno.EBUSY if self.frozen else errno.EINVAL, "as it is")
        self.frozen = not self.frozen
        if not self.frozen:
            self.thawed.set()
        return 0


@pytest.fixture
def system() -> System:
    return System()


def test_freeze_and_thaw(system, tmp_path):
    freezer = Freezer(str(tmp_path), system.ioctl)
    freezer.freeze(60)
    assert system.frozen
    freezer.thaw()
    freezer.thaw()
    assert not system.frozen and system.asked == [FIFREEZE, FITHAW, FITHAW]


def test_a_frozen_file_system_thaws_after_the_timeout(system, tmp_path):
    Freezer(str(tmp_path), system.ioctl).freeze(0.05)
    assert system.thawed.wait(30)


def test_a_second_freeze_restarts_the_timer(system, tmp_path):
    freezer = Freezer(str(tmp_path), system.ioctl)
    freezer.freeze(0.2)
    freezer.freeze(60)
    assert not system.thawed.wait(0.5)
    assert system.frozen
    freezer.thaw()


def test_a_failed_freeze_leaves_no_timer(system, tmp_path):
    system.refusal = errno.EOPNOTSUPP
    with pytest.raises(OSError):
        Freezer(str(tmp_path), system.ioctl).freeze(0.05)
    assert not system.thawed.wait(0.2)
    assert system.asked == [FIFREEZE]


SCRIPT = """
set -e
truncate -s 16M "$1/image"
mkfs.ext4 -q "$1/image"
mkdir "$1/mount"
mount -o loop "$1/image" "$1/mount"
exec "$2" -c '
import sys, time
from sandbox_agent.machine.freezer import Freezer
path = sys.argv[1]
def write():
    started = time.monotonic()
    open(path + "/file", "w").close()
    return time.monotonic() - started
freezer = Freezer(path)
freezer.freeze(1.0)
waited = write()
assert 0.5 < waited < 20, waited
freezer.freeze(30)
freezer.freeze(30)
freezer.thaw()
assert write() < 5
' "$1/mount"
"""


def test_a_real_file_system(root, tmp_path):
    """A scratch file system in its own mount namespace; both disappear with the process."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh", str(tmp_path), sys.executable],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "loop" in done.stderr:
        pytest.skip(f"no loop device: {done.stderr}")
    assert done.returncode == 0, done.stderr
