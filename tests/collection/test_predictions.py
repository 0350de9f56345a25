"""Every module, state and option: check mode predicts the run, a second run changes nothing, the diff is readable.

The gateway and its engine are real, the machines are in memory (tests/api/memory_host.py): the predictions concern the
engine, and test_modules.py and test_volumes.py check the same modules above real machines. docs/predictions.md holds
the results; ``GROVE_WRITE_DOCS=1`` writes it.
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
from typing import Any

import pytest

from sandbox_gateway.errors import UsedOutside
from sandbox_gateway.records import VolumeSnapshot
from tests.api import memory_host
from tests.api.memory_gateway import MemoryGateway
from tests.collection.predictions import CASES, THINGS, Case, task, with_prefix
from tests.collection.runner import Result, Target, check_prediction
from tests.support.session import REPOSITORY

PAGE = REPOSITORY / "docs" / "predictions.md"
COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/collection/test_predictions.py"
LONGEST = 60
"""The most lines that the diff of a case may have."""


@dataclass(frozen=True)
class Outcome:
    """The results of a case: check mode, the run, a second run."""

    case: Case
    prefix: str
    said: Result
    done: Result
    again: Result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Outcome]]:
    """All cases in two plays: one sets them up, the other runs each task three times."""
    root = tmp_path_factory.mktemp("predictions")
    gateway = MemoryGateway(root, ShellHost(), log={"level": "warning"})
    try:
        gateway.build_template("base")
        scratch = root / "scratch"
        scratch.mkdir()
        target = Target(gateway.unix_url, scratch)
        prefixes = {case: f"c{number:02}-" for number, case in enumerate(CASES)}
        before = [task(*each, prefixes[case]) for case in CASES for each in case.before]
        for result in target.play(*before):
            assert not result.get("failed"), result
        for case in CASES:
            for what, whom in case.meanwhile:
                change_setup(gateway, target, what, with_prefix(whom, prefixes[case]))
        thrice = [
            {**task(case.module, case.options, prefixes[case]), **way}
            for case in CASES
            for way in ({"check_mode": True}, {}, {})
        ]
        results = target.play(*thrice, options=("--diff",))
        yield {
            case: Outcome(case, prefixes[case], *results[3 * number : 3 * number + 3])
            for number, case in enumerate(CASES)
        }
    finally:
        gateway.end()


class ShellMachine(memory_host.Machine):
    """Its shell finds everything in order."""

    async def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        known = {**request, "args": ["exit", "0"]} if request["args"][0] == "/bin/sh" else request
        return await super()._exec(known)


class ShellHost(memory_host.MemoryHost):
    machine_type = ShellMachine


def change_setup(gateway: MemoryGateway, target: Target, what: str, whom: str) -> None:
    """``write`` a file in a sandbox; ``end`` its machine; ``outdate`` a template, as if another version of the gateway
    had built it; ``keep`` the snapshots of a volume as a jail host does."""
    if what == "write":
        target.client.post(f"/sandboxes/{whom}/exec", {"args": ["write", "/root/written", "something"]})
    elif what == "end":
        asyncio.run_coroutine_threadsafe(end_machine(gateway, whom), gateway.loop).result(20)
        deadline = time.monotonic() + 20
        while [each["state"] for each in target.client.pages("/sandboxes", name=whom)] != ["paused"]:
            assert time.monotonic() < deadline, f"that the machine of {whom} ended was not noticed"
            time.sleep(0.02)
    elif what == "outdate":
        gateway.engine.templates.get(whom).recipe_digest = "0" * 64
    else:
        keep_snapshots(gateway, whom)


async def end_machine(gateway: MemoryGateway, name: str) -> None:
    instance = gateway.engine.sandboxes.get(name).instance
    await gateway.host.machines.pop(instance).stop()
    gateway.host._exit(instance)


def keep_snapshots(gateway: MemoryGateway, name: str) -> None:
    """The error is that of ZfsStorage; tests/jail_zfs/test_volume_storage.py checks that it raises it."""
    kept, remove = gateway.engine.index.volume(name).id, gateway.host.remove_volume_snapshot

    async def refuse(snapshot: VolumeSnapshot) -> None:
        if snapshot.volume == kept:
            raise UsedOutside({"ZFS clone": {"0123456789ab": "made"}}, "Remove them first.")
        await remove(snapshot)

    gateway.host.remove_volume_snapshot = refuse


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}-{case.title}".replace(" ", "_"))
def test_check_mode_predicts_the_run_and_a_second_run_changes_nothing(case: Case, found: dict[Case, Outcome]) -> None:
    said, done, again = (found[case].said, found[case].done, found[case].again)
    if case.unforeseen:
        assert said["changed"] and not said.get("failed"), said
        assert done["failed"] and done["failure"]["kind"] == case.unforeseen, done
        assert not done["changed"], done
        return
    if case.fails:
        assert done["failed"] and done["failure"]["kind"] == case.fails, done
    for result in (said, done, again):
        assert bool(result.get("failed")) is bool(case.fails), result
        assert result.get("failure", {}).get("kind") == done.get("failure", {}).get("kind")
    assert said.get("msg") == done.get("msg")
    if case.module.endswith("_info"):
        assert said == done == again and not done["changed"]
        return
    check_prediction(said, done)
    assert again["changed"] is bool(case.again), again
    if not case.again:
        assert again["diff"] == {"before": {}, "after": {}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}-{case.title}".replace(" ", "_"))
def test_diffs_are_readable(case: Case, found: dict[Case, Outcome]) -> None:
    done = found[case].done
    if "diff" not in done:
        assert case.module.endswith("_info")
        return
    before, after = done["diff"]["before"], done["diff"]["after"]
    assert (before != after) is done["changed"]
    assert set(before) | set(after) <= {outcome["name"] for outcome in done["outcomes"] if outcome["changed"]}
    shown = [line for line in ansible_diff(before, after) if line[:1] in "+-"]
    assert len(shown) <= LONGEST, shown


def ansible_diff(before: Any, after: Any) -> list[str]:
    texts = [json.dumps(each, sort_keys=True, indent=4).splitlines() for each in (before, after)]
    return list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]


def test_the_page_matches_the_results(found: dict[Case, Outcome]) -> None:
    page = page_text(found)
    if os.environ.get("GROVE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.exists() and PAGE.read_text() == page, f"docs/predictions.md is not what was found: run {COMMAND}"


# The page

HEAD = f"""# Check mode and runs

