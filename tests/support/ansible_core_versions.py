"""The releases of ansible-core that attacks are tested on: the oldest that the collection supports, and the newest."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import session

NEWEST = "newest"
"""The release that these tests run with."""
OLDEST = "oldest"
EACH = (OLDEST, NEWEST)
_OLDEST = (
    "ansible-core==2.16.19 --hash=sha256:d7a32ba0f96f9c6582b7ff159a4a6f0e694662cfc4840497c88fed63bf58cd14",
    "resolvelib==1.0.1 --hash=sha256:d2da45d1a8dfee81bdd591647783e340ef3bcb104b54c383f70d422ef5cc7dbf",
)
"""Packages that .venv has in another version. It has the rest, as requirements/dev.txt pins it."""
_INSTALL_SECONDS = 600
_RUN_SECONDS = 300


def run_command(
    core: str, program: str, *arguments: str | Path, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ansible-playbook` (``program`` is "playbook"), `ansible-inventory` ("inventory") or another."""
    return subprocess.run(
        [sys.executable, "-m", "ansible", program, *map(str, arguments)],
        env={**os.environ, **_environment(core, cwd), **(environment or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_RUN_SECONDS,
        check=False,
    )


def run_plays(core: str, folder: Path, hosts: Path | str, *plays: dict[str, Any], **environment: str) -> str:
    """Run plays that gather no facts; returns the output. A traceback fails the test."""
    book = folder / "book.yml"
    book.write_text(json.dumps([{"gather_facts": False, **each} for each in plays]))
    python = f"ansible_python_interpreter={sys.executable}"
    done = run_command(core, "playbook", "-i", hosts, "-e", python, book, cwd=folder, environment=environment)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


def _environment(core: str, scratch: Path) -> dict[str, str]:
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
    return {**variables, "PYTHONPATH": str(_oldest())} if core == OLDEST else variables


@cache
def _oldest() -> Path:
    """A directory with the oldest release and its requirements, installed once for each test state."""
    version = ".".join(map(str, sys.version_info[:2]))
    digest = hashlib.sha256(" ".join([version, *_OLDEST]).encode()).hexdigest()[:32]
    place = session.cache_dir() / f"ansible-core-{digest}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=session.cache_dir()) as scratch:
            made = Path(scratch) / "made"
            _install(_OLDEST, made)
            try:
                # Atomic: the directory exists only if it is complete.
                made.rename(place)
            except OSError:
                assert place.exists(), f"{place} cannot be made"
    return place


def _install(requirements: Sequence[str], place: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(requirements))
        listed.flush()
        done: subprocess.CompletedProcess[Any] = subprocess.run(
            [*pip, "--only-binary=:all:", "--target", place, "--requirement", listed.name],
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    assert done.returncode == 0, f"{requirements[0]} cannot be installed: {done.stderr}"
