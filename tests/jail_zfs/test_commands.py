"""Test commands that are hung in the kernel, as on a ZFS or NFS file system that does not respond."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed
from tests.support.waiting import wait_until
from tests.support.xfs import LoopXfs


@pytest.fixture
def frozen_directory(requires_root: None, tmp_path: Path) -> Iterator[Path]:
    """Create a directory in which every writer hangs and ignores all signals."""
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320) as xfs:
        subprocess.run(["fsfreeze", "--freeze", str(xfs.mount_point)], check=True, timeout=30)
        try:
            yield xfs.mount_point
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(xfs.mount_point)], check=False, timeout=30)


def unfreeze(frozen_directory: Path) -> None:
    """Unfreeze the file system, and wait until the command has exited and the event loop has noticed the exit."""
    subprocess.run(["fsfreeze", "--unfreeze", str(frozen_directory)], check=True, timeout=30)
    wait_until(lambda: not any(path.read_text() for path in Path("/proc/self/task").glob("*/children")))
    time.sleep(0.2)


async def test_an_unkillable_command_is_abandoned(frozen_directory: Path) -> None:
    try:
        with pytest.raises(BackendFailed, match=r"did not finish within 0\.5 s and was killed"):
            await asyncio.wait_for(run_async(["touch", str(frozen_directory / "file")], timeout=0.5), 60)
    finally:
        await asyncio.to_thread(unfreeze, frozen_directory)


async def test_a_cancelled_caller_does_not_wait_for_an_unkillable_command(frozen_directory: Path) -> None:
    task = asyncio.ensure_future(run_async(["touch", str(frozen_directory / "file")], timeout=600))
    await asyncio.sleep(0.5)
    task.cancel()
    completed, _ = await asyncio.wait([task], timeout=60)
    await asyncio.to_thread(unfreeze, frozen_directory)
    assert completed and task.cancelled()
