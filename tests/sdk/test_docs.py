"""Runs the examples on the pages of docs/ for agents' authors unchanged, against a live gateway."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.conftest import Server
from tests.support import forkd_command, session
from tests.support.session import REPOSITORY

_CLIENTS = re.compile(r"^(?:from|import) (?:e2b|e2b_code_interpreter|cubesandbox|forkd)\b", re.MULTILINE)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)
_TEMPLATE = "debian"
"""The name that the pages use."""
_ABORTED = -signal.SIGABRT
"""Threads of the e2b client's HTTP library outlive Python and may then abort it (curioswitch/pyqwest#164): by then the
example has finished, which is what counts here.
"""


def examples() -> list[tuple[Path, int, str]]:
    return [
        (page, number, block)
        for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
        for number, block in enumerate(_BLOCK.findall(page.read_text()), 1)
        if _CLIENTS.search(block)
    ]


def environment(server: Server) -> dict[str, str]:
    where = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "CUBE_API_URL", "FORKD_URL"), server.url)
    proxy = {"CUBE_PROXY_NODE_IP": "127.0.0.1", "CUBE_PROXY_PORT_HTTP": str(server.port)}
    keys = dict.fromkeys(("E2B_API_KEY", "CUBE_API_KEY", "FORKD_TOKEN"), server.key)
    forkd = forkd_command.install(session.run_dir())
    programs = f"{forkd.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": programs, "CUBE_TEMPLATE_ID": _TEMPLATE, "FORKD_TARGET": f"127.0.0.1:{session.free_port()}"}
    return {**os.environ, **where, **proxy, **keys, **own}


def test_every_client_has_an_example():
    found = "\n".join(block for _, _, block in examples())
    for client in ("e2b", "e2b_code_interpreter", "cubesandbox", "forkd"):
        assert re.search(rf"^from {client} import", found, re.MULTILINE), client


@pytest.mark.usefixtures("needs_memory")
@pytest.mark.parametrize(
    ("page", "number", "code"), [pytest.param(*each, id=f"{each[0].stem}-{each[1]}") for each in examples()]
)
def test_examples_print_the_documented_output(server, page, number, code):
    before = _sandboxes(server)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environment(server), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, _ABORTED), done.stderr[-3000:]
    assert done.stdout.split() == " ".join(_SAID.findall(code)).split()
    assert _sandboxes(server) == before, f"the example {number} of {page.name} leaves sandboxes behind"


def _sandboxes(server: Server) -> list[str]:
    return [each["sandboxID"] for each in server.gateway.call("GET", "/sandboxes")]
