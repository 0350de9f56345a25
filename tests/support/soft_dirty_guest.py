"""Capture a machine again and again with soft-dirty bits, on a kernel that has them: ``… process|qemu COUNT``.

Runs as root on an XFS file system, inside a virtual machine. The captured machine is either a process that maps its
image like QEMU, or a nested QEMU. Every second capture is live. Prints a JSON object.

``$SOFT_DIRTY_QEMU`` contains the command that starts QEMU.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs import capture
from sandbox_gateway.hosts.kvm_xfs.capture import Capture
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, SnapshotFiles
from sandbox_gateway.hosts.kvm_xfs.memory import listing
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import WriteTracking
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import MemoryMode

_MEMORY_BYTES = 32 << 20
_LIVE_BYTES = 64 << 10
_SETTLE_SECONDS = 20
_BOOT_SECTOR = bytes.fromhex(
    "fa31c08ed88ed0bc007cfb88165e7c66ff065a7ca15a7c31d2bb5000f7f388d430c00500308ec066a15a7c2666a30000f6065a7c3f75d8a05b7c"
    "a2527cbe4a7cb4428a165e7ccd13ebc51000200000000020"
)
"""A program in real mode: it counts, and writes the count to one of the 80 pages at 0x30000 after another.

After every 64 rounds it reads 32 sectors of the disk to 0x20000:

    cli; xor ax, ax; mov ds, ax; mov ss, ax; mov sp, 0x7c00; sti; mov [drive], dl
    main: inc dword [count]; mov ax, [count]; xor dx, dx; mov bx, 80; div bx
    mov ah, dl; xor al, al; add ax, 0x3000; mov es, ax; mov eax, [count]; mov es:[0], eax
    test byte [count], 0x3f; jnz main
    mov al, [count+1]; mov [lba], al; mov si, packet; mov ah, 0x42; mov dl, [drive]; int 0x13; jmp main
"""


class ProcessMachine:
    """A process that maps its image like QEMU, writes to it, and reads its disk into it, past the cache."""

    has_ended = False

    def __init__(self, files: InstanceFiles) -> None:
        self.files = files
        self._process = subprocess.Popen([sys.executable, __file__, "writer", str(files.memory), str(files.disk)])
        self.pid = self._process.pid

    async def connect(self) -> None: ...

    async def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WSTOPPED)

    async def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def execute(self, command: str) -> None: ...

    @contextlib.asynccontextmanager
    async def added_fd(self, descriptor: int) -> AsyncIterator[str]:
        yield str(descriptor)

    async def save_devices(self, filename: str) -> None:
        os.write(int(filename), b"devices")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def write_forever(image: Path, disk: Path) -> None:
    with image.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECT)
    page_count = len(memory) // PAGE_BYTES
    view = memoryview(memory)
    number = 0
    while True:
        number += 1
        start = random.randrange(page_count) * PAGE_BYTES
        memory[start : start + 8] = number.to_bytes(8, "little")
        if number % 50 == 0:
            start = random.randrange(page_count - 16) * PAGE_BYTES
            os.preadv(descriptor, [view[start : start + 16 * PAGE_BYTES]], random.randrange(64) * 16 * PAGE_BYTES)
        if number % 500 == 0:
            time.sleep(0.05)


def spawn_qemu(files: InstanceFiles) -> int:
    """Start a QEMU process with the memory and the disk of ``files``, and return its pid."""
    command = [
        *shlex.split(os.environ["SOFT_DIRTY_QEMU"]),
        *("-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-accel", "tcg,tb-size=16"),
        *("-M", "pc,memory-backend=mem,suppress-vmdesc=on,usb=off,vmport=off", "-m", f"{_MEMORY_BYTES >> 20}M"),
        *("-object", f"memory-backend-file,id=mem,size={_MEMORY_BYTES},mem-path={files.memory},share=off"),
        *("-blockdev", f"driver=file,node-name=file,filename={files.disk},cache.direct=on,aio=threads"),
        *("-blockdev", "driver=raw,node-name=disk,file=file,cache.direct=on"),
        *("-device", "virtio-blk-pci,drive=disk,bootindex=0,romfile="),
        *("-chardev", f"socket,id=qmp,path={files.qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]
    return subprocess.Popen(command).pid


async def connect_to_qemu(pid: int, files: InstanceFiles) -> Machine:
    """Return the machine of a QEMU process once its program runs."""
    await wait_for(lambda: files.qmp.exists() and is_mapped(pid, files))
    machine = Machine(pid, files)
    ram = Ram(machine.pid, files.memory)
    count = np.empty(PAGE_BYTES, dtype=np.uint8)
    first_page = np.array([(ram.areas[0].start + 0x30000, PAGE_BYTES)], dtype=np.uint64)

    def has_counted() -> bool:
        ram.read(first_page, count)
        return bool(count[:4].any())

    await wait_for(has_counted)
    return machine


async def capture_process(machine: ProcessMachine, root: Path, count: int) -> dict[str, Any]:
    await wait_for(lambda: is_mapped(machine.pid, machine.files))
    return await capture_repeatedly(machine, root, count)


def is_mapped(pid: int, files: InstanceFiles) -> bool:
    """Return whether a process has mapped its image."""
    try:
        return bool(Ram(pid, files.memory).areas)
    except BackendFailed:
        return False


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SETTLE_SECONDS * 10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def record_memory(machine: Any) -> Callable[[], NDArray[np.uint8]]:
    """Return a function that returns the machine's memory just before it last continued."""
    memory = np.empty(0, dtype=np.uint8)
    original_cont: Callable[[], Awaitable[None]] = machine.cont

    async def record_and_continue() -> None:
        nonlocal memory
        ram = Ram(machine.pid, machine.files.memory)
        memory = np.empty(ram.end, dtype=np.uint8)
        ram.read(ram.list_all_pages(), memory)
        await original_cont()

    machine.cont = record_and_continue
    return lambda: memory


