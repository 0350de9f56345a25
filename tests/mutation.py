"""Mutation testing of the pure modules: ``./dev mutation [SUBJECT…]``.

mutmut changes one expression of a subject at a time and runs the subject's tests. A mutant that no test detects
survives. Each subject is tested in its own tree under ``.cache/mutation``; the repository itself is not modified.
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
WORK_DIRECTORY = REPOSITORY / ".cache" / "mutation"
GATEWAY_PATH = "src/sandbox_gateway"
COLLECTION_PATH = "src/ansible_collections/grove/sandbox"
MODULE_UTILS_PATH = f"{COLLECTION_PATH}/plugins/module_utils"
TIME_LIMIT_SECONDS = 600
"""Time limit for one subject in seconds. Mutants that are still untested count as not checked."""
MAX_PRINTED_SURVIVORS = 40
"""Maximum number of survivors to print for one subject."""

CONFTEST_TEXT = """
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


UNIT_TEST_PATH = "tests/unit/gateway"
ENGINE_TEST_PATH = "tests/unit/engine"
PLAN_TEST_PATHS = ("tests/unit/plugins",)
SUBJECTS = {
    "plan": Subject((f"{MODULE_UTILS_PATH}/_plan.py",), PLAN_TEST_PATHS),
    "plan-fork": Subject((f"{MODULE_UTILS_PATH}/_fork.py",), PLAN_TEST_PATHS),
    "plan-sandbox": Subject((f"{MODULE_UTILS_PATH}/_sandbox.py",), PLAN_TEST_PATHS),
    "plan-names": Subject((f"{MODULE_UTILS_PATH}/_names.py",), PLAN_TEST_PATHS),
    "records": Subject((f"{GATEWAY_PATH}/records.py",), (f"{UNIT_TEST_PATH}/test_records.py",)),
    "recipes": Subject(
        (f"{GATEWAY_PATH}/recipes.py",), (f"{UNIT_TEST_PATH}/test_recipes.py", f"{UNIT_TEST_PATH}/test_records.py")
    ),
    "index": Subject(
        tuple(f"{GATEWAY_PATH}/engine/{name}.py" for name in ("index", "lineage")),
        tuple(f"{ENGINE_TEST_PATH}/test_{name}.py" for name in ("index", "lineage")),
    ),
    "retention": Subject((f"{GATEWAY_PATH}/engine/retention.py",), (f"{ENGINE_TEST_PATH}/test_retention.py",)),
    "guest-json": Subject((f"{GATEWAY_PATH}/engine/guest_json.py",), (f"{ENGINE_TEST_PATH}/test_guest_json.py",)),
    "network-policy": Subject(
        (f"{GATEWAY_PATH}/hosts/network_policy.py",), ("tests/unit/hosts/test_network_policy.py",)
    ),
    "zfs-parse": Subject(
        tuple(f"src/zfs_core/{name}.py" for name in ("names", "options", "parse")),
        ("tests/unit/zfs_core/test_parse.py",),
    ),
    "pages": Subject(
        tuple(f"{GATEWAY_PATH}/hosts/kvm_xfs/memory/{name}.py" for name in ("copying", "listing", "ram", "page_runs")),
        ("tests/kvm_xfs/test_memory.py",),
    ),
}


@dataclass(frozen=True)
class Result:
    counts: dict[str, int]
    survivors: list[str]

    @property
    def killed_count(self) -> int:
        return self.counts.get("killed", 0) + self.counts.get("timeout", 0)

    @property
    def tested_count(self) -> int:
        return sum(self.counts.values()) - self.counts.get("not checked", 0) - self.counts.get("skipped", 0)


def run_mutmut(subject: Subject, directory: Path) -> Result:
    """Run mutmut for a subject. Raise RuntimeError if it fails, for example because a test fails on unchanged code."""
    prepare_tree(subject, directory)
    environment = {**os.environ, "PYTHONPATH": ""}
    job_count = str(os.cpu_count() or 1)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "mutmut", "run", "--max-children", job_count],
            cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT_SECONDS,
        )  # fmt: skip
        if run.returncode != 0:
            raise RuntimeError(run.stdout[-3000:])
    except subprocess.TimeoutExpired:
        print(f"stopped mutmut after {TIME_LIMIT_SECONDS} s", file=sys.stderr)
    listing = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=directory, env=environment, text=True, capture_output=True, check=True,
    )  # fmt: skip
    mutants = [tuple(line.strip().rsplit(": ", 1)) for line in listing.stdout.splitlines() if ": " in line]
    counts = dict(collections.Counter(state for _, state in mutants))
    return Result(counts, [name for name, state in mutants if state in ("survived", "no tests")])


def prepare_tree(subject: Subject, directory: Path) -> None:
    """Fill ``directory`` with the sources (in ``src``), the tests and the settings that mutmut needs."""
    shutil.rmtree(directory, ignore_errors=True)
    collection_directory = directory / COLLECTION_PATH
    collection_directory.mkdir(parents=True)
    for package in ("sandbox_gateway", "sandbox_agent", "zfs_core"):
        shutil.copytree(REPOSITORY / "gateway/src" / package, directory / "src" / package)
    shutil.copytree(REPOSITORY / "plugins", collection_directory / "plugins")
    for name in ("docs", "plugins", "tests"):
        shutil.copytree(REPOSITORY / name, directory / name)
    # The suite's own conftest.py checks for leftovers on the machine, but these tests leave none.
    (directory / "tests/conftest.py").write_text(CONFTEST_TEXT)
    (directory / "pytest.ini").write_text(
        "[pytest]\npythonpath = . src\naddopts = --import-mode=importlib -p no:xdist\nanyio_mode = auto\n"
    )
    (directory / "pyproject.toml").write_text(
        "[tool.mutmut]\n"
        'source_paths = ["src"]\n'
        f"only_mutate = {json.dumps(subject.sources)}\n"
        'also_copy = ["docs", "plugins", "pytest.ini"]\n'
        f"pytest_add_cli_args_test_selection = {json.dumps(subject.tests)}\n"
        "use_git_change_detection = false\ntimeout_constant = 10.0\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev mutation", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"one of {', '.join(SUBJECTS)} (default: all)")
    names = parser.parse_args().subjects or list(SUBJECTS)
    if unknown := set(names) - SUBJECTS.keys():
        parser.error(f"unknown subject {', '.join(sorted(unknown))}: choose from {', '.join(SUBJECTS)}")
    rows, failed_subjects = [], []
    for name in names:
        start_time = time.monotonic()
        try:
            result = run_mutmut(SUBJECTS[name], WORK_DIRECTORY / name)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            failed_subjects.append(name)
            continue
        for survivor in result.survivors[:MAX_PRINTED_SURVIVORS]:
            print(f"survived: {survivor}")
        kill_rate = 100 * result.killed_count / max(1, result.tested_count)
        rows.append(f"| {name} | {result.tested_count} | {result.killed_count} | {kill_rate:.0f} % |")
        print(f"{name}: {result.counts} in {time.monotonic() - start_time:.0f} s", flush=True)
    print("\n| subject | mutants | killed | kill rate |\n|---|---:|---:|---:|")
    print("\n".join(rows))
    if failed_subjects:
        sys.exit(f"these subjects could not be tested: {', '.join(failed_subjects)}")


if __name__ == "__main__":
    main()
