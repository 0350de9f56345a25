"""The steps that run in the guest, and the summary of their results."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.openzfs import guest

_PYTHON = ".venv/bin/python"
_SUITE = "/usr/lib/python3/dist-packages/libzfs_core/test"
"""The directory of OpenZFS's own tests of libzfs_core, from Debian's package python3-pyzfs."""


@dataclass(frozen=True)
class Step:
    name: str
    argv: tuple[str, ...]
    seconds: int
    """The deadline, which suffices on a busy machine."""
    result: str = ""
    """The file with the outcome of each test, in the directory of results: JUnit's XML, or JSON."""


@dataclass(frozen=True)
class Outcome:
    step: Step
    status: int | None
    """Exit status, or None if the step did not end."""
    seconds: float
    counts: dict[str, int]

    @property
    def is_success(self) -> bool:
        # A run that tests nothing proves nothing.
        return self.status == 0 and (not self.step.result or self.counts.get("passed", 0) > 0)

    def __str__(self) -> str:
        status = {None: "did not end", 0: "passed", guest.TIMED_OUT: "timed out"}.get(
            self.status, f"failed ({self.status})"
        )
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{self.step.name}: {status} in {self.seconds:.0f} s" + (f": {counts}" if counts else "")


def _make_pytest_step(name: str, *arguments: str, seconds: int) -> Step:
    argv = (_PYTHON, "-m", "pytest", "-v", "--color=no", "--timeout=1200", *arguments)
    return Step(name, (*argv, f"--junit-xml={guest.RESULTS}/{name}.xml"), seconds, f"{name}.xml")


STEPS = (
    Step(
        "pyzfs",
        (_PYTHON, "-m", "tests.zfs_core.conformance", _SUITE, "--json", f"{guest.RESULTS}/pyzfs.json"),
        2 * 3600,
        "pyzfs.json",
    ),
    _make_pytest_step("lzc", "tests/zfs_core_cli", seconds=2 * 3600),
    _make_pytest_step("jail_zfs", "tests/freebsd_shim/test_zfs.py", "tests/jail_zfs", seconds=3 * 3600),
    _make_pytest_step("engine", "tests/engine", "-k", "jail_zfs", seconds=6 * 3600),
)


def select_steps(names: list[str]) -> list[Step]:
    """Return the named steps, or all. Raises ValueError if a name is unknown."""
    known_names = [step.name for step in STEPS]
    for name in names:
        if name not in known_names:
            raise ValueError(f"unknown step '{name}': use {', '.join(known_names)}, or -- COMMAND…")
    return [step for step in STEPS if not names or step.name in names]


def count_results(file: Path) -> dict[str, int]:
    """Return the number of tests with each outcome, or {} if the step ended before it wrote the file."""
    if not file.is_file():
        return {}
    return _count_junit(file) if file.suffix == ".xml" else _count_json(file)


def _count_junit(file: Path) -> dict[str, int]:
    counts = Counter(
        next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        for case in ET.parse(file).getroot().iter("testcase")
    )
    names = {"passed": "passed", "failure": "failed", "error": "errors", "skipped": "skipped"}
    return {name: counts[tag] for tag, name in names.items() if tag == "passed" or counts[tag]}


def _count_json(file: Path) -> dict[str, int]:
    tests = json.loads(file.read_text())["tests"]
    counts = Counter(str(test["outcome"]) for test in tests.values())
    return {"passed": counts.pop("passed", 0), **dict(sorted(counts.items()))}
