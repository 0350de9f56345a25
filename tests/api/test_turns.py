"""Test that a client that starts many machines delays other clients by at most one start."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from tests.api.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.waiting import eventually

FORKS = 30


def test_one_fork_does_not_wait_for_all_forks_of_another_client(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, limits={"starts": 1})
    try:
        gateway.build_template()
        started_before = gateway.host.forked
        gateway.host.slow = 0.05
        responses: list[httpx.Response] = []

        def create_many() -> None:
            with gateway.client(ADMIN_KEY) as client:
                responses.append(client.post("/snapshots/base/fork", json={"count": FORKS, "concurrency": FORKS}))

        other_client = threading.Thread(target=create_many)
        other_client.start()
        eventually(lambda: gateway.host.forked > started_before)
        with gateway.client() as client:
            assert client.post("/sandboxes", json={"templateID": "base", "name": "one"}).status_code == 201
        started = gateway.host.forked - started_before
        other_client.join(60)
        assert [response.status_code for response in responses] == [201]
        assert started < FORKS / 2
        assert gateway.host.forked - started_before == FORKS + 1
    finally:
        gateway.end()
