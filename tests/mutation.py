"""Mutation testing of the pure modules: ``./dev mutation [SUBJECT…]``.

mutmut changes one expression of a subject at a time and runs the subject's tests. A change that no test detects
survives. Each subject gets its own tree below ``.cache/mutation``; the repository's files stay unchanged.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PLACE = REPOSITORY / ".cache" / "mutation"
GATEWAY = "src/sandbox_gateway"
COLLECTION = "src/ansible_collections/grove/sandbox"
MODULE_UTILS = f"{COLLECTION}/plugins/module_utils"
SECONDS = 600
"""Time limit for one subject. Mutants without a result by then are counted as such."""
LISTED = 40
"""Survivors that are shown of one subject."""

CONFTEST = """
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("mutation", deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
settings.load_profile("mutation")


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"
"""


@dataclass(frozen=True)
class Subject:
    sources: tuple[str, ...]
    tests: tuple[str, ...]


UNIT = "tests/unit/gateway"
PLANS = ("tests/unit/plugins",)
SUBJECTS = {
    "plan": Subject((f"{MODULE_UTILS}/_plan.py",), PLANS),
    "plan-fork": Subject((f"{MODULE_UTILS}/_fork.py",), PLANS),
    "plan-sandbox": Subject((f"{MODULE_UTILS}/_sandbox.py",), PLANS),
    "plan-names": Subject((f"{MODULE_UTILS}/_names.py",), PLANS),
    "records": Subject((f"{GATEWAY}/records.py",), (f"{UNIT}/test_records.py",)),
    "recipes": Subject((f"{GATEWAY}/recipes.py",), (f"{UNIT}/test_recipes.py", f"{UNIT}/test_records.py")),
    "index": Subject((f"{GATEWAY}/engine/index.py",), (f"{UNIT}/test_index.py",)),
    "retention": Subject((f"{GATEWAY}/engine/retention.py",), (f"{UNIT}/test_retention.py",)),
    "guest-json": Subject((f"{GATEWAY}/engine/guest_json.py",), (f"{UNIT}/test_guest_json.py",)),
    "addresses": Subject((f"{GATEWAY}/hosts/addresses.py",), (f"{UNIT}/test_addresses.py",)),
    "zfs-parse": Subject(
        tuple(f"{GATEWAY}/zfs/{name}.py" for name in ("names", "options", "parse")),
        ("tests/jail_zfs/test_zfs_parse.py",),
    ),
    "pages": Subject(
        tuple(f"{GATEWAY}/hosts/kvm_xfs/memory/{name}.py" for name in ("copying", "listing", "ram", "runs")),
        ("tests/kvm_xfs/test_memory.py",),
    ),
}


@dataclass(frozen=True)
class Result:
    counts: dict[str, int]
    survivors: list[str]

    @property
    def killed(self) -> int:
        return self.counts.get("killed", 0) + self.counts.get("timeout", 0)

    @property
    def tried(self) -> int:
        return sum(self.counts.values()) - self.counts.get("not checked", 0) - self.counts.get("skipped", 0)


def mutate(subject: Subject, place: Path) -> Result:
    """Raises RuntimeError if mutmut could not run, for example because the subject's tests fail on unchanged code."""
    prepare(subject, place)
    environment = {**os.environ, "PYTHONPATH": ""}
    jobs = str(os.cpu_count() or 1)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mutmut", "run", "--max-children", jobs],
            cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-3000:])
    except subprocess.TimeoutExpired:
        print(f"stopped after {SECONDS} s", file=sys.stderr)
    said = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=place, env=environment, text=True, capture_output=True, check=True,
    )  # fmt: skip
    rows = [tuple(line.strip().rsplit(": ", 1)) for line in said.stdout.splitlines() if ": " in line]
    counts = dict(collections.Counter(state for _, state in rows))
    return Result(counts, [name for name, state in rows if state in ("survived", "no tests")])


def prepare(subject: Subject, place: Path) -> None:
    """Lay out ``place`` for mutmut: sources in src, tests beside them."""
    shutil.rmtree(place, ignore_errors=True)
    collection = place / COLLECTION
    collection.mkdir(parents=True)
    for package in ("sandbox_gateway", "sandbox_agent"):
        shutil.copytree(REPOSITORY / "gateway/src" / package, place / "src" / package)
    shutil.copytree(REPOSITORY / "plugins", collection / "plugins")
    for name in ("docs", "plugins", "tests"):
        shutil.copytree(REPOSITORY / name, place / name)
    # The suite's own conftest.py looks for leftovers on the machine; these tests leave none.
    (place / "tests/conftest.py").write_text(CONFTEST)
    (place / "pytest.ini").write_text(
        "[pytest]\npythonpath = . src\naddopts = --import-mode=importlib -p no:xdist\nanyio_mode = auto\n"
    )
    (place / "pyproject.toml").write_text(
        "[tool.mutmut]\n"
        'source_paths = ["src"]\n'
        f"only_mutate = {json.dumps(subject.sources)}\n"
        'also_copy = ["docs", "plugins", "pytest.ini"]\n'
        f"pytest_add_cli_args_test_selection = {json.dumps(subject.tests)}\n"
        "use_git_change_detection = false\ntimeout_constant = 10.0\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev mutation", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; default: all")
    names = parser.parse_args().subjects or list(SUBJECTS)
    if unknown := set(names) - SUBJECTS.keys():
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    rows, failed = [], []
    for name in names:
        started = time.monotonic()
        try:
            result = mutate(SUBJECTS[name], PLACE / name)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        for survivor in result.survivors[:LISTED]:
            print(f"survived: {survivor}")
        rate = 100 * result.killed / max(1, result.tried)
        rows.append(f"| {name} | {result.tried} | {result.killed} | {rate:.0f} % |")
        print(f"{name}: {result.counts} in {time.monotonic() - started:.0f} s", flush=True)
    print("\n| subject | mutants | killed | kill rate |\n|---|---:|---:|---:|")
    print("\n".join(rows))
    if failed:
        sys.exit(f"these could not be tried: {', '.join(failed)}")


if __name__ == "__main__":
    main()
