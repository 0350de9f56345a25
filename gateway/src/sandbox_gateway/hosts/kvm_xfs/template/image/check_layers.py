"""Check the layers of an image before they are unpacked, without writing anything.

This program runs in its own namespaces with the host's Python and imports only the standard library. Its arguments are
the maximum number of bytes, the maximum number of entries, and the layers, from the lowest to the highest. It prints a
JSON object: `problem` is a sentence about the first layer that cannot be unpacked safely, or "".
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WHITEOUT_PREFIX = ".wh."
_OVERHEAD_PER_ENTRY = 2048
"""Bytes of headers and padding that an entry may have in an archive, besides its contents."""
_MAX_NAME_LENGTH = 4096


class LayerProblem(Exception):
    """A layer cannot be unpacked safely. The message is the end of a sentence: the subject is the layer."""


class TooLarge(LayerProblem):
    """The image does not fit the template's disk. The message is a whole sentence."""


def check_layers(paths: Sequence[str], max_bytes: int, max_entries: int) -> str:
    """Return what is wrong with the layers, as a sentence, or ""."""
    budget = Budget(max_bytes, max_entries)
    for number, path in enumerate(paths, 1):
        try:
            with Path(path).open("rb") as file:
                _check_layer(file, budget)
        except TooLarge as error:
            return str(error)
        except LayerProblem as error:
            return f"layer {number} of {len(paths)} {error}"
        except MemoryError:
            return f"layer {number} of {len(paths)} has headers that are too large: build the image again"
        except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, OverflowError, RecursionError) as error:
            return f"layer {number} of {len(paths)} is damaged ({error}): build or fetch the image again"
    return ""


class Budget:
    """The bytes and entries that the layers of an image may still contain."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = self._bytes = max_bytes
        self._max_entries = self._entries = max_entries
        self._stream_bytes = max_bytes + max_entries * _OVERHEAD_PER_ENTRY

    def take_entry(self, size: int) -> None:
        self._entries -= 1
        self._bytes -= size
        if self._bytes < 0:
            raise TooLarge(
                f"the image unpacks to more than {self._max_bytes >> 20} MiB, the size of the template's disk: set "
                "diskSizeMB to a larger number"
            )
        if self._entries < 0:
            raise TooLarge(
                f"the image contains more than {self._max_entries} files, the most that the template's disk can hold: "
                "set diskSizeMB to a larger number"
            )

    def take_stream(self, size: int) -> None:
        self._stream_bytes -= size
        if self._stream_bytes < 0:
            self.take_entry(self._max_bytes + 1)


class _CountingReader:
    """A stream of which every byte is taken from the budget."""

    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._budget.take_stream(len(data))
        return data


def _check_layer(file: IO[bytes], budget: Budget) -> None:
    magic = file.read(4)
    file.seek(0)
    if magic == _ZSTD_MAGIC:
        raise LayerProblem("is compressed with zstd, which is not supported: build the image with gzip compression")
    stream: IO[bytes] = gzip.GzipFile(fileobj=file) if magic.startswith(_GZIP_MAGIC) else file  # type: ignore[assignment]
    reader = _CountingReader(stream, budget)
    with tarfile.open(fileobj=reader, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            archive.members = []  # Otherwise the archive remembers each of millions of members.
            check_member(member)
            budget.take_entry(member.size if member.isreg() else 0)
    while reader.read(1 << 20):
        pass


def check_member(member: tarfile.TarInfo) -> None:
    """Raise LayerProblem if an entry of a layer cannot be unpacked safely."""
    name = _quote(member.name)
    parts = _split(member.name, f"contains {name}")
    if member.ischr() or member.isblk():
        raise LayerProblem(
            f"contains the device {name}: remove it from the image, because the sandbox's kernel creates its devices"
        )
    if member.issparse():
        raise LayerProblem(f"contains the sparse file {name}: build the image with a tool that stores whole files")
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk() or member.isfifo()):
        raise LayerProblem(f"contains {name} of the unknown type {member.type!r}: build the image again")
    if not parts and not member.isdir():
        raise LayerProblem("contains a root that is not a directory: build the image again")
    if member.islnk():
        _split(member.linkname, f"contains the hard link {name} to {_quote(member.linkname)}")
    if len(member.name) > _MAX_NAME_LENGTH or len(member.linkname) > _MAX_NAME_LENGTH:
        raise LayerProblem(f"contains {name}, whose name or target is too long: shorten it")
    _check_whiteout(parts, name)


def _split(path: str, subject: str) -> list[str]:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise LayerProblem(f"{subject}, which leads outside of the image: build the image again without it")
    return [part for part in path.split("/") if part not in ("", ".")]


def _check_whiteout(parts: Sequence[str], name: str) -> None:
    """Only the last component may be a whiteout, which names an entry of the same directory to remove."""
    for index, part in enumerate(parts):
        if part.startswith(_WHITEOUT_PREFIX):
            target = part.removeprefix(_WHITEOUT_PREFIX)
            is_opaque = part == ".wh..wh..opq"
            if index != len(parts) - 1 or (not is_opaque and (target in ("", ".", "..") or target.startswith(".wh."))):
                raise LayerProblem(f"contains the invalid whiteout {name}: build the image again without it")


def _quote(text: str) -> str:
    return ascii(text[:100])


if __name__ == "__main__":
    max_bytes, max_entries, *paths = sys.argv[1:]
    print(json.dumps({"problem": check_layers(paths, int(max_bytes), int(max_entries))}))
