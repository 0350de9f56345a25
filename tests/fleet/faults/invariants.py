"""The invariants of a quiet fleet. Each function returns a sentence for each problem."""

from __future__ import annotations

import base64
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx

from sandbox_gateway.engine.index import list_names
from sandbox_gateway.fleet.records import describe_object
from sandbox_gateway.records import Sandbox, SandboxState, Snapshot, SnapshotKind
from tests.fleet.faults.model import Model, Presence, SandboxFact
from tests.fleet.faults.processes import FleetProcesses, Objects
from tests.fleet.faults.workload import KEY

_PREFIX = "/grove.sandbox/"
_CONFIGURED = ("fleet", "hosts/", "members/")
"""Keys that exist as long as the fleet does."""


@dataclass(frozen=True)
class _Key:
    value: bytes
    has_lease: bool


def find_problems(fleet: FleetProcesses) -> list[str]:
    """Return what is not quiet yet, or inconsistent between etcd, the hosts and the lists of the gateways."""
    if dead_hosts := [name for name, gateway in fleet.gateways.items() if not gateway.is_alive]:
        return [f"the gateways of {', '.join(dead_hosts)} do not run"]
    try:
        keys = _read_keys(fleet)
        hosts = {name: gateway.read_objects() for name, gateway in fleet.gateways.items()}
        lists = [problem for name in fleet.gateways for problem in _check_lists(fleet, name, hosts)]
    except httpx.HTTPError as error:
        return [f"no answer: {error!r}"]
    return [*_check_hosts(hosts), *_check_machines_of_hosts(fleet, hosts), *_check_keys(keys, hosts), *lists]


def _read_keys(fleet: FleetProcesses) -> dict[str, _Key]:
    """Return all keys in etcd, without their prefix. Raises httpx.HTTPError."""
    start, end = (base64.b64encode(key.encode()).decode() for key in (_PREFIX, _PREFIX[:-1] + "0"))
    body = {"key": start, "range_end": end}
    response = httpx.post(f"{fleet.members[0].endpoint}/v3/kv/range", json=body, timeout=10, verify=fleet.etcd_tls)
    response.raise_for_status()
    return {
        base64.b64decode(each["key"]).decode().removeprefix(_PREFIX): _Key(
            base64.b64decode(each.get("value", "")), int(each.get("lease", 0)) != 0
        )
        for each in response.json().get("kvs", ())
    }


def _check_hosts(hosts: Mapping[str, Objects]) -> Iterator[str]:
    """No id or name of a sandbox belongs to two hosts, and nothing remains of an interrupted operation."""
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for host, objects in hosts.items():
        pauses = {each.pause_snapshot for each in objects.sandboxes.values() if each.pause_snapshot}
        known_disks = {each.instance for each in objects.sandboxes.values()} | objects.snapshots.keys()
        for sandbox in objects.sandboxes.values():
            for ref in {sandbox.id, sandbox.name}:
                holders[ref].append(host)
            if sandbox.arrival or sandbox.departure:
                yield f"{host}: sandbox {sandbox.id} is moving"
            if sandbox.state is not SandboxState.RUNNING:
                yield f"{host}: sandbox {sandbox.id} is paused: {sandbox.state_reason}"
        for snapshot in objects.snapshots.values():
            if snapshot.is_hidden and not (snapshot.kind is SnapshotKind.PAUSE and snapshot.id in pauses):
                yield f"{host}: {snapshot.kind} {snapshot.id} is hidden"
        for disk in objects.disks.keys() - known_disks:
            yield f"{host}: disk {disk} belongs to nothing"
    for ref, names in holders.items():
        if len(names) > 1:
            yield f"{ref} belongs to the hosts {names}"


