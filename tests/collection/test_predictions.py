"""Test that predictions are exact, second runs change nothing, and diffs are readable, for all modules and options.

The gateway and its engine are real, but the host is in memory (tests/support/memory_host.py), because predictions
depend only on the engine. test_modules.py and test_volumes.py test the modules with real machines. docs/predictions.md
shows the results; with ``GROVE_WRITE_DOCS=1``, the test writes that page.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import InUseExternally
from sandbox_gateway.records import VolumeSnapshot
from tests.collection.predictions import AGE_IDENTITY, AGE_KEY, CASES, RESOURCE_KINDS, Case, insert_prefix, make_task
from tests.collection.runner import Result, Target, check_plan, check_prediction
from tests.support import memory_host, session
from tests.support.memory_gateway import MemoryGateway
from tests.support.session import REPOSITORY

PAGE_PATH = REPOSITORY / "docs" / "predictions.md"
WRITE_PAGE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/collection/test_predictions.py"
MAX_DIFF_LINES = 60
"""Maximum number of lines in the diff of a case."""


@dataclass(frozen=True)
class CaseResults:
    """The results of a case in a check-mode run, with the keyword ``check_mode``, in the run, and in a second run."""

    case: Case
    prefix: str
    predicted: Result
    predicted_alone: Result
    actual: Result
    repeated: Result


@pytest.fixture(scope="module")
def results_by_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, CaseResults]]:
    """The results of all cases.

    One play sets up the cases. Another runs in check mode, with one task for each case. The last one runs each task
    three times, first with the keyword ``check_mode``, so that it has no plan session.
    """
    root = tmp_path_factory.mktemp("predictions")
    session.get_run_path().mkdir(parents=True, exist_ok=True)
    Path(AGE_IDENTITY).write_text(AGE_KEY)
    gateway = MemoryGateway(root, ShellHost(), log={"level": "warning"})
    try:
        gateway.build_template("base")
        scratch = root / "scratch"
        scratch.mkdir()
        target = Target(gateway.unix_url, scratch)
        prefixes = {case: f"c{number:02}-" for number, case in enumerate(CASES)}
        setup_tasks = [make_task(*setup_task, prefixes[case]) for case in CASES for setup_task in case.setup_tasks]
        for result in target.play(*setup_tasks):
            assert not result.get("failed"), result
        for case in CASES:
            for change, name in case.changes:
                change_setup(gateway, target, change, insert_prefix(name, prefixes[case]))
        tasks = [make_task(case.module, case.options, prefixes[case]) for case in CASES]
        predicted = target.play(*tasks, options=("--check", "--diff"))
        task_runs = [{**task, **keywords} for task in tasks for keywords in ({"check_mode": True}, {}, {})]
        results = target.play(*task_runs, options=("--diff",))
        yield {
            case: CaseResults(case, prefixes[case], predicted[number], *results[3 * number : 3 * number + 3])
            for number, case in enumerate(CASES)
        }
    finally:
        gateway.end()


class ShellMachine(memory_host.Machine):
    """A machine whose shell commands always succeed."""

    async def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        modified_request = {**request, "args": ["exit", "0"]} if request["args"][0] == "/bin/sh" else request
        return await super()._exec(modified_request)


class ShellHost(memory_host.MemoryHost):
    machine_type = ShellMachine


def change_setup(gateway: MemoryGateway, target: Target, change: str, name: str) -> None:
    """Apply one of a case's changes to its setup.

    ``write`` writes a file in a sandbox; ``end`` stops the machine of a sandbox; ``outdate`` makes a template look as
    if another version of the gateway had built it; ``keep`` makes the host keep the snapshots of a volume, as a jail
    host does if another program has cloned them.
    """
    if change == "write":
        target.client.post(f"/sandboxes/{name}/exec", {"args": ["write", "/root/written", "something"]})
    elif change == "end":
        asyncio.run_coroutine_threadsafe(end_machine(gateway, name), gateway.loop).result(20)
        deadline = time.monotonic() + 20
        while [sandbox["state"] for sandbox in target.client.list_all("/sandboxes", name=name)] != ["paused"]:
            assert time.monotonic() < deadline, f"the gateway did not notice that the machine of {name} stopped"
            time.sleep(0.02)
    elif change == "outdate":
        gateway.engine.templates.get(name).recipe_digest = "0" * 64
    else:
        prevent_snapshot_removal(gateway, name)


async def end_machine(gateway: MemoryGateway, name: str) -> None:
    instance = gateway.engine.sandboxes.get(name).instance
    await gateway.host.machines.pop(instance).stop()
    gateway.host._exit(instance)


def prevent_snapshot_removal(gateway: MemoryGateway, name: str) -> None:
    """Make removals of the volume's snapshots fail with the error that ZfsStorage raises.

    tests/jail_zfs/test_volume_storage.py checks that ZfsStorage raises it.
    """
    volume_id, remove = gateway.engine.index.get_volume(name).id, gateway.host.remove_volume_snapshot

    async def refuse(snapshot: VolumeSnapshot) -> None:
        if snapshot.volume == volume_id:
            raise InUseExternally({"ZFS clone": {"0123456789ab": "made"}}, "Remove them first.")
        await remove(snapshot)

    gateway.host.remove_volume_snapshot = refuse


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}-{case.title}".replace(" ", "_"))
def test_check_mode_predicts_the_run_and_a_second_run_changes_nothing(
    case: Case, results_by_case: dict[Case, CaseResults]
) -> None:
    results = results_by_case[case]
    predicted, predicted_alone, actual, repeated = (
        results.predicted,
        results.predicted_alone,
        results.actual,
        results.repeated,
    )
    if case.unpredicted_error:
        for prediction in (predicted, predicted_alone):
            assert prediction["changed"] and not prediction.get("failed"), prediction
        assert actual["failed"] and actual["failure"]["kind"] == case.unpredicted_error, actual
        assert not actual["changed"], actual
        return
    if case.error_kind:
        assert actual["failed"] and actual["failure"]["kind"] == case.error_kind, actual
    for result in (predicted, actual, repeated):
        assert bool(result.get("failed")) is bool(case.error_kind), result
        assert result.get("failure", {}).get("kind") == actual.get("failure", {}).get("kind")
    check_plan(predicted, actual, case.title)
    if case.needs_session:
        assert predicted_alone["changed"] and not predicted_alone.get("failed"), predicted_alone
        return
    assert predicted_alone.get("msg") == actual.get("msg")
    if case.module.endswith("_info"):
        assert predicted_alone == actual == repeated and not actual["changed"]
        return
    check_prediction(predicted_alone, actual)
    assert repeated["changed"] is bool(case.repeated_actions), repeated
    if not case.repeated_actions:
        assert repeated["diff"] == {"before": {}, "after": {}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}-{case.title}".replace(" ", "_"))
def test_diffs_are_readable(case: Case, results_by_case: dict[Case, CaseResults]) -> None:
    actual = results_by_case[case].actual
    if "diff" not in actual:
        assert case.module.endswith("_info")
        return
    before, after = actual["diff"]["before"], actual["diff"]["after"]
    assert (before != after) is actual["changed"]
    assert set(before) | set(after) <= {outcome["name"] for outcome in actual["outcomes"] if outcome["changed"]}
    changed_lines = [line for line in make_diff(before, after) if line[:1] in "+-"]
    assert len(changed_lines) <= MAX_DIFF_LINES, changed_lines


def make_diff(before: Any, after: Any) -> list[str]:
    line_lists = [json.dumps(views, sort_keys=True, indent=4).splitlines() for views in (before, after)]
    return list(difflib.unified_diff(*line_lists, n=0, lineterm=""))[2:]


def test_the_page_matches_the_results(results_by_case: dict[Case, CaseResults]) -> None:
    page = format_page(results_by_case)
    if os.environ.get("GROVE_WRITE_DOCS"):
        PAGE_PATH.write_text(page)
    assert PAGE_PATH.exists() and PAGE_PATH.read_text() == page, (
        f"docs/predictions.md does not match the results: run {WRITE_PAGE_COMMAND}"
    )


# The page

PAGE_HEAD = f"""# Check mode and real runs

