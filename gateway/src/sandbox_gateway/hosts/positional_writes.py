"""Write to a given offset in a file."""

from __future__ import annotations

import os


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. A single system call may write only a part of it."""
    remaining_data = memoryview(data)
    while remaining_data:
        written_bytes = os.pwrite(descriptor, remaining_data, offset)
        remaining_data, offset = remaining_data[written_bytes:], offset + written_bytes
