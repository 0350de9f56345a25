# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Translate a Dockerfile with the gateway's help, and pack the files that it copies from the context into archives.

The gateway parses the Dockerfile, and returns regular expressions for the files it copies. The digest of an archive
does not depend on the times and the owners of its files.

The modules and sandboxctl have identical copies of this file, because neither of them can import the other's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 256 << 10
_PIECE_BYTES = 256 << 10
_BLOCK_BYTES = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK_BYTES)


class ContextError(Exception):
    """A Dockerfile or its context cannot be used. The message is a sentence for the user."""


@dataclass(frozen=True)
class _IgnorePattern:
    regex: re.Pattern[str]
    is_exception: bool


@dataclass(frozen=True)
class _Entry:
    """A file, a directory or a link. ``name``: its path in the archive. ``path``: its path on this host."""

    name: str
    path: str
    status: os.stat_result
    target: str = ""

    def make_header(self) -> bytes:
        info = tarfile.TarInfo(self.name)
        info.mode = stat.S_IMODE(self.status.st_mode)
        info.mtime = max(0, int(self.status.st_mtime))
        if stat.S_ISDIR(self.status.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(self.status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, self.target
        else:
            info.size = self.status.st_size
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

    @property
    def padding(self) -> int:
        return -self.size % _BLOCK_BYTES

    @property
    def size(self) -> int:
        return self.status.st_size if stat.S_ISREG(self.status.st_mode) else 0

    def describe(self) -> bytes:
        """Return what the digest of an archive contains about the entry, except its contents."""
        text = f"{self.status.st_mode:o} {self.size} {len(os.fsencode(self.name))} {len(os.fsencode(self.target))} "
        return text.encode() + os.fsencode(self.name) + os.fsencode(self.target)

    def read(self) -> Iterator[bytes]:
        """Yield the contents of a file. Raises ContextError if its size has changed."""
        remaining = self.size
        if not stat.S_ISREG(self.status.st_mode):
            return
        with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                remaining -= len(piece)
                if remaining < 0:
                    break
                yield piece
        if remaining:
            raise ContextError(f"{self.path} was changed while it was read: try again")


@dataclass(frozen=True)
class Archive:
    """The files of one source, as a tar archive that is created while it is read."""

    source: str
    digest: str
    size: int
    _entries: Sequence[_Entry]

    def read_pieces(self) -> Iterator[bytes]:
        """Yield the archive. Raises ContextError, before the end, if a file has changed since it was planned."""
        hasher = hashlib.sha256()
        with _errors_explained():
            for entry in self._entries:
                hasher.update(entry.describe())
                yield entry.make_header()
                for piece in entry.read():
                    hasher.update(piece)
                    yield piece
                yield bytes(entry.padding)
        if hasher.hexdigest() != self.digest:
            raise ContextError(f"the files of the source {self.source!r} were changed during the upload: try again")
        yield _END


@dataclass(frozen=True)
class TranslatedDockerfile:
    """The fields of the recipe. ``missing_archives``: the archives that must be uploaded before the build."""

    image: str
    setup: Sequence[str]
    start_command: str
    missing_archives: Sequence[Archive]


def translate_dockerfile(
    post: Callable[[str, dict[str, Any]], Mapping[str, Any]], dockerfile: str, context: str = ""
) -> TranslatedDockerfile:
    """Translate the Dockerfile at a path. Raises ContextError, and what ``post`` raises.

    ``post`` sends a request with a body to a path of the gateway's API. ``context``: by default, the directory of the
    Dockerfile.
    """
    text = _read_text(dockerfile)
    context = context or str(Path(dockerfile).parent)
    if not Path(context).is_dir():
        raise ContextError(f"the context {context} is not a directory: create it, or use a different one")
    body = {"dockerfile": text, "ignoreFile": _read_ignore_file(dockerfile, context)}
    answer = post("/dockerfiles", body)
    archives: list[Archive] = []
    if answer["sources"]:
        packer = _Packer(context, answer["ignorePatterns"], answer["maxArchiveBytes"])
        archives = [packer.pack(source) for source in answer["sources"]]
        answer = post("/dockerfiles", {**body, "digests": {archive.source: archive.digest for archive in archives}})
    missing_archives = {each.digest: each for each in archives if each.digest in answer["missingDigests"]}
    return TranslatedDockerfile(
        answer["image"], answer["setup"], answer["startCommand"], tuple(missing_archives.values())
    )


def _read_text(path: str) -> str:
    """Return the contents of a file. Raises ContextError."""
    with _errors_explained():
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ContextError(f"{path} is not a regular file: correct the path, or replace it with a file")
            data = os.read(descriptor, MAX_TEXT_BYTES + 1)
        finally:
            os.close(descriptor)
    if len(data) > MAX_TEXT_BYTES:
        size = max(status.st_size, len(data))
        raise ContextError(f"{path} is {size} bytes long, but can have at most {MAX_TEXT_BYTES}: use a shorter file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ContextError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _read_ignore_file(dockerfile: str, context: str) -> str:
    """Return the contents of NAME.dockerignore or .dockerignore; "" if neither exists."""
    for path in (f"{dockerfile}.dockerignore", f"{context}/.dockerignore"):
        if os.path.lexists(path):
            return _read_text(path)
    return ""


class _Packer:
    def __init__(self, context: str, ignore_patterns: Sequence[Mapping[str, Any]], max_bytes: int) -> None:
        self._context = context
        self._root = os.path.realpath(context)
        self._ignore_patterns = [
            _IgnorePattern(re.compile(pattern["regex"]), pattern["isException"]) for pattern in ignore_patterns
        ]
        self._has_exceptions = any(pattern.is_exception for pattern in self._ignore_patterns)
        self._max_bytes = max_bytes

    def pack(self, source: Mapping[str, Any]) -> Archive:
        """Find the files of a source, and compute their digest. Raises ContextError."""
        label = f"the source {source['source']!r} (line {source['line']} of the Dockerfile)"
        hasher = hashlib.sha256()
        entries = []
        size = len(_END)
        with _errors_explained():
            for match in self._find_matches(source["components"], label):
                for entry in self._walk(match, label):
                    size += len(entry.make_header()) + entry.size + entry.padding
                    if size > self._max_bytes:
                        raise ContextError(
                            f"the files of {label} take up more than {self._max_bytes >> 20} MiB (limits.upload_mb): "
                            "list files that the template does not need in .dockerignore, or raise that limit"
                        )
                    entries.append(entry)
            for entry in entries:
                hasher.update(entry.describe())
                for piece in entry.read():
                    hasher.update(piece)
        if not entries:
            raise ContextError(
                f"{label} matches no file in {self._context} that .dockerignore does not exclude: correct one of them"
            )
        return Archive(source["source"], hasher.hexdigest(), size, entries)

    def _find_matches(self, components: Sequence[str], label: str) -> Sequence[str]:
        """Return the paths, relative to the context, that match a source. Raises ContextError."""
        paths = [""]
        for component in components:
            regex = re.compile(component)
            paths = [
                _join(path, name)
                for path in paths
                for name in self._list_directory(path, label)
                if regex.fullmatch(name)
            ]
        return paths

    def _list_directory(self, path: str, label: str) -> Sequence[str]:
        real_path = self._resolve(path, label)
        return _list_names(real_path) if Path(real_path).is_dir() else []

    def _resolve(self, path: str, label: str) -> str:
        """Return the real path of a path in the context. Raises ContextError if a link leads outside the context."""
        real_path = os.path.realpath(_join(self._root, path))
        if os.path.commonpath([self._root, real_path]) != self._root:
            raise ContextError(
                f"{label} is or contains the link {path!r}, which leads outside the context {self._context}: copy the "
                "files into the context"
            )
        return real_path

    def _walk(self, match: str, label: str) -> Iterator[_Entry]:
        """Yield the entries of a match, and of everything inside a directory, in a fixed order. Raises ContextError.

        A link is followed if it is the match itself. Links inside a directory are copied as links.
        """
        matched_patterns: tuple[bool, ...] = ()
        is_ignored = False
        parts = match.split("/") if match else []
        for depth in range(len(parts)):
            is_ignored, matched_patterns = self._check_ignored("/".join(parts[: depth + 1]), matched_patterns)
        real_path = self._resolve(match, label)
        top = self._make_entry(match or ".", real_path, follow=True)
        if not stat.S_ISDIR(top.status.st_mode):
            if not is_ignored:
                yield top
            return
        has_yielded = not is_ignored
        if has_yielded:
            yield top
        elif not self._has_exceptions:
            return
        pending = [(match, real_path, matched_patterns)]
        while pending:
            directory, directory_path, parent_patterns = pending.pop()
            for name in _list_names(directory_path):
                path = _join(directory, name)
                is_ignored, patterns = self._check_ignored(path, parent_patterns)
                if is_ignored and not self._has_exceptions:
                    continue
                entry = self._make_entry(path, _join(directory_path, name), follow=False)
                if stat.S_ISDIR(entry.status.st_mode):
                    pending.append((path, entry.path, patterns))
                if not is_ignored:
                    if not has_yielded:
                        # Without its directory, the archive would not show that this entry is inside the source.
                        has_yielded = True
                        yield top
                    yield entry

    def _check_ignored(self, path: str, parent_patterns: tuple[bool, ...]) -> tuple[bool, tuple[bool, ...]]:
        """Return whether a path is ignored, and which patterns match it. ``parent_patterns``: those of its parent."""
        is_ignored = False
        matched_patterns = []
        for number, pattern in enumerate(self._ignore_patterns):
            is_match = bool(parent_patterns) and parent_patterns[number]
            if not is_match and pattern.is_exception == is_ignored:
                is_match = pattern.regex.fullmatch(path) is not None
            matched_patterns.append(is_match)
            if is_match:
                is_ignored = not pattern.is_exception
        return is_ignored, tuple(matched_patterns)

    def _make_entry(self, name: str, path: str, *, follow: bool) -> _Entry:
        status = Path(path).stat() if follow else Path(path).lstat()
        mode = status.st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise ContextError(
                f"{path} is neither a file nor a directory nor a link: remove it, or list it in .dockerignore"
            )
        return _Entry(name, path, status, str(Path(path).readlink()) if stat.S_ISLNK(mode) else "")


def _join(directory: str, name: str) -> str:
    """Join paths relative to the context, which is the directory "", or join real paths."""
    return f"{directory}/{name}" if directory and name else directory or name


def _list_names(directory: str) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)


@contextlib.contextmanager
def _errors_explained() -> Iterator[None]:
    """Replace each OSError with a ContextError."""
    try:
        yield
    except OSError as error:
        raise _explain(error) from None


def _explain(error: OSError) -> ContextError:
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "a file of the context"
    if error.errno == errno.ENOENT:
        return ContextError(f"{path} does not exist: correct the path, or create the file")
    if error.errno == errno.ELOOP:
        return ContextError(f"{path} was replaced with a link while it was read: try again")
    return ContextError(f"{path} cannot be read ({error.strerror}): check the path and its permissions")
