"""Test the notifications that the daemon sends to a service manager."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

WATCHDOG_NOTIFICATION = b"WATCHDOG=1"
# SIGUSR1 blocks the daemon's event loop for three seconds. The second argument is the number of seconds that the host
# takes to open.
DAEMON_SCRIPT = """
import asyncio, signal, sys, time
from pathlib import Path
from sandbox_gateway.server import service_manager, serving
from sandbox_gateway.config import load
from tests.support.memory_host import MemoryHost

class SlowHost(MemoryHost):
    async def open(self):
        await asyncio.sleep(float(sys.argv[2]))

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3))
service_manager._EXTENSION_INTERVAL_SECONDS = 0.2
serving.make_host = lambda config: SlowHost()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""


class ServiceManager:
    """A service manager that starts the daemon and receives its notifications."""

    def __init__(self, run_dir: Path, environment: dict[str, str], open_seconds: float) -> None:
        config_file, notify_path = run_dir / "config.toml", run_dir / "notify.sock"
        config_file.write_text(f'[server]\nsocket = "{run_dir / "gateway.sock"}"\n[host]\nstate_root = "{run_dir}"\n')
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(notify_path))
        self.socket.settimeout(60)
        path_variables = {"NOTIFY_SOCKET": str(notify_path), "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DAEMON_SCRIPT, str(config_file), str(open_seconds)],
            stderr=subprocess.PIPE,
            env={**os.environ, **path_variables, **environment},
        )

    def receive(self) -> bytes:
        return self.socket.recv(100)

    def receive_until(self, state: bytes) -> list[bytes]:
        """Wait for the notification ``state``, and return the notifications that arrived before it."""
        states: list[bytes] = []
        while (received_state := self.receive()) != state:
            states.append(received_state)
        return states

    def stop(self, signal_number: signal.Signals) -> str:
        """Send a signal to the daemon, wait until it exits, and return its standard error."""
        self.process.send_signal(signal_number)
        try:
            return self.process.communicate(timeout=60)[1].decode()
        finally:
            self.socket.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.communicate()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="grove-notify-") as directory:
        yield Path(directory)


def test_notifications_continue_until_the_daemon_has_stopped(run_dir: Path) -> None:
    manager = ServiceManager(run_dir, {"WATCHDOG_USEC": "100000"}, 0)
    try:
        manager.receive_until(b"READY=1")
        manager.process.send_signal(signal.SIGTERM)
        assert set(manager.receive_until(b"STOPPING=1")) <= {WATCHDOG_NOTIFICATION}
    finally:
        manager.stop(signal.SIGTERM)


def test_a_hung_daemon_prints_its_stack_when_killed(run_dir: Path) -> None:
    manager = ServiceManager(run_dir, {"WATCHDOG_USEC": "400000"}, 0)
    manager.receive_until(b"READY=1")
    log = manager.stop(signal.SIGABRT)
    assert manager.process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in log and "asyncio" in log


@pytest.mark.parametrize(
    "watchdog_variables", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}]
)
def test_without_a_watchdog_no_notifications_are_sent(run_dir: Path, watchdog_variables: dict[str, str]) -> None:
    manager = ServiceManager(run_dir, watchdog_variables, 0)
    try:
        manager.receive_until(b"READY=1")
        manager.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            manager.receive()
    finally:
        assert "Traceback" not in manager.stop(signal.SIGTERM)


def test_a_slow_startup_requests_more_time(run_dir: Path) -> None:
    manager = ServiceManager(run_dir, {}, 2)
    try:
        notifications = manager.receive_until(b"READY=1")
        assert len(notifications) >= 2 and set(notifications) == {b"EXTEND_TIMEOUT_USEC=60000000"}
        manager.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            manager.receive()
    finally:
        manager.stop(signal.SIGTERM)
