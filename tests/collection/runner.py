"""Run ``ansible-playbook`` and collect the results of tasks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

from tests.collection.plan_comparison import RESULT_LIST_KEYS, Counts, PlanComparison
from tests.support import session

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 600
Task = dict[str, Any]
Result = dict[str, Any]


def find_ansible_playbook() -> str:
    adjacent_program = Path(sys.executable).with_name("ansible-playbook")
    program = str(adjacent_program) if adjacent_program.exists() else shutil.which("ansible-playbook")
    assert program, "ansible-playbook is needed: run the tests with ./dev test, which installs it"
    return program


class Target:
    """A gateway to test with playbooks (``play``, ``verify``) or with direct requests (``client``)."""

    def __init__(self, url: str, scratch: Path, *, token: str = "", template: str = "", prefix: str = "") -> None:
        self.url = url
        self.token = token
        self.template = template
        self.prefix = prefix
        self.scratch = scratch
        self.client = Client(url, token, timeout=TIMEOUT_SECONDS)
        self.output = ""

    def make_name(self, stem: str) -> str:
        """Return a name that is unique to this test run."""
        return f"{self.prefix}{stem}"

    def play(
        self,
        *tasks: Task,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        keywords: dict[str, Any] | None = None,
    ) -> list[Result]:
        """Run ``tasks`` in one play on one host, and return their results. A failure does not stop the play."""
        play = {"tasks": [{"ignore_errors": True, **task} for task in tasks], **(keywords or {})}
        results = self.run(play, options=options, environment=environment)
        assert len(results) == len(tasks), self.output
        return results

    def run(self, *plays: dict[str, Any], **arguments: Any) -> list[Result]:
        """Run plays on one host, and return the results of their tasks in the order in which the tasks finish."""
        self.write_playbook("play.yml", *plays)
        return self.run_playbooks("play.yml", **arguments)

    def write_playbook(self, name: str, *plays: dict[str, Any]) -> None:
        defaults = {
            "hosts": "all",
            "gather_facts": False,
            "module_defaults": {"group/grove.sandbox.all": {"gateway_url": self.url, "gateway_token": self.token}},
        }
        self.write_file(name, [play if "import_playbook" in play else {**defaults, **play} for play in plays])

    def write_file(self, name: str, content: Any) -> None:
        """Write a file that a playbook uses, such as a role's tasks."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each task gets its own line, as in a handwritten playbook. Ansible reports line numbers for YAML, not JSON.
        path.write_text(f"---\n{json.dumps(content, indent=2)}\n")

    def run_playbooks(
        self, *names: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> list[Result]:
        """Run playbooks, and return the results of their tasks in the order in which the tasks finish."""
        record = self.scratch / "results.jsonl"
        record.write_text("")
        process = subprocess.run(
            [
                find_ansible_playbook(),
                "-i",
                "target,",
                "-e",
                "ansible_python_interpreter=" + sys.executable,
                *options,
                *names,
            ],
            env={**os.environ, **self._make_environment(record), **(environment or {})},
            cwd=self.scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        self.output = process.stdout + process.stderr
        return [json.loads(line) for line in record.read_text().splitlines()]

    def _make_environment(self, record: Path) -> dict[str, str]:
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

    def verify(self, *tasks: Task, **options: Any) -> list[Result]:
        """Check that check mode predicts each task's changes, and that a second run changes nothing.

        Returns the results of the real runs.
        """
        task_runs = [{**task, **keywords} for task in tasks for keywords in ({"check_mode": True}, {}, {})]
        results = self.play(*task_runs, options=("--diff",), **options)
        actual_results = []
        for number, task in enumerate(tasks):
            predicted, actual, repeated = results[3 * number : 3 * number + 3]
            for result in (predicted, actual, repeated):
                assert not result.get("failed"), (task, result.get("msg"), result.get("module_stderr"))
            check_prediction(predicted, actual)
            assert actual["changed"], task
            assert not repeated["changed"], (task, repeated["outcomes"], repeated["diff"])
            assert repeated["diff"] == {"before": {}, "after": {}}, task
            actual_results.append(actual)
        return actual_results


def check_prediction(predicted: Result, actual: Result) -> None:
    """Check that the prediction has the same changes and resources as the run, except for unknown values."""
    assert predicted["changed"] == actual["changed"]
    assert predicted["diff"] == actual["diff"]
    assert predicted["outcomes"] == actual["outcomes"]
    for key in RESULT_LIST_KEYS:
        assert (key in predicted) == (key in actual)
        for expected, shape in zip(predicted.get(key, []), actual.get(key, []), strict=True):
            assert_matches(expected, shape)
    for name, view in actual["diff"]["after"].items():
        for key in RESULT_LIST_KEYS:
            for resource in actual.get(key, []):
                if resource["name"] == name:
                    assert_matches({field: value for field, value in view.items() if field in resource}, resource)


def assert_matches(expected: Any, actual: Any) -> None:
    """Check that ``actual`` contains ``expected``. A value of None in ``expected`` matches any value."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key, value in expected.items():
            if value is not None:
                assert key in actual, (key, actual)
                assert_matches(value, actual[key])
    else:
        assert expected == actual


def check_plan(planned: Result, actual: Result, task: str) -> None:
    """Check that a task in a plan session had the result of the run, except for unknown values."""
    PlanComparison("", Counts(), Counts()).check_result(planned, actual, task)
