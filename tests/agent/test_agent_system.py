"""Functions that change the system. The tests change only namespaces and scratch files, not this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox_agent.machine import system

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src"


@pytest.mark.parametrize(("offset", "is_set"), [(0.01, False), (-0.01, False), (5, True), (-5, True)])
def test_the_clock_is_set_only_if_it_is_wrong(monkeypatch, offset, is_set):
    settime_calls = []
    monkeypatch.setattr(time, "clock_settime", lambda clock, value: settime_calls.append((clock, value)))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    system.set_clock(1_700_000_000.0 + offset)
    assert settime_calls == ([(time.CLOCK_REALTIME, 1_700_000_000.0 + offset)] if is_set else [])


GROW_SCRIPT = """
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
def size_mb():
    status = os.statvfs(sys.argv[1])
    return status.f_blocks * status.f_frsize >> 20
size_before = size_mb()
system.grow_file_system(sys.argv[1])
assert size_before < 20 and size_mb() > 50, (size_before, size_mb())
system.grow_file_system(sys.argv[1])
' "$1/mount"
"""


def test_the_file_system_grows_with_its_device(requires_root, tmp_path):
    """The file system is in a new mount namespace. Both disappear when the process exits."""
    result = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            GROW_SCRIPT,
            "sh",
            str(tmp_path),
            sys.executable,
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "loop" in result.stderr and "Traceback" not in result.stderr:
        pytest.skip(f"no loop device: {result.stderr}")
    if "Permission denied to resize" in result.stderr:
        pytest.skip("needs CAP_SYS_RESOURCE")
    assert result.returncode == 0, result.stderr
