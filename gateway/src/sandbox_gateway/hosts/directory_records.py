"""Store each object's record in the object's directory.

An object is created in `.partial-<name>`. Renaming that directory into place commits the object. After a crash, the
object is either complete or a partial directory, which the next ``sweep`` removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from sandbox_gateway.config import explain
from sandbox_gateway.errors import BackendFailed, NoSpace
from sandbox_gateway.log import Logger
from sandbox_gateway.records import AnyRecord, NewerFormat, Record, now, parse_record

log = Logger("records")

PARTIAL = ".partial-"
MANIFEST = "manifest.json"
_DAMAGED = ".damaged"


def read_record(directory: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read the record in a directory. Raises ValueError with the reason, or NewerFormat."""
    try:
        with open(f"{directory}/{MANIFEST}", "rb", buffering=0) as file:  # noqa: PTH123 - faster for thousands of files
            return parse_record(kind, _parse_json(file.readall()))
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except ValidationError as error:
        raise ValueError(f"its manifest cannot be read: {explain(error)[:500]}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None


def _parse_json(text: bytes) -> Any:
    """Parse JSON. Equal strings, such as the keys of many records, become the same object, which saves memory."""
    try:
        return from_json(text, cache_strings="all")
    except ValueError:
        return json.loads(text)  # It accepts a little more, and its messages tell more.


class RecordReader:
    """Reads records for a scan, each only once.

    A scan needs all records twice: before it changes anything, to find those of a newer release, and then to use them.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[str, type], Any] = {}
        """Records or exceptions, by directory and kind."""

    def find_newer(self, directories: Iterable[Path], kind: type[AnyRecord]) -> dict[str, str]:
        """Return the paths of the manifests that only a newer release can read, with the reasons.

        Keeps the results of reading all records for ``read``.
        """
        reasons = {}
        for directory in directories:
            try:
                result: AnyRecord | Exception = read_record(directory, kind)
            except NewerFormat as error:
                reasons[f"{directory}/{MANIFEST}"] = str(error)
                continue
            except ValueError as error:
                # It is damaged or was never committed, which concerns only the scan.
                result = error.with_traceback(None)
            self._results[str(directory), kind] = result
        return reasons

    def read(self, directory: Path, kind: type[AnyRecord]) -> AnyRecord:
        """Return the record in a directory, like ``read_record``. A record that ``find_newer`` has read is kept only
        until the first call.
        """
        result = self._results.pop((str(directory), kind), None)
        if isinstance(result, Exception):
            raise result
        return result if isinstance(result, kind) else read_record(directory, kind)


def write_record(directory: Path, record: Record, *, durable: bool = True) -> None:
    """Write the record of a directory atomically: after a crash, either the old or the new record exists.

    If not ``durable``, this holds only for a crash of this process, not of the host.
    """
    text = json.dumps(record.model_dump(mode="json"), indent=1)
    temporary_file = directory / f"{PARTIAL}{MANIFEST}"
    with temporary_file.open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary_file.rename(directory / MANIFEST)
    if durable:
        sync_directory(directory)


def unlink_record(directory: Path) -> None:
    """Remove the record in ``directory``, so that its object no longer exists. The files may be removed later."""
    with contextlib.suppress(FileNotFoundError):
        (directory / MANIFEST).unlink()
        sync_directory(directory)


def has_record(directory: Path) -> bool:
    return (directory / MANIFEST).exists()


def partial_of(final: Path) -> Path:
    """Return the directory in which ``final`` is created."""
    return final.with_name(PARTIAL + final.name)


def commit(final: Path, *, durable: bool = True) -> None:
    """Rename the partial directory of ``final`` into place. ``durable`` is as for ``write_record``."""
    partial = partial_of(final)
    if durable:
        sync_directory(partial)
    partial.rename(final)
    if durable:
        sync_directory(final.parent)


def undo(final: Path) -> None:
    """Remove ``final``, whether it is committed or not."""
    partial = partial_of(final)
    if partial.exists():
        shutil.rmtree(partial, ignore_errors=True)
    else:  # The rename succeeded, but a later step failed.
        remove_durably(final)


def remove(directory: Path) -> None:
    """Remove a directory if it exists. If the process crashes during this, the next sweep removes the rest."""
    if not directory.exists():
        return
    partial = partial_of(directory) if not directory.name.startswith(PARTIAL) else directory
    if partial != directory:
        directory.rename(partial)
    shutil.rmtree(partial)


def remove_durably(directory: Path) -> None:
    """Durably remove a directory, if it exists, with one rename. Its files may remain until the next sweep."""
    partial = partial_of(directory)
    try:
        directory.rename(partial)
    except FileNotFoundError:
        return
    sync_directory(directory.parent)
    shutil.rmtree(partial, ignore_errors=True)


def sweep(parent: Path) -> list[str]:
    """Remove uncommitted entries in ``parent`` and its subdirectories, and return their names."""
    names = []
    for entry in _find_partial(parent):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        names.append(entry.name)
    return names


def _find_partial(parent: Path) -> list[Path]:
    """Return the uncommitted entries in ``parent`` and its subdirectories."""
    partial_entries, subdirectories = [], []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PARTIAL):
                partial_entries.append(parent / entry.name)
            elif entry.is_dir(follow_symlinks=False):
                subdirectories.append(entry.path)
    for directory in subdirectories:
        partial_entries += [Path(directory, name) for name in os.listdir(directory) if name.startswith(PARTIAL)]  # noqa: PTH208 - faster
    return partial_entries


def directories(parent: Path) -> list[Path]:
    """Return the directories in ``parent`` that are not hidden, sorted."""
    with os.scandir(parent) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return [parent / name for name in names]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Sequence[Path]) -> None:
    """Sync files concurrently, so that the file system can write its log once for several files."""
    with ThreadPoolExecutor(max_workers=max(1, len(paths))) as pool:
        list(pool.map(sync_file, paths))


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Quarantine:
    """A directory for damaged objects, below the state root ``root``."""

    def __init__(self, root: Path) -> None:
        self._directory = root / _DAMAGED

    def move(self, path: Path) -> Path:
        """Move a damaged file or directory to the quarantine. Returns its new path, which contains the time."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        target = self._directory / f"{path.parent.name}-{path.name}-{now():%Y%m%dT%H%M%S%f}"
        path.rename(target)
        return target

    @contextlib.contextmanager
    def quarantine_if_damaged(self, directory: Path, repaired: list[str]) -> Iterator[None]:
        """Move ``directory`` to the quarantine if this context raises ValueError, which means that it is damaged.

        Adds a sentence about this to ``repaired``.
        """
        try:
            yield
        except ValueError as error:
            if not any(directory.iterdir()):
                directory.rmdir()
                repaired.append(f"removed the empty directory {directory.name}")
                return
            target = self.move(directory)
            repaired.append(f"{directory.name} is damaged ({error}): moved to {target}")
            log.warning("quarantined", path=str(directory), to=str(target), reason=str(error))

    def list_from(self, parent: Path) -> list[str]:
        """Return the paths of the quarantined objects that came from ``parent``."""
        return [str(path) for path in sorted(self._directory.glob(f"{parent.name}-*"))]

    def subdirectories(self) -> list[Path]:
        """Return the directories in the quarantined objects."""
        return [path for path in self._directory.glob("*/*") if path.is_dir()]

    def contains(self, id: str) -> bool:
        """Return whether the object ``id`` is in quarantine."""
        return any(self._directory.glob(f"*-{id}-*"))


def is_full(error: OSError) -> bool:
    """Return whether an operation failed because the file system is full or a quota is reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space_error(where: str = "the state file system") -> NoSpace:
    return NoSpace(f"no space left on {where}: remove snapshots or sandboxes, or grow it")


@contextlib.contextmanager
def explaining_os_errors(where: str = "the state file system") -> Iterator[None]:
    """Convert an OSError raised in this context to NoSpace or BackendFailed, with a message for the user.

    ``where``: what has no space left if the disk is full.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise no_space_error(where) from None
        raise BackendFailed(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
