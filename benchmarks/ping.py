"""Ping a machine from outside, to measure how long a client waits for a reply.

This runs in a separate process (``python -m benchmarks.ping``), so that it does not slow down the gateway under test.
The guest's kernel answers ICMP echo requests, so if no reply arrives, the guest is not running.
"""

from __future__ import annotations

import itertools
import json
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

_INTERVAL_SECONDS = 0.001
_ECHO_REQUEST, _ECHO_REPLY = 8, 0
_IDENTIFIER = 0x6762
_TIMESTAMP = struct.Struct("!d")


@dataclass(frozen=True)
class Reply:
    """The times of one ping in seconds of ``time.monotonic``, which is the same clock in all processes."""

    sent_at: float
    received_at: float


class Ping:
    """Sends a ping every millisecond inside this context. Afterwards, ``replies`` contains the replies.

    ``prefix``: a command that runs the rest of its command line in the network of ``address``.
    """

    def __init__(self, address: str, *, prefix: Sequence[str] = ()) -> None:
        self._address = address
        self._prefix = prefix
        self.replies: list[Reply] = []

    def __enter__(self) -> Ping:
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "benchmarks.ping", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._address} does not answer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate(timeout=30)
        if kind is None:
            self.replies = [Reply(sent_at, received_at) for sent_at, received_at in json.loads(output)]

    def change_address(self, address: str) -> None:
        """Ping ``address`` from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n".encode())
        self._process.stdin.flush()

    def find_longest_wait(self, start: float, end: float) -> float:
        """Return the longest wait for a reply between ``start`` and ``end``, in milliseconds."""
        return find_longest_wait(self.replies, start, end)


def find_longest_wait(replies: list[Reply], start: float, end: float) -> float:
    """Return the longest wait for a reply between ``start`` and ``end``, in milliseconds.

    The wait for an unanswered ping lasts until a later ping is answered.
    """
    waits = [reply.received_at - reply.sent_at for reply in replies if start <= reply.sent_at <= end]
    receive_times = sorted(reply.received_at for reply in replies if start <= reply.received_at <= end)
    gaps = [later - earlier for earlier, later in itertools.pairwise(receive_times)]
    return max([*waits, *gaps], default=end - start) * 1000


def _compute_checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def _encode_echo_request(now: float) -> bytes:
    payload = _TIMESTAMP.pack(now)
    header = struct.pack("!BBHHH", _ECHO_REQUEST, 0, 0, _IDENTIFIER, 0)
    return struct.pack("!BBHHH", _ECHO_REQUEST, 0, _compute_checksum(header + payload), _IDENTIFIER, 0) + payload


def _main(address: str) -> None:
    """Ping until standard input is closed. Each line of input is a new address to ping.

    Prints a line after the first reply, and all replies at the end.
    """
    replies: list[tuple[float, float]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        next_ping = time.monotonic()
        deadline = next_ping + 30
        while True:
            now = time.monotonic()
            if now >= next_ping:
                raw.sendto(_encode_echo_request(now), (address, 0))
                next_ping = max(next_ping + _INTERVAL_SECONDS, now)
            ready, _, _ = select.select([raw, sys.stdin], [], [], max(0.0, next_ping - time.monotonic()))
            if raw in ready:
                packet = raw.recv(2048)
                message = packet[(packet[0] & 15) * 4 :]
                if message[0] == _ECHO_REPLY and message[4:6] == struct.pack("!H", _IDENTIFIER) and len(message) >= 16:
                    if not replies:
                        print("answered", flush=True)
                    replies.append((_TIMESTAMP.unpack_from(message, 8)[0], time.monotonic()))
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    break
                address = line.strip()
            if not replies and now > deadline:
                return
    json.dump(replies, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
