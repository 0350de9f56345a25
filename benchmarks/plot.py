"""Plot the main results: the pause of the source, fork and its floor with their parts, the gateway's memory, and the
rivals.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rivals.table import MACHINES, PLAYBOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "a plot needs matplotlib: .venv/bin/python -m pip install --require-hashes -r requirements/bench.txt"
_INK, _MUTED, _GRID = "#1f2430", "#667085", "#e4e7ec"
_FLOOR, _FIRST, _OURS, _SECOND, _TARGET = "#98a2b3", "#8fc1f0", "#0b6bcb", "#12a594", "#d92d20"
_PARTS = ("#0b6bcb", "#5ba4e6", "#12a594", "#7fd1c4", "#8e5bd6", "#c4a7ec", "#e08c1a", "#d0d5dd")
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "alignment": "left", "borderaxespad": 0.2}
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "svg.hashsalt": "grove.sandbox",
}


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(document: dict[str, Any], target: Path) -> None:
    """Write an SVG of the DRAWN benches in ``document`` (the JSON), which must contain at least one of them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = [(name, document["benches"][name]["measures"]) for name in _DRAWN if name in document["benches"]]
    with mpl.rc_context(_SETTINGS):
        widths = [_WIDTHS.get(name, 5.8) for name, _ in found]
        figure = Figure(figsize=(sum(widths), 6.4), layout="constrained")
        axes = figure.subplots(2, len(found), squeeze=False, height_ratios=(5, 1), width_ratios=widths)
        for column, (name, measures) in enumerate(found):
            _DRAWN[name](axes[0][column], axes[1][column], measures)
        figure.text(0.005, -0.02, _caption(document), color=_MUTED, fontsize=8, va="top")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")


def _draw_pause(above: Axes, below: Axes, measures: dict[str, Any]) -> None:
    above.set_title("Capture: how long a running sandbox is paused")
    _curve(above, measures["floor"], _FLOOR, "floor: bare QMP, no page copied")
    _curve(above, measures["pause"], _OURS, "source pause, measured by the host")
    _curve(above, measures["outside"], _SECOND, "longest wait for a ping meanwhile")
    _limit(above, measures["pause"]["target"]["limit"], "target for the median")
    _finish(above, "milliseconds", "share of captures", [measures[key] for key in ("floor", "pause", "outside")])
    _bar(below, measures, "pause")


def _draw_fork(above: Axes, below: Axes, measures: dict[str, Any]) -> None:
    above.set_title("Cold fork: how long until it answers")
    _curve(above, measures["floor"], _FLOOR, "floor: QEMU start and state load, no gateway")
    _curve(above, measures["returned"], _FIRST, "fork, until the engine returned it")
    _curve(above, measures["answered"], _OURS, "fork, until the agent answered")
    _curve(above, measures["exec"], _SECOND, "fork, until a first command has run")
    limit = measures["answered"]["target"]["limit"]
    _limit(above, limit * measures["floor"]["p50"], f"target for the median: {limit:g} x the floor's median")
    _finish(above, "milliseconds", "share of forks", [measures[key] for key in ("floor", "answered", "exec")])
    _bar(below, measures, "answered")


def _draw_memory(above: Axes, below: Axes, measures: dict[str, Any]) -> None:
    """Write an SVG of those DRAWN benches that are in ``document`` (the JSON). At least one must be there."""
    above.set_title("The gateway's resident memory in mixed use")
    for key, colour, label in (
        ("before", _FLOOR, "with the C library's settings"),
        ("now", _OURS, "with its own settings"),
    ):
        samples = [sample / (1 << 20) for sample in measures[key]["samples"]]
        named = f"{label} (at the end {samples[-1]:.0f} MiB)"
        above.plot(range(1, len(samples) + 1), samples, color=colour, linewidth=2, label=named)
    above.set_ylim(0, 1.1 * max(measures[key]["max"] for key in ("before", "now")) / (1 << 20))
    above.set_xlabel("rounds: create, run, upload, snapshot, fork, roll back, remove")
    above.set_ylabel("MiB")
    _frame(above)
    below.set_visible(False)


