"""Replaces the agent as root in a sandbox could, and checks whether the gateway still serves others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.api import inside
from tests.api.memory_gateway import MemoryGateway

PROBE_SECONDS = 20
"""The longest time that `/health` may take on a busy machine."""
ATTACK_SECONDS = 120

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def create_sandbox(memory_gateway: MemoryGateway, name: str) -> dict[str, Any]:
    with memory_gateway.client() as client:
        answer = client.post("/sandboxes", json={"templateID": "base", "name": name})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made


def make_answer(body: bytes, status: str = "200 OK") -> bytes:
    return inside.make_reply(status, body)


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@contextlib.contextmanager
def replaced_agent(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], *answers: bytes, **more: Any
) -> Iterator[inside.RawService]:
    """Replace the sandbox's agent by one that sends ``answers``, one after the other; the last one repeats."""
    with inside.raw_service(memory_gateway, sandbox, *answers, port=inside.AGENT_PORT, **more) as agent:
        yield agent


def send_endlessly(piece: bytes, limit: int = 256 << 20) -> tuple[inside.Handler, list[int]]:
    """Return a service that keeps sending ``piece`` to each reader, up to ``most`` bytes, and the number of bytes
    sent."""
    sent = [0]

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent[0] < limit:
            writer.write(piece)
            await writer.drain()
            sent[0] += len(piece)

    return flood, sent


def check_others_are_served(client: httpx.Client, attack: Callable[[], httpx.Response]) -> httpx.Response:
    """Return the answer to ``attack``. Requests for `/health` must be answered meanwhile."""
    answers: list[httpx.Response | BaseException] = []

    def run() -> None:
        try:
            answers.append(attack())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + ATTACK_SECONDS
    while True:
        ended = not thread.is_alive()
        assert client.get("/health", timeout=PROBE_SECONDS).status_code == 200
        if ended:
            break
        assert time.monotonic() < deadline, "the attack was never answered"
        time.sleep(0.02)
    (answer,) = answers
    if isinstance(answer, BaseException):
        raise answer
    return answer


class LoopMonitor:
    """Measures the longest uninterrupted work of the gateway's event loop, in seconds of its own processor time, so
    that other processes on this machine do not count."""

    def __init__(self, memory_gateway: MemoryGateway) -> None:
        self._loop = memory_gateway.loop
        self._task: asyncio.Task[None] | None = None
        self.longest = 0.0

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest, before = max(self.longest, now - before), now

    def __enter__(self) -> LoopMonitor:
        async def start() -> None:
            self._task = asyncio.create_task(self._watch())

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(PROBE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
