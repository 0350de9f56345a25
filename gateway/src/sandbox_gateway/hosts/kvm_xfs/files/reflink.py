"""Clone files so that the copies share their extents (FICLONE), and list the extents of files (FIEMAP).

Sources: ioctl_ficlone(2); Linux Documentation/filesystems/fiemap.rst; include/uapi/linux/fiemap.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import math
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sandbox_gateway.errors import BackendFailed, NoSpace, Timeout, Unsupported
from sandbox_gateway.hosts.os_errors import create_no_space_error, is_out_of_space

_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
_CLONE_RANGE = struct.Struct("=qQQQ")
_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_FLAG_SYNC = 0x1
_FIEMAP_EXTENT_LAST = 0x1
_FIEMAP_EXTENT_UNWRITTEN = 0x800
_FIEMAP_EXTENT_SHARED = 0x2000
_FIEMAP_HEADER = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = np.dtype(
    [
        ("logical", np.uint64),
        ("physical", np.uint64),
        ("length", np.uint64),
        ("reserved64", np.uint64, 2),
        ("flags", np.uint32),
        ("reserved", np.uint32, 3),
    ]
)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_BLOCK_BYTES = 4096
_BATCH_EXTENT_COUNT = 4096
_MAX_COMPARED_EXTENTS = 1 << 20
"""The maximum number of extents of two files that ``list_differing_ranges`` holds in memory, 24 bytes each."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_NO_ROWS = np.empty((0, 3), np.uint64)
_HOLE = np.iinfo(np.int64).min
_Batch: TypeAlias = npt.NDArray[np.void]
_COPY_CHUNK_BYTES = 4 << 20
_UNSUPPORTED_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.ENOSYS})
"""The errors of FICLONE if a file system cannot share extents, or if the files are on different file systems."""


@dataclass(frozen=True)
class Extent:
    """A contiguous part of a file on its device. Offsets and the length are in bytes."""

    logical: int
    physical: int
    length: int
    is_shared: bool


def clone_fd(source: int, target: int) -> None:
    """Make the file ``target`` share all extents of ``source``. Raises NoSpace, Unsupported or BackendFailed."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        raise _translate_error(error) from None


def clone_range(source: int, target: int, offset: int, length: int) -> bool:
    """Make the range of the file ``target`` share the extents of the same range of ``source``.

    Returns False if the file systems of the files cannot share this range. Raises OSError.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, _CLONE_RANGE.pack(source, offset, length, offset))
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        return False
    return True


def clone(source: Path, target: Path, mode: int = 0o600) -> None:
    """Create ``target``, which must not exist, with all extents of ``source``. On failure, ``target`` is removed."""
    with source.open("rb") as origin, _created_file(target, mode) as descriptor:
        clone_fd(origin.fileno(), descriptor)


def clone_or_copy(source: Path, target: Path, mode: int = 0o600) -> None:
    """Create ``target``, which must not exist, with the contents of ``source``. On failure, ``target`` is removed.

    See ``clone_or_copy_fd``.
    """
    with source.open("rb") as origin, _created_file(target, mode) as descriptor:
        clone_or_copy_fd(origin.fileno(), descriptor)


def clone_or_copy_fd(source: int, target: int) -> None:
    """Give the empty file ``target`` the contents of ``source``.

    The files share extents if their file systems allow that. Otherwise the data is copied; holes remain holes.
    Raises OSError.
    """
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        _copy_data(source, target)


def can_list_extents(descriptor: int) -> bool:
    """Return whether the file system of a file can list its extents."""
    try:
        # With room for 0 extents, the kernel only counts them.
        fcntl.ioctl(descriptor, _FS_IOC_FIEMAP, bytearray(_FIEMAP_HEADER.pack(0, _BLOCK_BYTES, 0, 0, 0, 0)))
    except OSError:
        return False
    return True


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """Free a range of a file, which then reads as zeros. Returns False if that is not possible."""
    flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    return bool(_libc.fallocate(descriptor, flags, ctypes.c_long(offset), ctypes.c_long(length)) == 0)


