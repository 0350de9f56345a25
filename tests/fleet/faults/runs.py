"""Run clients and injectors in batches. After each batch, heal the fleet, wait until it is quiet, and check it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tests.fleet.faults.injection import FAULTS, Injector, create_locks, heal
from tests.fleet.faults.invariants import find_double_machines, find_problems, resolve
from tests.fleet.faults.model import Model, Presence, SnapshotFact
from tests.fleet.faults.processes import FleetProcesses, GatewayProcess
from tests.fleet.faults.workload import KEY, SEED_SNAPSHOT, SEED_VALUE, Client
from tests.support.waiting import wait_until

_CLIENTS = 3
_INJECTORS = 2
_QUIET_SECONDS = 90.0
_STABLE_SECONDS = 3.5
"""TCP may send a packet of a separated gateway again so late, and the other one may still carry out the request."""
_HISTORY_LINES = 600


class FaultRun:
    def __init__(self, fleet: FleetProcesses, seed: str) -> None:
        self._fleet = fleet
        self._seed = seed
        self._random = random.Random(f"{seed} kinds")
        self._deck: list[str] = []
        self._model = Model(fleet.gateways)
        self._locks = create_locks(fleet)
        self._batch = 0
        self.faults: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def prepare(self) -> None:
        """Create the snapshot `seed` on all hosts."""
        first, *others = self._fleet.gateways.values()
        for gateway in self._fleet.gateways.values():
            wait_until(lambda gateway=gateway: _count_running(gateway) == len(self._fleet.gateways))  # type: ignore[misc]
        with first.client() as client:

            def post(path: str, body: object) -> None:
                client.post(path, json=body).raise_for_status()

            build = client.post("/templates", json={"name": "base"}).json()
            path = f"/templates/{build['templateID']}/builds/{build['buildID']}/status"
            wait_until(lambda: client.get(path).json()["status"] == "ready")
            post("/sandboxes", {"templateID": "base", "name": "first"})
            post("/sandboxes/first/exec", {"args": ["write", KEY, SEED_VALUE]})
            post("/sandboxes/first/snapshots", {"name": SEED_SNAPSHOT})
            for gateway in others:
                post(f"/snapshots/{SEED_SNAPSHOT}/copy?host={gateway.name}", None)
            client.delete("/sandboxes/first").raise_for_status()
        copies = dict.fromkeys(self._model.hosts, Presence.PRESENT)
        self._model.add(SnapshotFact("", SEED_SNAPSHOT, {SEED_VALUE}, copies))
        self._wait_until_quiet()

    def run_batch(self, fault_count: int) -> None:
        """Inject faults while the clients work. Raises AssertionError if an invariant does not hold afterwards."""
        self._batch += 1
        self._model.history.add(f"batch {self._batch}")
        seed = f"{self._seed} batch {self._batch}"
        kinds = self._draw_kinds(fault_count)
        stop = threading.Event()
        clients = [self._create_client(f"c{number}", seed) for number in range(_CLIENTS)]
        with ThreadPoolExecutor(_CLIENTS + _INJECTORS) as threads:
            work: list[Future[None]] = [threads.submit(client.run, stop) for client in clients]
            try:
                injectors = [
                    threads.submit(self._create_injector(number, seed).run, kinds[number::_INJECTORS])
                    for number in range(_INJECTORS)
                ]
                for injector in injectors:
                    injector.result()
            finally:
                stop.set()
            for each in work:
                each.result()
        heal(self._fleet)
        self._wait_until_quiet()
        problems = [*self._model.violations, *find_double_machines(self._fleet), *resolve(self._fleet, self._model)]
        assert not problems, self._describe(problems)

    def _draw_kinds(self, count: int) -> list[str]:
        """Return kinds of faults. Each kind is drawn equally often."""
        while len(self._deck) < count:
            self._deck += self._random.sample([*FAULTS], len(FAULTS))
        kinds, self._deck = self._deck[:count], self._deck[count:]
        return kinds

    def _create_client(self, name: str, seed: str) -> Client:
        return Client(name, seed, self._fleet, self._model, self.operations)

    def _create_injector(self, number: int, seed: str) -> Injector:
        name = f"i{number}"
        client = self._create_client(name, seed)
        return Injector(name, seed, self._fleet, self._model, client, self._locks, self.faults)

    def _wait_until_quiet(self) -> None:
        """Wait until all operations have ended, and everything is consistent and stays so for a while."""
        deadline = time.monotonic() + _QUIET_SECONDS
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < _STABLE_SECONDS:
            if problems := find_problems(self._fleet):
                assert time.monotonic() < deadline, self._describe(problems)
                quiet_since = time.monotonic()
            time.sleep(0.3)

    def _describe(self, problems: Sequence[str]) -> str:
        lines = "\n  ".join(problems)
        return (
            f"{len(problems)} problems after batch {self._batch}:\n  {lines}\n"
            f"To repeat this run: GROVE_FAULT_SEED={self._seed}\n"
            f"The sequence:\n{self._model.history.format(_HISTORY_LINES)}"
        )

    def count_faults(self) -> int:
        return sum(count for kind, count in self.faults.items() if kind in FAULTS)

    def format_counts(self) -> str:
        """Return tables of the faults, by kind, and of the operations, by kind and outcome."""
        reached = {kind: count for kind, count in sorted(self.faults.items()) if kind in FAULTS}
        missed = sum(self.faults.values()) - self.count_faults()
        lines = [f"seed {self._seed}: {self.count_faults()} faults in {self._batch} batches"]
        lines += [f"{count:6}  {kind}" for kind, count in reached.items()]
        lines += [f"{missed:6}  (steps at which a gateway was to be killed, but that were not reached)"]
        lines += [f"{len(self._model.lost_shares):6}  (shares of forks that hosts lost, killed after the decision)"]
        lines += [f"{sum(self.operations.values()):6}  requests:"]
        lines += [f"{count:6}  {kind}" for kind, count in sorted(self.operations.items())]
        return "\n".join(lines)


@contextlib.contextmanager
def prepared_run(fleet: FleetProcesses, seed: str) -> Iterator[FaultRun]:
    """Prepare a run, and print its counts at the end."""
    run = FaultRun(fleet, seed)
    run.prepare()
    try:
        yield run
    finally:
        print(run.format_counts())


def _count_running(gateway: GatewayProcess) -> int:
    return sum(host["state"] == "running" for host in gateway.get("/fleet")["hosts"])
