"""Install pinned Python packages in the cache of the tests, apart from the environment in which the tests run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support import session

_TIMEOUT_SECONDS = 600


@cache
def install(name: str, requirements: str) -> Path:
    """Install packages if they are missing, and return the directory from which Python can import them.

    ``name``: the beginning of the directory's name. ``requirements``: the text of a requirements file, in which each
    package has a version and hashes. Dependencies that the text does not name are not installed.
    """
    python_version = ".".join(map(str, sys.version_info[:2]))
    digest = hashlib.sha256(f"{python_version} {requirements}".encode()).hexdigest()[:32]
    directory = session.get_cache_dir() / f"{name}-{digest}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=session.get_cache_dir()) as scratch:
            requirements_file, temporary_directory = Path(scratch) / "requirements.txt", Path(scratch) / "install"
            requirements_file.write_text(requirements)
            _run_pip(name, requirements_file, temporary_directory)
            try:
                # Atomic: the directory exists only if it is complete.
                temporary_directory.rename(directory)
            except OSError:
                assert directory.exists(), f"{directory} cannot be created"
    return directory


def _run_pip(name: str, requirements_file: Path, directory: Path) -> None:
    options = ["-q", "--disable-pip-version-check", "--no-compile", "--no-deps", "--require-hashes"]
    locations = ["--target", directory, "--requirement", requirements_file]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--only-binary=:all:", *locations],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, f"{name} cannot be installed: {result.stderr}"
