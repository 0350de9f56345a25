"""Test playbooks/plan.yml: its plan, runs that apply the plan, and the examples of docs/plans.md.

``GROVE_WRITE_DOCS=1 ./dev test tests/collection/test_plan_playbook.py`` writes the examples to the page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.api.native import plans
from sandbox_gateway.api.native.shapes import CaptureCostsShape
from tests.collection.recipes import PlaybookRun, check_refusal, check_success, run_playbook
from tests.collection.runner import Target, Task
from tests.support import session
from tests.support.memory_gateway import MemoryGateway

PAGE_PATH = session.REPOSITORY / "docs" / "plans.md"
WRITE_PAGE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/collection/test_plan_playbook.py"
START_MARKER = "<!-- example: made by tests/collection/test_plan_playbook.py -->"
END_MARKER = "<!-- end of example -->"
DOCUMENTED_GATEWAY = "unix:///run/sandbox-gateway/gateway.sock"
VARIABLES = {"plan_sandbox": "shop", "plan_variants": "small,large", "plan_winner": "large"}
TASKS_WITH_CHANGES = 11


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[MemoryGateway]:
    """A gateway that has not taken a snapshot yet, so that the costs of its plans are always the same."""
    (tmp_path / "gateway").mkdir()
    gateway = MemoryGateway(tmp_path / "gateway", log={"level": "warning"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


class Runner:
    """Runs the playbook. ``plan``: the value of the extra variable that the last check-mode run has published."""

    def __init__(self, scratch: Path, gateway: MemoryGateway) -> None:
        self.scratch, self.gateway = scratch, gateway
        self.plan = ""

    def run(self, *options: str, **variables: Any) -> PlaybookRun:
        return run_playbook(
            self.scratch,
            *("-i", "localhost,", "grove.sandbox.plan"),
            *("-e", json.dumps({**VARIABLES, **variables})),
            *options,
            SANDBOX_GATEWAY_URL=self.gateway.unix_url,
            ANSIBLE_CALLBACKS_ENABLED="grove.sandbox.plan",
            ANSIBLE_SHOW_CUSTOM_STATS="1",
        )

    def check(self, **variables: Any) -> dict[str, Any]:
        """Make a plan. Returns the document."""
        output = check_success(self.run("--check", **variables))
        self.plan = read_stats(output)["grove_sandbox_plan"]
        plan: dict[str, Any] = json.loads(self.plan)
        return plan

    def apply(self, **variables: Any) -> PlaybookRun:
        return self.run(**variables, grove_sandbox_plan=self.plan)

    def read_state(self) -> dict[str, Any]:
        """Return the objects of the gateway by name, without values that only a run knows."""
        with self.gateway.client() as api:
            sandboxes, snapshots, volumes = (
                api.get(path).json() for path in ("/sandboxes", "/snapshots?limit=1000", "/volumes")
            )
        return {
            "sandboxes": {each["name"]: each["metadata"] for each in sandboxes},
            "snapshots": sorted(name for each in snapshots for name in each["names"]),
            "volumes": {each["name"]: [mount["sandboxName"] for mount in each["mounts"]] for each in volumes},
        }


def read_stats(output: str) -> dict[str, Any]:
    _, _, text = output.partition("\tRUN: ")
    assert text, output
    stats: dict[str, Any]
    stats, _ = json.JSONDecoder().raw_decode(text)
    return stats


@pytest.fixture
def runner(tmp_path: Path, gateway: MemoryGateway) -> Runner:
    return Runner(tmp_path, gateway)


# --- the playbook ----------------------------------------------------------------------------------------------------


def test_a_run_does_exactly_what_the_published_plan_says(runner: Runner) -> None:
    before = runner.read_state()
    plan = runner.check()
    assert runner.read_state() == before
    assert plan["problems"] == [] and plan["playbooks"] == ["plan.yml"]
    assert [action["verb"] for entry in plan["entries"] for action in entry["actions"]] == [
        *("create", "create", "capture", "fork", "update", "update", "capture", "rollback"),
        *("update", "detach", "attach", "remove", "remove", "remove", "capture"),
    ]
    check_success(runner.apply(), TASKS_WITH_CHANGES)
    assert runner.read_state() == {
        "sandboxes": {"shop": {"variant": "large"}},
        "snapshots": ["shop-before-large", "shop-large"],
        "volumes": {"shop-data": ["shop"]},
    }
    check_success(runner.run(), 0)
    assert runner.check()["entries"] and not any(entry["actions"] for entry in runner.check()["entries"])


def test_a_winner_that_differs_from_the_plan_is_refused(runner: Runner) -> None:
    runner.check()
    check_refusal(runner.apply(plan_winner="small"), "this task changed nothing")
    assert runner.read_state()["snapshots"] == ["shop-start"]


def test_without_a_winner_the_forks_remain(runner: Runner) -> None:
    runner.check(plan_winner="")
    check_success(runner.apply(plan_winner=""))
    state = runner.read_state()
    assert state["sandboxes"] == {
        "shop": {},
        "shop-try-small": {"variant": "small"},
        "shop-try-large": {"variant": "large"},
    }
    check_success(runner.run(plan_winner=""), 0)
    assert runner.read_state() == state
    check_success(runner.run())
    assert runner.read_state()["sandboxes"] == {"shop": {"variant": "large"}}
    # A winner that is chosen later is forked from the current state of the sandbox.
    check_success(runner.run(plan_winner="small"))
    assert runner.read_state()["sandboxes"] == {"shop": {"variant": "small"}}


def test_names_can_be_numbers_and_variants_a_list(runner: Runner) -> None:
    check_success(runner.run(plan_sandbox=1, plan_variants=[1, "two"], plan_winner=1), TASKS_WITH_CHANGES)
    check_success(runner.run(plan_sandbox="2", plan_variants=3, plan_winner=3), TASKS_WITH_CHANGES)
    assert runner.read_state()["sandboxes"] == {"1": {"variant": "1"}, "2": {"variant": "3"}}


@pytest.mark.parametrize("variables", [{"plan_sandbox": ""}, {"plan_variants": ""}, {"plan_winner": "huge"}])
def test_invalid_variables_are_reported(runner: Runner, variables: dict[str, str]) -> None:
    check_refusal(runner.run(**variables), "Set plan_sandbox to the name of a sandbox")
    assert runner.read_state()["volumes"] == {}


# --- the lookup in other plays ---------------------------------------------------------------------------------------

PUBLISH: Task = {
    "ansible.builtin.set_stats": {
        "data": {"grove_sandbox_plan": "{{ lookup('grove.sandbox.plan') | to_json }}"},
        "aggregate": False,
    },
    "when": "ansible_check_mode",
    "run_once": True,
}
SHOW_STATS = {"ANSIBLE_SHOW_CUSTOM_STATS": "1"}


@pytest.fixture
def target(tmp_path: Path, gateway: MemoryGateway) -> Target:
    return Target(gateway.unix_url, tmp_path)


@pytest.mark.parametrize("as_text", [True, False])
def test_templates_in_a_plan_are_not_evaluated(target: Target, as_text: bool) -> None:
    odd_text = "{{ nope }}{% if %} \"'\\ \u2028 True"
    (target.scratch / "odd.json").write_text(json.dumps({"odd": {"__ansible_unsafe": odd_text}}))
    box = {"grove.sandbox.sandbox": {"name": "box", "template": "base", "metadata": {"odd": "{{ odd }}"}}}
    target.play(box, PUBLISH, options=("--check", "-e", "@odd.json"), environment=SHOW_STATS)
    text = read_stats(target.output)["grove_sandbox_plan"]
    plan = json.loads(text)
    assert plan["entries"][0]["actions"][0]["changes"][0]["after"]["metadata"] == {"odd": odd_text}
    (target.scratch / "plan.json").write_text(json.dumps({"grove_sandbox_plan": text if as_text else plan}))
    (result,) = target.play(box, options=("-e", "@odd.json", "-e", "@plan.json"))
    assert result["changed"] and result["sandbox"]["metadata"] == {"odd": odd_text}


def test_a_plan_that_lacks_a_failed_host_cannot_be_applied(target: Target) -> None:
    box = {"grove.sandbox.sandbox": {"name": "box-{{ inventory_hostname }}", "template": "base"}}
    failing = {"ansible.builtin.fail": {}, "when": "inventory_hostname == 'target'", "ignore_errors": False}
    play = {"hosts": "all", "gather_facts": False, "tasks": [failing, box, PUBLISH]}
    (target.scratch / "two.yml").write_text(json.dumps([play]))
    environment = {"SANDBOX_GATEWAY_URL": target.url, "ANSIBLE_TRANSPORT": "local"}
    run = run_playbook(target.scratch, "-i", "target,other,", "two.yml", "--check", **environment, **SHOW_STATS)
    text = read_stats(run.output)["grove_sandbox_plan"]
    problem = "a task failed on host target, or the host was unreachable"
    assert json.loads(text)["problems"] == [problem]
    variables = json.dumps({"grove_sandbox_plan": text})
    run = run_playbook(target.scratch, "-i", "other,", "two.yml", "-e", variables, **environment)
    check_refusal(run, f"the plan is incomplete ({problem})")


def test_the_lookup_fails_in_a_run_without_check_mode(target: Target) -> None:
    (result,) = target.play({"ansible.builtin.debug": {"msg": "{{ lookup('grove.sandbox.plan') }}"}})
    assert result["failed"] and "only a check-mode run has a plan" in json.dumps(result), result


# --- the example of the page -----------------------------------------------------------------------------------------


def test_the_page_shows_the_playbook_and_its_plan(runner: Runner) -> None:
    table = format_table(check_success(runner.run("--check")), runner)
    runner.check()
    recaps = [format_recap(check_success(run)) for run in (runner.apply(), runner.run())]
    expected = format_example(table, recaps)
    check_page(START_MARKER, END_MARKER, expected)


def test_the_page_shows_the_plan_of_its_first_play(
    runner: Runner, gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs of recent captures are fixed, because real ones differ between runs."""
    costs = CaptureCostsShape(pause_ms=6, memory_bytes_written=10 << 20, disk_bytes_unique=1 << 20)
    monkeypatch.setattr(plans, "_compute_typical_costs", lambda session: costs)
    with gateway.client() as api:
        api.post("/sandboxes", json={"templateID": "base", "name": "web"}).raise_for_status()
    play = PAGE_PATH.read_text().partition("```yaml\n")[2].partition("```")[0]
    (runner.scratch / "play.yml").write_text(play)
    run = run_playbook(
        runner.scratch,
        *("-i", "localhost,", "-c", "local", "play.yml", "--check"),
        SANDBOX_GATEWAY_URL=gateway.unix_url,
        ANSIBLE_CALLBACKS_ENABLED="grove.sandbox.plan",
    )
    start = "The table for the play above, on a gateway that knows the costs of recent snapshots:\n\n```text\n"
    table = format_table(check_success(run), runner)
    check_page(start, "```\n\n| sign | meaning |", f"{start}{table}\n")


