"""Replace a sandbox's agent, as root in the sandbox could, and check that the gateway still serves other clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.support import guest_services
from tests.support.memory_gateway import MemoryGateway

PROBE_TIMEOUT_SECONDS = 20
"""Maximum response time of `/health` on a busy machine."""
MAX_BLOCKED_SECONDS = 0.2
"""Maximum CPU time for which a task may block the event loop. The largest possible response takes a third of it."""
ATTACK_TIMEOUT_SECONDS = 120

RESPONSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def create_sandbox(memory_gateway: MemoryGateway, name: str) -> dict[str, Any]:
    with memory_gateway.client() as client:
        response = client.post("/sandboxes", json={"templateID": "base", "name": name})
        assert response.status_code == 201, response.text
        sandbox: dict[str, Any] = response.json()
        return sandbox


def make_response(body: bytes, status: str = "200 OK") -> bytes:
    return guest_services.make_reply(status, body)


def make_chunked_response(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return RESPONSE_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@contextlib.contextmanager
def replaced_agent(
    memory_gateway: MemoryGateway, sandbox: dict[str, Any], *responses: bytes, **options: Any
) -> Iterator[guest_services.RawService]:
    """Replace the sandbox's agent with a service that sends ``responses`` in order, then repeats the last one."""
    with guest_services.raw_service(
        memory_gateway, sandbox, *responses, port=guest_services.AGENT_PORT, **options
    ) as agent:
        yield agent


def make_endless_sender(piece: bytes, limit: int = 256 << 20) -> tuple[guest_services.Handler, list[int]]:
    """Return a handler that sends ``piece`` repeatedly, and a list whose only item is the number of bytes sent so far.

    The handler stops after ``limit`` bytes, which is far more than the gateway should read.
    """
    sent_bytes = [0]

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent_bytes[0] < limit:
            writer.write(piece)
            await writer.drain()
            sent_bytes[0] += len(piece)

    return flood, sent_bytes


def check_others_are_served(client: httpx.Client, attack: Callable[[], httpx.Response]) -> httpx.Response:
    """Run ``attack`` and return its response. Meanwhile, check that `/health` responds."""
    responses: list[httpx.Response | BaseException] = []

    def run_attack() -> None:
        try:
            responses.append(attack())
        except BaseException as error:
            responses.append(error)

    thread = threading.Thread(target=run_attack, daemon=True)
    thread.start()
    deadline = time.monotonic() + ATTACK_TIMEOUT_SECONDS
    while True:
        has_ended = not thread.is_alive()
        assert client.get("/health", timeout=PROBE_TIMEOUT_SECONDS).status_code == 200
        if has_ended:
            break
        assert time.monotonic() < deadline, "the attack received no response"
        time.sleep(0.02)
    (response,) = responses
    if isinstance(response, BaseException):
        raise response
    return response


def check_loop_is_not_blocked(memory_gateway: MemoryGateway, attack: Callable[[], httpx.Response]) -> httpx.Response:
    """Run ``attack`` and return its response. Check that `/health` responds, and that no task blocks the event loop."""
    with memory_gateway.client() as client, LoopMonitor(memory_gateway) as loop_monitor:
        response = check_others_are_served(client, attack)
    assert loop_monitor.longest_block_seconds < MAX_BLOCKED_SECONDS
    return response


class LoopMonitor:
    """Measures the longest time for which a single task blocks the gateway's event loop.

    ``longest_block_seconds`` is CPU time in seconds, so other processes on this machine do not affect it.
    """

    def __init__(self, memory_gateway: MemoryGateway) -> None:
        self._loop = memory_gateway.loop
        self._task: asyncio.Task[None] | None = None
        self.longest_block_seconds = 0.0

    async def _watch(self) -> None:
        time_before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_block_seconds, time_before = max(self.longest_block_seconds, now - time_before), now

    def __enter__(self) -> LoopMonitor:
        async def start_watching() -> None:
            self._task = asyncio.create_task(self._watch())

        asyncio.run_coroutine_threadsafe(start_watching(), self._loop).result(PROBE_TIMEOUT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
