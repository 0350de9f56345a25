"""Run Ansible with the oldest supported release of ansible-core, or with the newest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import packages, session

NEWEST = "newest"
"""The release in the environment of the tests."""
OLDEST = "oldest"
RELEASES = (OLDEST, NEWEST)
_OLDEST_PINS = (
    "ansible-core==2.16.19 --hash=sha256:d7a32ba0f96f9c6582b7ff159a4a6f0e694662cfc4840497c88fed63bf58cd14",
    "resolvelib==1.0.1 --hash=sha256:d2da45d1a8dfee81bdd591647783e340ef3bcb104b54c383f70d422ef5cc7dbf",
)
"""Packages whose version differs from .venv. All other packages come from .venv (pinned in requirements/dev.txt)."""
_RUN_TIMEOUT_SECONDS = 300


def run_command(
    core: str, program: str, *arguments: str | Path, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Ansible's programs. ``program`` is "playbook" for `ansible-playbook`, and so on."""
    return subprocess.run(
        [sys.executable, "-m", "ansible", program, *map(str, arguments)],
        env={**os.environ, **_make_environment(core, cwd), **(environment or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_RUN_TIMEOUT_SECONDS,
        check=False,
    )


def run_plays(core: str, directory: Path, hosts: Path | str, *plays: dict[str, Any], **environment: str) -> str:
    """Run plays without gathering facts, and return their output. The test fails if the output contains a traceback."""
    playbook = directory / "book.yml"
    playbook.write_text(json.dumps([{"gather_facts": False, **each} for each in plays]))
    python_option = f"ansible_python_interpreter={sys.executable}"
    result = run_command(
        core, "playbook", "-i", hosts, "-e", python_option, playbook, cwd=directory, environment=environment
    )
    assert "Traceback" not in result.stdout + result.stderr, result.stdout + result.stderr
    return result.stdout + result.stderr


def _make_environment(core: str, scratch: Path) -> dict[str, str]:
    variables = {
        "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
        "ANSIBLE_HOME": str(scratch / "home"),
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
        "ANSIBLE_LOCALHOST_WARNING": "0",
        "ANSIBLE_NOCOLOR": "1",
        "COLUMNS": "1000",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**variables, **build_release_environment(core)}


def build_release_environment(core: str) -> dict[str, str]:
    """Return the environment variables with which the tests' Python imports the release ``core`` of ansible-core."""
    return {"PYTHONPATH": str(packages.install("ansible-core", "\n".join(_OLDEST_PINS)))} if core == OLDEST else {}
