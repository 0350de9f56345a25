"""Run ``ansible-playbook`` and measure the duration of each task."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import session

_HERE = Path(__file__).parent / "ansible"
_SECONDS = 1800


@dataclass(frozen=True)
class Timed:
    """A task: its name, and milliseconds from its start to the start of the next task or the end of the play."""

    name: str
    ms: float


class Plays:
    """Runs plays in ``scratch`` with the repository's collection. ``environment`` overrides environment variables."""

    def __init__(self, scratch: Path, environment: Mapping[str, str] | None = None) -> None:
        session.link_collection()
        self._scratch = scratch
        self._environment = dict(environment or {})

    def run(
        self,
        inventory: str | Path,
        tasks: Sequence[Mapping[str, Any]],
        *,
        forks: int = 5,
        changes: bool = True,
        **keywords: Any,
    ) -> list[Timed]:
        """Run a play on all hosts. Raises RuntimeError if a task failed, or changed something without ``changes``."""
        book, clock = self._scratch / "play.yml", self._scratch / "clock.jsonl"
        play = {"hosts": "all", "gather_facts": False, **keywords, "tasks": list(tasks)}
        book.write_text(json.dumps([play]))
        clock.write_text("")
        program = Path(sys.executable).with_name("ansible-playbook")
        done = subprocess.run(
            [str(program), "-i", str(inventory), "--forks", str(forks), str(book)],
            env={**os.environ, **self._settings(clock)},
            cwd=self._scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        marks = [json.loads(line) for line in clock.read_text().splitlines()]
        hosts = marks[-1].get("hosts", {}) if marks else {}
        wrong = not hosts or any(host["failures"] or host["unreachable"] for host in hosts.values())
        if done.returncode or wrong or (not changes and any(host["changed"] for host in hosts.values())):
            raise RuntimeError(
                f"the play failed or changed something unexpectedly:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
            )
        return [Timed(one["task"], (other["at"] - one["at"]) * 1000) for one, other in itertools.pairwise(marks)]

    def _settings(self, clock: Path) -> dict[str, str]:
        return {
            "ANSIBLE_ACTION_PLUGINS": str(_HERE / "action"),
            "ANSIBLE_CALLBACK_PLUGINS": str(_HERE / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "clock",
            "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
            "ANSIBLE_HOME": str(self._scratch / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "CLOCK_FILE": str(clock),
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._environment,
        }
