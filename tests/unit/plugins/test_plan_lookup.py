"""Test that the ``plan`` lookup returns the plan of a check-mode run, and fails in other runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible import constants as C
from ansible import context
from ansible.errors import AnsibleError
from ansible.module_utils.common.collections import ImmutableDict
from ansible_collections.grove.sandbox.plugins.lookup import plan as lookup
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_file, _plan_journal

from tests.unit.plugins.test_plan_file import ENTRY


@pytest.fixture(autouse=True)
def run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    start_run(monkeypatch)


def start_run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    check: bool = True,
    playbooks: Any = ("plays/site.yml",),
    has_callback: bool = True,
) -> None:
    """Start a run in which the callback, if it is enabled, has recorded no failure yet."""
    (_plan_journal.make_journal_path() / "failures.json").unlink(missing_ok=True)
    if has_callback:
        _plan_journal.record_failures([])
    monkeypatch.setattr(context, "CLIARGS", ImmutableDict(check=check, args=playbooks))


def look_up(*terms: str, variables: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    plugin = lookup.LookupModule()
    # This replaces the plugin loader, which needs the collection in a separate directory.
    plugin._load_name = "grove.sandbox.plan"
    definitions = yaml.safe_load(lookup.DOCUMENTATION)["options"]
    C.config.initialize_plugin_configuration_definitions("lookup", plugin._load_name, definitions)
    (document,) = plugin.run(list(terms), variables=variables, **options)
    # Artifacts of jobs are stored as JSON.
    plan: dict[str, Any] = json.loads(json.dumps(document))
    return _plan_file.check(plan, "the lookup")


def test_the_lookup_returns_the_plan_so_far() -> None:
    assert look_up()["entries"] == []
    _plan_journal.add_entry(ENTRY)
    plan = look_up()
    assert [entry["task"] for entry in plan["entries"]] == [ENTRY["task"]]
    assert plan["gateways"] == {ENTRY["gateway"]: ENTRY["gateway_url"]}
    assert plan["playbooks"] == ["site.yml"] and plan["problems"] == []


def test_the_lifetime_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_lifetime(plan: dict[str, Any]) -> float:
        times = [_plan_file._parse_time(plan[key]) for key in ("created_at", "expires_at")]
        return (times[1] - times[0]).total_seconds()

    assert compute_lifetime(look_up()) == 86400
    assert compute_lifetime(look_up(plan_lifetime=60)) == 60
    monkeypatch.setenv("GROVE_SANDBOX_PLAN_LIFETIME", "3600")
    assert compute_lifetime(look_up()) == 3600
    with pytest.raises(AnsibleError, match="plan_lifetime must be from 1 to 31536000 seconds, not 0"):
        look_up(plan_lifetime=0)


VARIABLES = {"ansible_play_hosts_all": ["web", "db"], "ansible_play_hosts": ["web"]}


def test_failures_and_tasks_without_a_plan_are_problems() -> None:
    _plan_journal.record_failures(["a task failed on host db"])
    _plan_journal.add_entry({"task": "a", "path": "site.yml:3", "host": "web", "problem": "the changes are unknown"})
    assert look_up(variables=VARIABLES)["problems"] == ["a task failed on host db", "the changes are unknown"]


@pytest.mark.parametrize("kind", ["one play", "two plays", "import", "two playbooks", "encrypted", "ad hoc"])
def test_without_the_callback_only_the_failures_of_the_only_play_are_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "site.yml"
    play: dict[str, Any] = {"hosts": "all"}
    plays = [play] * (2 if kind == "two plays" else 1)
    if kind == "import":
        plays = [{"ansible.builtin.import_playbook": "other.yml"}]
    path.write_text("$ANSIBLE_VAULT;1.1;AES256\n" if kind == "encrypted" else json.dumps(plays))
    playbooks = (str(path), str(path)) if kind == "two playbooks" else "web" if kind == "ad hoc" else (str(path),)
    start_run(monkeypatch, playbooks=playbooks, has_callback=False)
    known_problems = ["a task failed on host db, or the host was unreachable"]
    unknown_problems = ["it is unknown whether tasks failed, because the callback grove.sandbox.plan is not enabled"]
    expected = known_problems if kind in ("one play", "ad hoc") else unknown_problems
    assert look_up(variables=VARIABLES)["problems"] == expected


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("plays/site.yml", "./other.yml"), ["site.yml", "other.yml"]),
        ("all", []),
    ],
    ids=["playbooks", "ad hoc"],
)
def test_playbooks_are_named_without_their_directories(
    monkeypatch: pytest.MonkeyPatch, arguments: Any, names: list[str]
) -> None:
    start_run(monkeypatch, playbooks=arguments)
    assert look_up()["playbooks"] == names


def test_the_lookup_fails_outside_a_check_mode_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(monkeypatch, check=False)
    with pytest.raises(AnsibleError, match="only a check-mode run has a plan"):
        look_up()


def test_arguments_are_refused() -> None:
    with pytest.raises(AnsibleError, match="accepts only the option plan_lifetime"):
        look_up("plan.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is empty"),
        ({}, "is empty"),
        ("{", "it is not JSON"),
        ('{"format": NaN}', "it is not JSON"),
        ({"created_at": _plan_file._parse_time("2026-11-24T17:40:00Z")}, "pass the plan as JSON text"),
    ],
)
def test_an_extra_variable_that_is_not_a_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: Any, message: str
) -> None:
    monkeypatch.setattr(_plan_journal, "load_extra_vars", lambda _: {"grove_sandbox_plan": value})
    with pytest.raises(_plan_journal.Failure, match=message):
        _plan_journal.load_applied_plan()


@pytest.mark.parametrize("is_text", [True, False])
def test_an_extra_variable_can_be_the_plan_or_its_text(monkeypatch: pytest.MonkeyPatch, is_text: bool) -> None:
    plan = look_up()
    value = json.dumps(plan) if is_text else plan
    monkeypatch.setattr(_plan_journal, "load_extra_vars", lambda _: {"grove_sandbox_plan": value})
    assert _plan_journal.load_applied_plan() == plan
