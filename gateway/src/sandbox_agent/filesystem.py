"""filesystem.Filesystem, envd's service of directories and entries."""

from __future__ import annotations

import errno
import os
import stat
import time

from sandbox_agent import users
from sandbox_agent.connect import unary
from sandbox_agent.failure import Failure, invalid, of_os_error
from sandbox_agent.message import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.server import Route
    from sandbox_agent.wire import Request

MAX_ENTRIES = 100_000


def routes() -> dict[str, list[Route]]:
    return {
        "/filesystem.Filesystem/Stat": [unary(stat_entry)],
        "/filesystem.Filesystem/ListDir": [unary(list_dir)],
        "/filesystem.Filesystem/MakeDir": [unary(make_dir)],
        "/filesystem.Filesystem/Move": [unary(move)],
        "/filesystem.Filesystem/Remove": [unary(remove)],
    }


def stat_entry(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``"""
    return {"entry": entry(_path(request, message, "path"))}


def list_dir(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path, depth}`` → ``{entries}``, each directory before what is in it, by name; depth 0 means 1."""
    path = _path(request, message, "path")
    depth = message.get("depth") or 1
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise invalid("depth must be a whole number, at least 1")
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise invalid(f"{path} is not a directory")
    entries: list[dict[str, Any]] = []
    _walk(path, depth, entries)
    return {"entries": entries}


def _walk(path: str, depth: int, entries: list[dict[str, Any]]) -> None:
    for name in sorted(os.listdir(path)):
        child = os.path.join(path, name)
        try:
            entries.append(entry(child))
        except FileNotFoundError:
            continue
        if len(entries) > MAX_ENTRIES:
            raise Failure("resource_exhausted", f"more than {MAX_ENTRIES} entries: list with less depth")
        if depth > 1 and entries[-1]["type"] == "FILE_TYPE_DIRECTORY" and "isSymlink" not in entries[-1]:
            try:
                _walk(child, depth - 1, entries)
            except (FileNotFoundError, PermissionError):
                continue


def make_dir(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``; makes those above it too. ``already_exists`` where it is a directory already."""
    user = users.of_request(request)
    path = _path(request, message, "path")
    if os.path.isdir(path):
        raise Failure("already_exists", f"the directory {path} already exists")
    if os.path.lexists(path):
        raise invalid(f"{path} exists and is not a directory")
    user.make_dirs(path)
    return {"entry": entry(path)}


def move(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{source, destination}`` → ``{entry}``; replaces a file that is at the destination."""
    user = users.of_request(request)
    source, destination = _path(request, message, "source"), _path(request, message, "destination")
    os.lstat(source)
    user.make_dirs(os.path.dirname(destination))
    try:
        os.rename(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise of_os_error(error, f"{source} to {destination}") from None
        import shutil

        shutil.move(source, destination)
    return {"entry": entry(destination)}


def remove(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{}``; a directory with all in it. What is not there need not be removed."""
    path = _path(request, message, "path")
    if not message.get("path"):
        raise invalid("path is missing")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return {}
    if stat.S_ISDIR(mode):
        import shutil

        shutil.rmtree(path)
    else:
        os.unlink(path)
    return {}


def entry(path: str) -> dict[str, Any]:
    """An entry as envd describes it: of a symlink, ``type`` and ``mode`` are its target's."""
    found = os.lstat(path)
    mode = found.st_mode
    about: dict[str, Any] = {
        "name": os.path.basename(path) or "/",
        "path": path,
        "size": str(found.st_size),
        "permissions": stat.filemode(mode),
        "owner": users.user_name(found.st_uid),
        "group": users.group_name(found.st_gid),
        "modifiedTime": _timestamp(found.st_mtime_ns),
    }
    if stat.S_ISLNK(mode):
        about["symlinkTarget"] = os.path.realpath(path)
        about["isSymlink"] = True
        try:
            mode = os.stat(path).st_mode
        except OSError:
            about["type"] = "FILE_TYPE_SYMLINK"
    about.setdefault("type", "FILE_TYPE_DIRECTORY" if stat.S_ISDIR(mode) else "FILE_TYPE_FILE")
    about["mode"] = stat.S_IMODE(mode)
    return about


def _path(request: Request, message: dict[str, Any], key: str) -> str:
    return users.of_request(request).path(text(message, key))


def _timestamp(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:09d}Z"
