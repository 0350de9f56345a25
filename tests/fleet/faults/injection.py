"""Inject faults into the processes of a fleet and into the connections between them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from sandbox_gateway.fleet import membership
from tests.fleet.faults.model import Model
from tests.fleet.faults.network import Direction
from tests.fleet.faults.processes import FleetProcesses, GatewayProcess
from tests.fleet.faults.workload import Client
from tests.fleet.times import FAULT_TIMES

LEASE_SECONDS = FAULT_TIMES[membership, "LEASE_SECONDS"]
_LONG_SECONDS = (LEASE_SECONDS + 1, LEASE_SECONDS + 3)
"""etcd ends a lease up to a second late."""
_DOWN_SECONDS = (0.0, 2.0)
_MAX_STEPS = 45
_STEP_SECONDS = 6.0
_CLOCK_SHIFTS = (-7200, -60, -5, 5, 60, 7200)


class Injector:
    """Injects faults, one after the other. Several injectors share the locks of their targets."""

    def __init__(
        self,
        name: str,
        seed: str,
        fleet: FleetProcesses,
        model: Model,
        client: Client,
        locks: dict[str, threading.Lock],
        counts: Counter[str],
    ) -> None:
        """``client``: sends the requests during which a gateway is to be killed. ``counts``: the faults by kind."""
        self.name = name
        self._random = random.Random(f"{seed} {name}")
        self._fleet = fleet
        self._model = model
        self._client = client
        self._locks = locks
        self._counts = counts

    def run(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            FAULTS[kind](self, kind)
            time.sleep(self._random.uniform(0.0, 0.5))

    def _record(self, kind: str, details: str) -> None:
        self._model.history.add(f"FAULT {kind}: {details}")
        self._counts[kind] += 1

    @contextlib.contextmanager
    def _gateway(self) -> Iterator[GatewayProcess]:
        """Yield a random gateway that no other injector uses."""
        names = self._random.sample(self._model.hosts, len(self._model.hosts))
        with self._locked(names) as name:
            yield self._fleet.gateways[name]

    @contextlib.contextmanager
    def _locked(self, names: Sequence[str]) -> Iterator[str]:
        """Lock one of the targets, and yield it."""
        while True:
            for name in names:
                if self._locks[name].acquire(blocking=False):
                    try:
                        yield name
                    finally:
                        self._locks[name].release()
                    return
            time.sleep(0.05)

    def _restart(self, gateway: GatewayProcess) -> None:
        self._model.killed_hosts.add(gateway.name)
        gateway.kill()
        time.sleep(self._random.uniform(*_DOWN_SECONDS))
        gateway.start()
        self._model.history.add(f"{gateway.name} has started again")

    # -- gateways ---------------------------------------------------------------------------------------------------

    def kill_gateway(self, kind: str) -> None:
        with self._gateway() as gateway:
            time.sleep(self._random.uniform(0.0, 1.0))
            self._record(kind, gateway.name)
            self._restart(gateway)

    def kill_during_move(self, kind: str) -> None:
        self._kill_at_step(kind, self._client.move)

    def kill_during_copy(self, kind: str) -> None:
        self._kill_at_step(kind, self._client.copy_new_snapshot)

    def kill_during_fork(self, kind: str) -> None:
        self._kill_at_step(kind, self._client.fork_on_all_hosts)

    def _kill_at_step(self, kind: str, operation: Callable[[], None]) -> None:
        """Repeat an operation until a gateway, which takes part in it, has killed itself at a certain step."""
        with self._gateway() as gateway:
            step = self._random.randrange(_MAX_STEPS)
            self._model.history.add(f"{gateway.name} is to be killed at step {step}")
            gateway.arm(step)
            deadline = time.monotonic() + _STEP_SECONDS
            while gateway.is_alive and time.monotonic() < deadline:
                operation()
            gateway.disarm()
            if gateway.is_alive:
                self._counts[f"{kind}: not reached"] += 1
            else:
                self._record(kind, f"{gateway.name} at step {step}")
                self._restart(gateway)

    def pause_gateway(self, kind: str) -> None:
        with self._gateway() as gateway:
            seconds = self._random.uniform(*_LONG_SECONDS)
            self._record(kind, f"{gateway.name} for {seconds:.1f} s")
            gateway.pause()
            time.sleep(seconds)
            gateway.resume()
            self._model.history.add(f"{gateway.name} continues")

    def shift_clock(self, kind: str) -> None:
        """Let the clock of a gateway be wrong, until another step or the end of the batch."""
        gateway = self._fleet.gateways[self._random.choice(self._model.hosts)]
        seconds = self._random.choice(_CLOCK_SHIFTS)
        self._record(kind, f"{gateway.name} by {seconds} s")
        gateway.shift_clock(seconds)
        time.sleep(1.0)

    # -- etcd -------------------------------------------------------------------------------------------------------

    def kill_member(self, kind: str) -> None:
        with self._member() as number:
            member = self._fleet.members[number]
            self._record(kind, f"member {number}")
            member.kill()
            time.sleep(self._random.uniform(*_LONG_SECONDS))
            member.start(wait=False)

    def pause_member(self, kind: str) -> None:
        with self._member() as number:
            member = self._fleet.members[number]
            self._record(kind, f"member {number}")
            member.stop_answering()
            time.sleep(self._random.uniform(*_LONG_SECONDS))
            member.answer_again()

    def pause_etcd(self, kind: str) -> None:
        with self._all_members():
            seconds = self._random.uniform(*_LONG_SECONDS)
            self._record(kind, f"for {seconds:.1f} s")
            for member in self._fleet.members:
                member.stop_answering()
            time.sleep(seconds)
            for member in self._fleet.members:
                member.answer_again()
            self._model.history.add("etcd continues")

    def kill_etcd(self, kind: str) -> None:
        with self._all_members():
            seconds = self._random.uniform(*_LONG_SECONDS)
            self._record(kind, f"for {seconds:.1f} s")
            for member in self._fleet.members:
                member.kill()
            time.sleep(seconds)
            for member in self._fleet.members:
                member.start(wait=False)
            self._model.history.add("etcd has started again")

    @contextlib.contextmanager
    def _member(self) -> Iterator[int]:
        numbers = self._random.sample(range(len(self._fleet.members)), len(self._fleet.members))
        with self._locked([f"etcd {number}" for number in numbers]) as name:
            yield int(name.removeprefix("etcd "))

    @contextlib.contextmanager
    def _all_members(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number in range(len(self._fleet.members)):
                stack.enter_context(self._locks[f"etcd {number}"])
            yield

    # -- the network ------------------------------------------------------------------------------------------------

    def separate_gateways(self, kind: str) -> None:
        self._separate_gateways(kind, ["in", "out"])

    def silence_gateway(self, kind: str) -> None:
        """Let a gateway get no packets from another, which gets its packets."""
        self._separate_gateways(kind, ["in"])

    def _separate_gateways(self, kind: str, directions: Sequence[Direction]) -> None:
        with self._locks["network"]:
            one, other = self._random.sample(self._model.hosts, 2)
            seconds = self._random.uniform(*_LONG_SECONDS)
            self._record(kind, f"{one} and {other} for {seconds:.1f} s")
            self._cut(one, [self._fleet.network.get_address(other)], directions, seconds)

    def separate_from_etcd(self, kind: str) -> None:
        self._separate_from_etcd(kind, self._fleet.member_addresses)

    def separate_from_member(self, kind: str) -> None:
        self._separate_from_etcd(kind, [self._random.choice(self._fleet.member_addresses)])

    def _separate_from_etcd(self, kind: str, addresses: Sequence[str]) -> None:
        with self._locks["network"]:
            name = self._random.choice(self._model.hosts)
            seconds = self._random.uniform(*_LONG_SECONDS)
            self._record(kind, f"{name} for {seconds:.1f} s")
            self._cut(name, addresses, ["in", "out"], seconds)

    def _cut(self, name: str, addresses: Sequence[str], directions: Sequence[Direction], seconds: float) -> None:
        self._fleet.network.cut(name, addresses, directions)
        time.sleep(seconds)
        self._fleet.network.join(name, addresses, directions)
        self._model.history.add("the network is whole again")


FAULTS: dict[str, Callable[[Injector, str], None]] = {
    "gateway killed": Injector.kill_gateway,
    "gateway killed at a step of a move": Injector.kill_during_move,
    "gateway killed at a step of a copy": Injector.kill_during_copy,
    "gateway killed at a step of a fork on all hosts": Injector.kill_during_fork,
    "gateway paused for longer than its lease": Injector.pause_gateway,
    "clock of a gateway stepped": Injector.shift_clock,
    "member of etcd killed": Injector.kill_member,
    "member of etcd paused": Injector.pause_member,
    "all of etcd killed": Injector.kill_etcd,
    "all of etcd paused": Injector.pause_etcd,
    "two gateways separated": Injector.separate_gateways,
    "two gateways separated in one direction": Injector.silence_gateway,
    "gateway separated from etcd": Injector.separate_from_etcd,
    "gateway separated from a member of etcd": Injector.separate_from_member,
}


def create_locks(fleet: FleetProcesses) -> dict[str, threading.Lock]:
    """Return a lock for each target of faults: gateways, members of etcd, and the network."""
    names = [*fleet.gateways, *(f"etcd {number}" for number in range(len(fleet.members))), "network"]
    return {name: threading.Lock() for name in names}


def heal(fleet: FleetProcesses) -> None:
    """Start what does not run, and set all clocks right. All injectors have ended."""
    for gateway in fleet.gateways.values():
        gateway.disarm()
        gateway.shift_clock(0)
        if not gateway.is_alive:
            gateway.kill()
            gateway.start()
