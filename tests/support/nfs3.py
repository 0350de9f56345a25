"""A client for NFSv3 and its MOUNT protocol (RFC 1813) over TCP that can send what a hostile sandbox would send.

The caller chooses handles, user ids and RPC programs. The client implements only what the tests need.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from dataclasses import dataclass
from typing import Self

NFS, MOUNT, NLM, RQUOTA, PORTMAP = 100003, 100005, 100021, 100011, 100000
OK, PERM, NOENT, IO, ACCES, EXIST, NOSPC, ROFS, STALE, BADHANDLE = 0, 1, 2, 5, 13, 17, 28, 30, 70, 10001
UNSTABLE, FILE_SYNC = 0, 2


class RpcRejected(Exception):
    """The server's RPC layer rejected the call before accessing any file."""


class NfsError(Exception):
    """A procedure failed with the NFS status ``status``, such as ``NOENT``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NFS status {status}")
        self.status = status


@dataclass(frozen=True)
class Attributes:
    kind: int
    mode: int
    links: int
    uid: int
    gid: int
    size: int
    fsid: int
    fileid: int


class Reader:
    """A reader of XDR data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def u32(self) -> int:
        return int(self._take(">I", 4))

    def u64(self) -> int:
        return int(self._take(">Q", 8))

    def opaque(self) -> bytes:
        size = self.u32()
        data = self._data[self._offset : self._offset + size]
        self._offset += (size + 3) // 4 * 4
        return data

    def _take(self, format: str, size: int) -> int:
        value: int = struct.unpack_from(format, self._data, self._offset)[0]
        self._offset += size
        return value

    def attributes(self) -> Attributes:
        kind, mode, links, uid, gid = (self.u32() for _ in range(5))
        size, _, _, fsid, fileid = (self.u64() for _ in range(5))
        for _ in range(3):
            self.u64()
        return Attributes(kind, mode, links, uid, gid, size, fsid, fileid)

    def post_attributes(self) -> Attributes | None:
        return self.attributes() if self.u32() else None

    def skip_wcc(self) -> None:
        if self.u32():
            for _ in range(3):
                self.u64()
        self.post_attributes()


