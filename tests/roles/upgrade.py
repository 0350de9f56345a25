"""A newer gateway to upgrade to, and a counter that shows whether a sandbox survived the upgrade."""

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
    """The state of the counter in a sandbox's memory. ``mark`` is a random value chosen when the counter starts."""

    value: int
    mark: str

    def is_continuation_of(self, since: Count) -> bool:
        return self.mark == since.mark and self.value > since.value


def read_counter(run: Callable[..., str]) -> Count:
    """Read the counter, starting it if necessary. ``run(*argv)`` runs a program in the sandbox."""
    state = json.loads(run("python3", "-c", _COUNTER))
    return Count(state["value"], state["mark"])


def make_newer_collection(path: Path) -> None:
    """Create a collections path that contains this collection with version ``NEWER`` of the gateway."""
    collection = path / "ansible_collections" / "grove" / "sandbox"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("gateway", "meta", "roles"):
        shutil.copytree(session.REPOSITORY / name, collection / name, ignore=ignore)
    module = collection / "gateway" / "src" / "sandbox_gateway" / "__init__.py"
    text, changes = re.subn('__version__ = "[^"]+"', f'__version__ = "{NEWER}"', module.read_text())
    assert changes == 1
    module.write_text(text)
