"""Root in a guest has found a response that blocks the gateway's event loop: the service manager must notice.

The roles' tests check that systemd then restarts the gateway.
"""

from __future__ import annotations

import itertools
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.test_service_manager import WATCHDOG_NOTIFICATION, ServiceManager


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="grove-notify-") as directory:
        yield Path(directory)


def test_the_watchdog_is_notified_only_while_the_event_loop_runs(run_dir: Path) -> None:
    manager = ServiceManager(run_dir, {"WATCHDOG_USEC": "400000"}, 0)
    try:
        manager.receive_until(b"READY=1")
        for _ in range(5):
            assert manager.receive() == WATCHDOG_NOTIFICATION
        notification_times = [time.monotonic()]
        manager.process.send_signal(signal.SIGUSR1)
        for _ in range(15):
            assert manager.receive() == WATCHDOG_NOTIFICATION
            notification_times.append(time.monotonic())
        assert max(later - earlier for earlier, later in itertools.pairwise(notification_times)) > 2
    finally:
        log = manager.stop(signal.SIGTERM)
    assert manager.process.returncode == 0 and "Traceback" not in log
