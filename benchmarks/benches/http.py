"""Compare the same work over a gateway's socket and in this process's engine: the cost of HTTP and JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.gateways import gateway_beside
from benchmarks.measure import Result
from benchmarks.timers import milliseconds
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Snapshot
from tests.support.gateway import Gateway

_BETWEEN_SECONDS = 0.3
_TITLES = {
    "show": "show a sandbox",
    "exec": "run a command",
    "snapshot": "snapshot",
    "fork": "fork, until returned",
}


class Http:
    name = "http"
    title = "the HTTP surface beside the engine in-process"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=25, quick=3)
        result = Result(self.name, self.title, {"rounds": rounds})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        with host.source() as snapshot, gateway_beside(host) as gateway, ctx.steps("rounds", rounds) as steps:
            ours, theirs = _InProcess(host, snapshot), _OverHttp(gateway)
            for _ in range(rounds):
                for way, client in (("engine", ours), ("http", theirs)):
                    for verb, work in client.verbs():
                        _, taken = milliseconds(work)
                        samples[f"{way}_{verb}"].append(taken)
                        time.sleep(_BETWEEN_SECONDS / 3)
                    client.clean_up()
                    time.sleep(_BETWEEN_SECONDS)
                steps.done()
        for verb, title in _TITLES.items():
            result.measure(f"engine_{verb}", f"{title}, in-process", samples=samples[f"engine_{verb}"])
            over = samples[f"http_{verb}"]
            result.measure(f"http_{verb}", f"{title}, over HTTP", samples=over, floor=f"engine_{verb}")
        return result


class _InProcess:
    def __init__(self, host: KvmXfs, snapshot: Snapshot) -> None:
        self._do, self._engine, self._snapshot = host.live.do, host.live.engine, snapshot
        self._sandbox = host.sandbox(snapshot.id)
        self._fork: Any = None
        self._taken: Snapshot | None = None

    def verbs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "show", lambda: self._do(self._engine.sandboxes.has_diverged(self._sandbox.id))
        yield "exec", lambda: self._do(self._engine.commands.exec(self._sandbox.id, ["true"]))
        yield "snapshot", self._capture
        yield "fork", self._create

    def clean_up(self) -> None:
        self._do(self._engine.sandboxes.delete(self._fork.id))
        assert self._taken is not None
        self._do(self._engine.snapshots.delete(self._taken.id))

    def _capture(self) -> None:
        self._taken = self._do(self._engine.snapshots.create(self._sandbox.id))

    def _create(self) -> None:
        (self._fork,) = self._do(self._engine.forks.fork(self._snapshot.id, ForkSpec()))


class _OverHttp:
    """Does the work over HTTP, in another gateway.

    Its sandbox and snapshot are made like those of ``KvmXfs.source``.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._call = gateway.call
        first = self._call("POST", "/sandboxes", {"template": TEMPLATE})["sandboxID"]
        time.sleep(3)
        self._snapshot = self._call("POST", f"/sandboxes/{first}/snapshots", {})["snapshotID"]
        self._call("DELETE", f"/sandboxes/{first}")
        self._sandbox = self._call("POST", f"/snapshots/{self._snapshot}/fork")["sandboxID"]
        self._fork = self._taken = ""

    def verbs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "show", lambda: self._call("GET", f"/sandboxes/{self._sandbox}")
        yield "exec", lambda: self._call("POST", f"/sandboxes/{self._sandbox}/exec", {"args": ["true"]})
        yield "snapshot", self._capture
        yield "fork", self._create

    def clean_up(self) -> None:
        self._call("DELETE", f"/sandboxes/{self._fork}")
        self._call("DELETE", f"/snapshots/{self._taken}")

    def _capture(self) -> None:
        self._taken = self._call("POST", f"/sandboxes/{self._sandbox}/snapshots", {})["snapshotID"]

    def _create(self) -> None:
        self._fork = self._call("POST", f"/snapshots/{self._snapshot}/fork")["sandboxID"]
