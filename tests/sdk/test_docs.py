"""Run the examples in the documentation unchanged against a live gateway."""

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
_DOCUMENTED_OUTPUT = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)
_TEMPLATE = "debian"
"""The template name that the pages use."""
_ABORT_CODE = -signal.SIGABRT
"""Threads of the e2b client's HTTP library outlive Python and may then abort it (curioswitch/pyqwest#164), but by
then the example has finished.
"""


def find_examples() -> list[tuple[Path, int, str]]:
    return [
        (page, number, block)
        for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
        for number, block in enumerate(_BLOCK.findall(page.read_text()), 1)
        if _CLIENTS.search(block)
    ]


def environment(server: Server) -> dict[str, str]:
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "CUBE_API_URL", "FORKD_URL"), server.url)
    proxy = {"CUBE_PROXY_NODE_IP": "127.0.0.1", "CUBE_PROXY_PORT_HTTP": str(server.port)}
    keys = dict.fromkeys(("E2B_API_KEY", "CUBE_API_KEY", "FORKD_TOKEN"), server.key)
    forkd = forkd_command.install(session.run_dir())
    programs = f"{forkd.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": programs, "CUBE_TEMPLATE_ID": _TEMPLATE, "FORKD_TARGET": f"127.0.0.1:{session.free_port()}"}
    return {**os.environ, **urls, **proxy, **keys, **variables}


def test_every_client_has_an_example():
    source = "\n".join(block for _, _, block in find_examples())
    for client in ("e2b", "e2b_code_interpreter", "cubesandbox", "forkd"):
        assert re.search(rf"^from {client} import", source, re.MULTILINE), client


@pytest.mark.usefixtures("needs_memory")
@pytest.mark.parametrize(
    ("page", "number", "code"), [pytest.param(*each, id=f"{each[0].stem}-{each[1]}") for each in find_examples()]
)
def test_examples_print_the_documented_output(server, page, number, code):
    sandboxes_before = _list_sandboxes(server)
    argv = [sys.executable, "-c", code]
    result = subprocess.run(argv, env=environment(server), capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode in (0, _ABORT_CODE), result.stderr[-3000:]
    assert result.stdout.split() == " ".join(_DOCUMENTED_OUTPUT.findall(code)).split()
    assert _list_sandboxes(server) == sandboxes_before, f"example {number} of {page.name} does not remove its sandboxes"


def _list_sandboxes(server: Server) -> list[str]:
    return [each["sandboxID"] for each in server.gateway.call("GET", "/sandboxes")]
