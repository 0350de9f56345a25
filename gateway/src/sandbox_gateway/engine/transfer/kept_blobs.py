"""Blobs of unfinished pulls, by digest, so that an interrupted pull does not fetch them again.

A blob is checked when it is fetched, and its chunk again when it is used, so the files need not be durable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all

_MAX_UNUSED_SECONDS = 86400
_PARTIAL_PREFIX = ".partial-"
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class KeptBlobs:
    """Its methods block, except for ``used``, and raise GatewayError. Several pulls can use the same blob."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """``max_bytes``: the maximum size of the blobs that no pull uses."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Held while a blob that no pull uses is removed, so that no pull begins to use it meanwhile."""

    def open(self) -> None:
        """Remove partial files, and the blobs that exceed the limits."""
        with translated_os_errors(str(self._directory)):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            for path in self._directory.glob(f"{_PARTIAL_PREFIX}*"):
                path.unlink()
        self.trim()

    @contextlib.contextmanager
    def protected(self, digests: Iterable[str]) -> Iterator[None]:
        """Prevent ``trim`` and ``remove`` from removing these blobs inside this context."""
        digests = set(digests)
        with self._lock:
            self._users.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(digests)
                self._users += Counter()

    def has(self, digest: str, size: int) -> bool:
        try:
            return self._path(digest).stat().st_size == size
        except FileNotFoundError:
            return False

    def read(self, digest: str) -> bytes:
        with translated_os_errors(str(self._directory)):
            return self._path(digest).read_bytes()

    def write(self, digest: str, data: bytes) -> None:
        path = self._directory / f"{_PARTIAL_PREFIX}{secrets.token_hex(8)}"
        with translated_os_errors(str(self._directory)):
            try:
                descriptor = os.open(path, _CREATE_FLAGS, 0o600)
                try:
                    write_all(descriptor, data, 0)
                finally:
                    os.close(descriptor)
                path.rename(self._path(digest))
            finally:
                path.unlink(missing_ok=True)

    def remove(self, digests: Iterable[str]) -> None:
        """Remove the blobs among ``digests`` that no pull uses."""
        with translated_os_errors(str(self._directory)):
            for digest in digests:
                self._remove_unused(digest)

    def discard(self, digest: str) -> None:
        """Remove a blob that is damaged."""
        with translated_os_errors(str(self._directory)):
            self._path(digest).unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove the blobs that no pull uses or has used for a day, and the oldest ones that exceed the maximum."""
        with translated_os_errors(str(self._directory)):
            entries = []
            for path in self._directory.iterdir():
                # A pull that has just finished may remove the file.
                with contextlib.suppress(FileNotFoundError):
                    if not path.name.startswith("."):
                        entries.append((path, path.stat()))
            kept_bytes = 0
            for path, status in sorted(entries, key=lambda entry: entry[1].st_mtime, reverse=True):
                digest = f"sha256:{path.name}"
                if self._users[digest]:
                    continue
                kept_bytes += status.st_size
                if kept_bytes > self._max_bytes or time.time() - status.st_mtime > _MAX_UNUSED_SECONDS:
                    self._remove_unused(digest)

    def _remove_unused(self, digest: str) -> None:
        with self._lock:
            if not self._users[digest]:
                self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / digest.removeprefix("sha256:")
