"""``filesystem.Filesystem``, the service of envd for directories and their entries."""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import islice

from sandbox_agent.failure import Failure, from_os_error, invalid
from sandbox_agent.files.entries import Owners, describe_entry
from sandbox_agent.http.connect import streaming, unary
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
        "/filesystem.Filesystem/WatchDir": [streaming(lambda *args: _watchers().watch_dir(*args))],
        "/filesystem.Filesystem/CreateWatcher": [unary(lambda *args: _watchers().create_watcher(*args))],
        "/filesystem.Filesystem/GetWatcherEvents": [unary(lambda *args: _watchers().get_watcher_events(*args))],
        "/filesystem.Filesystem/RemoveWatcher": [unary(lambda *args: _watchers().remove_watcher(*args))],
    }


def _watchers() -> Watchers:
    """Import the watchers on the first request, because most sandboxes never use them."""
    from sandbox_agent.files import watch

    return watch.WATCHERS


def stat_entry(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``"""
    return {"entry": describe_entry(_resolve_path(request, message, "path"))}


def list_dir(request: Request, message: dict[str, Any]) -> bytes:
    """``{path, depth}`` → ``{entries}``, sorted by name, with each directory before its entries. Depth 0 means 1.

    The entries of unreadable subdirectories are omitted.
    """
    path = _resolve_path(request, message, "path")
    depth = message.get("depth") or 1
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise invalid("the field 'depth' must be a whole number of at least 1")
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise invalid(f"{path} is not a directory")
    # Encode entries one by one, because 100,000 dicts take more memory than a small sandbox has.
    encoded = [json.dumps(entry, separators=(",", ":")).encode() for entry in _walk(path, depth)]
    return b'{"entries":[%s]}' % b",".join(encoded)


def _walk(top: str, depth: int) -> Iterator[dict[str, Any]]:
    owners = Owners()
    remaining = MAX_ENTRIES

    def read_names(directory: str) -> list[str]:
        nonlocal remaining
        with os.scandir(directory) as items:
            names = [item.name for item in islice(items, remaining + 1)]
        remaining -= len(names)
        if remaining < 0:
            raise Failure("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries: use a smaller depth")
        return sorted(names, reverse=True)

    # Each open directory, with the names that are still to be listed.
    stack = [(top, read_names(top))]
    while stack:
        directory, pending = stack[-1]
        if not pending:
            stack.pop()
            continue
        child = os.path.join(directory, pending.pop())
        try:
            entry = describe_entry(child, owners)
            yield entry
            if len(stack) < depth and entry["type"] == "FILE_TYPE_DIRECTORY" and "isSymlink" not in entry:
                stack.append((child, read_names(child)))
        except OSError:
            continue


def make_dir(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{path}`` → ``{entry}``. Creates missing parents. Raises ``already_exists`` if the directory exists."""
    user = users.user_of(request)
    path = _resolve_path(request, message, "path")
    if os.path.isdir(path):
        raise Failure("already_exists", f"the directory {path} already exists")
    if os.path.lexists(path):
        raise invalid(f"{path} exists and is not a directory")
    user.make_dirs(path)
    return {"entry": describe_entry(path)}


def move(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """``{source, destination}`` → ``{entry}``. Replaces a file at the destination."""
    user = users.user_of(request)
    source, destination = _resolve_path(request, message, "source"), _resolve_path(request, message, "destination")
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
    """``{path}`` → ``{}``. Removes directories with their contents. A missing path is not an error."""
    path = _resolve_path(request, message, "path")
    if not message.get("path"):
        raise invalid("the field 'path' is missing or empty: set it to the path to remove")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return {}
    if stat.S_ISDIR(mode):
        import shutil

        try:
            shutil.rmtree(path)
        except RecursionError:
            raise Failure(
                "resource_exhausted", f"the directories in {path} are nested too deeply to remove: use rm -r"
            ) from None
    else:
        os.unlink(path)
    return {}


def _resolve_path(request: Request, message: dict[str, Any], key: str) -> str:
    return users.user_of(request).path(get_text(message, key))
