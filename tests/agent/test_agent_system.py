"""Functions that only the system can carry out. Nothing here changes this machine itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox_agent.machine import system

SOURCE = Path(__file__).parents[2] / "gateway/src"


@pytest.mark.parametrize(("ahead", "set_to"), [(0.01, False), (-0.01, False), (5, True), (-5, True)])
def test_the_clock_is_set_only_if_it_is_wrong(monkeypatch, ahead, set_to):
    settings = []
    monkeypatch.setattr(time, "clock_settime", lambda clock, value: settings.append((clock, value)))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    system.set_clock(1_700_000_000.0 + ahead)
    assert settings == ([(time.CLOCK_REALTIME, 1_700_000_000.0 + ahead)] if set_to else [])


GROW = """
set -e
truncate -s 16M "$1/image"
mkfs.ext4 -q "$1/image"
mkdir "$1/mount"
mount -o loop "$1/image" "$1/mount"
truncate -s 64M "$1/image"
losetup -c "$(findmnt -n -o SOURCE "$1/mount")"
exec "$2" -c '
import os, sys
from sandbox_agent.machine import system
def size():
    found = os.statvfs(sys.argv[1])
    return found.f_blocks * found.f_frsize >> 20
before = size()
system.grow_file_system(sys.argv[1])
assert before < 20 and size() > 50, (before, size())
system.grow_file_system(sys.argv[1])
' "$1/mount"
"""


def test_the_file_system_grows(root, tmp_path):
    """A scratch file system in its own mount namespace; both disappear with the process."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", GROW, "sh", str(tmp_path), sys.executable],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "loop" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"no loop device: {done.stderr}")
    if "Permission denied to resize" in done.stderr:
        pytest.skip("needs CAP_SYS_RESOURCE")
    assert done.returncode == 0, done.stderr
