"""Mount network volumes inside the machine. Every wait is bounded, because the server may be down or hang.

The list of mounts is kept in /run, which lasts as long as the mounts and is part of a fork. The kernel's mount table
shows which of them still exist.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import threading
import time

from sandbox_agent.failure import Failure, from_os_error, invalid
from sandbox_agent.http.message import get_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from sandbox_agent.http.wire import Reply, Request

    Mount = dict[str, Any]
    """A mount as the gateway sends it: path, source, type, options, readOnly."""

STATE = "/run/sandbox/mounts.json"
MOUNT_SECONDS = 25.0
"""Time limit for mounting all new volumes; shorter than the gateway's timeout."""
FLUSH_SECONDS = 5.0
"""Time limit for flushing pending writes to the server before a volume is unmounted."""

_TEXTS = ("path", "source", "type", "options")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8
_MAX_STACKED = 16
_POLL_SECONDS = 0.005

_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


def handle(request: Request, reply: Reply, *, managed: bool) -> None:
    """``{mounts: [{path, source, type, options, readOnly}]}``, in the order to mount → ``{mounted, unmounted}``.

    The answer lists paths. Keeps mounts that are already correct, removes the agent's other mounts, even if they are in
    use, and ignores the mounts of others. If one new volume cannot be mounted, mounts none.
    """
    wanted = _check(request.json())
    if not managed:
        raise Failure("failed_precondition", "the agent does not manage this machine")
    with _lock:
        mounted, unmounted = _reconcile(wanted)
    reply.json({"mounted": mounted, "unmounted": unmounted})


def _check(message: dict[str, Any]) -> list[Mount]:
    given = message.get("mounts")
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise invalid("the field mounts must be a list of JSON objects")
    wanted: list[Mount] = []
    for item in given:
        mount: Mount = {key: get_text(item, key) for key in _TEXTS}
        mount["readOnly"] = bool(item.get("readOnly"))
        path = mount["path"]
        if not path.startswith("/") or path == "/" or os.path.normpath(path) != path:
            raise invalid(f"cannot mount on {path!r}: the path must be absolute and contain no '..' or '//'")
        if not mount["source"] or not mount["type"]:
            raise invalid(f"the mount on {path} needs both a source and a type")
        if any(path == other["path"] for other in wanted):
            raise invalid(f"the path {path} is listed twice: list each mount point once")
        wanted.append(mount)
    return wanted


def _reconcile(wanted: list[Mount]) -> tuple[list[str], list[str]]:
    """Mount and unmount volumes so that exactly ``wanted`` is mounted. Returns the mounted and the unmounted paths."""
    ours = [mount for mount in _load() if _is_mounted(mount)]
    gone = sorted((mount for mount in ours if mount not in wanted), key=_depth, reverse=True)
    new = [mount for mount in wanted if mount not in ours]
    for mount in gone:
        _unmount(mount)
    # Save the list before mounting: an entry that is not mounted does no harm.
    stay = [mount for mount in ours if mount in wanted]
    _save(stay + new)
    done: list[Mount] = []
    deadline = time.monotonic() + MOUNT_SECONDS
    try:
        for mount in new:
            _mount(mount, deadline)
            done.append(mount)
    except BaseException:
        for mount in reversed(done):
            _unmount(mount)
        _save(stay)
        raise
    return [mount["path"] for mount in new], [mount["path"] for mount in gone]


def _depth(mount: Mount) -> int:
    depth: int = mount["path"].count("/")
    return depth


def _mount(mount: Mount, deadline: float) -> None:
    path = mount["path"]
    real = os.path.realpath(path)
    if real != path:
        raise invalid(f"the path {path} contains a symbolic link: use {real} instead")
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise invalid(f"cannot mount on {path}: the path or one of its parents is not a directory") from None
    except OSError as error:
        raise from_os_error(error, path) from None
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if mount["readOnly"] else 0)

    def work() -> int:
        arguments = (os.fsencode(mount[key]) for key in ("source", "path", "type"))
        result: int = _libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(mount["options"]) or None)
        return result

    number = _run_with_timeout(work, deadline - time.monotonic())
    if number == errno.ENODEV:
        raise Failure(
            "failed_precondition",
            f"{path}: this machine's kernel cannot mount {mount['type']}: use a template whose kernel has that module",
        )
    if number == errno.ETIMEDOUT:
        raise Failure(
            "deadline_exceeded",
            f"cannot mount {path}: the server of the volume does not answer. Check the network between the "
            "sandbox and the host",
        )
    if number:
        raise from_os_error(OSError(number, os.strerror(number)), path)


def _unmount(mount: Mount) -> None:
    """Unmount everything at the path down to ``mount``. Processes that still use it keep a detached mount."""
    path = os.fsencode(mount["path"])

    def flush() -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        result: int = _libc.syncfs(descriptor)
        return result

    # Force only if the server hangs: forcing makes pending writes fail and loses their data.
    force = _MNT_FORCE if _run_with_timeout(flush, FLUSH_SECONDS) == errno.ETIMEDOUT else 0
    for _ in range(_MAX_STACKED):
        if not _is_mounted(mount):
            return
        if _libc.umount2(path, force | _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            number = ctypes.get_errno()
            raise from_os_error(OSError(number, os.strerror(number)), mount["path"])
    raise Failure(
        "failed_precondition",
        f"too many mounts are stacked on {mount['path']}: unmount some of them",
    )


def _run_with_timeout(work: Callable[[], int], seconds: float) -> int:
    """Run ``work``, which returns 0 or sets errno, in a child process. Returns its errno, or ETIMEDOUT."""
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
            # Even a killed process can hang on the server, so a thread waits for it.
            threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()
            return errno.ETIMEDOUT
        time.sleep(_POLL_SECONDS)


def _is_mounted(mount: Mount) -> bool:
    return any(
        (path, kind, source, read_only) == (mount["path"], mount["type"], mount["source"], mount["readOnly"])
        for path, kind, source, read_only in _mount_table()
    )


def _mount_table() -> Iterator[tuple[str, str, str, bool]]:
    """Yield the entries of the kernel's mount table: (path, type, source, read-only)."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        for line in file:
            fields = line.split()
            kind, source = fields[fields.index("-") + 1 :][:2]
            yield _unescape(fields[4]), kind, _unescape(source), "ro" in fields[5].split(",")


def _unescape(field: str) -> str:
    for code, letter in (("040", " "), ("011", "\t"), ("012", "\n"), ("043", "#"), ("134", "\\")):
        field = field.replace(f"\\{code}", letter)
    return field


def _load() -> list[Mount]:
    try:
        with open(STATE, "rb") as file:
            return list(json.load(file))
    except FileNotFoundError:
        return []


def _save(mounts: list[Mount]) -> None:
    new = f"{STATE}.new"
    with open(new, "w") as file:
        json.dump(mounts, file)
    os.replace(new, STATE)
