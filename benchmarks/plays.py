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

_PLUGIN_DIRECTORY = Path(__file__).parent / "ansible"
_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class TimedTask:
    """The duration of a task in milliseconds, until the start of the next task or the end of the play."""

    name: str
    ms: float


class Plays:
    """Runs plays with the collection of this repository. ``scratch`` is a directory for their files.

    ``environment`` contains additional environment variables, which override the default ones.
    """

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
        may_change: bool = True,
        options: Sequence[str] = (),
        **play_keywords: Any,
    ) -> list[TimedTask]:
        """Run a play on all hosts and return the durations of its tasks.

        Raises RuntimeError if a task fails, or if a task changes something and ``may_change`` is False.
        """
        playbook, clock = self._scratch / "play.yml", self._scratch / "clock.jsonl"
        play = {"hosts": "all", "gather_facts": False, **play_keywords, "tasks": list(tasks)}
        playbook.write_text(json.dumps([play]))
        clock.write_text("")
        program = Path(sys.executable).with_name("ansible-playbook")
        result = subprocess.run(
            [str(program), "-i", str(inventory), "--forks", str(forks), *options, str(playbook)],
            env={**os.environ, **self._build_environment(clock)},
            cwd=self._scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        events = [json.loads(line) for line in clock.read_text().splitlines()]
        host_stats = events[-1].get("hosts", {}) if events else {}
        has_failed = not host_stats or any(host["failures"] or host["unreachable"] for host in host_stats.values())
        if result.returncode or has_failed or (not may_change and any(host["changed"] for host in host_stats.values())):
            raise RuntimeError(
                f"the play failed or changed something unexpectedly:\n{result.stdout[-3000:]}\n{result.stderr[-2000:]}"
            )
        return [
            TimedTask(event["task"], (next_event["at"] - event["at"]) * 1000)
            for event, next_event in itertools.pairwise(events)
        ]

    def _build_environment(self, clock: Path) -> dict[str, str]:
        return {
            "ANSIBLE_ACTION_PLUGINS": str(_PLUGIN_DIRECTORY / "action"),
            "ANSIBLE_CALLBACK_PLUGINS": str(_PLUGIN_DIRECTORY / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "clock",
            "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
            "ANSIBLE_HOME": str(self._scratch / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "CLOCK_FILE": str(clock),
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._environment,
        }
