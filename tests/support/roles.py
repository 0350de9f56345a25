"""Run a role of the collection as a user would, with a play and `ansible-playbook`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import session

_BIN_DIRECTORY = Path(sys.executable).parent


@dataclass(frozen=True)
class PlayResult:
    """The result of a play.

    ``changed_count``: the number of tasks that changed something. ``message``: the error, or "".
    """

    output: str
    changed_count: int
    failed: bool
    message: str

    @property
    def changed_task_names(self) -> list[str]:
        """Return the names of the tasks that changed something."""
        tasks = re.findall(
            r"^(?:TASK|RUNNING HANDLER) \[(.*?)\] \**\n((?:(?!TASK|RUNNING|PLAY).*\n)*)", self.output, re.M
        )
        return [name for name, task_output in tasks if re.search("^changed:", task_output, re.M)]


def play(
    role: str,
    variables: dict[str, Any],
    *,
    check: bool = False,
    directory: Path | None = None,
    command_prefix: tuple[str, ...] = (),
) -> PlayResult:
    """Apply ``role`` to this machine, or to the machine that ``command_prefix`` enters. Times out after ten minutes.

    ``directory``: where to write the playbook. ``command_prefix``: a command that runs its arguments on that machine.
    """
    directory = directory or session.get_run_dir()
    playbook = directory / f"play-{role}.json"
    playbook.write_text(
        json.dumps(
            [
                {
                    "hosts": "localhost",
                    "connection": "local",
                    "gather_facts": False,
                    "vars": {"ansible_python_interpreter": "/usr/bin/python3", **variables},
                    "roles": [f"grove.sandbox.{role}"],
                }
            ]
        )
    )
    argv = [
        *command_prefix,
        str(_BIN_DIRECTORY / "ansible-playbook"),
        "-i",
        "localhost,",
        str(playbook),
        *(["--check"] if check else []),
    ]
    result = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        env=make_environment(directory),
        check=False,
    )
    return read_result(result)


def read_result(result: subprocess.CompletedProcess[str]) -> PlayResult:
    """Return the result of a finished `ansible-playbook`."""
    output = result.stdout + result.stderr
    changed_counts = re.findall(r"changed=(\d+) +unreachable=\d+ +failed=\d+", output)
    assert changed_counts, output[-4000:]
    messages = re.findall(r'^fatal: .*?"msg": ("(?:[^"\\]|\\.)*")', output, re.M)
    failed = result.returncode != 0
    return PlayResult(
        output, sum(map(int, changed_counts)), failed, json.loads(messages[-1]) if messages and failed else ""
    )


def make_environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
        "ANSIBLE_HOME": str(home / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
        "PATH": f"{_BIN_DIRECTORY}:{os.environ['PATH']}",
    }
