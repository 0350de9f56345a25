"""Interfaces to the kernel for mounts, entropy, the clock and the network. All constants are Linux's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

IS_LINUX = sys.platform.startswith("linux")

MS_BIND = 0x1000
RNDADDENTROPY = 0x40085203
RNDRESEEDCRNG = 0x5207
FIFREEZE = 0xC0045877
FITHAW = 0xC0045878

CLOCK_TOLERANCE_SECONDS = 0.05
"""Seconds by which the clock may be wrong before it is set, because the request itself took some time."""


def bind_mount(source: str, target: str) -> None:
    """Mount the file ``source`` over the file ``target``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND), None) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number), target)


def sync_file_system(path: str) -> None:
    """Sync the file system that contains ``path``.

    On Linux, other file systems are not synced, because sync(2) would wait for a network volume that is not responding.
    """
    if not IS_LINUX:
        os.sync()
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(fd)


def add_entropy(seed: bytes) -> None:
    """Add ``seed`` to the kernel's entropy pool, credit its entropy, and reseed the random number generator."""
    fd = os.open("/dev/urandom", os.O_WRONLY)
    try:
        fcntl.ioctl(fd, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(fd, RNDRESEEDCRNG)
    finally:
        os.close(fd)


def set_clock(now: float) -> None:
    if abs(time.time() - now) > CLOCK_TOLERANCE_SECONDS:
        time.clock_settime(time.CLOCK_REALTIME, now)


def set_generation_interrupt() -> None:
    """Unmask the ACPI interrupt for a new VM generation if the kernel has the driver for it; mask it otherwise.

    Without the driver, the kernel would interpret useless ACPI code at the start of each fork.
    """
    if os.path.isdir("/sys/bus/acpi/devices/QEMUVGID:00"):
        has_driver = os.path.isdir("/sys/bus/acpi/drivers/vmgenid")
        # The kernel rejects a state that is already set.
        with suppress(OSError), open("/sys/firmware/acpi/interrupts/gpe05", "w") as interrupt:
            interrupt.write("unmask\n" if has_driver else "mask\n")


def grow_file_system(path: str = "/") -> None:
    """Grow the ext4 file system at ``path`` to the size of its device."""
    device_number = os.stat(path).st_dev
    device_name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device_number)}:{os.minor(device_number)}"))
    result = subprocess.run(
        ["resize2fs", f"/dev/{device_name}"],
        # Templates from images have it in /opt/sandbox/bin.
        env={"PATH": "/opt/sandbox/bin:/usr/sbin:/sbin:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
    )
    if result.returncode:
        raise OSError(0, f"resize2fs failed: {result.stderr.decode(errors='replace').strip()}")


def read_boot_id() -> str:
    """Return the boot id; "" if the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def find_gateway_address() -> str:
    """Return the address of the default gateway; "" if there is none."""
    if not IS_LINUX:
        return _find_gateway_address_on_freebsd()
    try:
        with open("/proc/net/route") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and fields[1] == "00000000" and fields[2] != "00000000":
            return socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))
    return ""


def _find_gateway_address_on_freebsd() -> str:
    """Return the address of the default gateway, according to FreeBSD's ``route``; "" if there is none."""
    try:
        result = subprocess.run(["/sbin/route", "-n", "get", "default"], capture_output=True, timeout=5, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    for line in result.stdout.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "gateway":
            return value.strip()
    return ""
