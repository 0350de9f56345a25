"""Create the seccomp filter of volume servers, which refuses system calls that a file server never needs.

The filter is a denylist, because the distribution provides nfs-ganesha, its libraries and libc, and later versions may
use other harmless calls. It refuses access to large parts of the kernel (modules, BPF, io_uring, keys, performance
events) and to other processes, mounts and namespaces. It also prevents new processes and the execution of programs in
memory; programs in files cannot be executed because the server's mounts are `noexec`.
"""

from __future__ import annotations

import errno
import os
import struct

_REFUSED_CALLS = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # Mounts, namespaces and roots.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "unshare": (272, 97),
    "setns": (308, 268),
    # New programs and processes; the filter checks the flags of `clone` below.
    "fork": (57, None),
    "vfork": (58, None),
    "execveat": (322, 281),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "uselib": (134, None),
    # The kernel itself.
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    # Large interfaces that a file server does not need.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
}
"""Numbers of the refused system calls on x86_64 and aarch64. None: the call does not exist there."""
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_SYSCALL_BIT = 0x40000000
_CLONE_THREAD = 0x10000
_NEW_NAMESPACE_FLAGS = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x20000
_ALLOWED_FAMILIES = (1, 2, 10)
"""The allowed address families of sockets: Unix, IPv4, IPv6."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000

_Instruction = tuple[int, int, int, int]


def build_file_server_filter(machine: str = "") -> bytes:
    """Return a BPF program (struct sock_filter[]) for seccomp(2). ``machine``: architecture (default: the host's)."""
    column, architecture = _ARCHITECTURES[machine or os.uname().machine]
    refused_numbers = sorted(number for numbers in _REFUSED_CALLS.values() if (number := numbers[column]) is not None)
    clone, clone3, socket = (numbers[column] for numbers in (_CLONE, _CLONE3, _SOCKET))
    allow, refuse = (_RETURN, 0, 0, _ALLOW), _return_errno(errno.EPERM)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_SYSCALL_BIT),
        (_RETURN, 0, 0, _KILL),
        # After ENOSYS, libc uses `clone`, whose flags a filter can check.
        (_EQUAL, 0, 1, clone3),
        _return_errno(errno.ENOSYS),
        # Allow only new threads, without new namespaces.
        (_EQUAL, 0, 5, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _NEW_NAMESPACE_FLAGS),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        refuse,
        allow,
        (_EQUAL, 0, 3 + len(_ALLOWED_FAMILIES), socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_EQUAL, len(_ALLOWED_FAMILIES) - index, 0, family) for index, family in enumerate(_ALLOWED_FAMILIES)),
        _return_errno(errno.EAFNOSUPPORT),
        allow,
    ]
    for number in refused_numbers:
        program += [(_EQUAL, 0, 1, number), refuse]
    program.append(allow)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _return_errno(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)
