"""A private XFS file system in a sparse file on a loop device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType


class LoopXfs:
    """A context manager that creates an XFS file system in the file ``image``, mounts it, and removes it on exit."""

    def __init__(self, image: Path, mount_point: Path, *, size_mb: int = 1024, reflink: bool = True) -> None:
        self.image = image
        self.mount_point = mount_point
        self.size_mb = size_mb
        self.reflink = reflink

    def __enter__(self) -> LoopXfs:
        self.mount_point.mkdir(parents=True, exist_ok=True)
        with self.image.open("wb") as file:
            file.truncate(self.size_mb << 20)
        _run("mkfs.xfs", "-q", "-m", f"reflink={int(self.reflink)}", str(self.image))
        self.mount()
        return self

    def mount(self) -> None:
        # The loop device is detached at unmount.
        _run("mount", "-o", "loop", "-t", "xfs", str(self.image), str(self.mount_point))

    def unmount(self) -> None:
        _run("umount", str(self.mount_point))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmount()
        self.mount_point.rmdir()
        self.image.unlink()


def _run(*argv: str) -> None:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed: {result.stderr.strip()}")