def _draw_rivals(above: Axes, below: Axes, measures: dict[str, Any]) -> None:
    """Draw a bar for each operation of each rival, on a logarithmic axis; a missing bar is not offered."""
    above.set_title("Snapshot, fork and rollback: medians, ms (number of samples)")
    labelled: list[tuple[float, str]] = []
    place = 0.0
    for columns, note in ((MACHINES, ""), (PLAYBOOKS, "playbook: ")):
        for operation in ("snapshot", "pause", "fork_1", "fork_10", "rollback"):
            found = [measures.get(f"{column}_{operation}") for column in columns]
            if not any(found):
                continue
            labelled.append((place + (len(columns) - 1) / 2, f"{note}{operation.replace('_', ' x ')}"))
            for column, measure in zip(columns, found, strict=True):
                if measure and measure["n"]:
                    above.barh([place], [measure["p50"]], color=_RIVALS[column], height=0.85)
                    label = (
                        f" {measure['p50']:,.3g} ({measure['n']})"
                        if measure["p50"] < 1000
                        else (f" {measure['p50']:,.0f} ({measure['n']})")
                    )
                    above.text(measure["p50"], place, label, fontsize=6, va="center", color=_MUTED)
                else:
                    above.text(1.1, place, "not offered", fontsize=6, va="center", color=_MUTED)
                place += 1
            place += 1
    for column, title in {**MACHINES, **PLAYBOOKS}.items():
        above.barh([0], [0], color=_RIVALS[column], label=title.replace("`", ""))
    above.set_xscale("log")
    above.xaxis.set_major_formatter("{x:,.0f}")
    above.set_xlim(
        1, 4 * max(measure["p50"] for measure in measures.values() if measure["n"] and measure["unit"] == "ms")
    )
    above.set_ylim(place, -1)
    above.set_yticks([middle for middle, _ in labelled], [label for _, label in labelled])
    above.set_xlabel("milliseconds, logarithmic")
    _frame(above)
    below.set_visible(False)


_RIVALS = {
    "ours": _OURS,
    "virsh_save": "#98a2b3",
    "savevm": "#7fd1c4",
    "virsh_internal": "#c4a7ec",
    "virsh_external": "#e08c1a",
    "our_play": _OURS,
    "hand_play": "#98a2b3",
}
_WIDTHS = {"rivals": 9.0}
_DRAWN = {"pause": _draw_pause, "fork": _draw_fork, "memory": _draw_memory, "rivals": _draw_rivals}
DRAWN = frozenset(_DRAWN)
"""The benches that a plot shows."""


def _curve(axes: Axes, measure: dict[str, Any], colour: str, label: str) -> None:
    """Draw the share of samples up to each value, with a dot at the median."""
    samples = sorted(measure["samples"])
    shares = [100 * (rank + 1) / len(samples) for rank in range(len(samples))]
    named = f"{label} (median {measure['p50']:.3g})"
    axes.step([samples[0], *samples], [0, *shares], where="post", color=colour, linewidth=2, label=named)
    axes.plot([measure["p50"]], [50], "o", color=colour, markersize=5)


def _limit(axes: Axes, value: float, label: str) -> None:
    axes.plot([value, value], [0, 50], color=_TARGET, linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def _finish(axes: Axes, x: str, y: str, measures: Sequence[dict[str, Any]]) -> None:
    """Label the axes. The x axis ends a little beyond each 95th percentile, so that a slow sample does not squeeze
    the rest.
    """
    axes.set_xlim(0, 1.15 * max(measure["p95"] for measure in measures))
    axes.set_ylim(0, 101)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yticks([0, 25, 50, 75, 100], ["0", "25 %", "50 %", "75 %", "100 %"])
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.19), **_LEGEND)


def _bar(axes: Axes, measures: dict[str, Any], whole: str) -> None:
    """Draw the medians of the parts as one stacked bar."""
    left = 0.0
    parts = [part for part in measures.values() if part.get("part_of") == whole and part["p50"] > 0]
    for part, colour in zip(parts, _PARTS, strict=False):
        axes.barh([0], [part["p50"]], left=left, color=colour, height=0.6, label=f"{part['title']}: {part['p50']:.3g}")
        left += part["p50"]
    axes.set_title("Where the time goes: medians of the parts, ms", fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(0, left or 1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.35), **_LEGEND)


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    counts = [
        f"{len(document['benches'][name]['measures'][key]['samples'])} {what}"
        for name, key, what in (
            ("pause", "pause", "captures"),
            ("fork", "answered", "forks"),
            ("memory", "now", "rounds"),
            ("rivals", "ours_snapshot", "snapshots of ours"),
        )
        if name in document["benches"]
    ]
    accelerator = {"tcg": "TCG (every instruction emulated)", "kvm": "KVM"}[machine["accelerator"]]
    return (
        f"{', '.join(counts)}; QEMU {machine['qemu']} with {accelerator}, {machine['cpus']} CPUs, "
        f"Linux {'.'.join(machine['kernel'].split('.')[:2])}; {document['started_at'][:10]}"
    )
