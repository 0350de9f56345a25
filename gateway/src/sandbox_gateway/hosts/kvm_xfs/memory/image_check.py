"""Detect damaged memory images by their size and by digests of a sample of their pages."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

from pydantic import BaseModel

from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES

_SAMPLE_COUNT = 16


class ImageCheck(BaseModel):
    """The expected properties of an image, which are checked before the image is used as a base."""

    size: int
    samples: dict[int, str]
    """Digests of pages with data, keyed by offset in bytes."""


def compute_check(image: Path) -> ImageCheck:
    """Return the check data of an image. Reads at most 16 pages."""
    descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        offsets = {_find_next_data(descriptor, random.randrange(0, size, PAGE_BYTES)) for _ in range(_SAMPLE_COUNT)}
        return ImageCheck(size=size, samples={each: _digest(descriptor, each) for each in offsets if each is not None})
    finally:
        os.close(descriptor)


def find_damage(image: Path, expected_check: ImageCheck) -> str:
    """Return a description of the damage to an image, or "" if none was detected."""
    try:
        descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"{image.name}: {error.strerror}"
    try:
        if os.fstat(descriptor).st_size != expected_check.size:
            return f"{image.name} has the wrong size"
        for offset, digest in expected_check.samples.items():
            if _digest(descriptor, offset) != digest:
                return f"{image.name} has changed at offset {offset}"
    except OSError as error:
        return f"{image.name}: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def _find_next_data(descriptor: int, offset: int) -> int | None:
    """Return the offset of the first page with data at or after ``offset``, or None if there is none."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) // PAGE_BYTES * PAGE_BYTES
    except OSError:
        return None


def _digest(descriptor: int, offset: int) -> str:
    return hashlib.blake2b(os.pread(descriptor, PAGE_BYTES, offset), digest_size=16).hexdigest()
