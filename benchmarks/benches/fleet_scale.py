"""Measure a fleet of up to 1,000 hosts with 200 sandboxes each: placement, the load of etcd, and a member's view."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import traceback
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.context import Context
from benchmarks.fleets import Client
from benchmarks.measure import Result
from benchmarks.simulation.hosts import TEMPLATE
from benchmarks.timers import time_call
from sandbox_gateway.fleet import store
from tests.support import session
from tests.support.certificates import Authority
from tests.support.etcd import Etcd, running_etcd

_SIZES = (10, 100, 300, 1_000)
_QUICK_SIZES = (5, 20)
_PREFIX = "/grove.sandbox/"
_PAUSE_SECONDS_PER_HOST = 0.0006
"""The time until all watches have got the changes of a placement, of which each host has one."""
_SETTLE_SECONDS = 1.0
"""The time until a host has published what it has committed."""
_NOTE = (
    "etcd, and the gateway that places the sandboxes, are real. One process simulates the hosts, and another one their "
    "watches (benchmarks/simulation). All processes share the CPUs of this machine"
)
_METRICS = {
    "process_cpu_seconds_total": "cpu",
    'grpc_server_handled_total{grpc_code="OK",grpc_method="Txn"': "transactions",
    'grpc_server_handled_total{grpc_code="OK",grpc_method="LeaseKeepAlive"': "renewals",
}
"""The beginnings of lines in etcd's metrics, and our names of them."""


class FleetScale:
    name = "fleet_scale"
    title = "placement, etcd and the view of a member with up to 1,000 hosts"

    def run(self, ctx: Context) -> Result:
        settings = {
            "hosts": list(_QUICK_SIZES if ctx.quick else _SIZES),
            "sandboxes_per_host": ctx.choose(full=200, quick=20),
            "starts": ctx.choose(full=3, quick=1),
            "placements": ctx.choose(full=150, quick=10),
            "idle_seconds": ctx.choose(full=20, quick=2),
        }
        result = Result(self.name, self.title, settings, notes=[_NOTE])
        with _running_fleet(settings["sandboxes_per_host"]) as fleet:
            for size in settings["hosts"]:
                ctx.print_progress(f"{size} hosts with {settings['sandboxes_per_host']} sandboxes each")
                try:
                    fleet.grow(size)
                    _add_measures(result, size, _collect_samples(fleet, size, settings))
                except Exception:  # The results of the smaller sizes are still useful.
                    result.failure = traceback.format_exc()
                    break
        return result


class _Fleet:
    """etcd, the simulated hosts, and their watches."""

    def __init__(self, root: Path, etcd: Etcd, section: dict[str, Any], hosts: _Worker, watches: _Worker) -> None:
        self._root = root
        self._etcd = etcd
        self._section = section
        self._hosts, self._watches = hosts, watches

    def grow(self, size: int) -> None:
        # Otherwise, the watches would get all changes of the hosts that join.
        self._watches.ask("0")
        self._hosts.ask(f"join {size}")
        self._watches.ask(str(size))

    def count_name_transactions(self) -> int:
        """Return how many transactions with names and ids the hosts have sent since their start."""
        return self._hosts.ask("count")

    @contextlib.contextmanager
    def running_router(self) -> Iterator[dict[str, Any]]:
        """Run a member without objects, and yield what it has measured while it loaded its view."""
        section = {**self._section, "name": "router", "address": f"127.0.0.1:{session.allocate_port()}"}
        self._root.joinpath("router").mkdir(exist_ok=True)
        with _running_worker("router", str(self._root / "router"), json.dumps(section)) as worker:
            yield json.loads(worker.read_line())

    def read_metrics(self) -> dict[str, float]:
        """Return the sums of etcd's metrics since its start: CPU time in seconds, and numbers of requests."""
        sums: dict[str, float] = defaultdict(float)
        with urllib.request.urlopen(f"{self._etcd.endpoint}/metrics", timeout=30) as response:
            for line in response.read().decode().splitlines():
                for start, key in _METRICS.items():
                    if line.startswith(start):
                        sums[key] += float(line.rpartition(" ")[2])
        return sums

    def transact(self) -> None:
        """Write as many keys as the claim of a sandbox, without the gateway."""
        operations = [store.put(f"/floor/{number}", b"x" * 50) for number in range(3)]
        body = json.dumps({"success": operations}).encode()
        urllib.request.urlopen(f"{self._etcd.endpoint}/v3/kv/txn", data=body, timeout=30).close()


