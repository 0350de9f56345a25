"""Watch a directory by scanning it periodically, on systems and file systems without notifications."""

from __future__ import annotations

import os
import stat
import time

from sandbox_agent.failure import Failure, from_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Seen = dict[str, os.stat_result]

SCAN_SECONDS = 1.0
"""Minimum number of seconds between two scans."""
_REST_FACTOR = 20
"""The pause after a scan is at least this many times as long as the scan itself."""
MAX_ENTRIES = 10_000


class Tree:
    """Like ``inotify.Tree``, but misses files that exist only between two scans, and merges repeated changes."""

    fd = -1

    def __init__(self, path: str, *, recursive: bool) -> None:
        self._path = path
        self._recursive = recursive
        self.ended = False
        self._known: Seen = {}
        try:
            self._root = os.stat(path)
            os.scandir(path).close()
        except OSError as error:
            raise from_os_error(error, path) from None
        self._known = self._scan()

    def due(self) -> float | None:
        return max(0.0, self._next - time.monotonic())

    def close(self) -> None:
        self._known = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield the changes since the last scan, if the next scan is due."""
        if self.due():
            return
        try:
            root = os.stat(self._path)
        except OSError:
            root = None
        if root is None or not _is_same_file(root, self._root):
            self.ended = True
            yield "REMOVE", "."
            return
        if _permissions(root) != _permissions(self._root):
            yield "CHMOD", "."
        before, now = self._known, self._scan()
        self._root, self._known = root, now
        yield from _differences(before, now)

    def _scan(self) -> Seen:
        started = time.monotonic()
        seen: Seen = {}
        stack = [""]
        while stack:
            here = stack.pop()
            try:
                with os.scandir(os.path.join(self._path, here)) as found:
                    for item in found:
                        self._add_item(item, here, seen, stack)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                # The directory cannot be read now, but its entries may still exist.
                below = f"{here}/" if here else ""
                seen.update({name: found for name, found in self._known.items() if name.startswith(below)})
        now = time.monotonic()
        self._next = now + max(SCAN_SECONDS, _REST_FACTOR * (now - started))
        return seen

    def _add_item(self, item: os.DirEntry[str], here: str, seen: Seen, stack: list[str]) -> None:
        name = f"{here}/{item.name}" if here else item.name
        try:
            seen[name] = found = item.stat(follow_symlinks=False)
        except OSError:
            return
        if len(seen) > MAX_ENTRIES:
            raise Failure(
                "resource_exhausted",
                f"{self._path} contains more than {MAX_ENTRIES} entries, too many to scan periodically: "
                "watch only a part of them",
            )
        if self._recursive and stat.S_ISDIR(found.st_mode):
            stack.append(name)


def _differences(before: Seen, now: Seen) -> Iterator[tuple[str, str]]:
    gone = sorted((name for name in before if name not in now), reverse=True)
    come = sorted(name for name in now if name not in before)
    # A new file can reuse the inode number of a deleted one, but has another modification time.
    places = {(*_identity(now[name]), now[name].st_mtime_ns): name for name in come}
    keys = {name: (*_identity(before[name]), before[name].st_mtime_ns) for name in gone}
    moved = {name: places[key] for name, key in keys.items() if key in places}
    for name in gone:
        # Entries move with their directory.
        if os.path.dirname(name) not in moved:
            yield "RENAME" if name in moved else "REMOVE", name
    arrived = set(moved.values())
    for name in come:
        yield "CREATE", name
        if name not in arrived and stat.S_ISREG(now[name].st_mode) and now[name].st_size:
            yield "WRITE", name
    for name, found in sorted(now.items()):
        if name not in before:
            continue
        known = before[name]
        if not _is_same_file(found, known):
            yield "CREATE", name
            continue
        written = (found.st_mtime_ns, found.st_size) != (known.st_mtime_ns, known.st_size)
        if written and stat.S_ISREG(found.st_mode):
            yield "WRITE", name
        if _permissions(found) != _permissions(known) or (found.st_ctime_ns != known.st_ctime_ns and not written):
            yield "CHMOD", name


def _is_same_file(one: os.stat_result, other: os.stat_result) -> bool:
    return _identity(one) == _identity(other)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)


def _permissions(found: os.stat_result) -> tuple[int, int, int]:
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
