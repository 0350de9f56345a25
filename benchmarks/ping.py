"""Ping a machine from outside, to measure how long a client waits for an answer.

This runs in a separate process (``python -m benchmarks.ping``), so that it does not slow down the gateway under test.
The guest's kernel answers ICMP echo requests, so if no answer arrives, the guest is not running.
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
class Answer:
    """The times of one ping in seconds of ``time.monotonic``, which is the same clock in all processes."""

    sent: float
    received: float


class Ping:
    """Sends a ping every millisecond inside this context. Afterwards, ``answers`` contains the answers.

    ``prefix``: a command that runs the rest of its command line in the network of ``address``.
    """

    def __init__(self, address: str, *, prefix: Sequence[str] = ()) -> None:
        self._address = address
        self._prefix = prefix
        self.answers: list[Answer] = []

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
            self.answers = [Answer(sent, received) for sent, received in json.loads(output)]

    def switch_to(self, address: str) -> None:
        """Ping ``address`` from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n".encode())
        self._process.stdin.flush()

    def longest_wait(self, start: float, end: float) -> float:
        """Return the longest wait for an answer between ``start`` and ``end``, in milliseconds."""
        return longest_wait(self.answers, start, end)


def longest_wait(answers: list[Answer], start: float, end: float) -> float:
    """Return the longest wait for an answer between ``start`` and ``end``, in milliseconds.

    The wait for an unanswered ping lasts until a later ping is answered.
    """
    waits = [answer.received - answer.sent for answer in answers if start <= answer.sent <= end]
    receive_times = sorted(answer.received for answer in answers if start <= answer.received <= end)
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

    Prints a line after the first answer, and all answers at the end.
    """
    answers: list[tuple[float, float]] = []
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
                    if not answers:
                        print("answered", flush=True)
                    answers.append((_TIMESTAMP.unpack_from(message, 8)[0], time.monotonic()))
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    break
                address = line.strip()
            if not answers and now > deadline:
                return
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
