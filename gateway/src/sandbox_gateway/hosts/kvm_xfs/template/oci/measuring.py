"""Measure a directory while a program writes to it, and stop the program if it writes too much."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TypeVar

from sandbox_gateway.command import run_async

_INTERVAL_SECONDS = 0.5
_MAX_MEASURING_SHARE = 0.2
"""The largest share of the time that measuring may take, because it uses the same disk as the program."""
_MEASURE_TIMEOUT_SECONDS = 600
_Result = TypeVar("_Result")


async def run_measured(program: Coroutine[None, None, _Result], check: Callable[[], Awaitable[None]]) -> _Result:
    """Run a program, and call ``check`` regularly and at the end. If ``check`` raises an error, cancel the program."""
    task = asyncio.ensure_future(program)
    interval_seconds = _INTERVAL_SECONDS
    try:
        while not task.done():
            await asyncio.wait([task], timeout=interval_seconds)
            start_time = time.monotonic()
            await check()
            interval_seconds = max(_INTERVAL_SECONDS, (time.monotonic() - start_time) / _MAX_MEASURING_SHARE)
        return await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def measure_file_sizes(directory: Path) -> int:
    """Return the sum of the sizes of all files, in bytes."""
    return await _run_du(directory, "--apparent-size", "--block-size=1")


async def measure_disk_usage(directory: Path) -> int:
    """Return how many bytes the files need on the disk."""
    return await _run_du(directory, "--block-size=1")


async def count_inodes(directory: Path) -> int:
    return await _run_du(directory, "--inodes")


async def _run_du(directory: Path, *options: str) -> int:
    # du, unlike os.walk, can read trees of any depth. It complains about files that are removed while it runs.
    argv = ["du", "--summarize", "--one-file-system", *options, "--", str(directory)]
    result = await run_async(argv, timeout=_MEASURE_TIMEOUT_SECONDS, check=False)
    return int(result.stdout.split(maxsplit=1)[0]) if result.stdout else 0
