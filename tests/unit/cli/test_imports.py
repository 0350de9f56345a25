"""`sandboxctl` imports few modules for queries, because imports would otherwise take most of their run time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from threading import Thread
from typing import Any

import pytest

SANDBOX = {
    "name": "one",
    "sandboxID": "0" * 12,
    "state": "running",
    "templateID": "1" * 12,
    "forkedFrom": "",
    "cpuCount": 1,
    "memoryMB": 256,
    "createdAt": "2026-01-01T00:00:00Z",
    "endAt": "9999-12-31T00:00:00Z",
}
HEALTH = {"status": "ok", "backend": "memory", "version": "1", "sandboxes": 1}
ALLOWED_MODULES = {"__future__", "sandbox_gateway"}
_PROGRAM = """
import http.client, json, sys
before = set(sys.modules)
from sandbox_gateway.cli import main
sys.argv = ["sandboxctl", *sys.argv[1:]]
try:
    main.main()
except SystemExit as error:
    assert not error.code, error.code
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})), file=sys.stderr)
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        item: Any = HEALTH if self.path == "/health" else SANDBOX if "0" * 12 in self.path else [SANDBOX]
        body = json.dumps(item).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = UnixStreamServer(str(tmp_path / "socket"), _Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"unix://{tmp_path}/socket"
    server.shutdown()
    thread.join()
    server.server_close()


def list_imported_modules(url: str, *arguments: str) -> set[str]:
    """Return the top-level modules that a command imports in addition to `http.client` and `json`."""
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--url", url, *arguments], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    modules: set[str] = set(json.loads(process.stderr.splitlines()[-1]))
    return modules


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("show", "0" * 12), ("health",)], ids=" ".join)
def test_a_query_imports_little_more_than_the_http_client(url: str, arguments: tuple[str, ...]) -> None:
    assert list_imported_modules(url, *arguments) <= ALLOWED_MODULES


def test_imports_are_detected(url: str) -> None:
    """Check that a disallowed import is detected: `--help` needs the command-line library."""
    assert "typer" in list_imported_modules(url, "list", "--help")
