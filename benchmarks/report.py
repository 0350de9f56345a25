"""Format results as tables for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Measure, Result

SCHEMA_VERSION = 1
_TABLE_WIDTH = 120


def describe_machine(accelerator: str, qemu: str) -> dict[str, Any]:
    """Return the properties of the machine that affect the results."""
    return {
        "cpus": os.cpu_count(),
        "cpu_model": _read_field("/proc/cpuinfo", "model name"),
        "memory_mb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "kernel": platform.release(),
        "qemu": qemu,
        "accelerator": accelerator,
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def build_document(
    results: list[Result], failed_names: list[str], *, machine: dict[str, Any], quick: bool, start_time: datetime
) -> dict[str, Any]:
    """Return the results in the format that README.md describes under "JSON"."""
    return {
        "schema": SCHEMA_VERSION,
        "started_at": start_time.isoformat(timespec="seconds"),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _describe_commit(),
        "quick": quick,
        "failed": failed_names,
        "machine": machine,
        "benches": {result.name: result.as_json() for result in results},
    }


def create_console() -> Console:
    """Return a console for standard output. If the output is not a terminal, the console is as wide as the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_TABLE_WIDTH)


def print_result(result: Result, console: Console) -> None:
    settings = ", ".join(f"{key} {_format_value(value)}" for key, value in result.settings.items())
    table = Table(title=f"{result.name}: {result.title}", title_justify="left")
    table.caption, table.caption_justify = settings, "left"
    table.add_column("measure")
    for heading in ("p50", "p95", "n", "floor p50", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measure in result.measures.values():
        table.add_row(*_format_row(result, measure), style="dim" if measure.part_of else "")
    console.print(table)
    for note in result.notes:
        console.print(f"  {note}", style="yellow")
    console.print()


def _format_row(result: Result, measure: Measure) -> list[str]:
    title = f"  {measure.title}" if measure.part_of else measure.title
    if not measure.samples:
        return [title, "-", "-", "0", "", "", ""]
    floor = result.measures.get(measure.floor)
    ratio = result.compute_ratio(measure)
    return [
        title,
        format_amount(measure.p50, measure.unit),
        format_amount(measure.p95, measure.unit),
        str(len(measure.samples)),
        format_amount(floor.p50, floor.unit) if floor else "",
        "" if ratio is None else f"{ratio:.2f}",
        _format_target(result, measure),
    ]


def _format_target(result: Result, measure: Measure) -> str:
    if measure.target is None:
        return ""
    limit = (
        f"{measure.target.limit:g} x floor"
        if measure.target.of == "ratio"
        else format_amount(measure.target.limit, measure.unit)
    )
    return f"[green]≤ {limit} ✓[/]" if result.meets_target(measure) else f"[red]≤ {limit} ✗[/]"


def format_amount(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"
    if unit == "bytes":
        for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if abs(value) >= size:
                return f"{value / size:.1f} {name}"
        return f"{value:.0f} B"
    return f"{value:g}"


def _format_value(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _describe_commit() -> str:
    """Return the measured commit, with a "+" if files have changed since, or "" outside a Git repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return result.stdout.strip()
