"""Define the results of a bench: measures, each with samples, a unit, and optionally a floor and a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from benchmarks.context import Context

Unit = Literal["ms", "bytes", "count"]


@dataclass(frozen=True)
class Target:
    """The upper limit of ``p50`` (in the measure's unit) or ``ratio`` (p50 divided by the floor's p50)."""

    of: Literal["p50", "ratio"]
    limit: float


@dataclass
class Measure:
    """Samples of one quantity. ``floor`` is the key of another measure in the result: a lower bound."""

    key: str
    title: str
    unit: Unit
    samples: list[float] = field(default_factory=list)
    floor: str = ""
    target: Target | None = None
    part_of: str = ""
    """The key of the measure that includes this one. Parts are indented in tables and drawn as one stacked bar."""

    @property
    def p50(self) -> float:
        return compute_percentile(self.samples, 50)

    @property
    def p95(self) -> float:
        return compute_percentile(self.samples, 95)


@dataclass
class Result:
    """All measures of one bench.

    ``settings`` contains the settings that affect the results, and ``notes`` contains sentences for the reader.
    ``failure`` is the traceback of an error that ended the bench after it had measured something.
    """

    name: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    def add_measure(
        self,
        key: str,
        title: str,
        unit: Unit = "ms",
        *,
        samples: Sequence[float] = (),
        floor: str = "",
        target: Target | None = None,
        part_of: str = "",
    ) -> Measure:
        """Add a measure. Measures are shown in the order in which they were added."""
        measure = Measure(key, title, unit, [float(sample) for sample in samples], floor, target, part_of)
        self.measures[key] = measure
        return measure

    def add_parts(self, measure_key: str, titles: Mapping[str, str], samples: Mapping[str, Sequence[float]]) -> None:
        """Add a part of the measure ``measure_key`` for each key of ``titles`` that has samples."""
        for key, title in titles.items():
            if samples.get(key):
                self.add_measure(f"{measure_key}.{key}", title, samples=samples[key], part_of=measure_key)

    def compute_ratio(self, measure: Measure) -> float | None:
        """Return p50 divided by the floor's p50, or None if there is no floor or it is 0."""
        floor = self.measures.get(measure.floor)
        if floor is None or not floor.samples or not measure.samples or not floor.p50:
            return None
        return measure.p50 / floor.p50

    def meets_target(self, measure: Measure) -> bool | None:
        """Return whether the measure meets its target, or None if its target, samples or required floor is missing."""
        if measure.target is None or not measure.samples:
            return None
        value = measure.p50 if measure.target.of == "p50" else self.compute_ratio(measure)
        return None if value is None else value <= measure.target.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "settings": self.settings,
            "notes": self.notes,
            "measures": {key: self._convert_measure(measure) for key, measure in self.measures.items()},
        }

    def _convert_measure(self, measure: Measure) -> dict[str, Any]:
        samples = measure.samples
        data: dict[str, Any] = {"title": measure.title, "unit": measure.unit, "n": len(samples)}
        if samples:
            data |= {
                "p50": round(measure.p50, 3),
                "p95": round(measure.p95, 3),
                "min": round(min(samples), 3),
                "max": round(max(samples), 3),
            }
        if measure.part_of:
            data["part_of"] = measure.part_of
        if measure.floor:
            ratio = self.compute_ratio(measure)
            data |= {"floor": measure.floor, "ratio": None if ratio is None else round(ratio, 3)}
        if measure.target:
            data["target"] = {"of": measure.target.of, "limit": measure.target.limit, "met": self.meets_target(measure)}
        data["samples"] = [round(sample, 3) for sample in samples]
        return data


class Bench(Protocol):
    """The interface of a bench. Each bench has its own file in ``benches/`` and is listed in ``benches.BENCHES``."""

    name: str
    title: str

    def run(self, ctx: Context) -> Result: ...


def compute_percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile of the samples, with linear interpolation, or 0 if there are no samples."""
    return float(np.percentile(samples, percent)) if samples else 0.0
