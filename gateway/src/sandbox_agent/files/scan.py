"""Watch a directory by scanning it periodically, for systems and file systems without notifications."""

from __future__ import annotations

import os
import stat
import time

from sandbox_agent.failure import Failure, from_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Entries = dict[str, os.stat_result]

SCAN_INTERVAL_SECONDS = 1.0
"""Minimum number of seconds between two scans."""
_PAUSE_FACTOR = 20
"""The pause after a scan is at least this many times as long as the scan itself."""
MAX_ENTRIES = 10_000


class TreeWatch:
    """A watch like ``inotify.TreeWatch``.

    It misses files that exist only between two scans, and merges repeated changes.
    """

    fd = -1

    def __init__(self, path: str, *, recursive: bool) -> None:
        self._path = path
        self._recursive = recursive
        self.has_ended = False
        self._entries: Entries = {}
        try:
            self._root_stat = os.stat(path)
            os.scandir(path).close()
        except OSError as error:
            raise from_os_error(error, path) from None
        self._entries = self._scan()

    def seconds_until_due(self) -> float | None:
        return max(0.0, self._next_scan_at - time.monotonic())

    def close(self) -> None:
        self._entries = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """If the next scan is due, scan the directory and yield the changes since the previous scan."""
        if self.seconds_until_due():
            return
        try:
            root_stat = os.stat(self._path)
        except OSError:
            root_stat = None
        if root_stat is None or not _is_same_file(root_stat, self._root_stat):
            self.has_ended = True
            yield "REMOVE", "."
            return
        if _get_permissions(root_stat) != _get_permissions(self._root_stat):
            yield "CHMOD", "."
        before, after = self._entries, self._scan()
        self._root_stat, self._entries = root_stat, after
        yield from _compare(before, after)

    def _scan(self) -> Entries:
        start_time = time.monotonic()
        entries: Entries = {}
        stack = [""]
        while stack:
            directory = stack.pop()
            try:
                with os.scandir(os.path.join(self._path, directory)) as items:
                    for item in items:
                        self._add_item(item, directory, entries, stack)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                # The directory is unreadable now, but its entries may still exist.
                prefix = f"{directory}/" if directory else ""
                entries.update({name: entry for name, entry in self._entries.items() if name.startswith(prefix)})
        now = time.monotonic()
        self._next_scan_at = now + max(SCAN_INTERVAL_SECONDS, _PAUSE_FACTOR * (now - start_time))
        return entries

    def _add_item(self, item: os.DirEntry[str], directory: str, entries: Entries, stack: list[str]) -> None:
        name = f"{directory}/{item.name}" if directory else item.name
        try:
            entries[name] = item_stat = item.stat(follow_symlinks=False)
        except OSError:
            return
        if len(entries) > MAX_ENTRIES:
            raise Failure(
                "resource_exhausted",
                f"{self._path} contains more than {MAX_ENTRIES} entries, too many to scan periodically: "
                "watch only some of them",
            )
        if self._recursive and stat.S_ISDIR(item_stat.st_mode):
            stack.append(name)


def _compare(before: Entries, after: Entries) -> Iterator[tuple[str, str]]:
    """Yield the changes between two scans as (type, name)."""
    removed_names = sorted((name for name in before if name not in after), reverse=True)
    added_names = sorted(name for name in after if name not in before)
    # A new file can reuse the inode number of a deleted file, but its modification time differs.
    names_by_key = {(*_get_identity(after[name]), after[name].st_mtime_ns): name for name in added_names}
    keys_by_name = {name: (*_get_identity(before[name]), before[name].st_mtime_ns) for name in removed_names}
    destinations_by_name = {name: names_by_key[key] for name, key in keys_by_name.items() if key in names_by_key}
    for name in removed_names:
        # The entries of a moved directory are not reported.
        if os.path.dirname(name) not in destinations_by_name:
            yield "RENAME" if name in destinations_by_name else "REMOVE", name
    destinations = set(destinations_by_name.values())
    for name in added_names:
        yield "CREATE", name
        if name not in destinations and stat.S_ISREG(after[name].st_mode) and after[name].st_size:
            yield "WRITE", name
    for name, current_stat in sorted(after.items()):
        if name not in before:
            continue
        previous_stat = before[name]
        if not _is_same_file(current_stat, previous_stat):
            yield "CREATE", name
            continue
        is_modified = (current_stat.st_mtime_ns, current_stat.st_size) != (
            previous_stat.st_mtime_ns,
            previous_stat.st_size,
        )
        if is_modified and stat.S_ISREG(current_stat.st_mode):
            yield "WRITE", name
        if _get_permissions(current_stat) != _get_permissions(previous_stat) or (
            current_stat.st_ctime_ns != previous_stat.st_ctime_ns and not is_modified
        ):
            yield "CHMOD", name


def _is_same_file(first: os.stat_result, second: os.stat_result) -> bool:
    return _get_identity(first) == _get_identity(second)


def _get_identity(file_stat: os.stat_result) -> tuple[int, int, int]:
    return file_stat.st_dev, file_stat.st_ino, stat.S_IFMT(file_stat.st_mode)


def _get_permissions(file_stat: os.stat_result) -> tuple[int, int, int]:
    return stat.S_IMODE(file_stat.st_mode), file_stat.st_uid, file_stat.st_gid
