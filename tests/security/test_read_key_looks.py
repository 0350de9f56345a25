"""A client with a read-only key reads sandboxes whose agents were replaced: this must not affect others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from tests.api.served import READ_KEY, Served
from tests.security.hostile import check_others_are_served, create_sandbox, make_answer, replaced_agent, send_endlessly

_LIMIT = 20
"""Seconds: plenty for two, and less than the thirty that an agent could once take."""
_SEVERAL = 24


async def _hang(_: Any, __: Any) -> None:
    await asyncio.sleep(3600)


def _read_only_client(served: Served) -> httpx.Client:
    client = served.client(READ_KEY)
    client.timeout = httpx.Timeout(_LIMIT)
    return client


def test_a_hanging_agent_makes_divergence_unknown(served: Served, one: dict[str, Any]) -> None:
    with served.client() as client, replaced_agent(served, one, b"HTTP/1.1 200 OK\r\n", then=_hang):
        answer = check_others_are_served(client, lambda: _read_only_client(served).get("/sandboxes/one"))
        assert answer.status_code == 200
        assert answer.json()["name"] == "one" and answer.json()["diverged"] is None
        renamed = client.patch("/sandboxes/one", json={"metadata": {"a": "b"}}, timeout=_LIMIT)
        assert renamed.json()["diverged"] is None
    assert _read_only_client(served).get("/sandboxes/one").json()["state"] == "running"


def test_hanging_agents_are_asked_concurrently(served: Served) -> None:
    made = [create_sandbox(served, f"s{number}") for number in range(_SEVERAL)]
    honest = create_sandbox(served, "honest")
    with contextlib.ExitStack() as stack:
        for each in made:
            stack.enter_context(replaced_agent(served, each, b"HTTP/1.1 200 OK\r\n", then=_hang))
        with served.client() as client:
            answer = check_others_are_served(
                client, lambda: _read_only_client(served).get("/sandboxes", params={"diverged": True})
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
    served: Served, one: dict[str, Any], answer: bytes
) -> None:
    with served.client() as client, replaced_agent(served, one, make_answer(answer)):
        seen = check_others_are_served(client, lambda: _read_only_client(served).get("/sandboxes/one"))
        listed = check_others_are_served(client, lambda: _read_only_client(served).get("/sandboxes?diverged=true"))
    assert seen.status_code == listed.status_code == 200
    assert seen.json()["diverged"] is None and listed.json()[0]["diverged"] is None


def test_an_agent_with_an_endless_answer_is_abandoned(served: Served, one: dict[str, Any]) -> None:
    flood, sent = send_endlessly(b"x" * 65536)
    head = b'HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n{"a": "'
    with served.client() as client, replaced_agent(served, one, head, then=flood):
        answer = check_others_are_served(client, lambda: _read_only_client(served).get("/sandboxes/one"))
    assert answer.json()["diverged"] is None
    assert sent[0] < 64 << 20