def _check_machines_of_hosts(fleet: FleetProcesses, hosts: Mapping[str, Objects]) -> Iterator[str]:
    """Exactly the running sandboxes have machines."""
    running: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for host, event, id in fleet.read_machine_log():
        if event == "start":
            running[host][id] += 1
        elif id == "*":
            running[host].clear()
        else:
            running[host][id] -= 1
    for host, objects in hosts.items():
        expected = Counter(each.id for each in objects.sandboxes.values() if each.state is SandboxState.RUNNING)
        if +running[host] != expected:
            yield f"{host}: machines of {dict(+running[host])} run, but {dict(expected)} are expected"


def _check_keys(keys: Mapping[str, _Key], hosts: Mapping[str, Objects]) -> Iterator[str]:
    """etcd has exactly the names and ids of the hosts' objects, without a lease, and nothing of any operation."""
    expected: dict[str, str] = {}
    for host, objects in hosts.items():
        records: list[Sandbox | Snapshot] = [*objects.sandboxes.values(), *objects.snapshots.values()]
        for record in records:
            if describe_object(record) is not None:
                expected |= {f"objects/{ref}/{host}": record.id for ref in (record.id, *list_names(record))}
    for path, key in keys.items():
        kind = path.partition("/")[0]
        if kind == "objects":
            if path not in expected:
                yield f"etcd: {path} belongs to nothing: {key.value!r}"
            elif json.loads(key.value)["id"] != expected[path]:
                yield f"etcd: {path} is {key.value!r}, not {expected[path]}"
            elif key.has_lease:
                yield f"etcd: {path} is still a claim"
        elif kind == "reservations":
            if key.value != b"0":
                yield f"etcd: {path} reserves {key.value!r}"
        elif kind == "decisions":
            # The hosts of a fork may ask for its decision for a day (``holds._DECISION_SECONDS``).
            if not key.has_lease:
                yield f"etcd: {path} stays for ever"
        elif not path.startswith(_CONFIGURED):
            yield f"etcd: {path} remains: {key.value!r}"
    yield from (f"etcd: {path} is missing" for path in expected.keys() - keys.keys())
    yield from (f"etcd: {host} is no member" for host in hosts if f"members/{host}" not in keys)


def _check_lists(fleet: FleetProcesses, name: str, hosts: Mapping[str, Objects]) -> Iterator[str]:
    """A gateway sees all hosts, no conflicts, and each object once, on its host. Raises httpx.HTTPError."""
    gateway = fleet.gateways[name]
    state = gateway.get("/fleet")
    if state["state"] != "joined" or not state["isCurrent"]:
        yield f"{name}: {state['state']}, is current: {state['isCurrent']}"
    yield from (f"{name}: {sentence}" for sentence in state["conflicts"])
    yield from (f"{name}: host {each['name']} is absent" for each in state["hosts"] if each["state"] != "running")
    with gateway.client() as client:
        response = client.get("/sandboxes?limit=1000")
        response.raise_for_status()
    if missing := response.headers.get("x-sandbox-hosts-missing"):
        yield f"{name}: {missing} is missing in its list"
    listed = Counter((each["sandboxID"], each["name"], each["sandboxHost"]) for each in response.json())
    expected = Counter(
        (each.id, each.name, host) for host, objects in hosts.items() for each in objects.sandboxes.values()
    )
    if listed != expected:
        yield f"{name} lists {listed - expected} too much, and not {expected - listed}"


def find_double_machines(fleet: FleetProcesses) -> list[str]:
    """Return the sandboxes that ever had machines on two hosts at the same time.

    A machine may outlive its gateway: only when the gateway starts again, its machines have certainly ended.
    """
    problems = []
    running: defaultdict[str, set[str]] = defaultdict(set)
    for host, event, id in fleet.read_machine_log():
        if event == "start":
            running[id].add(host)
            if len(running[id]) > 1:
                problems.append(f"sandbox {id} ran on the hosts {sorted(running[id])} at the same time")
        else:
            for hosts in running.values() if id == "*" else (running[id],):
                hosts.discard(host)
    return problems


