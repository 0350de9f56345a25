"""Watch a directory with Linux's inotify through ctypes, because the standard library has no binding for inotify.

inotify does not report changes that other machines make to a network file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct

from sandbox_agent.failure import Failure, from_os_error
from sandbox_agent.machine.system import IS_LINUX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

IS_AVAILABLE = IS_LINUX
MAX_DIRECTORIES = 32_768
"""Maximum number of directories per watch. The kernel also limits the total of all watches."""
_MAX_REPORTED_ENTRIES = 16_384

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _Q_OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_CHILD_EVENT_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR | _EXCL_UNLINK
_EVENT_TYPES = ((_CREATE | _MOVED_TO, "CREATE"), (_MODIFY, "WRITE"), (_DELETE, "REMOVE"), (_MOVED_FROM, "RENAME"))
_EVENT_HEADER = struct.Struct("iIII")
_BUFFER_SIZE = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class _Directory:
    """A watched directory that is called ``name`` in ``parent``."""

    __slots__ = ("children", "name", "parent", "wd")

    def __init__(self, wd: int) -> None:
        self.wd = wd
        self.name = ""
        self.parent: _Directory | None = None
        self.children: dict[str, _Directory] = {}

    def path(self) -> str:
        """Return the path relative to the root; "" for the root itself."""
        names = []
        directory: _Directory | None = self
        while directory is not None and directory.name:
            names.append(directory.name)
            directory = directory.parent
        return "/".join(reversed(names))

    def get_child_path(self, name: str) -> str:
        path = self.path()
        return f"{path}/{name}" if path else name

    def attach(self, parent: _Directory, name: str) -> None:
        self.detach()
        self.parent, self.name = parent, name
        parent.children[name] = self

    def detach(self) -> None:
        if self.parent is not None and self.parent.children.get(self.name) is self:
            del self.parent.children[self.name]
        self.parent = None

    def is_inside(self, other: _Directory) -> bool:
        directory: _Directory | None = self
        while directory is not None and directory is not other:
            directory = directory.parent
        return directory is other


class TreeWatch:
    """A watch on the directory ``path`` and, if ``recursive``, on its existing and future subdirectories.

    ``fd`` is readable when there are events to ``read``. ``has_ended`` is true once the directory has been removed,
    renamed or unmounted.
    """

    def __init__(self, path: str, *, recursive: bool) -> None:
        self._path = path
        self._recursive = recursive
        self._directories: dict[int, _Directory] = {}
        self._moved_directories: list[_Directory] = []
        self._reported_entries: set[tuple[int, str]] = set()
        self.has_ended = False
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _make_watch_error(ctypes.get_errno(), path)
        try:
            wd = self._add_watch(path, _CHILD_EVENT_MASK | _DELETE_SELF | _MOVE_SELF)
            if wd < 0:
                raise _make_watch_error(ctypes.get_errno(), path)
            self._root = self._directories[wd] = _Directory(wd)
            if recursive:
                for _ in self._scan(self._root):
                    pass
                self._reported_entries.clear()
        except BaseException:
            self.close()
            raise

    def seconds_until_due(self) -> float | None:
        """Return the seconds after which to call ``read`` even if ``fd`` is not readable; None to wait for ``fd``."""
        return None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield some of the pending events as (type, name), without waiting.

        Raises Failure ``data_loss`` if events were lost, and ``resource_exhausted`` if there are too many directories.
        """
        try:
            data = os.read(self.fd, _BUFFER_SIZE)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data) and not self.has_ended:
            wd, mask, _, size = _EVENT_HEADER.unpack_from(data, offset)
            offset += _EVENT_HEADER.size
            name = os.fsdecode(data[offset : offset + size].rstrip(b"\0"))
            offset += size
            if mask & _Q_OVERFLOW:
                raise Failure(
                    "data_loss",
                    "too many changes happened at once, and some were lost: list the directory again",
                )
            directory = self._directories.get(wd)
            if directory is None:
                continue
            if name:
                yield from self._handle_child_event(directory, name, mask)
            else:
                yield from self._handle_own_event(directory, mask)
        if not _is_readable(self.fd):
            self._forget_moved_directories()

    def _handle_child_event(self, directory: _Directory, name: str, mask: int) -> Iterator[tuple[str, str]]:
        key = (directory.wd, name)
        if not directory.is_inside(self._root):
            return  # The directory was moved out of the tree.
        if mask & _CREATE and key in self._reported_entries:
            self._reported_entries.discard(key)
            return
        path = directory.get_child_path(name)
        yield next((kind for bits, kind in _EVENT_TYPES if mask & bits), "CHMOD"), path
        if mask & (_DELETE | _MOVED_FROM):
            self._reported_entries.discard(key)
        if not (self._recursive and mask & _ISDIR):
            return
        if mask & _MOVED_FROM and name in directory.children:
            self._moved_directories.append(directory.children[name])
            directory.children[name].detach()
        elif mask & (_CREATE | _MOVED_TO):
            # Add the watch again even for a known directory, because another directory may have this name now.
            child = self._watch_child(directory, name)
            if child is not None:
                yield from self._scan(child, is_new=bool(mask & _CREATE))

    def _handle_own_event(self, directory: _Directory, mask: int) -> Iterator[tuple[str, str]]:
        """Handle an event on a watched directory itself.

        Yields events only for the root, because the watches on their parents report events on the other directories.
        """
        if directory is self._root and mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            self.has_ended = True
            yield "RENAME" if mask & _MOVE_SELF else "REMOVE", "."
        elif directory is self._root and mask & _ATTRIB:
            yield "CHMOD", "."
        if mask & _IGNORED:
            directory.detach()
            self._directories.pop(directory.wd, None)

    def _scan(self, top: _Directory, *, is_new: bool = False) -> Iterator[tuple[str, str]]:
        """Yield events for the entries of a directory that has just appeared, and watch its subdirectories.

        The kernel also reports entries that were created after the watch was added; ``_reported_entries`` filters out
        these duplicates. In a new directory (``is_new``), also yield WRITE for each file that is not empty, because it
        may have been written before the watch was added.
        """
        stack = [top]
        while stack:
            directory = stack.pop()
            try:
                items = os.scandir(os.path.join(self._path, directory.path()))
            except OSError:
                continue
            with items:
                for name, is_directory, has_contents in _list_items(items, is_new):
                    if len(self._reported_entries) < _MAX_REPORTED_ENTRIES:
                        self._reported_entries.add((directory.wd, name))
                    yield "CREATE", directory.get_child_path(name)
                    if has_contents:
                        yield "WRITE", directory.get_child_path(name)
                    child = self._watch_child(directory, name) if is_directory else None
                    if child is not None:
                        stack.append(child)

    def _watch_child(self, parent: _Directory, name: str) -> _Directory | None:
        """Watch a subdirectory. Returns None if it is missing, unreadable, or an ancestor of ``parent``."""
        wd = self._add_watch(os.path.join(self._path, parent.get_child_path(name)), _CHILD_EVENT_MASK | _DONT_FOLLOW)
        if wd < 0:
            error_number = ctypes.get_errno()
            if error_number in (errno.ENOSPC, errno.ENOMEM):
                raise _make_watch_error(error_number, self._path)
            return None
        child = self._directories.get(wd)
        if child is None:
            if len(self._directories) >= MAX_DIRECTORIES:
                raise Failure(
                    "resource_exhausted",
                    f"{self._path} contains more than {MAX_DIRECTORIES} directories: watch only some of them",
                )
            child = self._directories[wd] = _Directory(wd)
        elif parent.is_inside(child):
            return None
        child.attach(parent, name)
        return child

    def _add_watch(self, path: str, mask: int) -> int:
        return int(_libc.inotify_add_watch(self.fd, os.fsencode(path), mask))

    def _forget_moved_directories(self) -> None:
        """Stop watching directories that were moved out of the tree. Call this after all events have been read."""
        self._reported_entries.clear()
        for top in self._moved_directories:
            stack = [top] if top.parent is None else []
            while stack:
                directory = stack.pop()
                stack.extend(directory.children.values())
                if self._directories.pop(directory.wd, None) is directory:
                    _libc.inotify_rm_watch(self.fd, directory.wd)
        self._moved_directories.clear()


