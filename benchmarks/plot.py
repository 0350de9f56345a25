"""Plot the main results: captures, forks, the gateway's memory, the scale of gateways and fleets, and the rivals."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import compute_percentile
from benchmarks.report import format_amount
from benchmarks.rivals.table import MACHINES, PLAYBOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATPLOTLIB_MISSING = (
    "--plot requires matplotlib, which is not installed. "
    "Run .venv/bin/python -m pip install --require-hashes -r requirements/bench.txt"
)
_TEXT_COLOUR, _MUTED_COLOUR, _GRID_COLOUR = "#1f2430", "#667085", "#e4e7ec"
_FLOOR_COLOUR, _RETURNED_COLOUR, _MAIN_COLOUR = "#98a2b3", "#8fc1f0", "#0b6bcb"
_SECOND_COLOUR, _TARGET_COLOUR = "#12a594", "#d92d20"
_PART_COLOURS = ("#0b6bcb", "#5ba4e6", "#12a594", "#7fd1c4", "#8e5bd6", "#c4a7ec", "#e08c1a", "#d0d5dd")
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "alignment": "left", "borderaxespad": 0.2}
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _TEXT_COLOUR,
    "axes.edgecolor": _GRID_COLOUR,
    "axes.labelcolor": _MUTED_COLOUR,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": _MUTED_COLOUR,
    "ytick.color": _MUTED_COLOUR,
    "svg.hashsalt": "grove.sandbox",
}


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the results of PLOTTED_BENCHES in ``document`` as an SVG file. At least one bench must have results."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    benches = [(name, document["benches"][name]["measures"]) for name in _PLOTTERS if name in document["benches"]]
    with mpl.rc_context(_SETTINGS):
        widths = [_WIDTHS_INCHES.get(name, 5.8) for name, _ in benches]
        figure = Figure(figsize=(sum(widths), 6.4), layout="constrained")
        lower_height = 1 if _BENCHES_WITH_LOWER_PLOT & {name for name, _ in benches} else 0.01
        axes = figure.subplots(2, len(benches), squeeze=False, height_ratios=(5, lower_height), width_ratios=widths)
        for column, (name, measures) in enumerate(benches):
            _PLOTTERS[name](axes[0][column], axes[1][column], measures)
        figure.text(0.005, -0.02, _format_caption(document), color=_MUTED_COLOUR, fontsize=8, va="top")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")


def _draw_pause(upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any]) -> None:
    upper_plot.set_title("Capture: how long a running sandbox is paused")
    _draw_distribution(upper_plot, measures["floor"], _FLOOR_COLOUR, "floor: bare QMP, no page copied")
    _draw_distribution(upper_plot, measures["pause"], _MAIN_COLOUR, "source pause, measured by the host")
    _draw_distribution(upper_plot, measures["outside"], _SECOND_COLOUR, "longest wait for a ping during the capture")
    _draw_limit(upper_plot, measures["pause"]["target"]["limit"], "target for the median")
    _label_axes(
        upper_plot, "milliseconds", "share of captures", [measures[key] for key in ("floor", "pause", "outside")]
    )
    _draw_parts(lower_plot, measures, "pause")


def _draw_fork(upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any]) -> None:
    upper_plot.set_title("Cold fork: how long until it answers")
    _draw_distribution(upper_plot, measures["floor"], _FLOOR_COLOUR, "floor: QEMU start and state load, no gateway")
    _draw_distribution(upper_plot, measures["returned"], _RETURNED_COLOUR, "fork, until the engine returned it")
    _draw_distribution(upper_plot, measures["answered"], _MAIN_COLOUR, "fork, until the agent answered")
    _draw_distribution(upper_plot, measures["exec"], _SECOND_COLOUR, "fork, until a first command has run")
    limit = measures["answered"]["target"]["limit"]
    _draw_limit(upper_plot, limit * measures["floor"]["p50"], f"target for the median: {limit:g} x the floor's median")
    _label_axes(upper_plot, "milliseconds", "share of forks", [measures[key] for key in ("floor", "answered", "exec")])
    _draw_parts(lower_plot, measures, "answered")


def _draw_memory(upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any]) -> None:
    upper_plot.set_title("The gateway's resident memory in mixed use")
    for key, colour, label in (
        ("before", _FLOOR_COLOUR, "with the C library's settings"),
        ("now", _MAIN_COLOUR, "with its own settings"),
    ):
        samples = [sample / (1 << 20) for sample in measures[key]["samples"]]
        full_label = f"{label} (at the end {samples[-1]:.0f} MiB)"
        upper_plot.plot(range(1, len(samples) + 1), samples, color=colour, linewidth=2, label=full_label)
    upper_plot.set_ylim(0, 1.1 * max(measures[key]["max"] for key in ("before", "now")) / (1 << 20))
    upper_plot.set_xlabel("rounds: create, run, upload, snapshot, fork, roll back, remove")
    upper_plot.set_ylabel("MiB")
    _draw_frame(upper_plot)
    lower_plot.set_visible(False)


def _draw_scale(
    upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any], title: str = "The gateway with many snapshots"
) -> None:
    """Draw the medians against the number of snapshots. Both axes of the upper plot are logarithmic."""
    sizes = sorted(int(key.removeprefix("start_")) for key in measures if key.startswith("start_"))
    upper_plot.set_title(title)
    for key, colour, label in (
        ("floor_start", _FLOOR_COLOUR, "floor of a start: read the records"),
        ("start", _MAIN_COLOUR, "start"),
        ("floor_request", _PART_COLOURS[6], "floor of a request: an empty list"),
        ("page", _SECOND_COLOUR, "list 100 snapshots"),
        ("show", _RETURNED_COLOUR, "show a snapshot, by name"),
        ("lineage", _PART_COLOURS[4], "whole lineage"),
    ):
        medians = [measures[f"{key}_{size}"]["p50"] for size in sizes]
        _draw_series(upper_plot, sizes, medians, colour, label)
    upper_plot.set_xscale("log")
    upper_plot.set_yscale("log")
    upper_plot.set_xlabel("snapshots, with a stopped sandbox for every fifth")
    upper_plot.set_ylabel("milliseconds, median")
    _draw_frame(upper_plot)
    _draw_memory_by_size(lower_plot, sizes, measures, "Resident memory after the start")


def _draw_fleet_scale(upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any]) -> None:
    """Draw the times against the number of hosts. Both axes of the upper plot are logarithmic."""
    sizes = sorted(int(key.removeprefix("load_")) for key in measures if key.startswith("load_"))
    upper_plot.set_title("A fleet of many hosts")
    for key, percent, colour, label in (
        ("floor_place", 50, _FLOOR_COLOUR, "floor of a placement: one transaction in etcd, median"),
        ("place", 50, _MAIN_COLOUR, "a sandbox placed on another host, median"),
        ("place", 99, _RETURNED_COLOUR, "the same, 99th percentile"),
        ("load", 50, _SECOND_COLOUR, "a new member loads its view, median"),
        ("stall", 50, _PART_COLOURS[3], "the longest time in which it does nothing else, median"),
        ("cpu_per_placement", 50, _PART_COLOURS[6], "CPU time of etcd for a placement"),
        ("cpu_per_second", 50, _PART_COLOURS[4], "CPU time of etcd, each second, while nothing changes"),
    ):
        values = [compute_percentile(measures[f"{key}_{size}"]["samples"], percent) for size in sizes]
        # With few placements, what etcd does otherwise can outweigh them.
        values = [max(value, 0.1) for value in values]
        _draw_series(upper_plot, sizes, values, colour, label)
    upper_plot.set_xscale("log")
    upper_plot.set_yscale("log")
    requests, transactions = (
        measures[f"{key}_{sizes[-1]}"]["p50"] for key in ("requests_per_second", "transactions_per_placement")
    )
    upper_plot.set_xlabel(
        f"hosts (with {sizes[-1]:,}, etcd gets {requests:.0f} requests each second, "
        f"and {transactions:.1f} transactions for a placement)",
        fontsize=8,
    )
    upper_plot.set_ylabel("milliseconds")
    _draw_frame(upper_plot)
    _draw_memory_by_size(lower_plot, sizes, measures, "Memory of the view")


def _draw_series(plot: Axes, sizes: list[int], values: list[float], colour: str, label: str) -> None:
    plot.plot(sizes, values, "o-", color=colour, linewidth=2, markersize=4, label=f"{label} ({values[-1]:.3g})")


def _draw_memory_by_size(plot: Axes, sizes: list[int], measures: dict[str, Any], title: str) -> None:
    memory = [measures[f"memory_{size}"]["p50"] / (1 << 20) for size in sizes]
    plot.plot(sizes, memory, "o-", color=_MAIN_COLOUR, linewidth=2, markersize=4)
    plot.set_title(f"{title}, MiB (at the end {memory[-1]:.0f})", fontsize=9)
    plot.set_xscale("log")
    plot.set_ylim(0, 1.2 * max(*memory, 1))
    plot.grid(color=_GRID_COLOUR, linewidth=0.8)
    plot.spines[["top", "right"]].set_visible(False)


def _draw_rivals(upper_plot: Axes, lower_plot: Axes, measures: dict[str, Any]) -> None:
    """Draw a bar for each operation of each rival, on a logarithmic axis."""
    upper_plot.set_title("Snapshot, fork and rollback with other tools: medians (number of samples)")
    position, ticks = 0.0, []
    for columns, prefix in ((MACHINES, ""), (PLAYBOOKS, "playbook: ")):
        for operation, title in _RIVAL_OPERATIONS.items():
            bars = [(column, measures.get(f"{column}_{operation}")) for column in columns]
            if not any(measure for _, measure in bars):
                continue
            ticks.append((position + (len(bars) - 1) / 2, f"{prefix}{title}"))
            for column, measure in bars:
                value, label = _RIVAL_AXIS_START, "not offered"
                if measure and measure["n"]:
                    value, label = measure["p50"], f"{format_amount(measure['p50'], 'ms')} ({measure['n']})"
                    upper_plot.barh([position], [value], color=_RIVAL_COLOURS[column], height=0.85)
                upper_plot.text(value, position, f" {label}", fontsize=6, va="center", color=_MUTED_COLOUR)
                position += 1
            position += 1
    titles = MACHINES | {column: f"playbook: {title}" for column, title in PLAYBOOKS.items()}
    for column, title in titles.items():
        upper_plot.barh([0], [0], color=_RIVAL_COLOURS[column], label=title.replace("`", ""))
    upper_plot.set_xscale("log")
    upper_plot.xaxis.set_major_formatter("{x:,.0f}")
    medians = [measure["p50"] for measure in measures.values() if measure["n"] and measure["unit"] == "ms"]
    upper_plot.set_xlim(_RIVAL_AXIS_START, 4 * max(medians))
    upper_plot.set_ylim(position - 0.5, -1)
    upper_plot.set_yticks([middle for middle, _ in ticks], [label for _, label in ticks])
    upper_plot.set_xlabel("milliseconds, logarithmic")
    _draw_frame(upper_plot)
    upper_plot.grid(visible=False, axis="y")
    upper_plot.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=2, **_LEGEND)
    lower_plot.set_visible(False)


_RIVAL_AXIS_START = 1.0
_RIVAL_OPERATIONS = {
    "snapshot": "snapshot",
    "pause": "pause of the source",
    "fork_1": "one fork",
    "fork_10": "ten forks",
    "rollback": "rollback",
}
_RIVAL_COLOURS = {
    "ours": _MAIN_COLOUR,
    "virsh_save": _FLOOR_COLOUR,
    "savevm": "#7fd1c4",
    "virsh_internal": "#c4a7ec",
    "virsh_external": "#e08c1a",
    "our_play": _MAIN_COLOUR,
    "hand_play": _FLOOR_COLOUR,
}
_WIDTHS_INCHES = {"rivals": 9.0}
_BENCHES_WITH_LOWER_PLOT = {"pause", "fork", "scale", "jail_scale", "fleet_scale"}
_PLOTTERS = {
    "pause": _draw_pause,
    "fork": _draw_fork,
    "memory": _draw_memory,
    "scale": _draw_scale,
    "jail_scale": partial(_draw_scale, title="The gateway of a jail host with many snapshots"),
    "fleet_scale": _draw_fleet_scale,
    "rivals": _draw_rivals,
}
PLOTTED_BENCHES = frozenset(_PLOTTERS)
"""The names of the benches that can be drawn."""


def _draw_distribution(axes: Axes, measure: dict[str, Any], colour: str, label: str) -> None:
    """Draw the cumulative distribution of the samples, with a dot at the median."""
    samples = sorted(measure["samples"])
    shares = [100 * (rank + 1) / len(samples) for rank in range(len(samples))]
    full_label = f"{label} (median {measure['p50']:.3g})"
    axes.step([samples[0], *samples], [0, *shares], where="post", color=colour, linewidth=2, label=full_label)
    axes.plot([measure["p50"]], [50], "o", color=colour, markersize=5)


def _draw_limit(axes: Axes, value: float, label: str) -> None:
    axes.plot([value, value], [0, 50], color=_TARGET_COLOUR, linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def _label_axes(axes: Axes, x: str, y: str, measures: Sequence[dict[str, Any]]) -> None:
    """Label the axes.

    The x axis ends a little beyond the highest 95th percentile, so that slow samples do not compress the rest.
    """
    axes.set_xlim(0, 1.15 * max(measure["p95"] for measure in measures))
    axes.set_ylim(0, 101)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yticks([0, 25, 50, 75, 100], ["0", "25 %", "50 %", "75 %", "100 %"])
    _draw_frame(axes)


def _draw_frame(axes: Axes) -> None:
    axes.grid(color=_GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.19), **_LEGEND)


def _draw_parts(axes: Axes, measures: dict[str, Any], key: str) -> None:
    """Draw the medians of the parts of a measure as one stacked bar."""
    start = 0.0
    parts = [part for part in measures.values() if part.get("part_of") == key and part["p50"] > 0]
    for part, colour in zip(parts, _PART_COLOURS, strict=False):
        axes.barh([0], [part["p50"]], left=start, color=colour, height=0.6, label=f"{part['title']}: {part['p50']:.3g}")
        start += part["p50"]
    axes.set_title("Where the time goes: medians of the parts, ms", fontsize=9)
    axes.set_yticks([])
    axes.set_xlim(0, start or 1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.35), **_LEGEND)


def _format_caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    counts = [
        f"{scale['settings']['starts']} starts and {scale['settings']['rounds']} requests ({name})"
        for name in ("scale", "jail_scale")
        if (scale := document["benches"].get(name))
    ]
    if fleet := document["benches"].get("fleet_scale"):
        settings = fleet["settings"]
        counts.append(
            f"{settings['sandboxes_per_host']} sandboxes on each host, {settings['placements']} placements, "
            f"{settings['starts']} starts"
        )
    counts += [
        f"{len(document['benches'][name]['measures'][key]['samples'])} {noun}"
        for name, key, noun in (
            ("pause", "pause", "captures"),
            ("fork", "answered", "forks"),
            ("memory", "now", "rounds"),
            ("rivals", "ours_snapshot", "snapshots of this software"),
        )
        if name in document["benches"]
    ]
    accelerator = {"tcg": "TCG (every instruction emulated)", "kvm": "KVM"}.get(machine["accelerator"])
    # A run of only benches without machines has no accelerator.
    emulator = f"QEMU {machine['qemu']} with {accelerator}, " if accelerator else ""
    return (
        f"{', '.join(counts)}; {emulator}{machine['cpus']} CPUs, "
        f"Linux {'.'.join(machine['kernel'].split('.')[:2])}; {document['started_at'][:10]}"
    )
