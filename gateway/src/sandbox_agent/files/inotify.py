"""Watch a directory with Linux's inotify, through ctypes: the standard library has no binding.

inotify does not report changes that other machines make to a network file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct

from sandbox_agent.failure import Failure, from_os_error
from sandbox_agent.machine.system import LINUX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

AVAILABLE = LINUX
MAX_DIRECTORIES = 32_768
"""Maximum number of directories per watch. The kernel has its own limit for all watches together."""
_MAX_REMEMBERED = 16_384

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _Q_OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _EXCL_UNLINK, _ISDIR = 0x1000000, 0x2000000, 0x4000000, 0x40000000
_INSIDE = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR | _EXCL_UNLINK
_NAMES = ((_CREATE | _MOVED_TO, "CREATE"), (_MODIFY, "WRITE"), (_DELETE, "REMOVE"), (_MOVED_FROM, "RENAME"))
_EVENT = struct.Struct("iIII")
_BUFFER = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class _Directory:
    """A watched directory, called ``name`` in ``parent``."""

    __slots__ = ("children", "name", "parent", "wd")

    def __init__(self, wd: int) -> None:
        self.wd = wd
        self.name = ""
        self.parent: _Directory | None = None
        self.children: dict[str, _Directory] = {}

    def path(self) -> str:
        """Return the path relative to the root; "" for the root itself."""
        names = []
        here: _Directory | None = self
        while here is not None and here.name:
            names.append(here.name)
            here = here.parent
        return "/".join(reversed(names))

    def path_of(self, name: str) -> str:
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

    def is_in(self, other: _Directory) -> bool:
        here: _Directory | None = self
        while here is not None and here is not other:
            here = here.parent
        return here is other


class Tree:
    """A watch of the directory ``path``; with ``recursive`` also of its present and future subdirectories.

    ``fd`` is readable when there are events to ``read``; ``ended``: the directory is gone.
    """

    def __init__(self, path: str, *, recursive: bool) -> None:
        self._path = path
        self._recursive = recursive
        self._directories: dict[int, _Directory] = {}
        self._moved_away: list[_Directory] = []
        self._reported: set[tuple[int, str]] = set()
        self.ended = False
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _watch_failure(ctypes.get_errno(), path)
        try:
            wd = self._add_watch(path, _INSIDE | _DELETE_SELF | _MOVE_SELF)
            if wd < 0:
                raise _watch_failure(ctypes.get_errno(), path)
            self._root = self._directories[wd] = _Directory(wd)
            if recursive:
                for _ in self._scan(self._root):
                    pass
                self._reported.clear()
        except BaseException:
            self.close()
            raise

    def due(self) -> float | None:
        """Return after how many seconds to call ``read`` even if ``fd`` is not ready; None: never."""
        return None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> Iterator[tuple[str, str]]:
        """Yield some of the pending events as (type, name), without waiting.

        Raises Failure: ``data_loss`` if events were lost, ``resource_exhausted`` if there are too many directories.
        """
        try:
            data = os.read(self.fd, _BUFFER)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data) and not self.ended:
            wd, mask, _, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size
            name = os.fsdecode(data[offset : offset + size].rstrip(b"\0"))
            offset += size
            if mask & _Q_OVERFLOW:
                raise Failure(
                    "data_loss", "too many changes happened at once and some were lost: list the directory again"
                )
            directory = self._directories.get(wd)
            if directory is None:
                continue
            if name:
                yield from self._child_event(directory, name, mask)
            else:
                yield from self._own_event(directory, mask)
        if not _is_readable(self.fd):
            self._forget_moved()

    def _child_event(self, directory: _Directory, name: str, mask: int) -> Iterator[tuple[str, str]]:
        key = (directory.wd, name)
        if not directory.is_in(self._root):
            return  # It was moved out of the tree.
        if mask & _CREATE and key in self._reported:
            self._reported.discard(key)
            return
        path = directory.path_of(name)
        yield next((name for bits, name in _NAMES if mask & bits), "CHMOD"), path
        if mask & (_DELETE | _MOVED_FROM):
            self._reported.discard(key)
        if not (self._recursive and mask & _ISDIR):
            return
        if mask & _MOVED_FROM and name in directory.children:
            self._moved_away.append(directory.children[name])
            directory.children[name].detach()
        elif mask & (_CREATE | _MOVED_TO):
            # Add the watch again even for a known directory: a different directory may have that name by now.
            found = self._watch_child(directory, name)
            if found is not None:
                yield from self._scan(found, new=bool(mask & _CREATE))

    def _own_event(self, directory: _Directory, mask: int) -> Iterator[tuple[str, str]]:
        """Handle an event on a watched directory itself. Only the root matters: parents report the others."""
        if directory is self._root and mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            self.ended = True
            yield "RENAME" if mask & _MOVE_SELF else "REMOVE", "."
        elif directory is self._root and mask & _ATTRIB:
            yield "CHMOD", "."
        if mask & _IGNORED:
            directory.detach()
            self._directories.pop(directory.wd, None)

    def _scan(self, top: _Directory, *, new: bool = False) -> Iterator[tuple[str, str]]:
        """Report the entries of a directory that has just appeared, and watch its subdirectories.

        The kernel also reports entries created after the watch was added; ``_reported`` filters out duplicates. In a
        ``new`` directory a file with content counts as written: the write may have happened before the watch was added.
        """
        stack = [top]
        while stack:
            here = stack.pop()
            try:
                found = os.scandir(os.path.join(self._path, here.path()))
            except OSError:
                continue
            with found:
                for name, is_directory, written in _list_items(found, new):
                    if len(self._reported) < _MAX_REMEMBERED:
                        self._reported.add((here.wd, name))
                    yield "CREATE", here.path_of(name)
                    if written:
                        yield "WRITE", here.path_of(name)
                    child = self._watch_child(here, name) if is_directory else None
                    if child is not None:
                        stack.append(child)

    def _watch_child(self, parent: _Directory, name: str) -> _Directory | None:
        """Watch a subdirectory; None if it is gone, unreadable, or an ancestor of ``parent``."""
        wd = self._add_watch(os.path.join(self._path, parent.path_of(name)), _INSIDE | _DONT_FOLLOW)
        if wd < 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.ENOMEM):
                raise _watch_failure(number, self._path)
            return None
        known = self._directories.get(wd)
        if known is None:
            if len(self._directories) >= MAX_DIRECTORIES:
                raise Failure(
                    "resource_exhausted",
                    f"more than {MAX_DIRECTORIES} directories below {self._path}: watch only a part of them",
                )
            known = self._directories[wd] = _Directory(wd)
        elif parent.is_in(known):
            return None
        known.attach(parent, name)
        return known

    def _add_watch(self, path: str, mask: int) -> int:
        return int(_libc.inotify_add_watch(self.fd, os.fsencode(path), mask))

    def _forget_moved(self) -> None:
        """Once all events are read, forget directories that were moved out of the tree."""
        self._reported.clear()
        for top in self._moved_away:
            stack = [top] if top.parent is None else []
            while stack:
                here = stack.pop()
                stack.extend(here.children.values())
                if self._directories.pop(here.wd, None) is here:
                    _libc.inotify_rm_watch(self.fd, here.wd)
        self._moved_away.clear()


def _list_items(found: Iterator[os.DirEntry[str]], new: bool) -> Iterator[tuple[str, bool, bool]]:
    """Yield readable entries: (name, is a directory, is a file with content); the last only in a ``new`` directory."""
    while True:
        try:
            item = next(found)
        except (StopIteration, OSError):
            return
        try:
            is_directory = item.is_dir(follow_symlinks=False)
            written = new and item.is_file(follow_symlinks=False) and item.stat(follow_symlinks=False).st_size > 0
        except OSError:
            is_directory = written = False
        yield item.name, is_directory, written


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _watch_failure(number: int, path: str) -> Failure:
    if number == errno.ENOSPC:
        message = "the kernel's limit of watched directories is reached (fs.inotify.max_user_watches): watch fewer"
    elif number in (errno.EMFILE, errno.ENFILE):
        message = "the kernel's limit of watches is reached (fs.inotify.max_user_instances): stop one"
    elif number == errno.ENOSYS:
        return Failure("unimplemented", "this kernel has no inotify")
    else:
        return from_os_error(OSError(number, os.strerror(number)), path)
    return Failure("resource_exhausted", message)
