"""A client with a read-only key reads sandboxes whose agents were replaced. This must not affect other clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest

from sandbox_gateway.engine import divergence
from sandbox_gateway.records import Sandbox, Snapshot
from tests.api.memory_gateway import READ_KEY, MemoryGateway
from tests.api.memory_host import MemoryHost
from tests.security.hostile import (
    check_loop_is_not_blocked,
    create_sandbox,
    make_endless_sender,
    make_response,
    replaced_agent,
)
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
    monkeypatch.setattr(divergence, "_SYNC_SECONDS", 60)
    monkeypatch.setattr(divergence, "_SECONDS", 60)
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


def test_a_comparison_that_does_not_end_makes_divergence_unknown(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest decides how fragmented its disk is. However often clients ask, only one comparison uses the host."""
    monkeypatch.setattr(divergence, "_SECONDS", 1)
    may_end = asyncio.Event()
    has_diverged = MemoryHost.has_diverged
    running_counts: list[int] = []
    running: list[str] = []

    async def hang(host: MemoryHost, compared_sandbox: Sandbox, head: Snapshot) -> bool:
        running.append(compared_sandbox.id)
        running_counts.append(len(running))
        await may_end.wait()
        running.remove(compared_sandbox.id)
        return await has_diverged(host, compared_sandbox, head)

    monkeypatch.setattr(MemoryHost, "has_diverged", hang)
    client = _make_read_only_client(memory_gateway)
    for path in ("/sandboxes/one", "/sandboxes?diverged=true", "/sandboxes/one"):
        response = check_loop_is_not_blocked(memory_gateway, lambda path=path: client.get(path))
        body = response.json()
        assert (body[0] if isinstance(body, list) else body)["diverged"] is None
    assert running_counts == [1]
    memory_gateway.loop.call_soon_threadsafe(may_end.set)
    wait_until(lambda: not running)
    assert client.get("/sandboxes/one").json()["diverged"] is False
    assert running_counts == [1, 1]


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
