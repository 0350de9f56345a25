"""What a kernel and the agent say to each other over the kernel's channel; see ``kernel``."""

from __future__ import annotations

import struct

HEAD = struct.Struct(">cI")
"""Of a kernel's frame: what it is, the length of its content."""
SIZE = struct.Struct(">I")
"""Of the agent's frame: the length of its content."""
EVENT, SYNC, DONE = b"E", b"S", b"D"
MOST = 32 << 20
"""Bytes of one event."""

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}
"""The fields of a result by their MIME type; what has another is in ``extra``."""
