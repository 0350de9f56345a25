"""Captures a running machine, which is stopped only for the steps that require it."""

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
from sandbox_gateway.hosts.kvm_xfs.memory.copying import HeldPages, PageBuffer, copy_out
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Ram, Runs
from sandbox_gateway.hosts.kvm_xfs.memory.written import list_written
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import Memory

_INLINE_BYTES = 16 << 20


class Capture:
    """One capture of ``machine`` into the directory ``partial``, which it creates.

    Afterwards ``partial`` holds rootfs.img, kernel, initrd and, with memory, memory.img and device.state; nothing is
    synced to the device yet. The machine keeps running in every case.
    """

    def __init__(self, machine: Machine, files: Instance, partial: Path) -> None:
        self._machine = machine
        self._files = files
        self._partial = partial
        self._blank = False
        """The memory's base image is empty, so empty pages can stay holes."""
        self._stack = contextlib.ExitStack()
        self.mode = Memory.NONE
        self.memory_bytes = 0
        self.pause_ms = 0.0
        self.phases_ms: dict[str, float] = {}

    async def run(self, *, memory: bool, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Capture the machine. ``beside`` runs while the machine is stopped, and ends before the machine resumes."""
        with self._stack:
            await self._machine.connect()
            await asyncio.to_thread(self._prepare, memory)
            if not memory:
                await self._while_stopped(None, beside)
                return
            async with self._machine.lent(self._state) as state:
                held = await self._while_stopped(state, beside)
            if held is not None:
                self.memory_bytes = await asyncio.to_thread(held.write, self._image, skip_zeros=self._blank)

    def _prepare(self, with_memory: bool) -> None:
        """Do the slow steps: clone the memory image, flush the disk, open descriptors, allocate memory for pages."""
        self._partial.mkdir(mode=0o700)
        (self._partial / "kernel").hardlink_to(self._files.kernel)
        (self._partial / "initrd").hardlink_to(self._files.initrd)
        self._disk = self._open(self._files.disk, os.O_RDONLY)
        self._target = self._open(self._partial / "rootfs.img", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fsync(self._disk)
        if not with_memory:
            return
        self._blank = self._files.memory.stat().st_blocks == 0
        reflink.clone(self._files.memory, self._partial / "memory.img")
        self._image = self._open(self._partial / "memory.img", os.O_WRONLY)
        self._state = self._open(self._partial / "device.state", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._ram = Ram(self._machine.pid, self._files.memory)
        runs, _ = list_written(self._ram)
        self._buffer = PageBuffer(int(runs[:, 1].sum()) * 5 // 4 + (1 << 20))

    async def _while_stopped(self, state: str | None, beside: Callable[[], Awaitable[None]] | None) -> HeldPages | None:
        clock = time.perf_counter
        marks = [("", clock())]
        held = None
        await self._machine.stop()
        try:
            marks.append(("stop", clock()))
            async with _next_to(beside):
                if state is not None:
                    await self._machine.save_devices(state)
                    marks.append(("devices", clock()))
                reflink.clone_fd(self._disk, self._target)
                marks.append(("disk", clock()))
                if state is not None:
                    held = await self._copy_pages()
                    marks.append(("pages", clock()))
            if beside is not None:
                marks.append(("volumes", clock()))
        finally:
            await self._machine.cont()
        marks.append(("continue", clock()))
        self.pause_ms = round((marks[-1][1] - marks[0][1]) * 1000, 3)
        steps = itertools.pairwise(marks)
        self.phases_ms = {name: round((end - start) * 1000, 3) for (_, start), (name, end) in steps}
        return held

    async def _copy_pages(self) -> HeldPages:
        runs, self.mode = list_written(self._ram)
        # Switching to a thread costs more than copying a few pages; copying many would block the event loop.
        if int(runs[:, 1].sum()) <= _INLINE_BYTES:
            return self._copy(runs)
        return await asyncio.to_thread(self._copy, runs)

    def _copy(self, runs: Runs) -> HeldPages:
        return copy_out(self._ram, runs, self._image, self._buffer, skip_zeros=self._blank)

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
