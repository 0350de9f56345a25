"""Test that sandboxes keep running while the daemon is killed or stopped, and then started again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.gateway import TEMPLATE, Gateway

COUNTER_PROGRAM = (
    "import os, time\n"
    "count = 0\n"
    "while True:\n"
    "    count += 1\n"
    "    open('/run/counter.new', 'w').write(str(count))\n"
    "    os.replace('/run/counter.new', '/run/counter')\n"
    "    time.sleep(0.2)\n"
)


def read_counter(gateway: Gateway, name: str) -> int:
    return int(gateway.sh(name, "cat /run/counter"))


@pytest.fixture
def gateway_with_four_sandboxes(gateway: Callable[..., Gateway]) -> Gateway:
    """A gateway with four sandboxes: one that runs a counter, and three forks of its snapshot."""
    started_gateway = gateway()
    started_gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source", "timeout": -1})
    started_gateway.sh(
        "source",
        f'python3 -c "{COUNTER_PROGRAM}" </dev/null >/dev/null 2>&1 & while ! [ -e /run/counter ]; do sleep 0.1; done',
    )
    started_gateway.call("POST", "/sandboxes/source/snapshots", {"name": "mark"})
    started_gateway.call("POST", "/snapshots/mark/fork", {"count": 3, "names": [f"fork-{n}" for n in range(1, 4)]})
    return started_gateway


def read_observable_state(gateway: Gateway) -> Any:
    """Return everything that a restart must not change."""
    sandboxes = gateway.call("GET", "/sandboxes?limit=1000")
    keys = ("sandboxID", "name", "state", "templateID", "forkedFrom", "snapshotID", "metadata", "endAt")
    sandbox_fields = sorted(
        [{key: each.get(key) for key in keys} for each in sandboxes], key=lambda each: each["sandboxID"]
    )
    return sandbox_fields, gateway.call("GET", "/lineage"), gateway.call("GET", "/snapshots")


def test_sandboxes_survive_a_killed_gateway(gateway_with_four_sandboxes: Gateway) -> None:
    state_before = read_observable_state(gateway_with_four_sandboxes)
    counts = {name: read_counter(gateway_with_four_sandboxes, name) for name in ("source", "fork-1", "fork-3")}
    gateway_with_four_sandboxes.kill()
    gateway_with_four_sandboxes.start()
    assert read_observable_state(gateway_with_four_sandboxes) == state_before
    for name in ("source", *(f"fork-{n}" for n in range(1, 4))):
        assert gateway_with_four_sandboxes.sh(name, "hostname").strip() == name
    for name, count in counts.items():
        assert read_counter(gateway_with_four_sandboxes, name) > count, f"{name} stopped counting"
    gateway_with_four_sandboxes.call("POST", "/sandboxes/fork-1/snapshots", {"name": "after"})
    gateway_with_four_sandboxes.call("POST", "/snapshots/after/fork", {"name": "late"})


def test_killing_the_gateway_during_a_snapshot_leaves_no_partial_snapshot(gateway_with_four_sandboxes: Gateway) -> None:
    for delay in (0.02, 0.08):
        gateway_with_four_sandboxes.sh("source", "head -c 8000000 /dev/urandom >/run/blob")
        thread = threading.Thread(
            target=request_snapshot, args=(gateway_with_four_sandboxes.url, f"cut-{int(delay * 1000)}")
        )
        thread.start()
        time.sleep(delay)
        gateway_with_four_sandboxes.kill()
        thread.join(30)
        gateway_with_four_sandboxes.start()
        assert gateway_with_four_sandboxes.sh("source", "hostname").strip() == "source"
        assert not list(gateway_with_four_sandboxes.state_root.glob("snapshots/.partial-*"))
        for listed_snapshot in gateway_with_four_sandboxes.call("GET", "/snapshots"):
            fork = gateway_with_four_sandboxes.call("POST", f"/snapshots/{listed_snapshot['snapshotID']}/fork", {})
            assert read_counter(gateway_with_four_sandboxes, fork["sandboxID"]) > 0
            gateway_with_four_sandboxes.call("DELETE", f"/sandboxes/{fork['sandboxID']}")


def request_snapshot(url: str, name: str) -> None:
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix://"))
    client = httpx.Client(transport=transport, base_url="http://gateway", timeout=30)
    with client, contextlib.suppress(httpx.HTTPError):  # The gateway is killed during this request.
        client.post("/sandboxes/source/snapshots", json={"name": name})


def test_sigterm_leaves_sandboxes_running(gateway_with_four_sandboxes: Gateway) -> None:
    count_before = read_counter(gateway_with_four_sandboxes, "fork-2")
    assert gateway_with_four_sandboxes.stop() == 0
    time.sleep(1)
    gateway_with_four_sandboxes.start()
    assert read_counter(gateway_with_four_sandboxes, "fork-2") > count_before
