"""Runs the playbooks that docs/recipes.md and docs/awx.md describe, directly or through the plays on those pages."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.collection.runner import ansible_playbook
from tests.support import session
from tests.support.roles import environment

PAGES = [session.REPOSITORY / "docs" / name for name in ("recipes.md", "awx.md")]
SECONDS = 600


@dataclass(frozen=True)
class Played:
    output: str
    failed: bool

    @property
    def changed(self) -> int:
        """The number of tasks that changed something, on all hosts."""
        return sum(map(int, re.findall(r" changed=(\d+) ", self.output)))


@cache
def plays_by_playbook() -> dict[str, dict[str, Any]]:
    """The plays of the pages by the playbook that they import."""
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [play for block in blocks for play in yaml.safe_load(block)]
    return {play["ansible.builtin.import_playbook"]: play for play in found}


class Player:
    """Runs playbooks against the gateway at ``url``, from the directory ``scratch``."""

    def __init__(self, scratch: Path, url: str = "unix:///nowhere", inventory: str = "localhost,") -> None:
        self.scratch, self.url, self.inventory = scratch, url, inventory

    def page(self, name: str, *options: str, **variables: Any) -> Played:
        """The page's play with ``grove.sandbox.<name>``; ``variables`` extend or override its own."""
        play = plays_by_playbook()[f"grove.sandbox.{name}"]
        book = self.scratch / f"{name}.yml"
        book.write_text(json.dumps([{**play, "vars": {**play["vars"], **variables}}]))
        return self._run(str(book), *options)

    def run(self, name: str, *options: str, **variables: Any) -> Played:
        return self._run(f"grove.sandbox.{name}", "-e", json.dumps(variables), *options)

    def _run(self, *words: str) -> Played:
        return run_playbook(self.scratch, "-i", self.inventory, *words, SANDBOX_GATEWAY_URL=self.url)


def run_playbook(scratch: Path, *words: str, **variables: str) -> Played:
    """``ansible-playbook`` in ``scratch``; ``variables`` override environment variables."""
    done = subprocess.run(
        [ansible_playbook(), *words],
        env={**environment(scratch), "ANSIBLE_PIPELINING": "1", **variables},
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Played(done.stdout + done.stderr, done.returncode != 0)


def check_success(played: Played, changed: int | None = None) -> str:
    assert not played.failed, played.output
    if changed is not None:
        assert played.changed == changed, played.output
    return played.output


def check_refusal(played: Played, sentence: str) -> None:
    assert played.failed and sentence in " ".join(played.output.split()), played.output
