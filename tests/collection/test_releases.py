"""The collection is one release older than the gateway, or one release newer, with every module and option.

The cases are those of test_predictions.py, in the release of the collection. Cases whose setup needs access to the
gateway's process are omitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection.predictions import AGE_IDENTITY, AGE_KEY, CASES, insert_prefix, make_task
from tests.collection.runner import Result, Target
from tests.support.memory_gateway import MemoryGateway
from tests.support.release import Release, extract_previous_release

Data = dict[str, Any]
_each_selection = pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(10, id="sample")]
)
"""Takes all cases, or every tenth one."""
_UNKNOWN_TO_OLDER_GATEWAYS = {"export_since"}
"""Cases with a parameter that the previous release ignores: it writes a whole file (docs/snapshots.md)."""
_DUMP_CASES = """
import json
from tests.collection.predictions import CASES
fields = ("module", "title", "options", "setup_tasks", "changes", "repeated_actions", "error_kind", "unpredicted_error")
print(json.dumps([{field: getattr(case, field) for field in fields} for case in CASES]))
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return extract_previous_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[MemoryGateway]:
    root = tmp_path / "gateway"
    root.mkdir()
    gateway = MemoryGateway(root, log={"level": "warning"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


def _run_cases(target: Target, cases: list[Data], environment: dict[str, str]) -> list[tuple[Data, list[Result]]]:
    """Return each case with its results in check mode, in a run, and in a second run."""
    cases = [case for case in cases if not case["changes"] and not case["unpredicted_error"]]
    prefixes = [f"r{number:03}-" for number in range(len(cases))]
    setup_tasks = [
        make_task(*setup_task, prefix)
        for case, prefix in zip(cases, prefixes, strict=True)
        for setup_task in case["setup_tasks"]
    ]
    for result in target.play(*setup_tasks, environment=environment):
        assert not result.get("failed"), result
    tasks = [make_task(case["module"], case["options"], prefix) for case, prefix in zip(cases, prefixes, strict=True)]
    predicted = target.play(*tasks, options=("--check",), environment=environment)
    repeated_tasks = [task for task in tasks for _ in range(2)]
    results = target.play(*repeated_tasks, environment=environment)
    return [
        (insert_prefix(case, prefix), [predicted[number], *results[2 * number : 2 * number + 2]])
        for number, (case, prefix) in enumerate(zip(cases, prefixes, strict=True))
    ]


def _find_problem(case: Data, results: list[Result]) -> str:
    """Return how the results of a case differ from those of gateways and collections of one release, or ""."""
    predicted, actual, repeated = results
    if case["error_kind"]:
        kinds = [result.get("failure", {}).get("kind") for result in results]
        return "" if set(kinds) == {case["error_kind"]} else f"refused with {kinds}"
    for result in results:
        if result.get("failed"):
            return f"failed: {result.get('msg')} {result.get('exception', '')}"
    if (predicted["changed"], predicted.get("outcomes")) != (actual["changed"], actual.get("outcomes")):
        return f"predicted {predicted.get('outcomes')}, but did {actual.get('outcomes')}"
    if repeated["changed"] is not bool(case["repeated_actions"]):
        return f"again: {repeated.get('outcomes')}"
    return ""


@_each_selection
def test_an_older_collection_works_with_this_gateway(
    release: Release, gateway: MemoryGateway, tmp_path: Path, step: int
) -> None:
    cases = json.loads(release.run_python(_DUMP_CASES))[::step]
    environment = {"ANSIBLE_COLLECTIONS_PATH": str(release.collections)}
    problems = {
        f"{case['module']}: {case['title']}": problem
        for case, results in _run_cases(Target(gateway.unix_url, tmp_path), cases, environment)
        if (problem := _find_problem(case, results))
    }
    assert problems == {}
    assert len(cases) > 100 / step


@_each_selection
def test_this_collection_works_with_an_older_gateway(release: Release, tmp_path: Path, step: int) -> None:
    """That gateway must refuse the options that it does not know, and the error must say to upgrade it."""
    Path(AGE_IDENTITY).parent.mkdir(parents=True, exist_ok=True)
    Path(AGE_IDENTITY).write_text(AGE_KEY)
    known_cases = [case for case in CASES[::step] if case.title not in _UNKNOWN_TO_OLDER_GATEWAYS]
    cases = [{field: getattr(case, field) for field in case.__dataclass_fields__} for case in known_cases]
    problems, refused = {}, []
    root = tmp_path / "gateway"
    root.mkdir()
    with release.gateway(root) as url:
        for case, results in _run_cases(Target(url, tmp_path), cases, {}):
            actual = results[1]
            if actual.get("failure", {}).get("kind") == "too_old":
                assert "upgrade the gateway" in actual["msg"] or "upgrade it with" in actual["msg"]
                refused.append(case["title"])
            elif problem := _find_problem(case, results):
                problems[f"{case['module']}: {case['title']}"] = problem
    assert problems == {}
    print(f"{len(cases)} cases, of which the older gateway refused {refused}")
    assert len(refused) < len(cases) / 10 + 1, refused
