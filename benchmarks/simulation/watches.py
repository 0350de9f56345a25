"""Follow all changes like the gateways of a large fleet: ``python -m benchmarks.simulation.watches PORT PREFIX``.

The process reads numbers, one a line, opens so many watches in place of those before, and prints their number. It only
reads what etcd sends, because the gateways of a real fleet have machines of their own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import sys

_MAX_READ_BYTES = 1 << 16


async def _follow(port: int, prefix: str, is_open: asyncio.Semaphore) -> None:
    key = prefix.encode()
    end = key[:-1] + bytes([key[-1] + 1])
    request = {"create_request": {"key": _encode(key), "range_end": _encode(end)}}
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v3/watch HTTP/1.1\r\nHost: etcd\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await reader.readuntil(b'"created":true')
        is_open.release()
        while await reader.read(_MAX_READ_BYTES):
            pass
    finally:
        writer.transport.abort()


def _encode(text: bytes) -> str:
    return base64.b64encode(text).decode()


async def _run(port: int, prefix: str) -> None:
    tasks: list[asyncio.Task[None]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        is_open = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(_follow(port, prefix, is_open)) for _ in range(int(line))]
        for _ in tasks:
            await is_open.acquire()
        print(len(tasks), flush=True)


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_run(int(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()
