"""The frames that the agent and a kernel exchange. The module ``kernel`` describes them."""

from __future__ import annotations

import struct

KERNEL_FRAME_HEAD = struct.Struct(">cI")
"""The head of a frame from the kernel: its kind, and the length of its contents."""
AGENT_FRAME_HEAD = struct.Struct(">I")
"""The head of a frame from the agent: the length of its contents."""
EVENT, SYNC, DONE = b"E", b"S", b"D"
MAX_EVENT_BYTES = 32 << 20
"""Maximum size of an event, in bytes."""

FIELD_BY_MIME_TYPE = {
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
"""The field of a result for each MIME type. Other types are in the field ``extra``."""
