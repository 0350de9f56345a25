"""Commands that hang in the kernel, as on a ZFS or NFS that does not answer."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed
from tests.support.waiting import eventually
from tests.support.xfs import LoopXfs


@pytest.fixture
def frozen(need_root: None, tmp_path: Path) -> Iterator[Path]:
    """A directory in which every writer hangs and ignores all signals."""
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320) as xfs:
        subprocess.run(["fsfreeze", "--freeze", str(xfs.mount_point)], check=True, timeout=30)
        try:
            yield xfs.mount_point
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(xfs.mount_point)], check=False, timeout=30)


def thaw(frozen: Path) -> None:
    """Return when the command has ended and its event loop has had time to notice."""
    subprocess.run(["fsfreeze", "--unfreeze", str(frozen)], check=True, timeout=30)
    eventually(lambda: not any(path.read_text() for path in Path("/proc/self/task").glob("*/children")))
    time.sleep(0.2)


async def test_an_unkillable_command_is_abandoned(frozen: Path) -> None:
    try:
        with pytest.raises(BackendFailed, match=r"did not end within 0\.5 s and was stopped"):
            await asyncio.wait_for(run_async(["touch", str(frozen / "file")], timeout=0.5), 60)
    finally:
        await asyncio.to_thread(thaw, frozen)


async def test_a_cancelled_caller_does_not_wait_for_an_unkillable_command(frozen: Path) -> None:
    work = asyncio.ensure_future(run_async(["touch", str(frozen / "file")], timeout=600))
    await asyncio.sleep(0.5)
    work.cancel()
    done, _ = await asyncio.wait([work], timeout=60)
    await asyncio.to_thread(thaw, frozen)
    assert done and work.cancelled()
