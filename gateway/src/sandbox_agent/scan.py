"""Changes below a directory, found by looking again and again: where the system does not tell of them."""

from __future__ import annotations

import os
import stat
import time

from sandbox_agent.failure import Failure, of_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Seen = dict[str, os.stat_result]

EVERY = 1.0
"""Seconds between two looks, or more: looking takes at most a part of the time."""
_SHARE = 20
MAX_ENTRIES = 10_000


class Tree:
    """As inotify.Tree. What came and went between two looks is not seen; what changed twice changed once."""

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
            raise of_os_error(error, path) from None
        self._known = self._look()

    def due(self) -> float | None:
        return max(0.0, self._next - time.monotonic())

    def close(self) -> None:
        self._known = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """What happened since the last look, if it is time for another."""
        if self.due():
            return
        try:
            root = os.stat(self._path)
        except OSError:
            root = None
        if root is None or not _same(root, self._root):
            self.ended = True
            yield "REMOVE", "."
            return
        if _rights(root) != _rights(self._root):
            yield "CHMOD", "."
        before, now = self._known, self._look()
        self._root, self._known = root, now
        yield from _differences(before, now)

    def _look(self) -> Seen:
        started = time.monotonic()
        seen: Seen = {}
        stack = [""]
        while stack:
            here = stack.pop()
            try:
                with os.scandir(os.path.join(self._path, here)) as found:
                    for item in found:
                        self._see(item, here, seen, stack)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                # It cannot be read now, which does not mean that what was there is gone.
                below = f"{here}/" if here else ""
                seen.update({name: what for name, what in self._known.items() if name.startswith(below)})
        now = time.monotonic()
        self._next = now + max(EVERY, _SHARE * (now - started))
        return seen

    def _see(self, item: os.DirEntry[str], here: str, seen: Seen, stack: list[str]) -> None:
        name = f"{here}/{item.name}" if here else item.name
        try:
            seen[name] = found = item.stat(follow_symlinks=False)
        except OSError:
            return
        if len(seen) > MAX_ENTRIES:
            raise Failure(
                "resource_exhausted",
                f"more than {MAX_ENTRIES} entries below {self._path}, which are too many to look at "
                "again and again: watch a part of them",
            )
        if self._recursive and stat.S_ISDIR(found.st_mode):
            stack.append(name)


def _differences(before: Seen, now: Seen) -> Iterator[tuple[str, str]]:
    gone = sorted((name for name in before if name not in now), reverse=True)
    come = sorted(name for name in now if name not in before)
    # A number of a file that is gone may be another's by now; that has its own time.
    places = {(*_identity(now[name]), now[name].st_mtime_ns): name for name in come}
    keys = {name: (*_identity(before[name]), before[name].st_mtime_ns) for name in gone}
    moved = {name: places[key] for name, key in keys.items() if key in places}
    for name in gone:
        # What is in a directory moves with it.
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
        if not _same(found, known):
            yield "CREATE", name
            continue
        written = (found.st_mtime_ns, found.st_size) != (known.st_mtime_ns, known.st_size)
        if written and stat.S_ISREG(found.st_mode):
            yield "WRITE", name
        if _rights(found) != _rights(known) or (found.st_ctime_ns != known.st_ctime_ns and not written):
            yield "CHMOD", name


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return _identity(one) == _identity(other)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)


def _rights(found: os.stat_result) -> tuple[int, int, int]:
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid
