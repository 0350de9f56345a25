"""The envd service ``filesystem.Filesystem``, which manages directories and their entries."""

from __future__ import annotations

import errno
import json
import os
import stat
from itertools import islice

from sandbox_agent.failure import Failure, from_os_error, invalid_argument
from sandbox_agent.files.entries import OwnerNameCache, describe_entry
from sandbox_agent.http.connect import make_streaming_route, make_unary_route
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


def build_routes() -> dict[str, list[Route]]:
    return {
        "/filesystem.Filesystem/Stat": [make_unary_route(stat_entry)],
        "/filesystem.Filesystem/ListDir": [make_unary_route(list_dir)],
        "/filesystem.Filesystem/MakeDir": [make_unary_route(make_dir)],
        "/filesystem.Filesystem/Move": [make_unary_route(move)],
        "/filesystem.Filesystem/Remove": [make_unary_route(remove)],
        "/filesystem.Filesystem/WatchDir": [make_streaming_route(lambda *args: _load_watchers().watch_dir(*args))],
        "/filesystem.Filesystem/CreateWatcher": [
            make_unary_route(lambda *args: _load_watchers().create_watcher(*args))
        ],
        "/filesystem.Filesystem/GetWatcherEvents": [
            make_unary_route(lambda *args: _load_watchers().get_watcher_events(*args))
        ],
        "/filesystem.Filesystem/RemoveWatcher": [
            make_unary_route(lambda *args: _load_watchers().remove_watcher(*args))
        ],
    }


def _load_watchers() -> Watchers:
    """Return the watchers, which are imported on the first request, because most sandboxes never use them."""
    from sandbox_agent.files import watch

    return watch.WATCHERS


def stat_entry(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """Describe an entry: ``{path}`` → ``{entry}``."""
    return {"entry": describe_entry(_resolve_path(request, message, "path"))}


def list_dir(request: Request, message: dict[str, Any]) -> bytes:
    """List a directory and, if ``depth`` is greater than 1, its subdirectories.

    ``{path, depth}`` → ``{entries}``, sorted by name, with each directory before its entries. Depth 0 means 1. The
    entries of unreadable subdirectories are omitted.
    """
    path = _resolve_path(request, message, "path")
    depth = message.get("depth") or 1
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise invalid_argument("the field 'depth' must be a positive integer")
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise invalid_argument(f"{path} is not a directory")
    # Encode entries one by one, because 100,000 dicts take more memory than a small sandbox has.
    encoded_entries = [json.dumps(entry, separators=(",", ":")).encode() for entry in _walk(path, depth)]
    return b'{"entries":[%s]}' % b",".join(encoded_entries)


def _walk(top: str, depth: int) -> Iterator[dict[str, Any]]:
    owner_names = OwnerNameCache()
    remaining_entry_count = MAX_ENTRIES

    def read_names(directory: str) -> list[str]:
        nonlocal remaining_entry_count
        with os.scandir(directory) as items:
            names = [item.name for item in islice(items, remaining_entry_count + 1)]
        remaining_entry_count -= len(names)
        if remaining_entry_count < 0:
            raise Failure("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries: use a smaller depth")
        return sorted(names, reverse=True)

    # Each open directory, with the names that are still to be listed.
    stack = [(top, read_names(top))]
    while stack:
        directory, pending_names = stack[-1]
        if not pending_names:
            stack.pop()
            continue
        child_path = os.path.join(directory, pending_names.pop())
        try:
            entry = describe_entry(child_path, owner_names)
            yield entry
            if len(stack) < depth and entry["type"] == "FILE_TYPE_DIRECTORY" and "isSymlink" not in entry:
                stack.append((child_path, read_names(child_path)))
        except OSError:
            continue


def make_dir(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """Create a directory and its missing parents: ``{path}`` → ``{entry}``.

    Raises Failure ``already_exists`` if the directory exists.
    """
    user = users.find_request_user(request)
    path = _resolve_path(request, message, "path")
    if os.path.isdir(path):
        raise Failure("already_exists", f"the directory {path} already exists")
    if os.path.lexists(path):
        raise invalid_argument(f"{path} exists and is not a directory")
    user.make_dirs(path)
    return {"entry": describe_entry(path)}


def move(request: Request, message: dict[str, Any]) -> dict[str, Any]:
    """Move an entry: ``{source, destination}`` → ``{entry}``. Replaces a file at the destination."""
    user = users.find_request_user(request)
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
    """Remove an entry: ``{path}`` → ``{}``. Removes directories with their contents. A missing path is not an error."""
    path = _resolve_path(request, message, "path")
    if not message.get("path"):
        raise invalid_argument("the field 'path' is missing or empty: set it to the path to remove")
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
    return users.find_request_user(request).resolve_path(get_text(message, key))
