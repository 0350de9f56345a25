"""Volumes that this machine mounts itself, from a server that may be dead or hang: nothing here waits for it long.

What the agent mounted is kept in /run, which is gone when the mounts are, and goes with them into a fork. Which of it
is still mounted, the kernel says.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import threading
import time

from sandbox_agent.failure import Failure, invalid, of_os_error
from sandbox_agent.message import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from sandbox_agent.wire import Reply, Request

    Mount = dict[str, Any]
    """path, source, type, options, readOnly"""

KEPT = "/run/sandbox/mounts.json"
MOUNT_SECONDS = 25.0
"""How long mounting all the new ones may take: less than the gateway waits for the answer."""
FLUSH_SECONDS = 5.0
"""How long the server may take for what was written to a volume that is taken away."""

_TEXTS = ("path", "source", "type", "options")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8
_STACKED = 16
_EVERY = 0.005

_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


def handle(request: Request, reply: Reply, *, managed: bool) -> None:
    """``{mounts: [{path, source, type, options, readOnly}]}``: all that shall be mounted, in this order.

    → ``{mounted, unmounted}``, lists of paths. What is mounted as it shall be is left alone; what the agent mounted
    and is not in the list goes, whoever uses it; what others mounted is not touched. Where one of the new ones
    cannot be mounted, none of them is.
    """
    wanted = _checked(request.json())
    if not managed:
        raise Failure("failed_precondition", "the agent does not manage this machine")
    with _lock:
        mounted, unmounted = _agree(wanted)
    reply.json({"mounted": mounted, "unmounted": unmounted})


def _checked(message: dict[str, Any]) -> list[Mount]:
    given = message.get("mounts")
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise invalid("mounts must be a list of JSON objects")
    wanted: list[Mount] = []
    for item in given:
        mount: Mount = {key: text(item, key) for key in _TEXTS}
        mount["readOnly"] = bool(item.get("readOnly"))
        path = mount["path"]
        if not path.startswith("/") or path == "/" or os.path.normpath(path) != path:
            raise invalid(f"{path!r} is not a path to mount on: it must be absolute, and without '..' or '//'")
        if not mount["source"] or not mount["type"]:
            raise invalid(f"{path}: source and type are needed")
        if any(path == other["path"] for other in wanted):
            raise invalid(f"{path} is there twice")
        wanted.append(mount)
    return wanted


def _agree(wanted: list[Mount]) -> tuple[list[str], list[str]]:
    """Make the machine agree with ``wanted``; the paths that were mounted, and those that were unmounted."""
    ours = [mount for mount in _kept() if _is_mounted(mount)]
    gone = sorted((mount for mount in ours if mount not in wanted), key=_depth, reverse=True)
    new = [mount for mount in wanted if mount not in ours]
    for mount in gone:
        _unmount(mount)
    # Before they are mounted: what is written down and not there does no harm.
    stay = [mount for mount in ours if mount in wanted]
    _keep(stay + new)
    done: list[Mount] = []
    deadline = time.monotonic() + MOUNT_SECONDS
    try:
        for mount in new:
            _mount(mount, deadline)
            done.append(mount)
    except BaseException:
        for mount in reversed(done):
            _unmount(mount)
        _keep(stay)
        raise
    return [mount["path"] for mount in new], [mount["path"] for mount in gone]


def _depth(mount: Mount) -> int:
    depth: int = mount["path"].count("/")
    return depth


def _mount(mount: Mount, deadline: float) -> None:
    path = mount["path"]
    real = os.path.realpath(path)
    if real != path:
        raise invalid(f"{path} goes through a symbolic link: mount on {real}")
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise invalid(f"{path} cannot be mounted on: it, or what it is in, is not a directory") from None
    except OSError as error:
        raise of_os_error(error, path) from None
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if mount["readOnly"] else 0)

    def work() -> int:
        arguments = (os.fsencode(mount[key]) for key in ("source", "path", "type"))
        result: int = _libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(mount["options"]) or None)
        return result

    number = _bounded(work, deadline - time.monotonic())
    if number == errno.ENODEV:
        raise Failure(
            "failed_precondition",
            f"{path}: this machine's kernel cannot mount {mount['type']}: its template needs a kernel with that module",
        )
    if number == errno.ETIMEDOUT:
        raise Failure("deadline_exceeded", f"{path}: the server of the volume does not answer")
    if number:
        raise of_os_error(OSError(number, os.strerror(number)), path)


def _unmount(mount: Mount) -> None:
    """Take away what is mounted at a path, down to ``mount``; who still uses it keeps a view that leads nowhere."""
    path = os.fsencode(mount["path"])

    def flush() -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        result: int = _libc.syncfs(descriptor)
        return result

    # Forced, what waits for the server fails: only where waiting has no end, for it costs what was written.
    force = _MNT_FORCE if _bounded(flush, FLUSH_SECONDS) == errno.ETIMEDOUT else 0
    for _ in range(_STACKED):
        if not _is_mounted(mount):
            return
        if _libc.umount2(path, force | _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            number = ctypes.get_errno()
            raise of_os_error(OSError(number, os.strerror(number)), mount["path"])
    raise Failure("failed_precondition", f"{mount['path']}: too much is mounted over it")


def _bounded(work: Callable[[], int], seconds: float) -> int:
    """Do ``work``, which returns 0 or sets errno, in a process of its own; its errno. ETIMEDOUT: it was given up."""
    child = os.fork()
    if not child:
        try:
            number = 0 if work() == 0 else ctypes.get_errno()
        except OSError as error:
            number = error.errno or errno.EIO
        except BaseException:
            number = errno.EIO
        finally:
            os._exit(number)
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EIO
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            # Where even that has to wait for the server, nobody waits for it.
            threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
            return errno.ETIMEDOUT
        time.sleep(_EVERY)


def _is_mounted(mount: Mount) -> bool:
    return any(
        (path, kind, source, read_only) == (mount["path"], mount["type"], mount["source"], mount["readOnly"])
        for path, kind, source, read_only in _table()
    )


def _table() -> Iterator[tuple[str, str, str, bool]]:
    """What is mounted: (path, type, source, read-only)."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            kind, source = fields[fields.index("-") + 1 :][:2]
            yield _unescaped(fields[4]), kind, _unescaped(source), "ro" in fields[5].split(",")


def _unescaped(field: str) -> str:
    for code, letter in (("040", " "), ("011", "\t"), ("012", "\n"), ("043", "#"), ("134", "\\")):
        field = field.replace(f"\\{code}", letter)
    return field


def _kept() -> list[Mount]:
    try:
        with open(KEPT, "rb") as file:
            return list(json.load(file))
    except FileNotFoundError:
        return []


def _keep(mounts: list[Mount]) -> None:
    new = f"{KEPT}.new"
    with open(new, "w") as file:
        json.dump(mounts, file)
    os.replace(new, KEPT)