@contextlib.contextmanager
def _created_file(path: Path, mode: int) -> Iterator[int]:
    """Create a file, which must not exist, and yield its descriptor. Remove the file on failure."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _copy_data(source: int, target: int) -> None:
    """Copy the data of a file, but not its holes, to an empty file."""
    os.ftruncate(target, os.fstat(source).st_size)
    buffer = memoryview(bytearray(_COPY_CHUNK_BYTES))
    for start, end in list_data_ranges(source):
        while start < end:
            length = os.preadv(source, [buffer[: min(_COPY_CHUNK_BYTES, end - start)]], start)
            if length == 0:
                raise BackendFailed("a memory image was truncated while it was being copied: take the snapshot again")
            data = buffer[:length]
            while data:
                written_bytes = os.pwrite(target, data, start)
                data, start = data[written_bytes:], start + written_bytes


def list_data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each part of a file that is not a hole. Raises OSError."""
    size, end = os.fstat(descriptor).st_size, 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # There is no data after this offset.
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def walk_extents(path: Path) -> Iterator[Extent]:
    """Flush dirty data, then yield the file's extents in order."""
    for batch in _walk_batches(path):
        for logical, physical, length, flags in batch[["logical", "physical", "length", "flags"]].tolist():
            yield Extent(logical, physical, length, bool(flags & _FIEMAP_EXTENT_SHARED))


def _walk_batches(path: Path, seconds: float = math.inf) -> Iterator[_Batch]:
    """Flush dirty data, then yield the file's extents in batches. Raises Timeout after ``seconds``.

    A guest can fragment its disk into millions of extents, so they are never all in memory at the same time.
    """
    start, deadline = 0, time.monotonic() + seconds
    with path.open("rb") as file:
        while len(batch := _read_batch(path, file.fileno(), start)):
            if time.monotonic() > deadline:
                raise Timeout(f"{path} has too many extents to examine them within {seconds:g} s")
            yield batch
            last_extent = batch[-1]
            if last_extent["flags"] & _FIEMAP_EXTENT_LAST:
                return
            start = int(last_extent["logical"] + last_extent["length"])


def _read_batch(path: Path, descriptor: int, start: int) -> _Batch:
    """Return up to _BATCH_EXTENT_COUNT extents from the offset ``start``."""
    buffer = bytearray(_FIEMAP_HEADER.size + _BATCH_EXTENT_COUNT * _FIEMAP_EXTENT.itemsize)
    _FIEMAP_HEADER.pack_into(buffer, 0, start, (1 << 64) - 1 - start, _FIEMAP_FLAG_SYNC, 0, _BATCH_EXTENT_COUNT, 0)
    # Flushing can take seconds. Unlike fcntl.ioctl, ctypes lets other threads run meanwhile.
    if _libc.ioctl(descriptor, _FS_IOC_FIEMAP, (ctypes.c_char * len(buffer)).from_buffer(buffer)) < 0:
        reason = os.strerror(ctypes.get_errno())
        raise BackendFailed(f"the kernel cannot list the extents of {path}: {reason}")
    count = _FIEMAP_HEADER.unpack_from(buffer)[3]
    return np.frombuffer(buffer, dtype=_FIEMAP_EXTENT, count=count, offset=_FIEMAP_HEADER.size)


def count_unique_bytes(path: Path, seconds: float = math.inf) -> int:
    """Return the number of bytes that the file does not share with other files. Removing the file would free them.

    Raises Timeout after ``seconds``.
    """
    return sum(
        int(batch["length"][(batch["flags"] & _FIEMAP_EXTENT_SHARED) == 0].sum())
        for batch in _walk_batches(path, seconds)
    )


def have_same_extents(one: Path, other: Path, seconds: float = math.inf) -> bool:
    """Return whether two files consist of the same blocks. Raises Timeout after ``seconds``.

    If they do, their contents are equal. If they do not, one of them has been written to.
    """
    walks = [_walk_merged_extents(path, seconds) for path in (one, other)]
    rows = [_NO_ROWS, _NO_ROWS]
    while True:
        rows = [each if len(each) else next(walk, _NO_ROWS) for each, walk in zip(rows, walks, strict=True)]
        count = min(len(rows[0]), len(rows[1]))
        if count == 0:
            return len(rows[0]) == len(rows[1])
        if not np.array_equal(rows[0][:count], rows[1][:count]):
            return False
        rows = [each[count:] for each in rows]


