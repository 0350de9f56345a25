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

from pydantic import ValidationError

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
        return parse_record(kind, json.loads((directory / MANIFEST).read_bytes()))
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except ValidationError as error:
        raise ValueError(f"its manifest cannot be read: {explain(error)[:500]}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None


def find_newer(directories: Iterable[Path], kind: type[AnyRecord]) -> dict[str, str]:
    """Return the paths of the manifests that only a newer release can read, with the reasons."""
    reasons = {}
    for directory in directories:
        try:
            read_record(directory, kind)
        except NewerFormat as error:
            reasons[str(directory / MANIFEST)] = str(error)
        except ValueError:
            pass  # It is damaged or was never committed. The scan finds it again.
    return reasons


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
    for entry in [*parent.glob(f"{PARTIAL}*"), *parent.glob(f"*/{PARTIAL}*")]:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        names.append(entry.name)
    return names


def directories(parent: Path) -> list[Path]:
    """Return the directories in ``parent`` that are not hidden, sorted."""
    return [entry for entry in sorted(parent.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]


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


@contextlib.contextmanager
def explaining_os_errors(where: str = "the state file system") -> Iterator[None]:
    """Convert an OSError raised in this context to NoSpace or BackendFailed, with a message for the user.

    ``where``: what has no space left if the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no space left on {where}: remove snapshots or sandboxes, or grow it") from None
        raise BackendFailed(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from error
