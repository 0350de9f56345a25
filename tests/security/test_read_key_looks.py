"""A client with a read-only key reads sandboxes whose agents were replaced: this must not affect others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from tests.api.memory_gateway import READ_KEY, MemoryGateway
from tests.security.hostile import check_others_are_served, create_sandbox, make_answer, replaced_agent, send_endlessly

_LIMIT = 20
"""Seconds: plenty for two, and less than the thirty that an agent could once take."""
_SEVERAL = 24


async def _hang(_: Any, __: Any) -> None:
    await asyncio.sleep(3600)


def _read_only_client(memory_gateway: MemoryGateway) -> httpx.Client:
    client = memory_gateway.client(READ_KEY)
    client.timeout = httpx.Timeout(_LIMIT)
    return client


def test_a_hanging_agent_makes_divergence_unknown(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    with memory_gateway.client() as client, replaced_agent(memory_gateway, sandbox, b"HTTP/1.1 200 OK\r\n", then=_hang):
        answer = check_others_are_served(client, lambda: _read_only_client(memory_gateway).get("/sandboxes/one"))
        assert answer.status_code == 200
        assert answer.json()["name"] == "one" and answer.json()["diverged"] is None
        renamed = client.patch("/sandboxes/one", json={"metadata": {"a": "b"}}, timeout=_LIMIT)
        assert renamed.json()["diverged"] is None
    assert _read_only_client(memory_gateway).get("/sandboxes/one").json()["state"] == "running"


def test_hanging_agents_are_asked_concurrently(memory_gateway: MemoryGateway) -> None:
    made = [create_sandbox(memory_gateway, f"s{number}") for number in range(_SEVERAL)]
    honest = create_sandbox(memory_gateway, "honest")
    with contextlib.ExitStack() as stack:
        for each in made:
            stack.enter_context(replaced_agent(memory_gateway, each, b"HTTP/1.1 200 OK\r\n", then=_hang))
        with memory_gateway.client() as client:
            answer = check_others_are_served(
                client, lambda: _read_only_client(memory_gateway).get("/sandboxes", params={"diverged": True})
            )
    told = {each["name"]: each["diverged"] for each in answer.json()}
    assert told.pop(honest["name"]) is False
    assert len(told) == _SEVERAL and set(told.values()) == {None}


@pytest.mark.parametrize(
    "answer",
    [b'"\\' * 100_000, b'"' * 200_000, b"[" * 200_000, b'{"a": ' + b"9" * 200_000 + b"}"],
    ids=["strings without an end", "quotes", "deep", "digits"],
)
def test_an_answer_that_is_slow_to_parse_does_not_delay_others(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], answer: bytes
) -> None:
    with memory_gateway.client() as client, replaced_agent(memory_gateway, sandbox, make_answer(answer)):
        seen = check_others_are_served(client, lambda: _read_only_client(memory_gateway).get("/sandboxes/one"))
        listed = check_others_are_served(
            client, lambda: _read_only_client(memory_gateway).get("/sandboxes?diverged=true")
        )
    assert seen.status_code == listed.status_code == 200
    assert seen.json()["diverged"] is None and listed.json()[0]["diverged"] is None


def test_an_agent_with_an_endless_answer_is_abandoned(memory_gateway: MemoryGateway, sandbox: dict[str, Any]) -> None:
    flood, sent = send_endlessly(b"x" * 65536)
    head = b'HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n{"a": "'
    with memory_gateway.client() as client, replaced_agent(memory_gateway, sandbox, head, then=flood):
        answer = check_others_are_served(client, lambda: _read_only_client(memory_gateway).get("/sandboxes/one"))
    assert answer.json()["diverged"] is None
    assert sent[0] < 64 << 20
