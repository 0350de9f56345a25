"""Measure the cost of HTTP and JSON by comparing requests over a gateway's socket with direct calls to an engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.gateways import companion_gateway
from benchmarks.measure import Result
from benchmarks.timers import time_call
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Snapshot
from tests.support.gateway import Gateway

_COOLDOWN_SECONDS = 0.3
_TITLES = {
    "show": "show a sandbox",
    "exec": "run a command",
    "snapshot": "snapshot",
    "fork": "fork, until returned",
}


class Http:
    name = "http"
    title = "requests over HTTP, compared with the engine in-process"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=25, quick=3)
        result = Result(self.name, self.title, {"rounds": rounds})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        with (
            host.temporary_snapshot() as snapshot,
            companion_gateway(host) as gateway,
            ctx.showing_progress("rounds", rounds) as steps,
        ):
            engine_client, http_client = _EngineClient(host, snapshot), _HttpClient(gateway)
            for _ in range(rounds):
                for prefix, client in (("engine", engine_client), ("http", http_client)):
                    for operation, call in client.list_operations():
                        _, elapsed = time_call(call)
                        samples[f"{prefix}_{operation}"].append(elapsed)
                        time.sleep(_COOLDOWN_SECONDS / 3)
                    client.clean_up()
                    time.sleep(_COOLDOWN_SECONDS)
                steps.advance()
        for operation, title in _TITLES.items():
            floor, key = f"engine_{operation}", f"http_{operation}"
            result.add_measure(floor, f"{title}, in-process", samples=samples[floor])
            result.add_measure(key, f"{title}, over HTTP", samples=samples[key], floor=floor)
        return result


class _EngineClient:
    """Performs the operations with the engine in this process."""

    def __init__(self, host: KvmXfs, snapshot: Snapshot) -> None:
        self._do, self._engine, self._snapshot = host.live.do, host.live.engine, snapshot
        self._sandbox = host.create_sandbox(snapshot.id)
        self._fork: Any = None
        self._new_snapshot: Snapshot | None = None

    def list_operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "show", lambda: self._do(self._engine.sandboxes.has_diverged(self._sandbox.id))
        yield "exec", lambda: self._do(self._engine.commands.exec(self._sandbox.id, ["true"]))
        yield "snapshot", self._create_snapshot
        yield "fork", self._create_fork

    def clean_up(self) -> None:
        self._do(self._engine.sandboxes.delete(self._fork.id))
        assert self._new_snapshot is not None
        self._do(self._engine.snapshots.delete(self._new_snapshot.id))

    def _create_snapshot(self) -> None:
        self._new_snapshot = self._do(self._engine.snapshots.create(self._sandbox.id))

    def _create_fork(self) -> None:
        (self._fork,) = self._do(self._engine.forks.fork(self._snapshot.id, ForkSpec()))


class _HttpClient:
    """Performs the operations over HTTP, in a separate gateway.

    Takes its snapshot in the same way as ``KvmXfs.temporary_snapshot``.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._call = gateway.call
        source = self._call("POST", "/sandboxes", {"template": TEMPLATE})["sandboxID"]
        time.sleep(3)
        self._snapshot = self._call("POST", f"/sandboxes/{source}/snapshots", {})["snapshotID"]
        self._call("DELETE", f"/sandboxes/{source}")
        self._sandbox = self._call("POST", f"/snapshots/{self._snapshot}/fork")["sandboxID"]
        self._fork = self._new_snapshot = ""

    def list_operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "show", lambda: self._call("GET", f"/sandboxes/{self._sandbox}")
        yield "exec", lambda: self._call("POST", f"/sandboxes/{self._sandbox}/exec", {"args": ["true"]})
        yield "snapshot", self._create_snapshot
        yield "fork", self._create_fork

    def clean_up(self) -> None:
        self._call("DELETE", f"/sandboxes/{self._fork}")
        self._call("DELETE", f"/snapshots/{self._new_snapshot}")

    def _create_snapshot(self) -> None:
        self._new_snapshot = self._call("POST", f"/sandboxes/{self._sandbox}/snapshots", {})["snapshotID"]

    def _create_fork(self) -> None:
        self._fork = self._call("POST", f"/snapshots/{self._snapshot}/fork")["sandboxID"]
