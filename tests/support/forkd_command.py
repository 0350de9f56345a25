"""Install the `forkd` command from the repository's gateway/extras/forkd."""

from __future__ import annotations

import socket
import sys
import time
import tomllib
from pathlib import Path

from tests.support import session

PACKAGE_DIRECTORY = session.REPOSITORY / "gateway" / "extras" / "forkd"
_START_TIMEOUT_SECONDS = 20


def install(directory: Path, *statements: str) -> Path:
    """Write the command to ``directory``, as installing the package would, and return the path.

    ``statements``: Python statements that change the modules ``command`` and ``port`` before the command runs.
    """
    project = tomllib.loads((PACKAGE_DIRECTORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["forkd"].partition(":")
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(PACKAGE_DIRECTORY / 'src')!r})",
        f"from {module.partition('.')[0]} import command, port",
        f"from {module} import {function}",
        *statements,
        f"sys.exit({function}())",
    ]
    command = directory / "forkd"
    command.write_text("\n".join(lines) + "\n")
    command.chmod(0o755)
    return command


def wait_until_listening(target: str) -> None:
    """Wait until a server listens on ``target``, which is HOST:PORT."""
    host, _, port = target.rpartition(":")
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on {target}"
            time.sleep(0.05)