def count_differing_pages(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int((one.view(np.uint64) != other.view(np.uint64)).reshape(-1, PAGE_BYTES // 8).any(axis=1).sum())


async def capture_repeatedly(machine: Any, root: Path, count: int) -> dict[str, Any]:
    tracking = WriteTracking(machine.files, TrackerClient(), MemoryMode.SOFT_DIRTY, None)
    read_recorded_memory = record_memory(machine)
    previous_image = np.fromfile(machine.files.memory, dtype=np.uint8)
    result: dict[str, Any] = {"captures": 0, "modes": {}, "differing_pages": 0, "reasons": []}
    result |= {"written_pages": 0, "changed_pages": 0, "max_stops": 0}
    for number in range(count):
        await asyncio.sleep(random.random() / 5)
        capture.MAX_SINGLE_STOP_BYTES = _LIVE_BYTES if number % 2 else 1 << 40
        files = SnapshotFiles(root / f"capture-{number}")
        done = Capture(machine, machine.files, files, tracking)
        await done.run()
        image = np.fromfile(files.memory, dtype=np.uint8)
        result["captures"] += 1
        result["modes"][done.mode.value] = result["modes"].get(done.mode.value, 0) + 1
        result["differing_pages"] += count_differing_pages(image, read_recorded_memory())
        if tracking.reason:
            result["reasons"].append(tracking.reason)
        if done.mode is not MemoryMode.LIVE:  # a live capture may write a page several times
            result["written_pages"] += done.memory_bytes // PAGE_BYTES
            result["changed_pages"] += count_differing_pages(image, previous_image)
        result["max_stops"] = max(result["max_stops"], len(done.stops_ms))
        previous_image = image
        shutil.rmtree(files.directory)
    return result


def create_files(root: Path, kind: str) -> InstanceFiles:
    files = InstanceFiles(root / "machine")
    files.run.mkdir(parents=True)
    files.kernel.write_bytes(b"kernel")
    files.initrd.write_bytes(b"initrd")
    random_bytes = os.urandom(8 << 20)
    files.disk.write_bytes((_BOOT_SECTOR.ljust(510, b"\0") + b"\x55\xaa" + random_bytes)[: 8 << 20])
    if kind == "qemu":
        files.memory.touch()
        os.truncate(files.memory, _MEMORY_BYTES)
    else:
        files.memory.write_bytes(random_bytes * (_MEMORY_BYTES // len(random_bytes)))
    return files


async def capture_qemu(pid: int, files: InstanceFiles, root: Path, count: int) -> dict[str, Any]:
    machine = await connect_to_qemu(pid, files)
    try:
        return await capture_repeatedly(machine, root, count)
    finally:
        await machine.kill()


def main(kind: str, count: int) -> None:
    if not listing.has_soft_dirty_bits():
        raise SystemExit("this kernel does not support soft-dirty bits")
    root = Path("soft-dirty").absolute()
    files = create_files(root, kind)
    try:
        if kind == "qemu":
            result = asyncio.run(capture_qemu(spawn_qemu(files), files, root, count))
        else:
            machine = ProcessMachine(files)
            try:
                result = asyncio.run(capture_process(machine, root, count))
            finally:
                machine.kill()
    finally:
        shutil.rmtree(root)
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "writer":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        write_forever(Path(sys.argv[2]), Path(sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]))
