"""Changes below a directory as Linux tells them: inotify.

Changes that others make to a network file system are not among them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct

from sandbox_agent.failure import Failure, of_os_error
from sandbox_agent.system import LINUX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

AVAILABLE = LINUX
MAX_DIRECTORIES = 32_768
"""Directories that one watch may take; the kernel has a limit of its own for all of them."""
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
    """A watched directory; ``name`` is that in ``parent``."""

    __slots__ = ("children", "name", "parent", "wd")

    def __init__(self, wd: int) -> None:
        self.wd = wd
        self.name = ""
        self.parent: _Directory | None = None
        self.children: dict[str, _Directory] = {}

    def path(self) -> str:
        """Relative to the root; "" for the root itself."""
        names = []
        here: _Directory | None = self
        while here is not None and here.name:
            names.append(here.name)
            here = here.parent
        return "/".join(reversed(names))

    def below(self, name: str) -> str:
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
    """A watch of the directory ``path``, and with ``recursive`` of those in it, also of those that come to be.

    ``fd`` is readable when there is something to ``read``; ``ended``: the directory is not there any more.
    """

    def __init__(self, path: str, *, recursive: bool) -> None:
        self._path = path
        self._recursive = recursive
        self._directories: dict[int, _Directory] = {}
        self._leaving: list[_Directory] = []
        self._looked: set[tuple[int, str]] = set()
        self.ended = False
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise _refused(ctypes.get_errno(), path)
        try:
            wd = self._ask(path, _INSIDE | _DELETE_SELF | _MOVE_SELF)
            if wd < 0:
                raise _refused(ctypes.get_errno(), path)
            self._root = self._directories[wd] = _Directory(wd)
            if recursive:
                for _ in self._look(self._root):
                    pass
                self._looked.clear()
        except BaseException:
            self.close()
            raise

    def due(self) -> float | None:
        """Seconds until it is to be read though ``fd`` is not ready; None: never."""
        return None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> Iterator[tuple[str, str]]:
        """What happened, ``(what, name)``: some of it, without waiting.

        Raises Failure ``data_loss`` where some of it is not known, ``resource_exhausted`` where it became too much
        to watch.
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
                raise Failure("data_loss", "so much changed at once that some of it is not known: look for yourself")
            directory = self._directories.get(wd)
            if directory is None:
                continue
            if name:
                yield from self._inside(directory, name, mask)
            else:
                yield from self._itself(directory, mask)
        if not _waiting(self.fd):
            self._settle()

    def _inside(self, directory: _Directory, name: str, mask: int) -> Iterator[tuple[str, str]]:
        key = (directory.wd, name)
        if not directory.is_in(self._root):
            return  # It has left; what may have come of that is looked at anew.
        if mask & _CREATE and key in self._looked:
            self._looked.discard(key)
            return
        path = directory.below(name)
        yield next((what for bits, what in _NAMES if mask & bits), "CHMOD"), path
        if mask & (_DELETE | _MOVED_FROM):
            self._looked.discard(key)
        if not (self._recursive and mask & _ISDIR):
            return
        if mask & _MOVED_FROM and name in directory.children:
            self._leaving.append(directory.children[name])
            directory.children[name].detach()
        elif mask & (_CREATE | _MOVED_TO):
            # Asked for anew, also where the directory that moved is known: by now another one may have the name.
            found = self._add(directory, name)
            if found is not None:
                yield from self._look(found, new=bool(mask & _CREATE))

    def _itself(self, directory: _Directory, mask: int) -> Iterator[tuple[str, str]]:
        """What happened to a directory: of those within others the others tell."""
        if directory is self._root and mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            self.ended = True
            yield "RENAME" if mask & _MOVE_SELF else "REMOVE", "."
        elif directory is self._root and mask & _ATTRIB:
            yield "CHMOD", "."
        if mask & _IGNORED:
            directory.detach()
            self._directories.pop(directory.wd, None)

    def _look(self, top: _Directory, *, new: bool = False) -> Iterator[tuple[str, str]]:
        """Report all that is in a directory which has just appeared, and watch those in it.

        Some of it may have come after the watch did: of that, the kernel's report is skipped. In a ``new`` one files
        that are not empty were written, too, perhaps before anybody could see.
        """
        stack = [top]
        while stack:
            here = stack.pop()
            try:
                found = os.scandir(os.path.join(self._path, here.path()))
            except OSError:
                continue
            with found:
                for name, is_directory, written in _items(found, new):
                    if len(self._looked) < _MAX_REMEMBERED:
                        self._looked.add((here.wd, name))
                    yield "CREATE", here.below(name)
                    if written:
                        yield "WRITE", here.below(name)
                    child = self._add(here, name) if is_directory else None
                    if child is not None:
                        stack.append(child)

    def _add(self, parent: _Directory, name: str) -> _Directory | None:
        """Watch the directory; None where it is gone again, not the agent's to read, or above ``parent``."""
        wd = self._ask(os.path.join(self._path, parent.below(name)), _INSIDE | _DONT_FOLLOW)
        if wd < 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.ENOMEM):
                raise _refused(number, self._path)
            return None
        known = self._directories.get(wd)
        if known is None:
            if len(self._directories) >= MAX_DIRECTORIES:
                raise Failure(
                    "resource_exhausted",
                    f"more than {MAX_DIRECTORIES} directories below {self._path}: watch a part of them",
                )
            known = self._directories[wd] = _Directory(wd)
        elif parent.is_in(known):
            return None
        known.attach(parent, name)
        return known

    def _ask(self, path: str, mask: int) -> int:
        return int(_libc.inotify_add_watch(self.fd, os.fsencode(path), mask))

    def _settle(self) -> None:
        """All was read: what was moved and did not arrive is elsewhere."""
        self._looked.clear()
        for top in self._leaving:
            stack = [top] if top.parent is None else []
            while stack:
                here = stack.pop()
                stack.extend(here.children.values())
                if self._directories.pop(here.wd, None) is here:
                    _libc.inotify_rm_watch(self.fd, here.wd)
        self._leaving.clear()


def _items(found: Iterator[os.DirEntry[str]], new: bool) -> Iterator[tuple[str, bool, bool]]:
    """As many as can be read: name, whether it is a directory, and, in a ``new`` one, whether a file with content."""
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


def _waiting(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _refused(number: int, path: str) -> Failure:
    if number == errno.ENOSPC:
        what = "the kernel watches no more directories (fs.inotify.max_user_watches): watch fewer, or a part"
    elif number in (errno.EMFILE, errno.ENFILE):
        what = "the kernel makes no more watches (fs.inotify.max_user_instances): stop one"
    elif number == errno.ENOSYS:
        return Failure("unimplemented", "this kernel does not tell of changes")
    else:
        return of_os_error(OSError(number, os.strerror(number)), path)
    return Failure("resource_exhausted", what)