def resolve(fleet: FleetProcesses, model: Model) -> list[str]:
    """Compare the model with the quiet fleet, and let the model know what had been unknown."""
    hosts = {name: gateway.read_objects() for name, gateway in fleet.gateways.items()}
    return [*_resolve_sandboxes(model, hosts), *_resolve_snapshots(model, hosts)]


def _resolve_sandboxes(model: Model, hosts: Mapping[str, Objects]) -> Iterator[str]:
    found = {id: (host, each) for host, objects in hosts.items() for id, each in objects.sandboxes.items()}
    ids = {each.name: id for id, (_, each) in found.items()}
    parts: defaultdict[int, list[tuple[str, bool]]] = defaultdict(list)
    for fact in model.sandboxes:
        is_creation_unknown = fact.presence is Presence.UNKNOWN and not fact.id
        id = fact.id or next((ids[name] for name in fact.names if name in ids), "")
        host, sandbox = found.pop(id, ("", None))
        if is_creation_unknown:
            parts[fact.request].append((fact.host, sandbox is not None))
        if sandbox is None:
            if fact.presence is Presence.PRESENT:
                yield f"sandbox {fact.id} {fact.names} is lost"
            fact.presence = Presence.ABSENT
            continue
        if fact.presence is Presence.ABSENT:
            yield f"sandbox {id} {sandbox.name} exists, although it was deleted, or never created"
        if sandbox.name not in fact.names:
            yield f"sandbox {id} is called {sandbox.name}, not {fact.names}"
        yield from _check_value(fact, hosts[host].disks.get(sandbox.instance, {}).get(KEY), f"sandbox {id}")
        fact.id, fact.names, fact.presence, fact.is_settled = id, {sandbox.name}, Presence.PRESENT, True
    yield from (f"sandbox {id} {each.name} of {host} belongs to no request" for id, (host, each) in found.items())
    for number, part in parts.items():
        missing_hosts = {host for host, exists in part if not exists}
        if missing_hosts and any(exists for _, exists in part):
            problem = f"request {number} has created nothing on {sorted(missing_hosts)}, but its other sandboxes"
            # A share is only in memory until it is committed: see docs/fleets.md, "Failures".
            if missing_hosts <= model.killed_hosts:
                model.lost_shares.append(problem)
            else:
                yield problem
    model.killed_hosts.clear()
    model.sandboxes[:] = [each for each in model.sandboxes if each.presence is Presence.PRESENT]


def _check_value(fact: SandboxFact, value: str | None, noun: str) -> Iterator[str]:
    if value not in fact.values:
        yield f"{noun} has the value {value}, not one of {fact.values}"
    else:
        fact.values = {value}


def _resolve_snapshots(model: Model, hosts: Mapping[str, Objects]) -> Iterator[str]:
    known_names = {fact.name for fact in model.snapshots}
    for host, objects in hosts.items():
        found = {
            name: each
            for each in objects.snapshots.values()
            if each.kind is SnapshotKind.SNAPSHOT
            for name in each.names
        }
        yield from (f"snapshot {name} of {host} belongs to no request" for name in found.keys() - known_names)
        for fact in model.snapshots:
            presence = fact.copies.get(host, Presence.ABSENT)
            snapshot = found.get(fact.name)
            if snapshot is None and presence is Presence.PRESENT:
                yield f"snapshot {fact.name} of {host} is lost"
            if snapshot is not None and presence is Presence.ABSENT:
                yield f"snapshot {fact.name} of {host} exists, although it was deleted, or never created"
            if snapshot is not None and (value := objects.disks.get(snapshot.id, {}).get(KEY)) not in fact.values:
                yield f"snapshot {fact.name} of {host} has the value {value}, not one of {fact.values}"
            fact.copies[host] = Presence.ABSENT if snapshot is None else Presence.PRESENT
    model.snapshots[:] = [each for each in model.snapshots if each.is_usable]
