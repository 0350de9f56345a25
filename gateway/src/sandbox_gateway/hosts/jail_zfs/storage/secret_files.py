"""Keep the environments of sandboxes in files that only root can read.

The rest of a sandbox's record is in user properties, which every user of the host can read with `zfs get`.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.records import Sandbox


class SecretFiles:
    """Manages a directory with one file for each sandbox that has an environment.

    A record contains the name of its file. A file never changes: a new environment gets a new file, so that the record
    and its environment change together. Methods block. Calls for different sandboxes may run in parallel.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._current_files: dict[str, tuple[str, dict[str, str]]] = {}
        """The name and the contents of each sandbox's file, keyed by the sandbox's id."""
        self._superseded_names: dict[str, set[str]] = {}
        """The names of each sandbox's files that are no longer needed once its record is committed."""

    def open(self) -> None:
        """Create the directory, or correct its mode."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.chmod(0o700)

    def write(self, sandbox: Sandbox) -> str:
        """Store the environment durably. Returns the name of the file, or "" if the environment is empty.

        After you have committed the record, call ``remove_superseded_files``. Raises NoSpace or BackendFailed.
        """
        name, env = self._current_files.get(sandbox.id, ("", {}))
        if env == sandbox.env:
            return name
        new_name = f"{sandbox.id}.{secrets.token_hex(8)}" if sandbox.env else ""
        if new_name:
            self._create(new_name, {"env": sandbox.env})
        if name:
            self._superseded_names.setdefault(sandbox.id, set()).add(name)
        self._current_files[sandbox.id] = new_name, dict(sandbox.env)
        return new_name

    def _create(self, name: str, contents: dict[str, Any]) -> None:
        path = self._directory / name
        try:
            file_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(file_fd, "w") as file:
                json.dump(contents, file)
                file.flush()
                os.fsync(file_fd)
            directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory_fd)
            finally:
                os.close(directory_fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            _raise_gateway_error(error, path)

    def remove_superseded_files(self, sandbox_id: str) -> None:
        for name in self._superseded_names.pop(sandbox_id, ()):
            (self._directory / name).unlink(missing_ok=True)

    def remove(self, sandbox_id: str) -> None:
        """Remove the files of a sandbox whose record has been removed."""
        self.remove_superseded_files(sandbox_id)
        name, _ = self._current_files.pop(sandbox_id, ("", {}))
        if name:
            (self._directory / name).unlink(missing_ok=True)

    def load(self, sandboxes: Sequence[Sandbox], names: Mapping[str, str]) -> list[str]:
        """Read the environments of all sandboxes from their files. ``names``: the file of each sandbox that has one.

        Returns a sentence for each file that is missing or damaged. The sandbox keeps its reference to the file.
        """
        self._current_files.clear()
        self._superseded_names.clear()
        notes = []
        for sandbox in sandboxes:
            if name := names.get(sandbox.id, ""):
                try:
                    sandbox.env = self._read(name)
                except ValueError as error:
                    notes.append(
                        f"the sandbox {sandbox.name} ({sandbox.id}) has no environment variables, because {error}: "
                        "restore the file and restart the gateway, or create the sandbox again"
                    )
                self._current_files[sandbox.id] = name, dict(sandbox.env)
        return notes

    def _read(self, name: str) -> dict[str, str]:
        """Return the environment stored in a file. Raises ValueError with a message that states the reason."""
        path = self._directory / name
        try:
            env = json.loads(path.read_bytes())["env"]
        except FileNotFoundError:
            raise ValueError(f"the file {path} does not exist") from None
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            raise ValueError(f"the file {path} cannot be read") from None
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ValueError(f"the file {path} cannot be read")
        return env

    def sweep(self) -> list[str]:
        """Remove files that no record refers to, such as after an interrupted creation. Returns a sentence for each."""
        names_in_use = {name for name, _ in self._current_files.values()}
        files = (path for path in self._directory.iterdir() if path.is_file())
        stray_names = sorted(path.name for path in files if path.name not in names_in_use)
        for name in stray_names:
            (self._directory / name).unlink()
        return [f"removed the file {self._directory / name}, which no record referred to" for name in stray_names]


def _raise_gateway_error(error: OSError, path: Path) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise NoSpace(f"no space is left for {path}: free some space in the gateway's state root") from error
    raise BackendFailed(f"the file {path} cannot be written ({error.strerror})") from error
