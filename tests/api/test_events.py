"""The stream of events, and requests whose client disconnects."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.support.memory_gateway import MemoryGateway, create_sandbox


def collect_events(
    memory_gateway: MemoryGateway, operation: str, last_kind: str, ready_event: threading.Event
) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    kind = ""
    with (
        memory_gateway.client() as client,
        client.stream("GET", "/events", params={"operation": operation}) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line == ": connected":
                ready_event.set()
            elif line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((kind, json.loads(line.removeprefix("data: "))))
                if kind == last_kind and events[-1][1].get("done") == events[-1][1].get("total"):
                    return events
    return events


def start_listener(
    memory_gateway: MemoryGateway, operation: str, last_kind: str
) -> tuple[threading.Thread, list[tuple[str, dict[str, Any]]]]:
    events: list[tuple[str, dict[str, Any]]] = []
    ready_event = threading.Event()
    thread = threading.Thread(
        target=lambda: events.extend(collect_events(memory_gateway, operation, last_kind, ready_event)), daemon=True
    )
    thread.start()
    assert ready_event.wait(30)
    return thread, events


def test_an_operation_reports_only_its_own_progress(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    thread, events = start_listener(memory_gateway, "abc123", "fork.progress")
    create_sandbox(api, name="other")
    response = api.post("/sandboxes/one/clone", json={"count": 3}, headers={"X-Operation-Id": "abc123"})
    assert response.status_code == 201
    thread.join(30)
    assert [(kind, data["done"], data["total"]) for kind, data in events] == [
        ("fork.progress", number, 3) for number in (1, 2, 3)
    ]
    assert all(data["operation"] == "abc123" and data["sandboxID"] and data["at"] for _, data in events)


def test_every_change_is_reported(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    thread, events = start_listener(memory_gateway, "", "sandbox.killed")
    sandbox = create_sandbox(api, name="one")
    api.delete("/sandboxes/one")
    thread.join(30)
    assert [(kind, data["sandboxID"]) for kind, data in events] == [
        ("sandbox.created", sandbox["sandboxID"]),
        ("sandbox.killed", sandbox["sandboxID"]),
    ]


def test_listeners_are_removed_when_they_disconnect(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    queue_count_before = len(memory_gateway.engine.events._queues)
    for _ in range(3):
        thread, _ = start_listener(memory_gateway, "", "sandbox.killed")
        create_sandbox(api, name="one")
        api.delete("/sandboxes/one")
        thread.join(30)
    deadline = time.monotonic() + 30
    while len(memory_gateway.engine.events._queues) > queue_count_before and time.monotonic() < deadline:
        time.sleep(0.05)
    # A queue of an earlier test may also have been removed.
    assert len(memory_gateway.engine.events._queues) <= queue_count_before


@pytest.mark.parametrize("route", ["/sandboxes", "/snapshots/s1/fork", "/sandboxes/one/clone"])
def test_a_disconnect_leaves_no_incomplete_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, route: str
) -> None:
    create_sandbox(api, name="one")
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    fork_count_before = memory_gateway.host.fork_count
    memory_gateway.host.fork_seconds = 1.0
    with memory_gateway.client() as impatient_client, pytest.raises(httpx.ReadTimeout):
        impatient_client.post(route, json={"templateID": "base", "count": 2}, timeout=0.3)
    deadline = time.monotonic() + 30
    while memory_gateway.host.fork_count == fork_count_before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1.2)
    assert memory_gateway.host.fork_count > fork_count_before, "the fork has started"
    assert [item["name"] for item in api.get("/sandboxes").json()] == ["one"]
    assert len(memory_gateway.host.machines) == 1


def test_a_command_of_a_disconnected_client_does_not_delay_requests(
    memory_gateway: MemoryGateway, api: httpx.Client
) -> None:
    create_sandbox(api, name="one")
    with memory_gateway.client() as impatient_client, pytest.raises(httpx.ReadTimeout):
        impatient_client.post("/sandboxes/one/exec", json={"args": ["sleep", "30"]}, timeout=0.3)
    start_time = time.monotonic()
    assert api.delete("/sandboxes/one").status_code == 204
    assert time.monotonic() - start_time < 5
