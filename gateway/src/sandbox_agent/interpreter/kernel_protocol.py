"""The frames between the agent and a kernel; see ``kernel``."""

from __future__ import annotations

import struct

HEAD = struct.Struct(">cI")
"""The head of a kernel's frame: its kind, and the length of its content."""
SIZE = struct.Struct(">I")
"""The head of the agent's frame: the length of its content."""
EVENT, SYNC, DONE = b"E", b"S", b"D"
MAX_SIZE = 32 << 20
"""Maximum number of bytes in one event."""

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
"""The field of a result for each MIME type; other types are in ``extra``."""
