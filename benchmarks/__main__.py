"""Run benchmarks: ``python -m benchmarks [--json FILE] [--plot FILE] [--quick] [NAME…]``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks import plot, report
from benchmarks.benches import BENCHES
from benchmarks.context import Context
from benchmarks.measure import Result
from tests import leaks
from tests.support import session


def main() -> int:
    """Run the requested benches and return the exit code.

    The exit code is 0 if all benches succeeded, 1 if a bench failed or something could not be removed, and 2 if the
    run could not start.
    """
    options = _parse_options()
    if os.geteuid() != 0:
        print(
            "benchmarks: this command must run as root to start machines and mount file systems: run ./dev bench.",
            file=sys.stderr,
        )
        return 2
    if options.plot and not plot.is_available():
        print(f"benchmarks: {plot.MATPLOTLIB_MISSING}", file=sys.stderr)
        return 2
    session.get_run_id()
    leaks.sweep_earlier_runs()
    inventory = leaks.take_inventory()
    has_failed = True
    try:
        has_failed = bool(_run(options))
    finally:
        leftovers = leaks.wait_for_cleanup(inventory)
        for leftover in leftovers:
            print(f"benchmarks: something was not removed: {leftover}", file=sys.stderr)
    return 1 if leftovers or has_failed else 0


def _run(options: argparse.Namespace) -> list[str]:
    """Run the benches, then print and save their results. Returns the names of the benches that failed."""
    start_time = datetime.now(UTC)
    progress_console, result_console = Console(stderr=True), report.create_console()
    results: list[Result] = []
    failed_names: list[str] = []
    with Context(quick=options.quick, console=progress_console) as ctx:
        for bench in [bench for bench in BENCHES if bench.name in options.names]:
            progress_console.print(f"[bold]{bench.name}[/]: {bench.title}", highlight=False)
            failure = ""
            try:
                results.append(bench.run(ctx))
            except Exception:  # The results of the other benches are still useful.
                failure = traceback.format_exc()
            else:
                report.print_result(results[-1], result_console)
                failure = results[-1].failure
            if failure:
                progress_console.print(failure, style="red", highlight=False, markup=False)
                failed_names.append(bench.name)
        # Reading the platform creates a host, which a run of only the jail bench does not need.
        platform = ctx.kvm_xfs.host.platform if "kvm_xfs" in vars(ctx) else None
        machine = report.describe_machine(
            platform.accelerator if platform else "", platform.qemu_version if platform else ""
        )
    document = report.build_document(results, failed_names, machine=machine, quick=options.quick, start_time=start_time)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot and plot.PLOTTED_BENCHES & document["benches"].keys():
        plot.draw(document, options.plot)
    return failed_names


def _parse_options() -> argparse.Namespace:
    names = [bench.name for bench in BENCHES]
    bench_lines = [f"  {bench.name:10} {bench.title}" for bench in BENCHES]
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description="Run benchmarks. Each result is shown next to the floor of this machine.",
        epilog="benches:\n" + "\n".join(bench_lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples to FILE (see benchmarks/README.md)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw the results of {', '.join(sorted(plot.PLOTTED_BENCHES))} as SVG",
    )
    parser.add_argument("--quick", action="store_true", help="run only a few rounds, to check that the benches work")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches to run (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"unknown bench: {', '.join(unknown)}. Available benches: {', '.join(names)}")
    options.names = options.names or names
    if options.plot and not plot.PLOTTED_BENCHES & set(options.names):
        parser.error(f"--plot can draw only {' and '.join(sorted(plot.PLOTTED_BENCHES))}: add at least one of them")
    return options


if __name__ == "__main__":
    sys.exit(main())
