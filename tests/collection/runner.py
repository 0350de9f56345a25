"""Real ``ansible-playbook`` runs and their results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

from tests.support import session

HERE = Path(__file__).parent
SECONDS = 600
Task = dict[str, Any]
Result = dict[str, Any]


def ansible_playbook() -> str:
    beside = Path(sys.executable).with_name("ansible-playbook")
    found = str(beside) if beside.exists() else shutil.which("ansible-playbook")
    assert found, "ansible-playbook is needed: run the tests with ./dev test, which installs it"
    return found


class Target:
    """A gateway and its clients: playbooks (``play``, ``prove``) and direct requests (``client``)."""

    def __init__(self, url: str, scratch: Path, *, token: str = "", template: str = "", prefix: str = "") -> None:
        self.url = url
        self.token = token
        self.template = template
        self.prefix = prefix
        self.scratch = scratch
        self.client = Client(url, token, timeout=SECONDS)
        self.output = ""

    def name(self, stem: str) -> str:
        """A name that no other test, and no earlier run against the same gateway, uses."""
        return f"{self.prefix}{stem}"

    def play(
        self,
        *tasks: Task,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        keywords: dict[str, Any] | None = None,
    ) -> list[Result]:
        """The results of ``tasks`` in one play on one host; a failure does not end the play."""
        play = {
            "hosts": "all",
            "gather_facts": False,
            "module_defaults": {"group/grove.sandbox.all": {"gateway_url": self.url, "gateway_token": self.token}},
            "tasks": [{"ignore_errors": True, **task} for task in tasks],
            **(keywords or {}),
        }
        book, record = self.scratch / "play.yml", self.scratch / "results.jsonl"
        book.write_text(json.dumps([play]))
        record.write_text("")
        run = subprocess.run(
            [ansible_playbook(), "-i", "target,", "-e", "ansible_python_interpreter=" + sys.executable, *options, book],
            env={**os.environ, **self._environment(record), **(environment or {})},
            cwd=self.scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        self.output = run.stdout + run.stderr
        results = [json.loads(line) for line in record.read_text().splitlines()]
        assert len(results) == len(tasks), self.output
        return results

    def _environment(self, record: Path) -> dict[str, str]:
        return {
            "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
            "ANSIBLE_HOME": str(self.scratch / "home"),
            "ANSIBLE_CALLBACK_PLUGINS": str(HERE / "plugins" / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": "record",
            "ANSIBLE_CONNECTION_PLUGINS": str(HERE / "plugins" / "connection"),
            "ANSIBLE_LOCALHOST_WARNING": "0",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_TRANSPORT": "local",
            "LC_ALL": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RECORD_FILE": str(record),
        }

    def verify(self, *tasks: Task, **more: Any) -> list[Result]:
        """Check that check mode predicts each task's run and that a second run changes nothing. Return the results of
        the real runs."""
        thrice = [{**task, **way} for task in tasks for way in ({"check_mode": True}, {}, {})]
        results = self.play(*thrice, options=("--diff",), **more)
        real = []
        for number, task in enumerate(tasks):
            said, done, again = results[3 * number : 3 * number + 3]
            for result in (said, done, again):
                assert not result.get("failed"), (task, result.get("msg"), result.get("module_stderr"))
            check_prediction(said, done)
            assert done["changed"], task
            assert not again["changed"], (task, again["outcomes"], again["diff"])
            assert again["diff"] == {"before": {}, "after": {}}, task
            real.append(done)
        return real


LISTS = ("sandboxes", "snapshots", "templates", "volumes", "backups")


def check_prediction(said: Result, done: Result) -> None:
    """Check that the prediction matches the run: the same changes and objects, except for values that were not yet
    known."""
    assert said["changed"] == done["changed"]
    assert said["diff"] == done["diff"]
    assert said["outcomes"] == done["outcomes"]
    for key in LISTS:
        assert (key in said) == (key in done)
        for expected, found in zip(said.get(key, []), done.get(key, []), strict=True):
            matches(expected, found)
    for name, view in done["diff"]["after"].items():
        for key in LISTS:
            for thing in done.get(key, []):
                if thing["name"] == name:
                    matches({word: value for word, value in view.items() if word in thing}, thing)


def matches(expected: Any, found: Any) -> None:
    """``found`` is ``expected``; None stands for an unknown value, and ``expected`` may lack keys of a mapping."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, value in expected.items():
            if value is not None:
                assert key in found, (key, found)
                matches(value, found[key])
    else:
        assert expected == found
