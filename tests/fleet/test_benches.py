"""The benches of a fleet, with few rounds and hosts."""

from __future__ import annotations

from rich.console import Console

from benchmarks.benches.fleet import Fleet
from benchmarks.benches.fleet_scale import FleetScale
from benchmarks.context import Context
from benchmarks.measure import Bench, Result


def _run(bench: Bench) -> Result:
    with Context(quick=True, console=Console(quiet=True)) as ctx:
        return bench.run(ctx)


def test_forwarded_requests_lists_and_forks_are_measured() -> None:
    result = _run(Fleet())
    counts = {key: len(measure.samples) for key, measure in result.measures.items()}
    requests = [f"{kind}_{name}" for name in ("show", "exec", "list") for kind in ("direct", "forwarded", "added")]
    forks = ["alone_fork", "own_fork", "placed_fork", "alone_forks", "spread_forks"]
    assert counts == dict.fromkeys(requests, 5) | dict.fromkeys(forks, 2)
    for name in ("show", "exec", "list"):
        direct, forwarded, added = (result.measures[key].samples for key in requests if key.endswith(f"_{name}"))
        assert added == [after - before for before, after in zip(direct, forwarded, strict=True)]


def test_large_fleets_are_simulated() -> None:
    result = _run(FleetScale())
    few, many = result.settings["hosts"]
    measures = result.measures
    assert len(measures[f"place_{many}"].samples) == 10
    # The claim of a sandbox, and its commit, perhaps with that of another one.
    assert 1 < measures[f"transactions_per_placement_{many}"].p50 < 3
    # Each member renews its lease every two seconds.
    assert measures[f"requests_per_second_{many}"].p50 > many / 4 > measures[f"requests_per_second_{few}"].p50 / 2
    for size in (few, many):
        assert 0 < measures[f"stall_{size}"].p50 <= measures[f"load_{size}"].p50 + 10
