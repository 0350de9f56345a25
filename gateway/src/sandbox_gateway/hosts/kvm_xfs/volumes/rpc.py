"""Call procedures of a server over ONC RPC (RFC 5531), without credentials."""

from __future__ import annotations

import struct

from sandbox_gateway.hosts.connect import open_connection

_MAX_REPLY_BYTES = 4 << 20
_MAX_FRAGMENTS = 1024
"""Fragments that have already arrived are read without yielding to other tasks, so their number must be limited."""


async def call(address: str, port: int, program: int, procedure: int) -> bytes:
    """Call a procedure of ``program``, version 3, without arguments. Returns its result. Raises OSError or EOFError.

    The server may be under the control of a guest: memory and time for its reply are limited.
    """
    reader, writer = await open_connection(address, port)
    try:
        request = struct.pack(">10I", 1, 0, 2, program, 3, procedure, 0, 0, 0, 0)
        writer.write(struct.pack(">I", len(request) | 1 << 31) + request)
        reply = bytearray()
        for _ in range(_MAX_FRAGMENTS):
            (header,) = struct.unpack(">I", await reader.readexactly(4))
            length = header & 0x7FFFFFFF
            if len(reply) + length > _MAX_REPLY_BYTES:
                raise EOFError(f"the RPC server's reply is longer than {_MAX_REPLY_BYTES} bytes")
            reply += await reader.readexactly(length)
            if header >> 31:  # This fragment is the last one.
                break
        else:
            raise EOFError(f"the RPC server's reply has more than {_MAX_FRAGMENTS} fragments")
    finally:
        writer.close()
    if reply[4:24] != struct.pack(">5I", 1, 0, 0, 0, 0):
        raise EOFError("the RPC server refused the call")
    return bytes(reply[24:])


def encode_opaque(text: str) -> bytes:
    """Encode a string as variable-length opaque data (XDR, RFC 4506)."""
    data = text.encode()
    return struct.pack(">I", len(data)) + data + b"\0" * (-len(data) % 4)
