"""Mount network volumes inside the machine. Every wait has a time limit, because the server may not respond.

The list of mounts is saved in /run, which lasts as long as the mounts and is copied to forks. The kernel's mount table
shows which of these mounts still exist.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import threading
import time

from sandbox_agent.failure import Failure, from_os_error, invalid_argument
from sandbox_agent.http.message import get_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from sandbox_agent.http.wire import Reply, Request

    Mount = dict[str, Any]
    """A mount in the format of the gateway, with the keys path, source, type, options and readOnly."""

STATE_FILE_PATH = "/run/sandbox/mounts.json"
MOUNT_TIMEOUT_SECONDS = 25.0
"""Time limit for mounting all new volumes. It is shorter than the timeout of the gateway."""
FLUSH_TIMEOUT_SECONDS = 5.0
"""Time limit for flushing pending writes to the server before unmounting a volume."""

_TEXT_FIELDS = ("path", "source", "type", "options")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8
_MAX_STACKED_MOUNTS = 16
_POLL_INTERVAL_SECONDS = 0.005

_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


def handle(request: Request, reply: Reply, *, managed: bool) -> None:
    """Mount and unmount volumes so that exactly the requested volumes are mounted.

    ``{mounts: [{path, source, type, options, readOnly}]}``, in mount order → ``{mounted, unmounted}`` (paths).

    Keeps the mounts that are already correct, unmounts the other mounts of the agent, even if they are in use, and
    ignores mounts that the agent did not create. If a new volume cannot be mounted, no new volume stays mounted.
    """
    desired_mounts = _parse_mounts(request.json())
    if not managed:
        raise Failure(
            "failed_precondition", "the agent does not manage this machine: start the agent without --unmanaged"
        )
    with _lock:
        mounted_paths, unmounted_paths = _reconcile(desired_mounts)
    reply.json({"mounted": mounted_paths, "unmounted": unmounted_paths})


def _parse_mounts(message: dict[str, Any]) -> list[Mount]:
    items = message.get("mounts")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise invalid_argument("the field 'mounts' must be a list of JSON objects")
    desired_mounts: list[Mount] = []
    for item in items:
        mount: Mount = {key: get_text(item, key) for key in _TEXT_FIELDS}
        mount["readOnly"] = bool(item.get("readOnly"))
        path = mount["path"]
        if not path.startswith("/") or path == "/" or os.path.normpath(path) != path:
            raise invalid_argument(
                f"cannot mount on {path!r}: use an absolute path other than '/', without '..', '//' or a trailing slash"
            )
        if not mount["source"] or not mount["type"]:
            raise invalid_argument(f"the mount on {path} needs both a source and a type")
        if any(path == other["path"] for other in desired_mounts):
            raise invalid_argument(f"the path {path} is listed twice: list each mount point once")
        desired_mounts.append(mount)
    return desired_mounts


def _reconcile(desired_mounts: list[Mount]) -> tuple[list[str], list[str]]:
    """Mount and unmount volumes so that exactly ``desired_mounts`` are mounted.

    Returns the mounted and the unmounted paths.
    """
    existing_mounts = [mount for mount in _load_mounts() if _is_mounted(mount)]
    obsolete_mounts = sorted(
        (mount for mount in existing_mounts if mount not in desired_mounts), key=_get_depth, reverse=True
    )
    new_mounts = [mount for mount in desired_mounts if mount not in existing_mounts]
    for mount in obsolete_mounts:
        _unmount(mount)
    # Save the list before mounting: an entry that is not mounted does no harm.
    unchanged_mounts = [mount for mount in existing_mounts if mount in desired_mounts]
    _save_mounts(unchanged_mounts + new_mounts)
    finished_mounts: list[Mount] = []
    deadline = time.monotonic() + MOUNT_TIMEOUT_SECONDS
    try:
        for mount in new_mounts:
            _mount(mount, deadline)
            finished_mounts.append(mount)
    except BaseException:
        for mount in reversed(finished_mounts):
            _unmount(mount)
        _save_mounts(unchanged_mounts)
        raise
    return [mount["path"] for mount in new_mounts], [mount["path"] for mount in obsolete_mounts]


def _get_depth(mount: Mount) -> int:
    depth: int = mount["path"].count("/")
    return depth


def _mount(mount: Mount, deadline: float) -> None:
    path = mount["path"]
    real_path = os.path.realpath(path)
    if real_path != path:
        raise invalid_argument(f"the path {path} contains a symbolic link: use {real_path} instead")
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise invalid_argument(f"cannot mount on {path}: the path or one of its parents is not a directory") from None
    except OSError as error:
        raise from_os_error(error, path) from None
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if mount["readOnly"] else 0)

    def mount_volume() -> int:
        arguments = (os.fsencode(mount[key]) for key in ("source", "path", "type"))
        result: int = _libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(mount["options"]) or None)
        return result

    error_number = _run_with_timeout(mount_volume, deadline - time.monotonic())
    if error_number == errno.ENODEV:
        raise Failure(
            "failed_precondition",
            f"cannot mount {path}, because this machine's kernel does not support {mount['type']}: use a "
            "template whose kernel supports it",
        )
    if error_number == errno.ETIMEDOUT:
        raise Failure(
            "deadline_exceeded",
            f"cannot mount {path}, because the volume server does not respond: check the network between the "
            "sandbox and the host",
        )
    if error_number:
        raise from_os_error(OSError(error_number, os.strerror(error_number)), path)


def _unmount(mount: Mount) -> None:
    """Unmount ``mount`` and everything stacked on it. Processes that use it keep access to the detached mount."""
    path = os.fsencode(mount["path"])

    def flush() -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        result: int = _libc.syncfs(fd)
        return result

    # Force only if the server is not responding, because forcing discards pending writes.
    force_flag = _MNT_FORCE if _run_with_timeout(flush, FLUSH_TIMEOUT_SECONDS) == errno.ETIMEDOUT else 0
    for _ in range(_MAX_STACKED_MOUNTS):
        if not _is_mounted(mount):
            return
        if _libc.umount2(path, force_flag | _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
            error_number = ctypes.get_errno()
            raise from_os_error(OSError(error_number, os.strerror(error_number)), mount["path"])
    raise Failure(
        "failed_precondition",
        f"too many mounts are stacked on {mount['path']}: unmount some of them",
    )


def _run_with_timeout(work: Callable[[], int], seconds: float) -> int:
    """Run ``work`` in a child process for at most ``seconds``.

    Returns 0 if ``work`` returns 0, ETIMEDOUT after a timeout, and otherwise the errno of ``work``.
    """
    child_pid = os.fork()
    if not child_pid:
        try:
            error_number = 0 if work() == 0 else ctypes.get_errno()
        except OSError as error:
            error_number = error.errno or errno.EIO
        except BaseException:
            error_number = errno.EIO
        finally:
            os._exit(error_number)
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child_pid, os.WNOHANG)
        if pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EIO
        if time.monotonic() > deadline:
            os.kill(child_pid, signal.SIGKILL)
            # Even a killed process can hang on the server, so wait for it in a thread.
            threading.Thread(target=os.waitpid, args=(child_pid, 0), daemon=True).start()
            return errno.ETIMEDOUT
        time.sleep(_POLL_INTERVAL_SECONDS)


def _is_mounted(mount: Mount) -> bool:
    return any(
        (path, kind, source, read_only) == (mount["path"], mount["type"], mount["source"], mount["readOnly"])
        for path, kind, source, read_only in _read_mount_table()
    )


def _read_mount_table() -> Iterator[tuple[str, str, str, bool]]:
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


def _load_mounts() -> list[Mount]:
    try:
        with open(STATE_FILE_PATH, "rb") as file:
            return list(json.load(file))
    except FileNotFoundError:
        return []


def _save_mounts(mounts: list[Mount]) -> None:
    temporary_path = f"{STATE_FILE_PATH}.new"
    with open(temporary_path, "w") as file:
        json.dump(mounts, file)
    os.replace(temporary_path, STATE_FILE_PATH)