def list_differing_ranges(path: Path, other: Path) -> Iterator[tuple[int, int]]:
    """Flush dirty data, then yield the (start, end) of each range of a file that may differ from ``other``.

    Ranges that share their blocks, or are holes in both files, are equal. The files must have the same size, and be on
    the same file system. If they are fragmented too much, only holes in both are equal.
    """
    size = path.stat().st_size
    rows, other_rows = (
        [*_walk_merged_extents(each, math.inf, _MAX_COMPARED_EXTENTS, skip_unwritten=True)] for each in (path, other)
    )
    count = sum(len(each) for each in (*rows, *other_rows))
    if count > _MAX_COMPARED_EXTENTS:
        yield from _list_data_of_both(path, other)
        return
    extents, other_extents = (np.concatenate([_NO_ROWS, *each]).astype(np.int64) for each in (rows, other_rows))
    bounds = np.unique(np.concatenate([_list_bounds(extents), _list_bounds(other_extents)]))
    differs = _find_shifts(extents, bounds) != _find_shifts(other_extents, bounds)
    # The last bound is the end of an extent, so nothing follows it.
    changes = np.flatnonzero(np.diff(differs, prepend=False))
    for start, end in bounds[changes].reshape(-1, 2).tolist():
        if start < size:
            yield start, min(end, size)


def _list_data_of_both(path: Path, other: Path) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each range that is not a hole in both files."""
    with path.open("rb") as file, other.open("rb") as other_file:
        unfinished: tuple[int, int] | None = None
        for start, end in heapq.merge(*(list_data_ranges(each.fileno()) for each in (file, other_file))):
            if unfinished is not None and start > unfinished[1]:
                yield unfinished
                unfinished = None
            unfinished = (start, end) if unfinished is None else (unfinished[0], max(unfinished[1], end))
        if unfinished is not None:
            yield unfinished


def _list_bounds(extents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([extents[:, 0], extents[:, 0] + extents[:, 2]])


def _find_shifts(extents: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how far each of the ascending ``offsets`` of a file is from its block on the device, or _HOLE."""
    if not len(extents):
        return np.full(len(offsets), _HOLE)
    indexes = np.searchsorted(extents[:, 0], offsets, side="right") - 1
    logical, physical, length = extents[np.maximum(indexes, 0)].T
    is_data = (indexes >= 0) & (offsets < logical + length)
    return np.where(is_data, physical - logical, _HOLE)


def _walk_merged_extents(
    path: Path, seconds: float, max_count: float = math.inf, *, skip_unwritten: bool = False
) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield arrays of (logical, physical, length). Joins adjacent extents, because sharing can split extents.

    Ends after more than ``max_count`` extents. ``skip_unwritten``: omit allocated extents that read as zeros.
    """
    unfinished, count = _NO_ROWS, 0
    for batch in _walk_batches(path, seconds):
        rows = np.stack([batch["logical"], batch["physical"], batch["length"]], axis=1)
        if skip_unwritten:
            rows = rows[(batch["flags"] & _FIEMAP_EXTENT_UNWRITTEN) == 0]
        rows = np.concatenate([unfinished, rows])
        if not len(rows):
            continue
        ends = rows[:, :2] + rows[:, 2:]
        first_indexes = np.flatnonzero(np.append(True, (rows[1:, :2] != ends[:-1]).any(axis=1)))
        last_indexes = np.append(first_indexes[1:], len(rows)) - 1
        merged = rows[first_indexes]
        merged[:, 2] = ends[last_indexes, 0] - merged[:, 0]
        if len(merged) > 1:
            yield merged[:-1]
            count += len(merged) - 1
        unfinished = merged[-1:]
        if count > max_count:
            break
    if len(unfinished):
        yield unfinished


def require_reflinks(directory: Path) -> None:
    """Check that files in ``directory`` can share extents. Raises Unsupported, with a remedy, if they cannot."""
    source, target = directory / ".reflink-probe", directory / ".reflink-probe-clone"
    try:
        source.write_bytes(b"probe" * 1000)
        target.unlink(missing_ok=True)
        clone(source, target)
    except Unsupported:
        raise Unsupported(
            f"{directory} cannot share blocks between files: put the state root on an XFS file system created with "
            "'mkfs.xfs -m reflink=1', as the kvm_xfs_host role does"
        ) from None
    except OSError as error:
        raise _translate_error(error) from None
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)


def _translate_error(error: OSError) -> NoSpace | Unsupported | BackendFailed:
    if is_out_of_space(error):
        return create_no_space_error()
    if error.errno in _UNSUPPORTED_ERRNOS:
        return Unsupported(
            f"this file system cannot share blocks between files ({error.strerror}): put the state root on an "
            "XFS file system created with reflink=1"
        )
    return BackendFailed(f"the kernel failed to share blocks between files: {error.strerror}")
