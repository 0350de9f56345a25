"""Root in a sandbox blocks the gateway's event loop on a host whose service manager cannot detect this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import wait_until

WATCHDOG_SECONDS = 4
# SIGUSR1 blocks the daemon's event loop with a call that never releases the GIL, so no thread written in Python runs.
DAEMON_SCRIPT = """
import asyncio, re, signal, sys
from pathlib import Path
from sandbox_gateway.server import serving
from sandbox_gateway.config import load
from tests.support.memory_host import MemoryHost

def hang(*_):
    re.match("(x+)+y", "x" * 100)

signal.signal(signal.SIGUSR1, hang)
serving.make_host = lambda config: MemoryHost()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A daemon that has answered a request, with the environment variable that the rc.d script sets."""
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_SECONDS * 1_000_000))
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="grove-hang-") as directory:
        config_file, socket_path = Path(directory, "config.toml"), Path(directory, "gateway.sock")
        config_file.write_text(f'[server]\nsocket = "{socket_path}"\n[host]\nstate_root = "{directory}"\n')
        process = subprocess.Popen(
            [sys.executable, "-c", DAEMON_SCRIPT, str(config_file)], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        try:
            wait_until(lambda: process.poll() is not None or is_responding(socket_path), seconds=60)
            yield process
        finally:
            process.kill()
            process.communicate()


def is_responding(socket_path: Path) -> bool:
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket_path)), base_url="http://gateway") as client:
            return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_hung_gateway_exits_with_its_stack(daemon: subprocess.Popen[str]) -> None:
    time.sleep(2 * WATCHDOG_SECONDS)
    assert daemon.poll() is None
    daemon.send_signal(signal.SIGUSR1)
    _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 1
    assert f"Timeout (0:00:0{WATCHDOG_SECONDS})!" in log and "in hang\n" in log


def test_a_gateway_with_a_watchdog_stops_normally(daemon: subprocess.Popen[str]) -> None:
    daemon.send_signal(signal.SIGTERM)
    _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 0 and "Traceback" not in log and "Timeout" not in log
