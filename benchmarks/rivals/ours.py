"""Our own side: requests to a gateway's socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.context import TEMPLATE, KvmXfs
from benchmarks.gateways import gateway_beside
from benchmarks.rivals.probe import wait_for_answer
from tests.support.gateway import Gateway


class Ours:
    key = "ours"
    title = "this software"
    prefix: tuple[str, ...] = ()

    def __init__(self, gateway: Gateway) -> None:
        self.not_offered: dict[str, str] = {}
        self._call = gateway.call
        made = self._call("POST", "/sandboxes", {"template": TEMPLATE})
        self._source = made["sandboxID"]
        self._forks: list[str] = []
        self._snapshot = ""
        self.address = self._address(self._source)

    def snapshot(self) -> None:
        self._snapshot = self._call("POST", f"/sandboxes/{self._source}/snapshots", {})["snapshotID"]
        wait_for_answer(self.address)

    def fork(self, count: int) -> None:
        made = self._call("POST", f"/snapshots/{self._snapshot}/fork", {"count": count})
        self._forks = [each["sandboxID"] for each in made["sandboxes"]]
        for fork in self._forks:
            wait_for_answer(self._address(fork))

    def rollback(self) -> None:
        self._call("POST", f"/sandboxes/{self._source}/rollback", {"snapshot": self._snapshot})
        self.address = self._address(self._source)
        wait_for_answer(self.address)

    def written(self) -> float:
        found = self._call("GET", f"/snapshots/{self._snapshot}")
        return float(found["memoryBytesWritten"] + found["diskBytesUnique"])

    def remove_forks(self) -> None:
        for fork in self._forks:
            self._call("DELETE", f"/sandboxes/{fork}")
        self._forks = []

    def remove_snapshot(self) -> None:
        """Remove the latest snapshot with its last user: after a rollback, that is the source."""
        self._call("DELETE", f"/snapshots/{self._snapshot}", params={"when": "unused"})

    def _address(self, sandbox: str) -> str:
        return str(self._call("GET", f"/sandboxes/{sandbox}")["address"])


@contextlib.contextmanager
def ours(host: KvmXfs, settle: float) -> Iterator[Ours]:
    """Run a gateway with a source. Removes everything at the end."""
    with gateway_beside(host) as gateway:
        made = Ours(gateway)
        time.sleep(settle)
        yield made