class _Worker:
    """A process of the simulation, with which this one exchanges lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> int:
        """Send a command, and return the number with which the process answers."""
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return int(self.read_line())

    def read_line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def _running_worker(module: str, *arguments: str) -> Iterator[_Worker]:
    argv = [sys.executable, "-m", f"benchmarks.simulation.{module}", *arguments]
    with subprocess.Popen(
        argv, cwd=session.REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield _Worker(process)
            assert process.stdin
            process.stdin.close()
            process.wait(30)
        finally:
            process.kill()


@contextlib.contextmanager
def _running_fleet(sandboxes_per_host: int) -> Iterator[_Fleet]:
    root = session.get_run_dir() / "fleet-scale"
    root.mkdir()
    certificate = Authority(root / "authority").get("member")
    secret = root / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(bytes(32))
    with running_etcd(root / "etcd") as etcd:
        section = {
            "etcd": [etcd.endpoint],
            "prefix": _PREFIX,
            "tls_ca": str(certificate.ca),
            "tls_cert": str(certificate.cert),
            "tls_key": str(certificate.key),
            "secret_file": str(secret),
        }
        with (
            _running_worker("hosts", str(root), json.dumps(section), str(sandboxes_per_host)) as hosts,
            _running_worker("watches", str(etcd.port), _PREFIX) as watches,
        ):
            yield _Fleet(root, etcd, section, hosts, watches)


def _collect_samples(fleet: _Fleet, size: int, settings: Mapping[str, Any]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(settings["starts"] - 1):
        with fleet.running_router() as figures:
            _add_load(samples, figures)
    with fleet.running_router() as figures:
        _add_load(samples, figures)
        seconds = settings["idle_seconds"]
        before = fleet.read_metrics()
        time.sleep(seconds)
        idle = {key: (value - before[key]) / seconds for key, value in fleet.read_metrics().items()}
        client = Client(figures["port"])
        # The first request also creates a connection to a host.
        client.call("POST", "/sandboxes", {"templateID": TEMPLATE})
        pause = size * _PAUSE_SECONDS_PER_HOST
        time.sleep(_SETTLE_SECONDS)
        count_before, before, start = fleet.count_name_transactions(), fleet.read_metrics(), time.perf_counter()
        for _ in range(settings["placements"]):
            _, elapsed = time_call(lambda: client.call("POST", "/sandboxes", {"templateID": TEMPLATE}))
            samples["place"].append(elapsed)
            time.sleep(pause)
        time.sleep(_SETTLE_SECONDS)
        count = fleet.count_name_transactions() - count_before
        after, seconds = fleet.read_metrics(), time.perf_counter() - start
        client.close()
    for _ in range(settings["placements"]):
        samples["floor_place"].append(time_call(fleet.transact)[1])
        time.sleep(0.01)
    samples["transactions_per_placement"] = [count / settings["placements"]]
    samples["cpu_per_placement"] = [(after["cpu"] - before["cpu"] - idle["cpu"] * seconds) / settings["placements"]]
    samples["requests_per_second"] = [idle["transactions"] + idle["renewals"]]
    samples["transactions_per_second"] = [idle["transactions"]]
    samples["cpu_per_second"] = [idle["cpu"]]
    return samples


def _add_load(samples: dict[str, list[float]], figures: Mapping[str, Any]) -> None:
    samples["load"].append(figures["load_ms"])
    samples["stall"].append(figures["stall_ms"])
    samples["memory"].append(figures["memory"] - figures["memory_before"])


def _add_measures(result: Result, size: int, samples: Mapping[str, list[float]]) -> None:
    def add(key: str, title: str, unit: Any = "ms", factor: float = 1, floor: str = "") -> None:
        values = [factor * value for value in samples[key]]
        floor = f"{floor}_{size}" if floor else ""
        result.add_measure(f"{key}_{size}", f"{size:,} hosts: {title}", unit, samples=values, floor=floor)

    add("floor_place", "a transaction that writes three keys")
    add("place", "a sandbox placed on another host", floor="floor_place")
    add("transactions_per_placement", "transactions in etcd for a placement", "count")
    add("cpu_per_placement", "CPU time of etcd for a placement, with all watches", factor=1000)
    add("requests_per_second", "requests to etcd, each second, while nothing changes", "count")
    add("transactions_per_second", "of these: transactions", "count")
    add("cpu_per_second", "CPU time of etcd, each second, while nothing changes", factor=1000)
    add("load", "a new member loads its view")
    add("stall", "the longest time in which it does nothing else")
    add("memory", "memory of the view", "bytes")
