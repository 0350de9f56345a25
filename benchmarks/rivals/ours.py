"""Perform the operations with this software, by sending requests to a gateway's socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.context import TEMPLATE, KvmXfs
from benchmarks.gateways import companion_gateway
from benchmarks.rivals.probe import wait_for_answer
from tests.support.gateway import Gateway


class OurMachine:
    key = "ours"
    title = "this software"
    baseline_key = ""
    prefix: tuple[str, ...] = ()

    def __init__(self, gateway: Gateway) -> None:
        self.not_offered: dict[str, str] = {}
        self._call = gateway.call
        self._source = self._call("POST", "/sandboxes", {"templateID": TEMPLATE})["sandboxID"]
        self._forks: list[str] = []
        self._snapshot = ""
        self.address = self._find_address(self._source)

    def snapshot(self) -> None:
        self._snapshot = self._call("POST", f"/sandboxes/{self._source}/snapshots", {})["snapshotID"]
        wait_for_answer(self.address)

    def fork(self, count: int) -> None:
        response = self._call("POST", f"/snapshots/{self._snapshot}/fork", {"count": count})
        self._forks = [fork["sandboxID"] for fork in response["sandboxes"]]
        for fork in self._forks:
            wait_for_answer(self._find_address(fork))

    def rollback(self) -> None:
        self._call("POST", f"/sandboxes/{self._source}/rollback", {"snapshotID": self._snapshot})
        self.address = self._find_address(self._source)
        wait_for_answer(self.address)

    def count_written_bytes(self) -> float:
        snapshot = self._call("GET", f"/snapshots/{self._snapshot}")
        return float(snapshot["memoryBytesWritten"] + snapshot["diskBytesUnique"])

    def remove_forks(self) -> None:
        for fork in self._forks:
            self._call("DELETE", f"/sandboxes/{fork}")
        self._forks = []

    def remove_snapshot(self) -> None:
        # After a rollback, the source still uses the snapshot, so the gateway removes it once it is unused.
        self._call("DELETE", f"/snapshots/{self._snapshot}", params={"when": "unused"})

    def _find_address(self, sandbox: str) -> str:
        return str(self._call("GET", f"/sandboxes/{sandbox}")["address"])


@contextlib.contextmanager
def our_machine(host: KvmXfs, settle_seconds: float) -> Iterator[OurMachine]:
    """Run a gateway with a source, and yield the source after ``settle_seconds``. Removes everything at the end."""
    with companion_gateway(host) as gateway:
        machine = OurMachine(gateway)
        time.sleep(settle_seconds)
        yield machine
