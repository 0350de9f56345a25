"""Start the server of one volume in isolation.

    launcher.py IMAGE DIRECTORY VOLUME PROGRAM NETWORK FILTER PORT

This program runs as root and uses only the standard library.

The server gets a mount namespace with the file system of IMAGE at /VOLUME on a small, read-only root in memory; a PID
namespace in which it is the first process; the network namespace whose file is NETWORK; the seccomp filter
FILTER (hexadecimal); and few capabilities. If the kernel supports it, the server can listen only on the TCP ports PORT
and PORT + 1, and connect to none: the servers of all volumes share a network namespace. When the server exits, its
mounts disappear, because no other namespace has them, and the loop device detaches itself. The network namespace
remains.

nfs-ganesha resolves names with slashes as the kernel does, and a guest may request `/usr` or `../x`. It also accepts
handles of every file system that it knows. So the server must not see any other file system: after it has started, the
directories of the host that are needed to start a program are unmounted, and `mtab` lists only the volume's file
system. No client can connect to the server before then.

IMAGE is locked (flock) while the loop device uses it. So an image is never mounted twice, and all data has been written
to it when another process gets the lock. DIRECTORY contains the first configuration and an empty `root`; its path is
part of the server's command line. Later configurations are written through the server's descriptor ROOT_FD, because
every other path to its root is read-only.

The program prints the server's process id in the caller's namespace. Then it acts as rpcbind, without which the server
does not start, until the server has registered and the caller has closed standard input. The caller does so when the
server responds. The program exits with 0 after it has unmounted the host's file systems from the server's namespace.
"""

# This program does not use pathlib: importing it takes longer than the rest of the program, and a fork waits for it.
# ruff: noqa: PTH102, PTH112, PTH114, PTH115, PTH123, PTH211

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import time

BLOCK_BYTES = 4096
"""Block size of the file system in an image, in bytes."""
CONFIG_FILE = "ganesha.conf"
SERVER_NAME = "ganesha.nfsd"
"""Last part of a server's argv[0], which is a path in DIRECTORY."""
ROOT_FD = 100
"""Descriptor of the server's writable root directory."""
EXT4_IOC_RESIZE_FS = 0x40086610

_LOCK_TIMEOUT_SECONDS = 10.0
_MAX_CALL_BYTES = 1 << 16
"""Maximum length of a call to the substitute for rpcbind, in bytes."""
_MAX_OPEN_FILES = 4096
_MAX_MEMORY_BYTES = 768 << 20
"""Memory limit of a server, including its threads' stacks. A server that needs more exits and is replaced."""
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x20000, 0x08000000, 0x20000000
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_NOATIME = 1, 2, 4, 8, 0x20, 0x400
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 4, 16
_LOOP_CONFIG = struct.Struct("=II 5Q4I64s64s32s2Q 64x")
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION, _LANDLOCK_RULE_NET_PORT = 1, 2
_LANDLOCK_BIND_TCP, _LANDLOCK_CONNECT_TCP = 1, 2
_LANDLOCK_VERSION_WITH_PORTS = 4
"""The version of Landlock in Linux 6.7."""
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SETGID, SETUID: to act on behalf of users in the guests.
_KEPT_CAPABILITIES = {0, 1, 2, 3, 4, 6, 7}
_LAST_CAPABILITY = 63
_NFS, _MOUNT, _RPCBPROC_SET = 100003, 100005, 1
# Directories of the host that are needed to start a program. Most are links into the first.
_PROGRAM_DIRECTORIES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")

_libc = ctypes.CDLL(None, use_errno=True)


def main(image: str, directory: str, volume: str, program: str, network: str, filter_hex: str, port: str) -> int:
    rpcbind_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    error_reader, error_writer = os.pipe()  # A successful exec closes the writer.
    with open(network) as namespace:
        _check_result("setns", _libc.setns(namespace.fileno(), _CLONE_NEWNET))
    _check_result("unshare", _libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWUTS | _CLONE_NEWPID))
    server_pid = os.fork()
    if not server_pid:
        try:
            _exec_server(image, directory, volume, program, rpcbind_socket, bytes.fromhex(filter_hex), int(port))
        except BaseException as error:
            os.write(error_writer, (str(error) or type(error).__name__).encode())
        os._exit(1)
    os.close(error_writer)
    with os.fdopen(error_reader, "rb") as errors:
        if message := errors.read():
            print(message.decode(errors="replace"), file=sys.stderr)
            return 1
    print(server_pid, flush=True)
    if not _act_as_rpcbind(rpcbind_socket, server_pid):
        return 1
    # pivot_root has also changed the root of this process.
    for path in ("/run", *_PROGRAM_DIRECTORIES):
        if os.path.ismount(path):
            _check_result(f"umount {path}", _libc.umount2(path.encode(), _MNT_DETACH))
    return 0


