"""Run the examples in the documentation unchanged against a live gateway."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.servers import Server, build_e2b_environment
from tests.support import forkd_command, session
from tests.support.session import REPOSITORY

_CLIENT_IMPORT_PATTERN = re.compile(r"^(?:from|import) (?:e2b|e2b_code_interpreter|cubesandbox|forkd)\b", re.MULTILINE)
_PYTHON_BLOCK_PATTERN = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DOCUMENTED_OUTPUT_PATTERN = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)
_TEMPLATE_NAME = "debian"
"""The template name that the pages use."""
_ABORT_EXIT_CODE = -signal.SIGABRT
"""Threads of the e2b client's HTTP library outlive Python and may then abort it (curioswitch/pyqwest#164), but by
then the example has finished.
"""


def find_examples() -> list[tuple[Path, int, str]]:
    return [
        (page, number, block)
        for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
        for number, block in enumerate(_PYTHON_BLOCK_PATTERN.findall(page.read_text()), 1)
        if _CLIENT_IMPORT_PATTERN.search(block)
    ]


def build_environment(server: Server) -> dict[str, str]:
    urls = dict.fromkeys(("CUBE_API_URL", "FORKD_URL"), server.url)
    proxy = {"CUBE_PROXY_NODE_IP": "127.0.0.1", "CUBE_PROXY_PORT_HTTP": str(server.port)}
    keys = {
        **dict.fromkeys(("CUBE_API_KEY", "FORKD_TOKEN"), server.key),
        **build_e2b_environment(server.url, server.key),
    }
    forkd_program = forkd_command.install(session.get_run_dir())
    search_path = f"{forkd_program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {
        "PATH": search_path,
        "CUBE_TEMPLATE_ID": _TEMPLATE_NAME,
        "FORKD_TARGET": f"127.0.0.1:{session.allocate_port()}",
    }
    return {**os.environ, **urls, **proxy, **keys, **variables}


def test_every_client_has_an_example():
    source = "\n".join(block for _, _, block in find_examples())
    for client in ("e2b", "e2b_code_interpreter", "cubesandbox", "forkd"):
        assert re.search(rf"^from {client} import", source, re.MULTILINE), client


@pytest.mark.usefixtures("requires_memory")
@pytest.mark.parametrize(
    ("page", "number", "code"), [pytest.param(*each, id=f"{each[0].stem}-{each[1]}") for each in find_examples()]
)
def test_examples_print_the_documented_output(server, page, number, code):
    sandbox_ids_before = _list_sandbox_ids(server)
    argv = [sys.executable, "-c", code]
    result = subprocess.run(
        argv, env=build_environment(server), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode in (0, _ABORT_EXIT_CODE), result.stderr[-3000:]
    assert result.stdout.split() == " ".join(_DOCUMENTED_OUTPUT_PATTERN.findall(code)).split()
    assert _list_sandbox_ids(server) == sandbox_ids_before, (
        f"example {number} of {page.name} does not remove its sandboxes"
    )


def _list_sandbox_ids(server: Server) -> list[str]:
    return [each["sandboxID"] for each in server.gateway.call("GET", "/sandboxes")]
