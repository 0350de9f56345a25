"""Measure what a fleet adds to a request: its way through another gateway, merged lists, and the choice of hosts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.context import Context
from benchmarks.fleets import Client, created_tls_world, running_gateways
from benchmarks.measure import Result, Target
from benchmarks.timers import time_call
from tests.support import session

_HOSTS = ("h1", "h2", "h3")
_LISTED_COUNT = 30
_SPREAD_COUNT = 30
_ADDED_LIMIT_MS = 3
_NOTE = (
    "the gateways, etcd and TLS are real. The machines are only simulated (tests/support/memory_host.py), so that they "
    "add as little as possible. All processes share the CPUs of this machine"
)
_FORWARDED = {
    "show": "show a sandbox",
    "exec": "run a command",
    "list": f"list {_LISTED_COUNT} sandboxes",
}

Operation = Callable[[], Any]


class Fleet:
    name = "fleet"
    title = "requests through another gateway, merged lists, and placed forks"

    def run(self, ctx: Context) -> Result:
        rounds, fork_rounds = ctx.choose(full=300, quick=5), ctx.choose(full=40, quick=2)
        settings = {
            "rounds": rounds,
            "fork_rounds": fork_rounds,
            "hosts": len(_HOSTS),
            "machines": "tests/support/memory_host.py",
        }
        result = Result(self.name, self.title, settings, notes=[_NOTE])
        samples: dict[str, list[float]] = defaultdict(list)
        with (
            created_tls_world(session.get_run_dir() / "fleet") as world,
            running_gateways(world, ["alone"], in_fleet=False) as (alone,),
            running_gateways(world, _HOSTS) as members,
            ctx.showing_progress("rounds", rounds + fork_rounds) as steps,
        ):
            requests = _prepare_requests(alone, members)
            for number in range(rounds):
                _run_round(requests, samples, is_reversed=bool(number % 2))
                steps.advance()
            forks = _Forks(alone, members)
            for number in range(fork_rounds):
                _run_round(forks.list_operations(), samples, is_reversed=bool(number % 2))
                forks.delete_all()
                steps.advance()
        _add_measures(result, samples)
        return result


def _add_measures(result: Result, samples: Mapping[str, list[float]]) -> None:
    for key, title in _FORWARDED.items():
        direct, forwarded = samples[f"direct_{key}"], samples[f"forwarded_{key}"]
        added = [after - before for before, after in zip(direct, forwarded, strict=True)]
        target = Target("p50", _ADDED_LIMIT_MS)
        is_list = key == "list"
        floor_title = f"{title}, at a gateway without a fleet" if is_list else f"{title}, at the gateway of its host"
        title_of_forwarded = f"{title}, merged from {len(_HOSTS)} hosts" if is_list else f"{title}, at another gateway"
        result.add_measure(f"direct_{key}", floor_title, samples=direct)
        result.add_measure(f"forwarded_{key}", title_of_forwarded, samples=forwarded, floor=f"direct_{key}")
        result.add_measure(f"added_{key}", "the difference, in each round", samples=added, target=target)
    for floor, keys in (
        ("alone_fork", {"own_fork": "one fork, on the gateway's host", "placed_fork": "one fork, on another host"}),
        ("alone_forks", {"spread_forks": f"{_SPREAD_COUNT} forks, spread over {len(_HOSTS)} hosts"}),
    ):
        noun = "one fork" if floor == "alone_fork" else f"{_SPREAD_COUNT} forks"
        result.add_measure(floor, f"{noun}, without a fleet", samples=samples[floor])
        for key, title in keys.items():
            result.add_measure(key, title, samples=samples[key], floor=floor)


def _prepare_requests(alone: Client, members: Sequence[Client]) -> dict[str, Operation]:
    """Create sandboxes, and return the requests about them, by the key of their measure."""
    forwarding, direct, _ = members
    counts = {alone: _LISTED_COUNT, **{member: _LISTED_COUNT // len(members) for member in members}}
    for client, count in counts.items():
        for _ in range(count):
            client.call("POST", "/sandboxes", {"templateID": "base", "metadata": {"is": "listed"}})
    sandbox = direct.call("POST", "/sandboxes", {"templateID": "base"})
    show = f"/sandboxes/{sandbox['sandboxID']}"
    listing = "/sandboxes?metadata=is%3Dlisted"
    command = {"args": ["read", "nothing"]}
    requests: dict[str, Operation] = {
        "direct_show": lambda: direct.call("GET", show),
        "forwarded_show": lambda: forwarding.call("GET", show),
        "direct_exec": lambda: direct.call("POST", f"{show}/exec", command),
        "forwarded_exec": lambda: forwarding.call("POST", f"{show}/exec", command),
        "direct_list": lambda: alone.call("GET", listing),
        "forwarded_list": lambda: forwarding.call("GET", listing),
    }
    if requests["forwarded_show"]()["sandboxHost"] != _HOSTS[1]:
        raise RuntimeError(f"the sandbox is not on {_HOSTS[1]}")
    for key in ("direct_list", "forwarded_list"):
        if (count := len(requests[key]())) != _LISTED_COUNT:
            raise RuntimeError(f"{key}: {count} sandboxes instead of {_LISTED_COUNT}")
    return requests


class _Forks:
    """The forks of a round. Without a fleet, there is one host."""

    def __init__(self, alone: Client, members: Sequence[Client]) -> None:
        self._alone, self._member = alone, members[0]
        self._numbers = itertools.count()

    def list_operations(self) -> dict[str, Operation]:
        here, there = {"host": _HOSTS[0]}, {"host": _HOSTS[1]}
        return {
            "alone_fork": lambda: self._fork(self._alone, 1),
            "own_fork": lambda: self._fork(self._member, 1, here, [_HOSTS[0]]),
            "placed_fork": lambda: self._fork(self._member, 1, there, [_HOSTS[1]]),
            "alone_forks": lambda: self._fork(self._alone, _SPREAD_COUNT),
            "spread_forks": lambda: self._fork(self._member, _SPREAD_COUNT, {"strategy": "spread"}, _HOSTS),
        }

    def _fork(
        self, client: Client, count: int, placement: dict[str, str] | None = None, hosts: Sequence[str] = ()
    ) -> None:
        body: dict[str, Any] = {"names": [f"fork-{next(self._numbers)}" for _ in range(count)]}
        if placement:
            body["placement"] = placement
        sandboxes = client.call("POST", "/snapshots/base/fork", body)["sandboxes"]
        actual_hosts = {each["sandboxHost"] for each in sandboxes if "sandboxHost" in each}
        if len(sandboxes) != count or actual_hosts != {*hosts}:
            raise RuntimeError(f"{len(sandboxes)} forks on {sorted(actual_hosts)} instead of {count} on {hosts}")

    def delete_all(self) -> None:
        for client in (self._alone, self._member):
            for sandbox in client.call("GET", "/sandboxes?limit=1000"):
                if sandbox["name"].startswith("fork-"):
                    client.call("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def _run_round(operations: Mapping[str, Operation], samples: dict[str, list[float]], *, is_reversed: bool) -> None:
    """Carry out each operation once. The order changes, so that no operation always follows the same one."""
    for key in reversed([*operations]) if is_reversed else operations:
        _, elapsed = time_call(operations[key])
        samples[key].append(elapsed)