def _exec_server(
    image: str,
    directory: str,
    volume: str,
    program: str,
    rpcbind_socket: socket.socket,
    seccomp_filter: bytes,
    port: int,
) -> None:
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    # The loop device keeps the file open and thus locked.
    image_fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    _lock(image_fd, image)
    device_fd, device_path = _attach_loop_device(image_fd, image)
    root = f"{directory}/root"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=4m,mode=755")
    _populate_root(root, directory, volume, device_path)
    os.dup2(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), ROOT_FD)
    _bind_mount(root, root, _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for path in _PROGRAM_DIRECTORIES:
        if os.path.isdir(root + path) and not os.path.islink(path):
            _bind_mount(path, root + path, _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _mount("tmpfs", f"{root}/run", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=1m,mode=755")
    _mount_image(image_fd, device_path, f"{root}/{volume}")
    os.close(device_fd)
    os.close(image_fd)
    os.chdir(root)
    _check_result("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"host"))
    os.chdir("/")
    _check_result("umount", _libc.umount2(b"host", _MNT_DETACH))
    rpcbind_socket.bind("/run/rpcbind.sock")
    rpcbind_socket.listen(8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    for descriptor in (0, 1):
        # The caller's in-memory log: an open file of the host would give access to other files of the host.
        os.dup2(2, descriptor)
    _restrict_ports((port, port + 1))
    _drop_privileges(seccomp_filter)
    os.execv(
        program,
        [f"{directory}/{SERVER_NAME}", *("-F", "-L", "STDERR", "-p", "/run/ganesha.pid", "-f", f"/{CONFIG_FILE}")],
    )


def _populate_root(root: str, directory: str, volume: str, device_path: str) -> None:
    """Create the files, links and mount points in a server's root."""
    for path in ("/host", "/etc", "/run", "/var", "/var/lib", "/var/lib/nfs", "/var/lib/nfs/ganesha", f"/{volume}"):
        os.mkdir(root + path)
    for path in ("/tmp", "/var/run"):
        os.symlink("/run", root + path)
    for path in _PROGRAM_DIRECTORIES:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.mkdir(root + path)
    with open(f"{root}/etc/hosts", "w") as hosts:
        hosts.write("127.0.0.1 localhost\n")
    with open(f"{root}/etc/mtab", "w") as mtab:
        mtab.write(f"{device_path} /{volume} ext4 rw 0 0\n")
    for path in ("/etc/ld.so.cache", "/etc/netconfig"):
        _copy(path, root + path)
    _copy(f"{directory}/{CONFIG_FILE}", f"{root}/{CONFIG_FILE}")


def _copy(path: str, target: str) -> None:
    with open(path, "rb") as source, open(target, "wb") as copy:
        copy.write(source.read())


def _bind_mount(path: str, target: str, flags: int) -> None:
    _mount(path, target, "", _MS_BIND)
    _mount("none", target, "", _MS_BIND | _MS_REMOUNT | flags)


def _mount_image(image_fd: int, device_path: str, target: str) -> None:
    """Mount the file system on ``device_path``, and grow it to the size of its image."""
    options = "errors=remount-ro,discard,noinit_itable"
    _mount(device_path, target, "ext4", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOATIME, options)
    block_count = os.fstat(image_fd).st_size // BLOCK_BYTES
    if read_block_counts(image_fd)[0] < block_count:
        mount_fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.ioctl(mount_fd, EXT4_IOC_RESIZE_FS, struct.pack("=Q", block_count))
        os.close(mount_fd)


def read_block_counts(image_fd: int) -> tuple[int, int]:
    """Read the numbers of total and used blocks from the superblock of the ext4 file system in an image."""
    superblock = os.pread(image_fd, 1024, 1024)
    low, _, free_low = struct.unpack_from("<3I", superblock, 0x4)
    high, _, free_high = struct.unpack_from("<3I", superblock, 0x150)
    (overhead,) = struct.unpack_from("<I", superblock, 0x248)
    total_count = high << 32 | low
    return total_count, max(0, total_count - (free_high << 32 | free_low) - overhead)


def _lock(image_fd: int, image: str) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(image_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, f"{image} is in use by an earlier server that has not exited") from None
            time.sleep(0.01)


def _attach_loop_device(image_fd: int, image: str) -> tuple[int, str]:
    """Attach an image to a loop device that detaches itself after its last use. Returns its descriptor and path."""
    control_fd = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
    try:
        while True:
            device_path = f"/dev/loop{fcntl.ioctl(control_fd, _LOOP_CTL_GET_FREE)}"
            device_fd = os.open(device_path, os.O_RDWR | os.O_CLOEXEC)
            config_fields = (image_fd, BLOCK_BYTES, 0, 0, 0, 0, 0, 0, 0, 0, flags, image.encode()[:63], b"", b"", 0, 0)
            try:
                fcntl.ioctl(device_fd, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(*config_fields))
                return device_fd, device_path
            except OSError as error:
                os.close(device_fd)
                if error.errno == errno.EINVAL and flags & _LO_FLAGS_DIRECT_IO:
                    flags = _LO_FLAGS_AUTOCLEAR  # The file system does not support direct I/O: use the page cache.
                elif error.errno != errno.EBUSY:  # EBUSY: another process has taken the device.
                    raise
    finally:
        os.close(control_fd)


def can_restrict_ports() -> bool:
    """Return whether the kernel can restrict the TCP ports of a process."""
    version = _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    return bool(version >= _LANDLOCK_VERSION_WITH_PORTS)


def _restrict_ports(ports: tuple[int, ...]) -> None:
    """Allow listening on TCP only on ``ports``, and no outgoing TCP connections, if the kernel can restrict them."""
    if not can_restrict_ports():
        return
    attributes = struct.pack("=QQ", 0, _LANDLOCK_BIND_TCP | _LANDLOCK_CONNECT_TCP)
    ruleset_fd = _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check_result("landlock_create_ruleset", min(ruleset_fd, 0))
    for port in ports:
        rule = struct.pack("=QQ", _LANDLOCK_BIND_TCP, port)
        result = _libc.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset_fd, _LANDLOCK_RULE_NET_PORT, rule, 0)
        _check_result("landlock_add_rule", result)
    _check_result("landlock_restrict_self", _libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset_fd, 0))
    os.close(ruleset_fd)


def _drop_privileges(seccomp_filter: bytes) -> None:
    """Permanently drop all privileges that a file server does not need."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in _KEPT_CAPABILITIES:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # Fails for capabilities that the kernel does not know.
    _check_result("prctl", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    filter_buffer = ctypes.create_string_buffer(seccomp_filter)
    filter_program = _SockFilterProgram(len(seccomp_filter) // 8, ctypes.addressof(filter_buffer))
    _check_result("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0))


class _SockFilterProgram(ctypes.Structure):
    """The C structure sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _act_as_rpcbind(rpcbind_socket: socket.socket, server_pid: int) -> bool:
    """Act as rpcbind until the server has registered and standard input is closed.

    Returns False if the server exited.
    """
    callers: dict[int, socket.socket] = {}
    transports: dict[int, set[bytes]] = {_NFS: set(), _MOUNT: set()}
    descriptors = [0, rpcbind_socket.fileno()]
    # The server registers NFS before MOUNT, both over the same transports.
    while 0 in descriptors or not transports[_NFS] or transports[_MOUNT] != transports[_NFS]:
        ready_descriptors, _, _ = select.select([*descriptors, *callers], [], [], 0.2)
        if os.waitpid(server_pid, os.WNOHANG)[0]:
            return False
        for descriptor in ready_descriptors:
            if descriptor == 0:
                descriptors.remove(0)
            elif descriptor == rpcbind_socket.fileno():
                caller, _ = rpcbind_socket.accept()
                caller.settimeout(5)
                callers[caller.fileno()] = caller
            elif not _answer_call(callers[descriptor], transports):
                callers.pop(descriptor).close()
    return True


def _answer_call(caller: socket.socket, transports: dict[int, set[bytes]]) -> bool:
    """Answer one RPCBIND call (RFC 5531, RFC 1833) with success.

    If the call registers a transport, adds it to ``transports``. Returns False at the end of the connection.
    """
    with contextlib.suppress(OSError, struct.error):
        (header,) = struct.unpack(">I", caller.recv(4, socket.MSG_WAITALL))
        call = caller.recv(min(header & 0x7FFFFFFF, _MAX_CALL_BYTES), socket.MSG_WAITALL)
        xid, *_, procedure = struct.unpack_from(">6I", call)
        reply = struct.pack(">6I", xid, 1, 0, 0, 0, 0) + (struct.pack(">I", 1) if procedure else b"")
        caller.sendall(struct.pack(">I", len(reply) | 1 << 31) + reply)
        if procedure == _RPCBPROC_SET:
            credentials_length = struct.unpack_from(">I", call, 28)[0]
            verifier_offset = 32 + credentials_length + 4
            arguments_offset = verifier_offset + 4 + struct.unpack_from(">I", call, verifier_offset)[0]
            program, version, length = struct.unpack_from(">3I", call, arguments_offset)
            if program in transports and version == 3:
                transports[program].add(call[arguments_offset + 12 : arguments_offset + 12 + length])
        return True
    return False


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    _check_result(f"mount {source} {target}", result)


def _check_result(operation: str, result: int) -> None:
    if result != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{operation}: {os.strerror(error_number)}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