[tests/collection/test_predictions.py](../tests/collection/test_predictions.py) runs every state and option of every
module four times: in `ansible-playbook --check`, in a real run with the keyword `check_mode: true`, then for real, and
then for real again.

* The columns *check mode* and *run* show the actions that the result lists in `outcomes`. If both columns are the same,
  the prediction was right. The test then also compares the diff and every value that can be known in advance.
* The column *check mode* shows the check-mode run. The prediction with the keyword is the same, unless the
  [last section](#the-keyword-check_mode) lists it.
* The column *again* shows the second real run.
* A single `-` means that there was no action.
* A refusal is shown as its `failure.kind`. With `continue_on_error`, the module still handles the other names.

In the diffs, `…` stands for an id.

This page also shows the exceptions:

* Two modules are not idempotent with certain options: `sandbox_volume` with `rollback_to` and `sandbox_rollback` with
  `unless_clean: false` roll back on every run.
* Check mode does not predict failures whose cause only the host can find: a build fails, or a jail host must keep a
  snapshot of a volume because another program has cloned it. In these cases, the real run fails and changes nothing.
* Only with an API key that has the scope `admin`, or through the gateway's socket, does check mode predict that the
  `path` or the `image` of a template does not exist.
* Check mode does not know which files and directories earlier tasks of the run create. If `import_from` does not
  exist, check mode refuses the task, and the plan lists as unknown whether an earlier task writes the file. If the
  directory of `export_to` does not exist, the real run fails and changes nothing.
* With `age_identity`, check mode decrypts only the beginning of the file. If the rest was changed or is missing, the
  real run fails and imports nothing.
* In a [fleet](fleets.md#check-mode-and-plans), a run that does not apply a plan may choose other hosts for new
  sandboxes than check mode predicts.

The test generates this page: `{WRITE_PAGE_COMMAND}`.
It fails if its results differ from the page.
"""


KEYWORD_SECTION = """## The keyword check_mode

A task with the keyword `check_mode: true` in a real run uses no [plan session](plans.md#how-it-works). It is predicted
on its own, without the failures that only the gateway can find, for example because there is no room for a machine. In
these cases, the prediction differs from the prediction of a check-mode run:
"""


def format_page(results_by_case: dict[Case, CaseResults]) -> str:
    lines = [PAGE_HEAD]
    for module in RESOURCE_KINDS:
        table_header = "| options | check mode | run | again | diff |"
        lines += [f"## {module}", "", table_header, "|---|---|---|---|---|"]
        lines += [format_row(case_results) for case, case_results in results_by_case.items() if case.module == module]
        lines.append("")
    lines += [KEYWORD_SECTION]
    lines += [
        f"* `{results.case.module}`, {results.case.title}: {format_actions(results.predicted_alone, results.prefix)}"
        for results in results_by_case.values()
        if format_actions(results.predicted_alone, results.prefix) != format_actions(results.predicted, results.prefix)
    ]
    return "\n".join(lines).rstrip() + "\n"


def format_row(case_results: CaseResults) -> str:
    repeated_actions = format_actions(case_results.repeated, case_results.prefix)
    if case_results.case.repeated_actions:
        repeated_actions += f"; {case_results.case.repeated_actions}"
    cells = [
        case_results.case.title,
        format_actions(case_results.predicted, case_results.prefix),
        format_actions(case_results.actual, case_results.prefix),
        repeated_actions,
        format_diff(case_results),
    ]
    return f"| {' | '.join(cells)} |"


def format_actions(result: Result, prefix: str) -> str:
    """Return the actions with the names of their resources, as the page shows them."""
    names_by_actions: dict[str, list[str]] = {}
    for outcome in result.get("outcomes", []):
        if outcome["actions"]:
            names_by_actions.setdefault(", ".join(outcome["actions"]), []).append(outcome["name"].removeprefix(prefix))
    parts = [f"{verbs} {', '.join(f'`{name}`' for name in names)}" for verbs, names in names_by_actions.items()]
    if result.get("failed"):
        parts.append(f"refused: {result['failure']['kind']}")
    return "; ".join(parts) or "-"


def format_diff(case_results: CaseResults) -> str:
    if "diff" not in case_results.actual:
        return "-"
    before, after = case_results.actual["diff"]["before"], case_results.actual["diff"]["after"]
    removed, added = [name for name in before if name not in after], [name for name in after if name not in before]
    changes = [
        f"`{name}`: {key} {format_value(old)} → {format_value(new)}"
        for name in before
        if name in after
        for key, old, new in find_differences(before[name], after[name])
    ]
    lines = [*[f"- `{name}`" for name in removed], *changes, *[f"+ `{name}`" for name in added]]
    return mask_variable_parts("; ".join(lines), case_results.prefix) or "-"


def find_differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the old value and the new value of each leaf that differs. A missing value is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from find_differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path, before, after


def format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return " ".join(str(item) for item in value.values() if not isinstance(item, bool))
    return "nothing" if value in (None, "") else json.dumps(value).strip('"')


def mask_variable_parts(text: str, prefix: str) -> str:
    """Replace ids with an ellipsis, and remove the case's prefix and directory, because they differ between runs."""
    return re.sub(r"\b[0-9a-f]{12}\b", "…", text.replace(prefix, "").replace(f"{session.get_run_path()}/", ""))
