"""Notifications to a service manager, from the daemon as a process."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ALIVE = b"WATCHDOG=1"
# On a signal, its event loop blocks for three seconds; its host takes as long to open as its argument says.
STAND_IN = """
import asyncio, signal, sys, time
from pathlib import Path
from sandbox_gateway.server import serving, supervisor
from sandbox_gateway.config import load
from tests.api.memory_host import MemoryHost

class Slow(MemoryHost):
    async def open(self):
        await asyncio.sleep(float(sys.argv[2]))

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3))
supervisor._START_INTERVAL = 0.2
serving.make_host = lambda config: Slow()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""


class Manager:
    """Starts the daemon and receives its notifications."""

    def __init__(self, run: Path, environment: dict[str, str], opens_in: float) -> None:
        config, where = run / "config.toml", run / "notify.sock"
        config.write_text(f'[server]\nsocket = "{run / "gateway.sock"}"\n[host]\nstate_root = "{run}"\n')
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(where))
        self.socket.settimeout(60)
        paths = {"NOTIFY_SOCKET": str(where), "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", STAND_IN, str(config), str(opens_in)],
            stderr=subprocess.PIPE,
            env={**os.environ, **paths, **environment},
        )

    def receive(self) -> bytes:
        return self.socket.recv(100)

    def receive_until(self, state: bytes) -> list[bytes]:
        """The notifications before ``state``."""
        heard: list[bytes] = []
        while (said := self.receive()) != state:
            heard.append(said)
        return heard

    def end(self, number: signal.Signals) -> str:
        """Send a signal; returns the daemon's standard error."""
        self.process.send_signal(number)
        try:
            return self.process.communicate(timeout=60)[1].decode()
        finally:
            self.socket.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.communicate()


@pytest.fixture
def start_daemon() -> Iterator[Path]:
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="grove-notify-") as directory:
        yield Path(directory)


def test_the_watchdog_is_notified_only_while_the_event_loop_runs(start_daemon: Path) -> None:
    manager = Manager(start_daemon, {"WATCHDOG_USEC": "400000"}, 0)
    try:
        manager.receive_until(b"READY=1")
        for _ in range(5):
            assert manager.receive() == ALIVE
        times = [time.monotonic()]
        manager.process.send_signal(signal.SIGUSR1)
        for _ in range(15):
            assert manager.receive() == ALIVE
            times.append(time.monotonic())
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) > 2
    finally:
        log = manager.end(signal.SIGTERM)
    assert manager.process.returncode == 0 and "Traceback" not in log


def test_notifications_continue_until_the_daemon_has_stopped(start_daemon: Path) -> None:
    manager = Manager(start_daemon, {"WATCHDOG_USEC": "100000"}, 0)
    try:
        manager.receive_until(b"READY=1")
        manager.process.send_signal(signal.SIGTERM)
        assert set(manager.receive_until(b"STOPPING=1")) <= {ALIVE}
    finally:
        manager.end(signal.SIGTERM)


def test_a_killed_hung_daemon_logs_where_it_hangs(start_daemon: Path) -> None:
    manager = Manager(start_daemon, {"WATCHDOG_USEC": "400000"}, 0)
    manager.receive_until(b"READY=1")
    log = manager.end(signal.SIGABRT)
    assert manager.process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in log and "asyncio" in log


@pytest.mark.parametrize("watched", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "x"}])
def test_without_a_watchdog_no_notifications_are_sent(start_daemon: Path, watched: dict[str, str]) -> None:
    manager = Manager(start_daemon, watched, 0)
    try:
        manager.receive_until(b"READY=1")
        manager.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            manager.receive()
    finally:
        assert "Traceback" not in manager.end(signal.SIGTERM)


def test_a_slow_startup_requests_more_time(start_daemon: Path) -> None:
    manager = Manager(start_daemon, {}, 2)
    try:
        before = manager.receive_until(b"READY=1")
        assert len(before) >= 2 and set(before) == {b"EXTEND_TIMEOUT_USEC=60000000"}
        manager.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            manager.receive()
    finally:
        manager.end(signal.SIGTERM)
