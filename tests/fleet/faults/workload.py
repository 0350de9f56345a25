"""The clients. Each sends requests to random gateways, and records in the model what the answers mean.

A response below 300 means that the request had its effect, and an error that it had none. After 503, or if the
connection was lost, the outcome is unknown.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from tests.fleet.faults.model import Model, Presence, SandboxFact, SnapshotFact
from tests.fleet.faults.processes import FleetProcesses

SEED_SNAPSHOT = "seed"
SEED_VALUE = "seed-value"
KEY = "key"
_MAX_SANDBOXES = 6
_MAX_SNAPSHOTS = 3
_PAUSE_SECONDS = (0.0, 0.15)
_EXPECTED_ERRORS = frozenset(
    {"not_found", "gone", "name_taken", "conflict", "in_use", "busy", "no_space", "unavailable", "timeout"}
)
"""The kinds of errors that faults and concurrent requests explain. Another one, such as 500, is a violation."""
_LOST, _NOT_SENT = 0, -1
_Fact = TypeVar("_Fact", SandboxFact, SnapshotFact)


@dataclass(frozen=True)
class Outcome:
    status: int
    """_LOST if the connection was lost, and _NOT_SENT if the gateway did not run."""
    body: Any = None

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_unknown(self) -> bool:
        return self.status in (_LOST, 503)

    @property
    def presence(self) -> Presence:
        """Whether an object that the request creates exists afterwards."""
        if self.is_unknown:
            return Presence.UNKNOWN
        return Presence.PRESENT if self.is_done else Presence.ABSENT

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", "")) if isinstance(self.body, dict) else ""


class Client:
    """Sends requests as one client. Its choices depend only on ``seed``, its name, and what exists at the time."""

    def __init__(self, name: str, seed: str, fleet: FleetProcesses, model: Model, counts: Counter[str]) -> None:
        """``counts``: gets the number of operations by kind and by outcome."""
        self.name = name
        self._random = random.Random(f"{seed} {name}")
        self._fleet = fleet
        self._model = model
        self._counts = counts

    def run(self, stop: threading.Event) -> None:
        """Carry out random operations until ``stop`` is set."""
        operations: Sequence[tuple[Callable[[], None], int]] = (
            (self.create, 5),
            (self.fork_on_all_hosts, 3),
            (self.compete_for_a_name, 2),
            (self.write, 6),
            (self.rename, 3),
            (self.capture, 3),
            (self.copy_snapshot, 3),
            (self.move, 4),
            (self.drain, 1),
            (self.cordon, 1),
            (self.delete_sandbox, 4),
            (self.delete_snapshot, 2),
        )
        functions, weights = zip(*operations, strict=True)
        while not stop.is_set():
            (operation,) = self._random.choices(functions, weights)
            if operation == self.drain:
                self.drain(stop)
            else:
                operation()
            time.sleep(self._random.uniform(*_PAUSE_SECONDS))

    # -- sandboxes --------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Create a sandbox on a chosen host."""
        if len(self._list_sandboxes()) >= _MAX_SANDBOXES:
            self.delete_sandbox()
            return
        snapshot = self._choose_snapshot()
        host = self._random.choice(self._model.hosts)
        fact = self._create_fact(snapshot)
        body = {"names": [*fact.names], "placement": {"host": host}}
        outcome = self._request("create", "POST", f"/snapshots/{snapshot.name}/fork", body)
        self._record_created([fact], outcome)

    def fork_on_all_hosts(self) -> None:
        if len(self._list_sandboxes()) >= _MAX_SANDBOXES:
            self.delete_sandbox()
            return
        # Only hosts that have the snapshot can fork it. All hosts have this one.
        snapshot = self._model.snapshots[0]
        request = self._model.make_number()
        facts = [self._create_fact(snapshot, request) for _ in self._model.hosts]
        names = [name for fact in facts for name in fact.names]
        placement = {"hosts": self._random.sample(self._model.hosts, len(facts))}
        for fact, host in zip(facts, placement["hosts"], strict=True):
            fact.host = host
        outcome = self._request(
            "fork on all hosts", "POST", f"/snapshots/{snapshot.name}/fork", {"names": names, "placement": placement}
        )
        self._record_created(facts, outcome)

    def _create_fact(self, snapshot: SnapshotFact, request: int = 0) -> SandboxFact:
        name = f"{self.name}-{self._model.make_number()}"
        fact = SandboxFact(self.name, {name}, {*snapshot.values}, request=request or self._model.make_number())
        self._model.add(fact)
        return fact

    def _record_created(self, facts: Sequence[SandboxFact], outcome: Outcome) -> None:
        for fact in facts:
            fact.presence = outcome.presence
        if outcome.is_done:
            for fact in facts:
                (fact.id,) = (each["sandboxID"] for each in outcome.body["sandboxes"] if each["name"] in fact.names)

    def compete_for_a_name(self) -> None:
        """Create two sandboxes with the same name on two hosts, at the same time. At most one may succeed."""
        if len(self._list_sandboxes()) >= _MAX_SANDBOXES:
            self.delete_sandbox()
            return
        snapshot = self._model.snapshots[0]
        fact = self._create_fact(snapshot)
        hosts = self._random.sample(self._model.hosts, 2)
        gateways = [self._choose_gateway() for _ in hosts]

        def create(host: str, gateway: str) -> Outcome:
            body = {"names": [*fact.names], "placement": {"host": host}}
            path = f"/snapshots/{snapshot.name}/fork"
            return self._request("compete for a name", "POST", path, body, gateway=gateway)

        with ThreadPoolExecutor(2) as threads:
            outcomes = [*threads.map(create, hosts, gateways)]
        done = [outcome for outcome in outcomes if outcome.is_done]
        if len(done) > 1:
            self._model.report(f"two hosts have given the name {fact.ref}")
        if done:
            self._record_created([fact], done[0])
        else:
            is_unknown = any(outcome.is_unknown for outcome in outcomes)
            fact.presence = Presence.UNKNOWN if is_unknown else Presence.ABSENT

    def write(self) -> None:
        """Replace the value in a sandbox."""
        if (fact := self._choose(self._list_sandboxes())) is None:
            return
        value = f"v{self._model.make_number()}"
        with fact.data_lock:
            if not fact.is_settled:
                return
            outcome = self._request("write", "POST", f"/sandboxes/{fact.id}/exec", {"args": ["write", KEY, value]})
            if outcome.is_done and outcome.body["exitCode"] == 0:
                fact.values = {value}
            else:
                # The command may have run even if its outcome could not be returned.
                fact.values = {*fact.values, value}
                fact.is_settled = not outcome.is_unknown
        self._require_found(fact, outcome)

    def rename(self) -> None:
        if (fact := self._choose(self._list_sandboxes())) is None:
            return
        name = f"{self.name}-{self._model.make_number()}"
        outcome = self._request("rename", "PATCH", f"/sandboxes/{fact.id}", {"name": name})
        if outcome.is_done:
            fact.names = {name}
        elif outcome.is_unknown:
            fact.names = {*fact.names, name}
        self._require_found(fact, outcome)

    def delete_sandbox(self) -> None:
        if (fact := self._choose(self._list_sandboxes())) is None:
            return
        fact.presence = Presence.UNKNOWN  # Other clients no longer move it.
        outcome = self._request("delete", "DELETE", f"/sandboxes/{fact.id}")
        if outcome.is_done:
            fact.presence = Presence.ABSENT
        elif not outcome.is_unknown:
            fact.presence = Presence.PRESENT
        self._require_found(fact, outcome)

    def move(self) -> None:
        """Move a sandbox of any client to a chosen host."""
        if (fact := self._choose(self._model.list_sandboxes())) is not None:
            self._move(fact, "move", {"host": self._random.choice(self._model.hosts)})

    def _move(self, fact: SandboxFact, kind: str, body: dict[str, Any]) -> None:
        with fact.data_lock:
            outcome = self._request(kind, "POST", f"/sandboxes/{fact.id}/move", body)
            if outcome.is_unknown:
                fact.is_settled = False

    # -- snapshots --------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Take a snapshot with a name."""
        if len(self._list_snapshots()) >= _MAX_SNAPSHOTS:
            self.delete_snapshot()
            return
        if (fact := self._choose(self._list_sandboxes())) is None:
            return
        # If its move is not complete, it is unknown which host takes the snapshot.
        snapshot = SnapshotFact(self.name, f"{self.name}-{self._model.make_number()}", {*fact.values}, {})
        self._model.add(snapshot)
        outcome = self._request("capture", "POST", f"/sandboxes/{fact.id}/snapshots", {"name": snapshot.name})
        if outcome.is_done:
            snapshot.copies = {outcome.body["sandboxHost"]: Presence.PRESENT}
        elif outcome.is_unknown:
            snapshot.copies = dict.fromkeys(self._model.hosts, Presence.UNKNOWN)
        self._require_found(fact, outcome)

    def copy_snapshot(self) -> None:
        """Copy a snapshot to another host."""
        if (snapshot := self._choose(self._list_snapshots())) is None:
            return
        host = self._random.choice(self._model.hosts)
        outcome = self._request("copy", "POST", f"/snapshots/{snapshot.name}/copy?host={host}")
        if outcome.is_done:
            snapshot.copies[host] = Presence.PRESENT
        elif outcome.is_unknown and snapshot.copies.get(host) is not Presence.PRESENT:
            snapshot.copies[host] = Presence.UNKNOWN

    def copy_new_snapshot(self) -> None:
        """Take a snapshot, and copy it to other hosts."""
        if not self._list_sandboxes():
            self.create()
        if len(self._list_snapshots()) >= _MAX_SNAPSHOTS:
            self.delete_snapshot()
        self.capture()
        self.copy_snapshot()
        self.copy_snapshot()

    def delete_snapshot(self) -> None:
        """Delete all copies of a snapshot."""
        if (snapshot := self._choose(self._list_snapshots())) is None:
            return
        copies = {host: presence for host, presence in snapshot.copies.items() if presence is not Presence.ABSENT}
        snapshot.copies = dict.fromkeys(copies, Presence.UNKNOWN)
        outcome = self._request("delete snapshot", "DELETE", f"/snapshots/{snapshot.name}")
        if outcome.is_done:
            snapshot.copies = {}
        elif not outcome.is_unknown and len(copies) == 1:
            snapshot.copies = copies
        # Otherwise, docs/fleets.md applies: "If a host refuses, the copies on the hosts before it may already be
        # changed".

    # -- hosts ------------------------------------------------------------------------------------------------------

    def cordon(self) -> None:
        """Cordon a host, or end that."""
        host = self._random.choice(self._model.hosts)
        self._request("cordon", "PATCH", f"/fleet/hosts/{host}", {"cordoned": self._random.random() < 0.3})

    def drain(self, stop: threading.Event | None = None) -> None:
        """Cordon a host, and move all its sandboxes away, like `sandboxctl host drain`. Then end the cordon."""
        host = self._random.choice(self._model.hosts)
        self._request("cordon", "PATCH", f"/fleet/hosts/{host}", {"cordoned": True})
        outcome = self._request("list", "GET", "/sandboxes?limit=1000")
        entries = outcome.body if outcome.is_done else []
        ids = {each["sandboxID"] for each in entries if each["sandboxHost"] == host}
        for fact in self._model.list_sandboxes():
            if fact.id in ids and not (stop and stop.is_set()):
                self._move(fact, "drain", {})
        self._request("cordon", "PATCH", f"/fleet/hosts/{host}", {"cordoned": False})

    # -- requests ---------------------------------------------------------------------------------------------------

    def _list_sandboxes(self) -> list[SandboxFact]:
        return self._model.list_sandboxes(self.name)

    def _list_snapshots(self) -> list[SnapshotFact]:
        return self._model.list_snapshots(self.name)

    def _choose_snapshot(self) -> SnapshotFact:
        return self._random.choice([self._model.snapshots[0], *self._list_snapshots()])

    def _choose(self, facts: Sequence[_Fact]) -> _Fact | None:
        return self._random.choice(facts) if facts else None

    def _choose_gateway(self) -> str:
        return self._random.choice(self._model.hosts)

    def _require_found(self, fact: SandboxFact, outcome: Outcome) -> None:
        if outcome.status == 404:
            self._model.report(f"sandbox {fact.id} was not found, although it exists")

    def _request(self, kind: str, method: str, path: str, body: Any = None, *, gateway: str = "") -> Outcome:
        gateway = gateway or self._choose_gateway()
        text = f"{self.name}: {method} {path} {body or ''} at {gateway}"
        self._model.history.add(text)
        outcome = self._send(gateway, method, path, body)
        message = outcome.body.get("message", "") if isinstance(outcome.body, dict) and not outcome.is_done else ""
        self._model.history.add(f"{text} -> {outcome.status} {message[:300]}")
        result = "done" if outcome.is_done else "unknown" if outcome.is_unknown else "refused"
        self._counts[f"{kind}: {result}"] += 1
        if outcome.status >= 300 and outcome.kind not in _EXPECTED_ERRORS:
            self._model.report(f"unexpected error: {text} -> {outcome.status} {outcome.body}")
        return outcome

    def _send(self, gateway: str, method: str, path: str, body: Any) -> Outcome:
        try:
            with self._fleet.gateways[gateway].client() as client:
                response = client.request(method, quote(path, safe="/?=&"), json=body)
        except httpx.ConnectError:
            return Outcome(_NOT_SENT)
        except (httpx.TransportError, OSError):
            return Outcome(_LOST)
        try:
            return Outcome(response.status_code, response.json() if response.content else None)
        except ValueError:
            return Outcome(response.status_code, {"message": response.text})
