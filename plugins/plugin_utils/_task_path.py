# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Name the files of tasks, so that a plan can be applied in another checkout of the playbooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ansible import constants as C


def make_portable_path(path: str, playbooks: Sequence[str], role_name: str = "", role_path: str = "") -> str:
    """Return a name for a file that is unique in a run and does not depend on the location of the checkout.

    ``playbooks``: the paths of the run's playbooks. ``role_name``, ``role_path``: the role of the task, if it has one.
    """
    directories = [_make_absolute(playbook).parent for playbook in playbooks] or [Path.cwd()]
    # A collection is usually outside the checkout.
    own_directories = [each for each in directories if not _find_in_collections(each)]
    base = Path(os.path.commonpath(own_directories or directories))
    if inner_path := _find_relative_path(Path(path), base):
        return inner_path
    # No relative path contains two slashes in a row.
    if name := _find_in_collections(Path(path)):
        return f"collection://{name}"
    if _is_found_by_name(role_name, role_path) and (inner_path := _find_relative_path(Path(path), Path(role_path))):
        return f"role://{role_name}/{inner_path}"
    file, base = _resolve(Path(path)), base.resolve()
    # Files without a common directory are not in the same checkout.
    return str(file) if os.path.commonpath([file, base]) == os.sep else os.path.relpath(file, base)


def _make_absolute(path: str) -> Path:
    return Path(os.path.normpath(Path(path).absolute()))


def _find_relative_path(path: Path, directory: Path) -> str:
    """Return the path relative to a directory, or "" if the file is not inside it."""
    # Ansible resolves links in the paths of roles, but not in the paths of playbooks.
    for file, base in ((path, directory), (_resolve(path), directory.resolve())):
        if base in file.parents:
            return str(file.relative_to(base))
    return ""


def _resolve(path: Path) -> Path:
    """Return the path without links to directories. The file itself can be a link whose target has a temporary name."""
    return path.parent.resolve() / path.name


def _find_in_collections(path: Path) -> str:
    """Return COLLECTION/PATH for a file inside a loaded collection, or "" for any other file."""
    for name in sorted(sys.modules):
        package, _separator, collection = name.partition(".")
        if package == "ansible_collections" and collection.count(".") == 1:
            for directory in getattr(sys.modules[name], "__path__", ()):
                if inner_path := _find_relative_path(path, Path(directory)):
                    return f"{collection}/{inner_path}"
    return ""


def _is_found_by_name(role_name: str, role_path: str) -> bool:
    """Return whether the configured roles path contains this role, and no other role of the same name before it."""
    candidates = [Path(directory) / role_name for directory in C.DEFAULT_ROLES_PATH] if role_name else []
    first_match = next(filter(Path.is_dir, candidates), None)
    return first_match is not None and first_match.resolve() == Path(role_path).resolve()
