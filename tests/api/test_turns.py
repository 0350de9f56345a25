"""Test that a client that starts many machines delays other clients by at most one start."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.support.waiting import wait_until

FORK_COUNT = 30


def test_one_fork_does_not_wait_for_all_forks_of_another_client(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, limits={"starts": 1})
    try:
        gateway.build_template()
        start_count_before = gateway.host.fork_count
        gateway.host.fork_seconds = 0.05
        responses: list[httpx.Response] = []

        def create_forks() -> None:
            with gateway.client(ADMIN_KEY) as client:
                responses.append(
                    client.post("/snapshots/base/fork", json={"count": FORK_COUNT, "concurrency": FORK_COUNT})
                )

        other_client_thread = threading.Thread(target=create_forks)
        other_client_thread.start()
        wait_until(lambda: gateway.host.fork_count > start_count_before)
        with gateway.client() as client:
            assert client.post("/sandboxes", json={"templateID": "base", "name": "one"}).status_code == 201
        start_count = gateway.host.fork_count - start_count_before
        other_client_thread.join(60)
        assert [response.status_code for response in responses] == [201]
        assert start_count < FORK_COUNT / 2
        assert gateway.host.fork_count - start_count_before == FORK_COUNT + 1
    finally:
        gateway.end()
