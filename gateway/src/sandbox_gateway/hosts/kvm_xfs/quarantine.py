"""Move damaged objects to a directory in the state root, so that they are neither used nor lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sandbox_gateway.log import Logger
from sandbox_gateway.records import now

log = Logger("records")

_QUARANTINE_NAME = ".damaged"


class Quarantine:
    """A directory for damaged objects, in the state root ``root``."""

    def __init__(self, root: Path) -> None:
        self._directory = root / _QUARANTINE_NAME

    def move(self, path: Path) -> Path:
        """Move a damaged file or directory to the quarantine. Returns its new path, which contains the current time."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        target = self._directory / f"{path.parent.name}-{path.name}-{now():%Y%m%dT%H%M%S%f}"
        path.rename(target)
        return target

    @contextlib.contextmanager
    def quarantined_if_damaged(self, directory: Path, repaired: list[str]) -> Iterator[None]:
        """Quarantine ``directory`` if the code in this context raises ValueError because the record is damaged.

        An empty directory is removed instead. Appends a sentence about the change to ``repaired``.
        """
        try:
            yield
        except ValueError as error:
            if not any(directory.iterdir()):
                directory.rmdir()
                repaired.append(f"removed the empty directory {directory.name}")
                return
            target = self.move(directory)
            repaired.append(f"{directory.name} is damaged ({error}): moved it to {target}")
            log.warning("quarantined", path=str(directory), to=str(target), reason=str(error))

    def list_quarantined_paths(self, parent: Path) -> list[str]:
        """Return the paths of the quarantined objects that came from ``parent``."""
        return [str(path) for path in sorted(self._directory.glob(f"{parent.name}-*"))]

    def list_subdirectories(self) -> list[Path]:
        """Return the directories that are directly inside quarantined objects."""
        return [path for path in self._directory.glob("*/*") if path.is_dir()]

    def contains(self, id: str) -> bool:
        """Return whether the object ``id`` is in quarantine."""
        return any(self._directory.glob(f"*-{id}-*"))
