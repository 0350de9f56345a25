"""An unprivileged user attacks root on a machine where a developer runs `./dev`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import session

_NOBODY_UID = 65534


@pytest.mark.parametrize(
    ("variable", "command"),
    [("GROVE_STATE", "demo"), ("GROVE_TEST_STATE", "bench"), ("GROVE_MOLECULE_STATE", "molecule")],
)
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_foreign_state_directory_is_refused(
    requires_root: None, tmp_path: Path, variable: str, command: str, kind: str
) -> None:
    """For example, the attacker creates /var/tmp/grove-sandbox with a virtual environment before the first demo."""
    state_directory, marker = tmp_path / "state", tmp_path / "ran"
    attacker_directory = tmp_path / "theirs" if kind == "link" else state_directory
    fake_python = attacker_directory / "gateway" / "venv" / "bin" / "python"
    fake_python.parent.mkdir(parents=True)
    fake_python.write_text(f"#!/bin/sh\ntouch {marker}\n")
    fake_python.chmod(0o755)
    if kind == "link":
        state_directory.symlink_to(attacker_directory)
    os.chown(state_directory, _NOBODY_UID, _NOBODY_UID, follow_symlinks=False)
    result = subprocess.run(
        [str(session.REPOSITORY / "dev"), command],
        env={**os.environ, variable: str(state_directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not marker.exists()
    assert result.returncode == 1
    assert f"'{state_directory}' belongs to nobody, but root runs programs from it." in result.stderr
