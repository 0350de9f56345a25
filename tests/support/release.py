"""An earlier release of this repository, taken from its history."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import session

PREVIOUS = "3c179d2fc24a96d1bcf89756a8638f886932fd89"
"""The commit of the release before this one. There are no tags yet: it is the state of 27 November 2026."""
_SERVE = """
import sys
from pathlib import Path
from tests.api.memory_gateway import MemoryGateway
gateway = MemoryGateway(Path(sys.argv[1]), log={"level": "warning"})
gateway.build_template("base")
print(gateway.unix_url, flush=True)
sys.stdin.read()
gateway.end()
"""


class Release:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.collections = root / ".cache" / "collections"
        namespace = self.collections / "ansible_collections" / "grove"
        namespace.mkdir(parents=True)
        (namespace / "sandbox").symlink_to(root, target_is_directory=True)

    def run_python(self, code: str, *arguments: str) -> str:
        """Run a program with the packages of the release. Return what it prints."""
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], **self._options, check=True, stdout=subprocess.PIPE, timeout=120
        ).stdout

    @contextlib.contextmanager
    def gateway(self, root: Path) -> Iterator[str]:
        """Run a gateway of the release on an in-memory host that has the template `base`. Yield its URL."""
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(root)], **self._options, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.communicate(timeout=60)
            assert process.returncode == 0

    @property
    def _options(self) -> dict[str, object]:
        import_path = [self.root, self.collections, self.root / "gateway" / "src"]
        environment = {**os.environ, "PYTHONPATH": ":".join(map(str, import_path)), "PYTHONDONTWRITEBYTECODE": "1"}
        return {"cwd": self.root, "env": environment, "text": True}


def extract_previous_release(root: Path) -> Release:
    """Extract the previous release to ``root``. Skips the test if the repository has no history."""
    git = ["git", "-C", str(session.REPOSITORY)]
    if subprocess.run([*git, "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], check=False, capture_output=True).returncode:
        pytest.skip(f"the history has no commit {PREVIOUS[:8]}: clone the repository with its whole history")
    archive = subprocess.run([*git, "archive", PREVIOUS], check=True, capture_output=True, timeout=120).stdout
    subprocess.run(["tar", "-xf", "-", "-C", str(root)], input=archive, check=True, timeout=120)
    return Release(root)