[tests/collection/test_predictions.py](../tests/collection/test_predictions.py) runs every state and option of every
module three times: in check mode, then for real, and then for real a second time. The columns *check mode* and *run*
show the actions that the result lists in `outcomes`. If they are the same, the prediction was right. The test then also
compares the diff, and every value that can be known in advance. The column *again* shows the second real run. A single
`-` means that there was no action. A refusal is shown as its `failure.kind`; with `continue_on_error` the module still
handles the other names.

In the diffs `…` stands for an id.

This page also shows where the results are not ideal. Two modules are only partly idempotent: `sandbox_volume` with
`rollback_to`, and `sandbox_rollback` with `unless_clean: false`, change something on every run. Check mode also cannot
predict results that only the host knows: whether the `path` of a template exists, whether a build succeeds, and whether
a jail host must keep a snapshot of a volume because another volume was made from it. In these cases the run is refused
and changes nothing.

The test generates this page: `{COMMAND}`.
It fails if its results differ from the page.
"""


def page_text(found: dict[Case, Outcome]) -> str:
    lines = [HEAD]
    for module in THINGS:
        head = "| options | check mode | run | again | diff |"
        lines += [f"## {module}", "", head, "|---|---|---|---|---|"]
        lines += [row(each) for case, each in found.items() if case.module == module]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def row(each: Outcome) -> str:
    again = actions(each.again, each.prefix)
    if each.case.again:
        again += f"; {each.case.again}"
    cells = [each.case.title, actions(each.said, each.prefix), actions(each.done, each.prefix), again, diff(each)]
    return f"| {' | '.join(cells)} |"


def actions(result: Result, prefix: str) -> str:
    """The names by action."""
    did: dict[str, list[str]] = {}
    for outcome in result.get("outcomes", []):
        if outcome["actions"]:
            did.setdefault(", ".join(outcome["actions"]), []).append(outcome["name"].removeprefix(prefix))
    said = [f"{verbs} {', '.join(f'`{name}`' for name in names)}" for verbs, names in did.items()]
    if result.get("failed"):
        said.append(f"refused: {result['failure']['kind']}")
    return "; ".join(said) or "-"


def diff(each: Outcome) -> str:
    if "diff" not in each.done:
        return "-"
    before, after = each.done["diff"]["before"], each.done["diff"]["after"]
    gone, come = [name for name in before if name not in after], [name for name in after if name not in before]
    changes = [
        f"`{name}`: {key} {plain_value(then)} → {plain_value(now)}"
        for name in before
        if name in after
        for key, then, now in differences(before[name], after[name])
    ]
    shown = [*[f"- `{name}`" for name in gone], *changes, *[f"+ `{name}`" for name in come]]
    return remove_changing_parts("; ".join(shown), each.prefix) or "-"


def differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf that differs: its path, the old and the new value; None for a missing one."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key), after.get(key), f"{place}.{key}" if place else key)
    elif before != after:
        yield place, before, after


def plain_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(plain_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return " ".join(str(item) for item in value.values() if not isinstance(item, bool))
    return "nothing" if value in (None, "") else json.dumps(value).strip('"')


def remove_changing_parts(text: str, prefix: str) -> str:
    """Remove the parts that differ between runs: the case's prefix, and ids."""
    return re.sub(r"\b[0-9a-f]{12}\b", "…", text.replace(prefix, ""))
