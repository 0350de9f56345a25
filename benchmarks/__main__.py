"""``python -m benchmarks [--json FILE] [--plot FILE] [--quick] [NAME…]``."""

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
    """Exit code 0: all benches succeeded. 1: a bench failed or left something behind. 2: the run could not start."""
    options = _options()
    if os.geteuid() != 0:
        print(
            "benchmarks: not running as root, which machines and mounts need. Run ./dev bench, which uses root.",
            file=sys.stderr,
        )
        return 2
    if options.plot and not plot.is_available():
        print(f"benchmarks: {plot.MISSING}", file=sys.stderr)
        return 2
    session.run_id()
    leaks.sweep_earlier_runs()
    before = leaks.take_inventory()
    failed = True
    try:
        failed = bool(_run(options))
    finally:
        left = leaks.wait_for_leftovers(before)
        for line in left:
            print(f"benchmarks: left behind: {line}", file=sys.stderr)
    return 1 if left or failed else 0


def _run(options: argparse.Namespace) -> list[str]:
    """Run the benches, show and write the results. Returns the names of the benches that failed."""
    started = datetime.now(UTC)
    progress, out = Console(stderr=True), report.wide_console()
    results: list[Result] = []
    failed: list[str] = []
    with Context(quick=options.quick, console=progress) as ctx:
        for bench in [bench for bench in BENCHES if bench.name in options.names]:
            progress.print(f"[bold]{bench.name}[/]: {bench.title}", highlight=False)
            try:
                results.append(bench.run(ctx))
            except Exception:  # The results of the other benches are still useful.
                progress.print(traceback.format_exc(), style="red", highlight=False, markup=False)
                failed.append(bench.name)
            else:
                report.show(results[-1], out)
        # Reading the platform creates a host, which a run of only the jail bench does not need.
        platform = ctx.kvm_xfs.host.platform if "kvm_xfs" in vars(ctx) else None
        machine = report.machine(platform.accelerator if platform else "", platform.qemu_version if platform else "")
    found = report.document(results, failed, machine=machine, quick=options.quick, started=started)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot and plot.DRAWN & found["benches"].keys():
        plot.draw(found, options.plot)
    return failed


def _options() -> argparse.Namespace:
    names = [bench.name for bench in BENCHES]
    lines = [f"  {bench.name:10} {bench.title}" for bench in BENCHES]
    parser = argparse.ArgumentParser(
        prog="./dev bench",
        description="Run benchmarks. Each result is shown next to the floor of this machine.",
        epilog="benches:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples to FILE (see benchmarks/README.md)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the results of pause, fork, memory and rivals as SVG"
    )
    parser.add_argument("--quick", action="store_true", help="run few rounds, to check that the benches work")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches to run (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"unknown bench: {', '.join(unknown)}. Available: {', '.join(names)}")
    options.names = options.names or names
    if options.plot and not plot.DRAWN & set(options.names):
        parser.error(f"--plot draws only {' and '.join(sorted(plot.DRAWN))}: add at least one of them")
    return options


if __name__ == "__main__":
    sys.exit(main())
