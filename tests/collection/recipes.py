"""Run the playbooks that docs/recipes.md and docs/awx.md describe, directly or through the plays on these pages."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.collection.runner import find_ansible_playbook
from tests.support import session
from tests.support.roles import make_environment

PAGES = [session.REPOSITORY / "docs" / name for name in ("recipes.md", "awx.md")]
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class PlaybookRun:
    output: str
    failed: bool

    @property
    def changed_task_count(self) -> int:
        """The number of changed tasks on all hosts."""
        return sum(map(int, re.findall(r" changed=(\d+) ", self.output)))


@cache
def load_plays_by_playbook() -> dict[str, dict[str, Any]]:
    """Return the plays on the pages, keyed by the playbook that they import."""
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    plays = [play for block in blocks for play in yaml.safe_load(block)]
    key = "ansible.builtin.import_playbook"
    return {play[key]: play for play in plays if key in play}


class PlaybookRunner:
    """Runs playbooks against the gateway at ``url``, in the directory ``scratch``."""

    def __init__(self, scratch: Path, url: str = "unix:///nowhere", inventory: str = "localhost,") -> None:
        self.scratch, self.url, self.inventory = scratch, url, inventory

    def run_documented_play(self, name: str, *options: str, **variables: Any) -> PlaybookRun:
        """Run the play that imports ``grove.sandbox.<name>``. ``variables`` extend or override its variables."""
        play = load_plays_by_playbook()[f"grove.sandbox.{name}"]
        playbook = self.scratch / f"{name}.yml"
        playbook.write_text(json.dumps([{**play, "vars": {**play["vars"], **variables}}]))
        return self._run(str(playbook), *options)

    def run(self, name: str, *options: str, **variables: Any) -> PlaybookRun:
        return self._run(f"grove.sandbox.{name}", "-e", json.dumps(variables), *options)

    def _run(self, *arguments: str) -> PlaybookRun:
        return run_playbook(self.scratch, "-i", self.inventory, *arguments, SANDBOX_GATEWAY_URL=self.url)


def run_playbook(scratch: Path, *arguments: str, **variables: str) -> PlaybookRun:
    """Run ``ansible-playbook`` in ``scratch``. ``variables`` are environment variables."""
    result = subprocess.run(
        [find_ansible_playbook(), *arguments],
        env={**make_environment(scratch), "ANSIBLE_PIPELINING": "1", **variables},
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return PlaybookRun(result.stdout + result.stderr, result.returncode != 0)


def check_success(run: PlaybookRun, changed_count: int | None = None) -> str:
    assert not run.failed, run.output
    if changed_count is not None:
        assert run.changed_task_count == changed_count, run.output
    return run.output


def check_refusal(run: PlaybookRun, sentence: str) -> None:
    assert run.failed and sentence in " ".join(run.output.split()), run.output
