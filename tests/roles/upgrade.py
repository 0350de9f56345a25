"""A newer gateway to upgrade to, and a counter that shows whether a sandbox survived the upgrade."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support import session

NEWER_VERSION = "0.1.1"
_COUNTER_PROGRAM = (session.REPOSITORY / "playbooks" / "files" / "counter.py").read_text()


@dataclass(frozen=True)
class CounterState:
    """The state of the counter in a sandbox's memory. ``mark`` is a random value chosen when the counter starts."""

    value: int
    mark: str

    def is_continuation_of(self, earlier: CounterState) -> bool:
        return self.mark == earlier.mark and self.value > earlier.value


def read_counter(run: Callable[..., str]) -> CounterState:
    """Read the counter, starting it if necessary. ``run(*argv)`` runs a program in the sandbox."""
    state = json.loads(run("python3", "-c", _COUNTER_PROGRAM))
    return CounterState(state["value"], state["mark"])


def make_newer_collection(path: Path) -> None:
    """Create a collections path that contains this collection with version ``NEWER_VERSION`` of the gateway."""
    collection = path / "ansible_collections" / "grove" / "sandbox"
    ignore_patterns = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("gateway", "meta", "roles"):
        shutil.copytree(session.REPOSITORY / name, collection / name, ignore=ignore_patterns)
    module_path = collection / "gateway" / "src" / "sandbox_gateway" / "__init__.py"
    text, replacement_count = re.subn(
        '__version__ = "[^"]+"', f'__version__ = "{NEWER_VERSION}"', module_path.read_text()
    )
    assert replacement_count == 1
    module_path.write_text(text)
