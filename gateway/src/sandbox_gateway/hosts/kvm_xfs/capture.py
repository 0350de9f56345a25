"""Capture a running machine, which is stopped only for the steps that require it.

A large dirty set is copied in rounds while the machine runs, so that little remains to be copied during the last stop.
I/O that is in flight when pages are listed writes to these pages without marking them. Stopping the machine waits until
such I/O has finished. Therefore each round stops the machine after listing the pages and before copying them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import ImageCheck
from sandbox_gateway.hosts.kvm_xfs.memory.page_runs import Runs, count_bytes
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Ram
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import WriteTracking
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import MemoryMode

MAX_SINGLE_STOP_BYTES = 16 << 20
"""Larger dirty sets are copied in rounds before the last stop."""
_MAX_ROUNDS = 12
_MAX_DIRTY_RATIO = 0.8
"""Start another round only if less than this fraction of the bytes that the last round copied is dirty again."""
_MAX_INLINE_BYTES = 16 << 20
"""Copy at most this many bytes on the thread of the event loop."""


class Capture:
    """Performs one capture of ``machine`` into the files ``partial``, whose directory it creates.

    The files are not synced to the device. The machine keeps running, even if the capture fails. Without ``tracking``,
    which keeps track of the machine's writes, the memory is not captured.
    """

    def __init__(
        self, machine: Machine, files: InstanceFiles, partial: SnapshotFiles, tracking: WriteTracking | None
    ) -> None:
        self._machine = machine
        self._files = files
        self._partial = partial
        self._tracking = tracking
        self._stack = contextlib.ExitStack()
        self._round_count = 0
        self.mode = MemoryMode.NONE
        self.memory_bytes = 0
        self.image_check: ImageCheck | None = None
        self.stops_ms: list[float] = []
        """The duration of each stop of the machine, in milliseconds."""
        self.phases_ms: dict[str, float] = {}
        """The durations of the steps of the last stop, in milliseconds."""

    @property
    def pause_ms(self) -> float:
        return round(sum(self.stops_ms), 3)

    async def run(self, concurrent_step: Callable[[], Awaitable[None]] | None = None) -> None:
        """Capture the machine. ``concurrent_step`` runs during the last stop, before the machine resumes."""
        with self._stack:
            await self._machine.connect()
            await asyncio.to_thread(self._prepare)
            if self._tracking is None:
                await self._capture_while_stopped(None, concurrent_step)
                return
            if self._dirty_bytes > MAX_SINGLE_STOP_BYTES and self._tracking.has_marks:
                await self._copy_in_rounds(self._tracking)
            await asyncio.to_thread(self._copier.reserve, self._dirty_bytes * 5 // 4 + (1 << 20))
            async with self._machine.added_fd(self._state) as state:
                await self._capture_while_stopped(state, concurrent_step)
            await asyncio.to_thread(self._complete_image, self._tracking)

    def _prepare(self) -> None:
        """Do the slow steps in advance: clone the memory image, flush the disk, and open descriptors."""
        self._partial.directory.mkdir(mode=0o700)
        self._partial.kernel.hardlink_to(self._files.kernel)
        self._partial.initrd.hardlink_to(self._files.initrd)
        self._disk = self._open(self._files.disk, os.O_RDONLY)
        self._target = self._open(self._partial.disk, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fsync(self._disk)
        if self._tracking is not None:
            self._prepare_memory(self._tracking)

    def _prepare_memory(self, tracking: WriteTracking) -> None:
        self._ram = Ram(self._machine.pid, self._files.memory)
        self._dirty_bytes = count_bytes(tracking.begin(self._ram))
        self.mode = tracking.mode
        image, base = self._partial.memory, None
        if tracking.base is None:
            self._image = self._open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.truncate(self._image, self._files.memory.stat().st_size)
        else:
            reflink.clone_or_copy(tracking.base, image)
            self._image = self._open(image, os.O_WRONLY)
            base = self._open(tracking.base, os.O_RDONLY)
        self._state = self._open(self._partial.device_state, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._copier = Copier(self._ram, self._image, base)

    async def _copy_in_rounds(self, tracking: WriteTracking) -> None:
        """Copy written pages while the machine runs, until few remain or rounds no longer reduce their number."""
        self.mode = MemoryMode.LIVE
        while self._round_count < _MAX_ROUNDS:
            runs = await self._take_pages(tracking)
            copied_bytes = count_bytes(runs)
            self._dirty_bytes = await asyncio.to_thread(self._copy_round, runs, tracking)
            if not MAX_SINGLE_STOP_BYTES < self._dirty_bytes < copied_bytes * _MAX_DIRTY_RATIO:
                break

    def _copy_round(self, runs: Runs, tracking: WriteTracking) -> int:
        """Copy pages, and return the size in bytes of the pages that the machine has written since they were listed."""
        self._copier.copy(runs)
        # Flush now, because the reflink in the last stop waits until all data has been written.
        os.fdatasync(self._image)
        os.fsync(self._disk)
        return count_bytes(tracking.list_pages_since_last_take(self._ram))

    async def _take_pages(self, tracking: WriteTracking) -> Runs:
        only_new, self._round_count = self._round_count > 0, self._round_count + 1
        if tracking.can_take_marks_while_running:
            runs = await asyncio.to_thread(tracking.take, self._ram, only_new=only_new)
            async with self._stopped():
                return runs
        async with self._stopped():
            return await asyncio.to_thread(tracking.take, self._ram, only_new=only_new)

    async def _capture_while_stopped(
        self, state: str | None, concurrent_step: Callable[[], Awaitable[None]] | None
    ) -> None:
        async with self._stopped() as record_step:
            async with _running_concurrently(concurrent_step):
                if state is not None:
                    await self._machine.save_devices(state)
                    record_step("devices")
                reflink.clone_fd(self._disk, self._target)
                record_step("disk")
                if self._tracking is not None:
                    await self._buffer_pages(self._tracking)
                    record_step("pages")
            if concurrent_step is not None:
                record_step("volumes")

    async def _buffer_pages(self, tracking: WriteTracking) -> None:
        runs = tracking.take(self._ram, only_new=self._round_count > 0)
        # Switching to a thread costs more than copying a few pages; copying many would block the event loop.
        if count_bytes(runs) <= _MAX_INLINE_BYTES:
            self._copier.buffer(runs)
        else:
            await asyncio.to_thread(self._copier.buffer, runs)

    def _complete_image(self, tracking: WriteTracking) -> None:
        self._copier.write_buffered()
        self.memory_bytes = self._copier.written_bytes
        self.image_check = tracking.complete(self._partial.memory, self._partial.memory_directory)

    @contextlib.asynccontextmanager
    async def _stopped(self) -> AsyncIterator[Callable[[str], None]]:
        """Stop the machine inside this context. Yields a function that records when a named step ends."""
        times = [("", time.perf_counter())]

        def record_step(name: str) -> None:
            times.append((name, time.perf_counter()))

        await self._machine.stop()
        try:
            record_step("stop")
            yield record_step
        finally:
            await self._machine.cont()
            record_step("continue")
            self.stops_ms.append(round((times[-1][1] - times[0][1]) * 1000, 3))
            steps = itertools.pairwise(times)
            self.phases_ms = {name: round((end - start) * 1000, 3) for (_, start), (name, end) in steps}

    def _open(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, descriptor)
        return descriptor


@contextlib.asynccontextmanager
async def _running_concurrently(work: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Run ``work`` concurrently with this context, and wait until it has finished, even on failure."""
    if work is None:
        yield
        return
    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)  # Let it start now instead of at the first wait inside the context.
    try:
        yield
    except BaseException:
        await asyncio.gather(task, return_exceptions=True)
        raise
    await task
