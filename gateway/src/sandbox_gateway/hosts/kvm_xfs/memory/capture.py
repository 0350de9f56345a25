"""Captures a running machine, which is stopped only for the steps that require it.

A large dirty set is copied in rounds while the machine runs, so that the last stop copies little. I/O that was in
flight when pages were listed writes to them without a mark. A stop waits for its end, so a round copies its pages only
after a stop that follows the listing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.image_check import ImageCheck
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Ram
from sandbox_gateway.hosts.kvm_xfs.memory.runs import Runs, total
from sandbox_gateway.hosts.kvm_xfs.memory.window import Window
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Memory

LIVE_BYTES = 16 << 20
"""Larger dirty sets are copied in rounds."""
_MOST_ROUNDS = 12
_SHRINKING = 0.8
"""Another round pays if the last one had at most this part of the bytes of the one before."""
_INLINE_BYTES = 16 << 20


class Capture:
    """One capture of ``machine`` into the directory ``partial``, which it creates.

    Afterwards ``partial`` holds rootfs.img, kernel, initrd and, with memory, memory.img and device.state; nothing is
    synced to the device yet. The machine keeps running in every case. With ``window``, the machine's own, it captures
    the memory.
    """

    def __init__(self, machine: Machine, files: Instance, partial: Path, window: Window | None) -> None:
        self._machine = machine
        self._files = files
        self._partial = partial
        self._window = window
        self._stack = contextlib.ExitStack()
        self._rounds = 0
        self.mode = Memory.NONE
        self.memory_bytes = 0
        self.image_check: ImageCheck | None = None
        self.stops_ms: list[float] = []
        """The duration of each stop of the machine."""
        self.phases_ms: dict[str, float] = {}
        """The steps of the last stop."""

    @property
    def pause_ms(self) -> float:
        return round(sum(self.stops_ms), 3)

    async def run(self, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Capture the machine. ``beside`` runs during the last stop, and ends before the machine resumes."""
        with self._stack:
            await self._machine.connect()
            await asyncio.to_thread(self._prepare)
            if self._window is None:
                await self._capture_stopped(None, beside)
                return
            if self._listed > LIVE_BYTES and self._window.has_marks:
                await self._copy_in_rounds(self._window)
            await asyncio.to_thread(self._copier.reserve, self._listed * 5 // 4 + (1 << 20))
            async with self._machine.lent(self._state) as state:
                await self._capture_stopped(state, beside)
            await asyncio.to_thread(self._complete_image, self._window)

    def _prepare(self) -> None:
        """Do the slow steps: clone the memory image, flush the disk, open descriptors."""
        self._partial.mkdir(mode=0o700)
        (self._partial / "kernel").hardlink_to(self._files.kernel)
        (self._partial / "initrd").hardlink_to(self._files.initrd)
        self._disk = self._open(self._files.disk, os.O_RDONLY)
        self._target = self._open(self._partial / "rootfs.img", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fsync(self._disk)
        if self._window is not None:
            self._prepare_memory(self._window)

    def _prepare_memory(self, window: Window) -> None:
        self._ram = Ram(self._machine.pid, self._files.memory)
        self._listed = total(window.begin(self._ram))
        self.mode = window.mode
        image, base = self._partial / "memory.img", None
        if window.base is None:
            self._image = self._open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.truncate(self._image, self._files.memory.stat().st_size)
        else:
            reflink.clone(window.base, image)
            self._image = self._open(image, os.O_WRONLY)
            base = self._open(window.base, os.O_RDONLY)
        self._state = self._open(self._partial / "device.state", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._copier = Copier(self._ram, self._image, base)

    async def _copy_in_rounds(self, window: Window) -> None:
        """Copy the written pages while the machine runs, until few are left or it writes faster than we copy."""
        self.mode = Memory.LIVE
        while self._rounds < _MOST_ROUNDS:
            runs = await self._list_round(window)
            copied = total(runs)
            self._listed = await asyncio.to_thread(self._copy_round, runs, window)
            if not LIVE_BYTES < self._listed < copied * _SHRINKING:
                break

    def _copy_round(self, runs: Runs, window: Window) -> int:
        """Copy pages; return how many bytes the machine has written meanwhile."""
        self._copier.copy(runs)
        # The reflink in the last stop would wait for data that is being written.
        os.fdatasync(self._image)
        os.fsync(self._disk)
        return total(window.list_since_taken(self._ram))

    async def _list_round(self, window: Window) -> Runs:
        again, self._rounds = self._rounds > 0, self._rounds + 1
        if window.takes_atomically:
            runs = await asyncio.to_thread(window.take, self._ram, again=again)
            async with self._stopped():
                return runs
        async with self._stopped():
            return await asyncio.to_thread(window.take, self._ram, again=again)

    async def _capture_stopped(self, state: str | None, beside: Callable[[], Awaitable[None]] | None) -> None:
        async with self._stopped() as step:
            async with _next_to(beside):
                if state is not None:
                    await self._machine.save_devices(state)
                    step("devices")
                reflink.clone_fd(self._disk, self._target)
                step("disk")
                if self._window is not None:
                    await self._hold_pages(self._window)
                    step("pages")
            if beside is not None:
                step("volumes")

    async def _hold_pages(self, window: Window) -> None:
        runs = window.take(self._ram, again=self._rounds > 0)
        # Switching to a thread costs more than copying a few pages; copying many would block the event loop.
        if total(runs) <= _INLINE_BYTES:
            self._copier.hold(runs)
        else:
            await asyncio.to_thread(self._copier.hold, runs)

    def _complete_image(self, window: Window) -> None:
        self._copier.write_held()
        self.memory_bytes = self._copier.written
        self.image_check = window.complete(self._partial / "memory.img")

    @contextlib.asynccontextmanager
    async def _stopped(self) -> AsyncIterator[Callable[[str], None]]:
        """Stop the machine inside this context. Yields a function that ends a step, which it names."""
        marks = [("", time.perf_counter())]

        def step(name: str) -> None:
            marks.append((name, time.perf_counter()))

        await self._machine.stop()
        try:
            step("stop")
            yield step
        finally:
            await self._machine.cont()
            step("continue")
            self.stops_ms.append(round((marks[-1][1] - marks[0][1]) * 1000, 3))
            steps = itertools.pairwise(marks)
            self.phases_ms = {name: round((end - start) * 1000, 3) for (_, start), (name, end) in steps}

    def _open(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, descriptor)
        return descriptor


@contextlib.asynccontextmanager
async def _next_to(work: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Run ``work`` concurrently with this context, and always wait for its end."""
    if work is None:
        yield
        return
    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)  # Otherwise it would start only at the first wait inside the context.
    try:
        yield
    except BaseException:
        await asyncio.gather(task, return_exceptions=True)
        raise
    await task
