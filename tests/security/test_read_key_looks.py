"""A client with a read-only key reads sandboxes whose agents were replaced. This must not affect other clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine import sandboxes as engine_sandboxes
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.records import Sandbox, Snapshot
from tests.security.hostile import (
    check_loop_is_not_blocked,
    create_sandbox,
    make_endless_sender,
    make_response,
    replaced_agent,
)
from tests.support.memory_gateway import READ_KEY, MemoryGateway
from tests.support.memory_host import MemoryHost
from tests.support.waiting import wait_until

_MAX_RESPONSE_SECONDS = 20
"""More than enough for the timeout of 2 s, and less than the 30 s that an agent could once take."""
_AGENT_COUNT = 24
_LONG_LIST_LENGTH = 100


async def _hang(_: Any, __: Any) -> None:
    await asyncio.sleep(3600)


def _make_read_only_client(memory_gateway: MemoryGateway) -> httpx.Client:
    client = memory_gateway.client(READ_KEY)
    client.timeout = httpx.Timeout(_MAX_RESPONSE_SECONDS)
    return client


def test_an_unresponsive_agent_makes_divergence_unknown(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    with (
        memory_gateway.client() as client,
        replaced_agent(memory_gateway, sandbox, b"HTTP/1.1 200 OK\r\n", next_handler=_hang),
    ):
        response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes/one")
        )
        assert response.status_code == 200
        assert response.json()["name"] == "one" and response.json()["diverged"] is None
        patch_response = client.patch("/sandboxes/one", json={"metadata": {"a": "b"}}, timeout=_MAX_RESPONSE_SECONDS)
        assert patch_response.json()["diverged"] is None
    assert _make_read_only_client(memory_gateway).get("/sandboxes/one").json()["state"] == "running"


def test_unresponsive_agents_do_not_affect_the_others(memory_gateway: MemoryGateway) -> None:
    sandboxes = [create_sandbox(memory_gateway, f"s{number}") for number in range(_AGENT_COUNT)]
    honest_sandbox = create_sandbox(memory_gateway, "honest")
    with contextlib.ExitStack() as stack:
        for each in sandboxes:
            stack.enter_context(replaced_agent(memory_gateway, each, b"HTTP/1.1 200 OK\r\n", next_handler=_hang))
        response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes?diverged=true")
        )
    diverged_by_name = {each["name"]: each["diverged"] for each in response.json()}
    assert diverged_by_name.pop(honest_sandbox["name"]) is False
    assert len(diverged_by_name) == _AGENT_COUNT and set(diverged_by_name.values()) == {None}


def test_all_agents_are_queried_at_the_same_time(
    memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only some were queried at a time, each that hangs would delay the list."""
    monkeypatch.setattr(engine_sandboxes, "_SYNC_SECONDS", 60)
    monkeypatch.setattr(engine_sandboxes, "_DIVERGENCE_SECONDS", 60)
    sandboxes = [create_sandbox(memory_gateway, f"s{number}") for number in range(_LONG_LIST_LENGTH)]
    all_queried = threading.Barrier(_LONG_LIST_LENGTH)

    response_head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"

    async def wait_for_others(_: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(all_queried.wait, 50)
        writer.write(b"{}")

    with contextlib.ExitStack() as stack:
        for each in sandboxes:
            stack.enter_context(replaced_agent(memory_gateway, each, response_head, next_handler=wait_for_others))
        client = memory_gateway.client(READ_KEY)
        client.timeout = httpx.Timeout(100)
        response = check_loop_is_not_blocked(memory_gateway, lambda: client.get("/sandboxes?diverged=true"))
    assert [each["diverged"] for each in response.json()] == [False] * _LONG_LIST_LENGTH


class _HangingQueries:
    """Makes the comparisons and measurements of disks hang until the test ends them."""

    def __init__(self, memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = memory_gateway.loop
        self._may_end = asyncio.Event()
        self.running_count = self.max_running_count = 0
        self.spared_names: set[str] = set()
        compare, measure_disk = MemoryHost.compare, MemoryHost.measure_disk

        async def compare_later(host: MemoryHost, sandbox: Sandbox, head: Snapshot) -> bool:
            if sandbox.name not in self.spared_names:
                await self._hang()
            return await compare(host, sandbox, head)

        async def measure_later(host: MemoryHost) -> int:
            await self._hang()
            return await measure_disk(host)

        monkeypatch.setattr(MemoryHost, "compare", compare_later)
        monkeypatch.setattr(MemoryHost, "measure_disk", measure_later)

    async def _hang(self) -> None:
        self.running_count += 1
        self.max_running_count = max(self.max_running_count, self.running_count)
        await self._may_end.wait()
        self.running_count -= 1

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._may_end.set)
        wait_until(lambda: not self.running_count)


@pytest.fixture
def hanging_queries(memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[_HangingQueries]:
    """A guest decides how fragmented its disk is, and so how long these queries take."""
    monkeypatch.setattr(engine_sandboxes, "_DIVERGENCE_SECONDS", 1)
    monkeypatch.setattr(engine_sandboxes, "_USAGE_SECONDS", 1)
    queries = _HangingQueries(memory_gateway, monkeypatch)
    yield queries
    queries.end()


def test_a_comparison_that_does_not_end_makes_divergence_unknown(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], hanging_queries: _HangingQueries
) -> None:
    """However often clients ask, each sandbox is compared only once at a time."""
    client = _make_read_only_client(memory_gateway)
    for path in ("/sandboxes/one", "/sandboxes?diverged=true", "/sandboxes/one"):
        response = check_loop_is_not_blocked(memory_gateway, lambda path=path: client.get(path))
        body = response.json()
        assert (body[0] if isinstance(body, list) else body)["diverged"] is None
    usage_response = client.get("/sandboxes/one/usage")
    assert (usage_response.status_code, usage_response.json()["kind"]) == (504, "timeout"), usage_response.text
    assert hanging_queries.max_running_count == 1
    hanging_queries.end()
    assert client.get("/sandboxes/one").json()["diverged"] is False
    assert client.get("/sandboxes/one/usage").json()["diskBytes"] == 200_000


def test_captures_do_not_wait_for_queries_of_disks(
    memory_gateway: MemoryGateway,
    sandbox: dict[str, Any],
    hanging_queries: _HangingQueries,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that is short of room measures the sandbox before it captures it."""
    assert _make_read_only_client(memory_gateway).get("/sandboxes/one").json()["diverged"] is None
    monkeypatch.setattr(RoomMonitor, "has_disk_space", lambda *_: False)
    monkeypatch.setattr(RoomMonitor, "_require_disk_space", lambda *_: None)
    with memory_gateway.client() as client:
        response = check_loop_is_not_blocked(memory_gateway, lambda: client.post("/sandboxes/one/pause"))
    assert response.status_code == 204, response.text
    assert hanging_queries.max_running_count == 1


def test_plan_sessions_do_not_start_more_comparisons(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], hanging_queries: _HangingQueries
) -> None:
    client = _make_read_only_client(memory_gateway)
    for number in range(4):
        plan = client.post("/plans", json={"run": f"a-run-that-compares-disks-{number}"}).json()
        shown_sandbox = client.get(f"/plans/{plan['planID']}/sandboxes/one").json()
        assert shown_sandbox["diverged"] is None
        assert client.delete(f"/plans/{plan['planID']}").status_code == 204
    assert hanging_queries.max_running_count == 1


def test_comparisons_that_do_not_end_do_not_affect_other_sandboxes(
    memory_gateway: MemoryGateway, hanging_queries: _HangingQueries
) -> None:
    hanging_queries.spared_names = {"honest"}
    for name in (*(f"s{number}" for number in range(10)), "honest"):
        create_sandbox(memory_gateway, name)
    response = check_loop_is_not_blocked(
        memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes?diverged=true")
    )
    diverged_by_name = {each["name"]: each["diverged"] for each in response.json()}
    assert diverged_by_name.pop("honest") is False and {*diverged_by_name.values()} == {None}


def test_many_comparisons_that_do_not_end_use_few_threads(
    memory_gateway: MemoryGateway, hanging_queries: _HangingQueries
) -> None:
    for number in range(20):
        create_sandbox(memory_gateway, f"s{number}")
    response = check_loop_is_not_blocked(
        memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes?diverged=true")
    )
    assert [each["diverged"] for each in response.json()] == [None] * 20
    assert hanging_queries.max_running_count == 16


@pytest.mark.parametrize(
    "body",
    [b'"\\' * 100_000, b'"' * 200_000, b"[" * 200_000, b'{"a": ' + b"9" * 200_000 + b"}"],
    ids=["strings without an end", "quotes", "deep", "digits"],
)
def test_a_response_that_is_slow_to_parse_does_not_delay_other_requests(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], body: bytes
) -> None:
    with replaced_agent(memory_gateway, sandbox, make_response(body)):
        sandbox_response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes/one")
        )
        list_response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes?diverged=true")
        )
    assert sandbox_response.status_code == list_response.status_code == 200
    assert sandbox_response.json()["diverged"] is None and list_response.json()[0]["diverged"] is None


def test_an_endless_response_is_cut_off(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    flood, sent_bytes = make_endless_sender(b"x" * 65536)
    response_head = b'HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n{"a": "'
    with replaced_agent(memory_gateway, sandbox, response_head, next_handler=flood):
        response = check_loop_is_not_blocked(
            memory_gateway, lambda: _make_read_only_client(memory_gateway).get("/sandboxes/one")
        )
    assert response.json()["diverged"] is None
    assert sent_bytes[0] < 64 << 20
