"""``filesystem.Filesystem``: envd's service for directories and their entries."""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import islice

from sandbox_agent.failure import Failure, from_os_error, invalid
from sandbox_agent.files.entries import Owners, describe_entry
from sandbox_agent.http.connect import streamed, unary
from sandbox_agent.http.message import get_text
from sandbox_agent.machine import users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from sandbox_agent.files.watch import Watchers
    from sandbox_agent.http.server import Route
    from sandbox_agent.http.wire import Request

MAX_ENTRIES = 100_000


def routes() -> dict[str, list[Route]]:
    return {
        "/filesystem.Filesystem/Stat": [unary(stat_entry)],
        "/filesystem.Filesystem/ListDir": [unary(list_dir)],
        "/filesystem.Filesystem/MakeDir": [unary(make_dir)],
        "/filesystem.Filesystem/Move": [unary(move)],
        "/filesystem.Filesystem/Remove": [unary(remove)],
        "/filesystem.Filesystem/WatchDir": [streamed(lambda *given: _watchers().watch_dir(*given))],
        "/filesystem.Filesystem/CreateWatcher": [unary(lambda *given: _watchers().create_watcher(*given))],
        "/filesystem.Filesystem/GetWatcherEvents": [unary(lambda *given: _watchers().get_watcher_events(*given))],
        "/filesystem.Filesystem/RemoveWatcher": [unary(lambda *given: _watchers().remove_watcher(*given))],
    }


def _watchers() -> Watchers:
    """Import the watchers on the first request, because most sandboxes never use them."""
    from sandbox_agent.files import watch

    return watch.WATCHERS


def stat_entry(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``"""
    return {"entry": describe_entry(_path(request, message, "path"))}


def list_dir(request: Request, message: dict[str, Any]) -> bytes:
    """``{path, depth}`` → ``{entries}``, sorted by name, each directory before its entries; depth 0 means 1.

    A directory below ``path`` that cannot be read is listed without entries.
    """
    path = _path(request, message, "path")
    depth = message.get("depth") or 1
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise invalid("depth must be a whole number of at least 1")
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise invalid(f"{path} is not a directory")
    # Encode entries one by one: a hundred thousand dicts take more memory than a small sandbox has.
    encoded = [json.dumps(about, separators=(",", ":")).encode() for about in _walk(path, depth)]
    return b'{"entries":[%s]}' % b",".join(encoded)


def _walk(top: str, depth: int) -> Iterator[dict[str, Any]]:
    owners = Owners()
    room = MAX_ENTRIES

    def names(directory: str) -> list[str]:
        nonlocal room
        with os.scandir(directory) as found:
            names = [item.name for item in islice(found, room + 1)]
        room -= len(names)
        if room < 0:
            raise Failure("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries: use a smaller depth")
        return sorted(names, reverse=True)

    # The remaining names of each open directory.
    stack = [(top, names(top))]
    while stack:
        directory, left = stack[-1]
        if not left:
            stack.pop()
            continue
        child = os.path.join(directory, left.pop())
        try:
            about = describe_entry(child, owners)
            yield about
            if len(stack) < depth and about["type"] == "FILE_TYPE_DIRECTORY" and "isSymlink" not in about:
                stack.append((child, names(child)))
        except OSError:
            continue


def make_dir(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``. Creates missing parents. Fails with ``already_exists`` for an existing directory."""
    user = users.user_of(request)
    path = _path(request, message, "path")
    if os.path.isdir(path):
        raise Failure("already_exists", f"the directory {path} already exists")
    if os.path.lexists(path):
        raise invalid(f"{path} exists and is not a directory")
    user.make_dirs(path)
    return {"entry": describe_entry(path)}


def move(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{source, destination}`` → ``{entry}``. Replaces a file at the destination."""
    user = users.user_of(request)
    source, destination = _path(request, message, "source"), _path(request, message, "destination")
    os.lstat(source)
    user.make_dirs(os.path.dirname(destination))
    try:
        os.rename(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise from_os_error(error, f"{source} to {destination}") from None
        import shutil

        shutil.move(source, destination)
    return {"entry": describe_entry(destination)}


def remove(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{}``. Removes a directory with its contents. A missing path is not an error."""
    path = _path(request, message, "path")
    if not message.get("path"):
        raise invalid("the field path is missing or empty: set it to the path to remove")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return {}
    if stat.S_ISDIR(mode):
        import shutil

        try:
            shutil.rmtree(path)
        except RecursionError:
            raise Failure("resource_exhausted", f"the directories in {path} are nested too deeply: use rm -r") from None
    else:
        os.unlink(path)
    return {}


def _path(request: Request, message: dict[str, Any], key: str) -> str:
    return users.user_of(request).path(get_text(message, key))