def encode_opaque(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data + b"\0" * (-len(data) % 4)


def _encode_attributes(mode: int | None = None, size: int | None = None) -> bytes:
    """Encode a sattr3 that sets only the attributes that are not None."""
    data = struct.pack(">I", 0) if mode is None else struct.pack(">II", 1, mode)
    data += struct.pack(">II", 0, 0)
    data += struct.pack(">I", 0) if size is None else struct.pack(">IQ", 1, size)
    return data + struct.pack(">II", 0, 0)


class Connection:
    """A TCP connection to one of the server's ports. Calls contain the credentials ``uid`` and ``gid``."""

    def __init__(self, address: str, port: int, *, uid: int = 0, gid: int = 0, seconds: float = 5, source: int = 0):
        """Connect to the server. ``seconds``: the timeout. ``source``: the source port, or 0 for any port."""
        self._uid, self._gid = uid, gid
        self._xids = itertools.count(int.from_bytes(os.urandom(3), "big"))
        self._socket = socket.create_connection((address, port), seconds, ("", source) if source else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(self, program: int, version: int, procedure: int, arguments: bytes = b"") -> Reader:
        """Call a procedure, and return its results.

        Raises RpcRejected if the server rejects the call, or OSError if the connection breaks or no reply arrives.
        """
        xid = next(self._xids)
        credentials = struct.pack(">I", 0) + encode_opaque(b"sandbox") + struct.pack(">III", self._uid, self._gid, 0)
        call_header = struct.pack(">IIIIII", xid, 0, 2, program, version, procedure)
        message = call_header + struct.pack(">I", 1) + encode_opaque(credentials) + struct.pack(">II", 0, 0) + arguments
        self._socket.sendall(struct.pack(">I", len(message) | 1 << 31) + message)
        while True:
            reply = Reader(self._read_record())
            if reply.u32() == xid:
                break
        reply.u32()
        if reply.u32() != 0:
            reason = reply.u32()
            raise RpcRejected(f"denied: {'authentication ' + str(reply.u32()) if reason == 1 else 'RPC version'}")
        reply.u32(), reply.opaque()
        accept_status = reply.u32()
        if accept_status != 0:
            raise RpcRejected(f"not accepted: {accept_status}")
        return reply

    def _read_record(self) -> bytes:
        data = b""
        while True:
            header = int.from_bytes(self._read_exactly(4), "big")
            data += self._read_exactly(header & 0x7FFFFFFF)
            if header >> 31:
                return data

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the server closed the connection")
            data += piece
        return data


class Mount(Connection):
    def mount(self, path: str) -> bytes:
        """Return the handle of an export's root."""
        reply = self.call(MOUNT, 3, 1, encode_opaque(path.encode()))
        _check(reply)
        return reply.opaque()

    def exports(self) -> list[tuple[str, list[str]]]:
        """Return (path, clients) for each export that the server lists."""
        reply, exports = self.call(MOUNT, 3, 5), []
        while reply.u32():
            path, groups = reply.opaque().decode(), []
            while reply.u32():
                groups.append(reply.opaque().decode())
            exports.append((path, groups))
        return exports


class Nfs(Connection):
    """A connection for NFS calls. Handles are bytes. Methods raise NfsError for any status other than OK."""

    def getattr(self, handle: bytes) -> Attributes:
        return self._call_nfs(1, encode_opaque(handle)).attributes()

    def truncate(self, handle: bytes, size: int) -> None:
        self._call_nfs(2, encode_opaque(handle) + _encode_attributes(size=size) + struct.pack(">I", 0))

    def lookup(self, directory: bytes, name: str) -> bytes:
        return self._call_nfs(3, encode_opaque(directory) + encode_opaque(name.encode())).opaque()

    def read(self, handle: bytes, offset: int = 0, count: int = 65536) -> bytes:
        reply = self._call_nfs(6, encode_opaque(handle) + struct.pack(">QI", offset, count))
        reply.post_attributes(), reply.u32(), reply.u32()
        return reply.opaque()

    def write(self, handle: bytes, data: bytes, offset: int = 0, stable: int = FILE_SYNC) -> int:
        reply = self._call_nfs(
            7, encode_opaque(handle) + struct.pack(">QII", offset, len(data), stable) + encode_opaque(data)
        )
        reply.skip_wcc()
        return reply.u32()

    def create(self, directory: bytes, name: str, mode: int = 0o644) -> bytes:
        """Create a file unless it exists, and return its handle."""
        arguments = (
            encode_opaque(directory) + encode_opaque(name.encode()) + struct.pack(">I", 0) + _encode_attributes(mode)
        )
        return self._read_new_handle(self._call_nfs(8, arguments), directory, name)

    def mkdir(self, directory: bytes, name: str, mode: int = 0o755) -> bytes:
        return self._read_new_handle(
            self._call_nfs(9, encode_opaque(directory) + encode_opaque(name.encode()) + _encode_attributes(mode)),
            directory,
            name,
        )

    def symlink(self, directory: bytes, name: str, target: str) -> None:
        self._call_nfs(
            10,
            encode_opaque(directory)
            + encode_opaque(name.encode())
            + _encode_attributes()
            + encode_opaque(target.encode()),
        )

    def mknod(self, directory: bytes, name: str, major: int, minor: int) -> None:
        """Create a block device."""
        data = encode_opaque(directory) + encode_opaque(name.encode())
        self._call_nfs(11, data + struct.pack(">I", 3) + _encode_attributes(0o666) + struct.pack(">II", major, minor))

    def remove(self, directory: bytes, name: str) -> None:
        self._call_nfs(12, encode_opaque(directory) + encode_opaque(name.encode()))

    def rename(self, directory: bytes, name: str, new_directory: bytes, new_name: str) -> None:
        self._call_nfs(
            14,
            encode_opaque(directory)
            + encode_opaque(name.encode())
            + encode_opaque(new_directory)
            + encode_opaque(new_name.encode()),
        )

    def commit(self, handle: bytes) -> None:
        self._call_nfs(21, encode_opaque(handle) + struct.pack(">QI", 0, 0))

    def null(self) -> None:
        self.call(NFS, 3, 0)

    def _read_new_handle(self, reply: Reader, directory: bytes, name: str) -> bytes:
        return reply.opaque() if reply.u32() else self.lookup(directory, name)

    def _call_nfs(self, procedure: int, arguments: bytes) -> Reader:
        reply = self.call(NFS, 3, procedure, arguments)
        _check(reply)
        return reply


def _check(reply: Reader) -> None:
    status = reply.u32()
    if status != OK:
        raise NfsError(status)
