"""Make the kernel track which pages another process writes, without that process's cooperation.

A userfaultfd tracks the address space of the process that opens it. So this module makes the other process open one:
with ptrace, it makes the main thread execute one system call from the vDSO, without modifying the process's memory.
The descriptor stays open in that process, so the kernel keeps tracking after the helper process has exited.

This module uses only the standard library, because it runs in a helper process with extra privileges.
Sources: ptrace(2), pidfd_getfd(2), userfaultfd(2); Linux Documentation/admin-guide/mm/userfaultfd.rst (WP_ASYNC).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.process_checks import send_signal, wait_for_exit

_STOP_TIMEOUT_SECONDS = 2.0
_POLL_INTERVAL_SECONDS = 0.00005

_GETREGS, _SETREGS, _SINGLESTEP, _CONT, _DETACH, _SEIZE, _INTERRUPT = 12, 13, 9, 7, 17, 0x4206, 0x4207
_PTRACE_EVENT_STOP = 128
_WALL = 0x40000000
_SYS_USERFAULTFD, _SYS_PIDFD_GETFD = 323, 438
_SYSCALL_INSTRUCTION = b"\x0f\x05"
_USER_MODE_ONLY = 1
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_UFFD_API, _WP_UNPOPULATED, _WP_ASYNC, _MODE_WP = 0xAA, 1 << 13, 1 << 15, 1 << 1
_REGISTER_NAMES = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)


class _Registers(ctypes.Structure):
    """The C structure user_regs_struct of x86-64."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in _REGISTER_NAMES.split())


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def track_writes(pid: int, pidfd: int, areas: Sequence[tuple[int, int]]) -> None:
    """Make the kernel track the writes of process ``pid`` to ``areas``, which are pairs of start and end addresses.

    ``pidfd`` must refer to the same process, so that no later process with the same pid is affected. Stops the
    process's main thread for about 0.2 ms. The process keeps running even if this raises OSError or TimeoutError.
    """
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"system calls cannot be injected on {platform.machine()}, only on x86_64")
    instruction_address = _find_syscall_instruction(pid)
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
    remote_descriptor = _run_system_call(pid, pidfd, instruction_address, _SYS_USERFAULTFD, flags)
    descriptor = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, remote_descriptor, 0)
    _raise_if_failed(descriptor)
    try:
        # The process chose the descriptor: it must not make this process configure another kind of file.
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != "anon_inode:[userfaultfd]":
            raise OSError(errno.EBADF, f"process {pid} did not open a userfaultfd")
        fcntl.ioctl(descriptor, _UFFDIO_API, bytearray(struct.pack("=3Q", _UFFD_API, _WP_ASYNC | _WP_UNPOPULATED, 0)))
        for start, end in areas:
            fcntl.ioctl(descriptor, _UFFDIO_REGISTER, bytearray(struct.pack("=4Q", start, end - start, _MODE_WP, 0)))
    finally:
        os.close(descriptor)


def _find_syscall_instruction(pid: int) -> int:
    """Return the address of a system call instruction in the vDSO of a process."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[vdso]"):
            start, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(start)
                position = memory.read(end - start).find(_SYSCALL_INSTRUCTION)
            if position >= 0:
                return start + position
    raise OSError(errno.ENOEXEC, f"process {pid} has no vDSO with a system call instruction")


def _run_system_call(pid: int, pidfd: int, instruction_address: int, number: int, argument: int) -> int:
    """Make the main thread of ``pid`` run one system call and then continue as before. Returns the call's result."""
    with _stopped(pid, pidfd) as signals:
        original_registers, registers = _Registers(), _Registers()
        _ptrace(_GETREGS, pid, ctypes.addressof(original_registers))
        ctypes.memmove(ctypes.addressof(registers), ctypes.addressof(original_registers), ctypes.sizeof(_Registers))
        registers.rip, registers.rax, registers.rdi = instruction_address, number, argument
        # Otherwise the kernel would restart an interrupted system call of the thread at the wrong place.
        registers.orig_rax = 0xFFFFFFFFFFFFFFFF
        try:
            _ptrace(_SETREGS, pid, ctypes.addressof(registers))
            _step(pid, instruction_address, signals)
            _ptrace(_GETREGS, pid, ctypes.addressof(registers))
        finally:
            _ptrace(_SETREGS, pid, ctypes.addressof(original_registers))
    result = ctypes.c_long(registers.rax).value
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


@contextlib.contextmanager
def _stopped(pid: int, pidfd: int) -> Iterator[list[int]]:
    """Stop the main thread of ``pid`` inside this context. Delivers the signals in the yielded list afterwards."""
    signals: list[int] = []
    _ptrace(_SEIZE, pid)  # From now on, the pid is not reused until the process has been waited for.
    try:
        if wait_for_exit(pidfd, 0):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} exited")
        _ptrace(_INTERRUPT, pid)
        while (status := _wait_until_stopped(pid)) >> 16 != _PTRACE_EVENT_STOP:
            # The thread stopped for a signal first: deliver the signal, then wait for the next stop.
            _ptrace(_CONT, pid, data=os.WSTOPSIG(status))
        yield signals
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, pid)
        for each in signals:
            send_signal(pidfd, each)


def _step(pid: int, instruction_address: int, signals: list[int]) -> None:
    """Execute the system call instruction. Adds signals that arrive before its execution to ``signals``."""
    registers = _Registers()
    while True:
        _ptrace(_SINGLESTEP, pid)
        status = _wait_until_stopped(pid)
        _ptrace(_GETREGS, pid, ctypes.addressof(registers))
        if registers.rip != instruction_address:
            return
        if os.WSTOPSIG(status) != signal.SIGTRAP:
            signals.append(os.WSTOPSIG(status))


def _wait_until_stopped(pid: int) -> int:
    """Wait until the thread stops, and return its status. Raises TimeoutError, or ProcessLookupError if it exits."""
    deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
    while True:
        changed_pid, status = os.waitpid(pid, os.WNOHANG | _WALL)
        if changed_pid and os.WIFSTOPPED(status):
            return status
        if changed_pid:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} exited")
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop within {_STOP_TIMEOUT_SECONDS:g} s")
        time.sleep(_POLL_INTERVAL_SECONDS)


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    ctypes.set_errno(0)
    _raise_if_failed(_libc.ptrace(request, pid, 0, data))


def _raise_if_failed(result: int) -> None:
    if result == -1:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