def check_page(start: str, end: str, expected: str) -> None:
    """Check that the page has the text ``expected`` from ``start`` to ``end``, or write it if requested."""
    text = PAGE_PATH.read_text()
    assert text.count(start) == text.count(end) == 1
    expected_text = text[: text.index(start)] + expected + text[text.index(end) :]
    if os.environ.get("GROVE_WRITE_DOCS"):
        PAGE_PATH.write_text(expected_text)
    assert PAGE_PATH.read_text() == expected_text, f"the page does not match the playbook: run {WRITE_PAGE_COMMAND}"


def format_table(output: str, runner: Runner) -> str:
    _, _, table = output.partition("Gateway ")
    assert table, output
    lines = [line.rstrip() for line in f"Gateway {table}".splitlines()]
    return "\n".join(lines).strip().replace(runner.gateway.unix_url, DOCUMENTED_GATEWAY)


def format_recap(output: str) -> str:
    match = re.search(r"^localhost +: (ok=\d+) +(changed=\d+) +.*?(failed=\d+) +(skipped=\d+)", output, re.MULTILINE)
    assert match, output
    return "localhost: " + " ".join(match.groups())


def format_example(table: str, recaps: list[str]) -> str:
    playbook = (session.REPOSITORY / "playbooks" / "plan.yml").read_text().partition("\n- name: ")
    play = f"- name: {playbook[2]}".rstrip()
    return f"""{START_MARKER}

```yaml
{play}
```

The plan of its first run on a new gateway:

```text
{table}
```

The recap of the run that applies this plan, and of a second run:

```text
{recaps[0]}
{recaps[1]}
```

"""
