"""Attacker: a user without rights on the machine where a developer runs `./dev`. Target: root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import session

_NOBODY = 65534


@pytest.mark.parametrize(
    ("variable", "command"),
    [("GROVE_STATE", "demo"), ("GROVE_TEST_STATE", "bench"), ("GROVE_MOLECULE_STATE", "molecule")],
)
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_foreign_state_directory_is_refused(
    need_root: None, tmp_path: Path, variable: str, command: str, kind: str
) -> None:
    """For example, a user made /var/tmp/grove-sandbox before the first demo, with a virtual environment in it."""
    state, ran = tmp_path / "state", tmp_path / "ran"
    place = tmp_path / "theirs" if kind == "link" else state
    python = place / "gateway" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {ran}\n")
    python.chmod(0o755)
    if kind == "link":
        state.symlink_to(place)
    os.chown(state, _NOBODY, _NOBODY, follow_symlinks=False)
    done = subprocess.run(
        [str(session.REPOSITORY / "dev"), command],
        env={**os.environ, variable: str(state)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not ran.exists()
    assert done.returncode == 1
    assert f"'{state}' belongs to nobody, but root runs programs from it." in done.stderr
