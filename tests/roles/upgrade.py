"""A newer gateway for upgrades, and a program in a sandbox that shows that the sandbox survived."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support import session

NEWER = "0.1.1"
_COUNTER = (session.REPOSITORY / "playbooks" / "files" / "counter.py").read_text()


@dataclass(frozen=True)
class Count:
    """The state of the counter in a sandbox's memory; ``mark`` is drawn at random when it starts."""

    value: int
    mark: str

    def continued_from(self, since: Count) -> bool:
        return self.mark == since.mark and self.value > since.value


def read_counter(run: Callable[..., str]) -> Count:
    """Start the counter if it does not run, and read it. ``run(*argv)`` runs a program in the sandbox."""
    said = json.loads(run("python3", "-c", _COUNTER))
    return Count(said["value"], said["mark"])


def make_newer_collection(path: Path) -> None:
    """Make ``path`` a collections path that holds this collection with a gateway of version ``NEWER``."""
    place = path / "ansible_collections" / "grove" / "sandbox"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("gateway", "meta", "roles"):
        shutil.copytree(session.REPOSITORY / name, place / name, ignore=ignored)
    module = place / "gateway" / "src" / "sandbox_gateway" / "__init__.py"
    text, changes = re.subn('__version__ = "[^"]+"', f'__version__ = "{NEWER}"', module.read_text())
    assert changes == 1
    module.write_text(text)