def _list_items(items: Iterator[os.DirEntry[str]], is_new: bool) -> Iterator[tuple[str, bool, bool]]:
    """Yield each entry as (name, whether it is a directory, whether it is a non-empty file).

    The last item is False unless ``is_new``.
    """
    while True:
        try:
            item = next(items)
        except (StopIteration, OSError):
            return
        try:
            is_directory = item.is_dir(follow_symlinks=False)
            has_contents = (
                is_new and item.is_file(follow_symlinks=False) and item.stat(follow_symlinks=False).st_size > 0
            )
        except OSError:
            is_directory = has_contents = False
        yield item.name, is_directory, has_contents


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _make_watch_error(error_number: int, path: str) -> Failure:
    if error_number == errno.ENOSPC:
        message = (
            "the kernel's limit on watched directories (fs.inotify.max_user_watches) has been reached: "
            "watch fewer directories"
        )
    elif error_number in (errno.EMFILE, errno.ENFILE):
        message = "the kernel's limit on watches (fs.inotify.max_user_instances) has been reached: stop a watch first"
    elif error_number == errno.ENOSYS:
        return Failure("unimplemented", "this kernel has no inotify")
    else:
        return from_os_error(OSError(error_number, os.strerror(error_number)), path)
    return Failure("resource_exhausted", message)
