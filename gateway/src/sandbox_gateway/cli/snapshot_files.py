"""Write snapshots to files, and read them. A file gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sandbox_gateway.cli.client import Client, path
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.progress import transferring

_PIECE_BYTES = 256 << 10


def export(client: Client, snapshot: str, file: str, *, memory: bool) -> int:
    """Write a snapshot to ``file``, which must not exist, or to standard output. Return the number of bytes."""
    written_bytes = 0
    with _target(file) as output, transferring(f"exporting {snapshot}") as advance:

        def write(piece: bytes) -> None:
            nonlocal written_bytes
            output.write(piece)
            written_bytes += len(piece)
            advance(len(piece))

        with _explaining_errors("write", file):
            client.download(path("snapshots", snapshot, "export"), write, memory="" if memory else "none")
    return written_bytes


def import_(client: Client, file: str, name: str, trust: list[str]) -> Any:
    """Import ``file``, or standard input, and return the snapshot."""
    with contextlib.ExitStack() as stack:
        with _explaining_errors("read", file):
            source = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            size = None if file == "-" else os.fstat(source.fileno()).st_size
        advance = stack.enter_context(transferring(f"importing {file}", size))
        return client.upload("/snapshots/import", _read_pieces(source, file, advance), name=name, trust=trust)


def _read_pieces(source: BinaryIO, file: str, advance: Callable[[int], None]) -> Iterator[bytes]:
    while True:
        with _explaining_errors("read", file):
            piece = source.read(_PIECE_BYTES)
        if not piece:
            return
        yield piece
        advance(len(piece))


@contextlib.contextmanager
def _target(file: str) -> Iterator[BinaryIO]:
    """Yield a temporary file that gets the name ``file`` if the context ends without an error."""
    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    final = Path(file)
    if final.exists():
        raise Failure(f"{file} exists", ExitCode.USAGE, "choose another file, or remove it first")
    temporary = final.with_name(f".{final.name}.partial-{secrets.token_hex(4)}")
    try:
        with _explaining_errors("write", file):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as output:
            yield output
            with _explaining_errors("write", file):
                output.flush()
                os.fsync(descriptor)
        with _explaining_errors("write", file):
            temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _explaining_errors(verb: str, file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "check the path, its permissions, and the free space"
        raise Failure(f"cannot {verb} {file}: {error.strerror or error}", ExitCode.USAGE, hint) from None
