"""Test the ``*_info`` modules, and that the documentation lists every return value of each module."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.grove.sandbox.plugins.module_utils._fork import RESULT_KEYS
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import KEYS

from tests.collection.conftest import each_execution
from tests.collection.runner import Target, Task
from tests.support.faulty_gateway import FaultyGateway
from tests.support.session import REPOSITORY

MODULES = sorted((REPOSITORY / "plugins" / "modules").glob("*.py"))
KINDS = {
    "sandboxes": "sandbox",
    "snapshots": "snapshot",
    "backups": "snapshot",
    "templates": "template",
    "volumes": "volume",
}


def info_task(kind: str, **options: Any) -> Task:
    return {f"grove.sandbox.{kind}_info": options}


@each_execution
def test_info_modules_return_the_same_fields_as_the_other_modules(target: Target, keywords: dict[str, Any]) -> None:
    box, golden, data = (target.name(name) for name in ("box", "golden", "data"))
    *_, volume, captured, changed = target.verify(
        {"grove.sandbox.sandbox": {"name": box, "template": target.template}},
        {"grove.sandbox.sandbox_volume": {"name": data, "size_mb": 64, "snapshots": ["monday"]}},
        {"grove.sandbox.sandbox_snapshot": {"name": golden, "sandbox": box}},
        {"grove.sandbox.sandbox": {"name": box, "metadata": {"team": target.name("blue")}}},
        keywords=keywords,
    )
    sandboxes, by_id, snapshots, templates, volumes = target.play(
        info_task("sandbox", metadata={"team": target.name("blue")}, diverged=True),
        {**info_task("sandbox", name=changed["sandbox"]["id"]), "check_mode": True},
        info_task("sandbox_snapshot", sandbox=box),
        info_task("sandbox_template", name=target.template),
        info_task("sandbox_volume", name=[data]),
        keywords=keywords,
    )
    diverged = sandboxes["sandboxes"][0]["diverged"]
    assert isinstance(diverged, bool) and changed["sandbox"]["diverged"] is None
    assert sandboxes["sandboxes"] == [{**changed["sandbox"], "diverged": diverged}]
    assert by_id["sandboxes"] == [changed["sandbox"]]
    assert snapshots["snapshots"] == [captured["snapshot"]]
    assert [template["name"] for template in templates["templates"]] == [target.template]
    assert volumes["volumes"] == [{**volume["volume"], "used_mb": volumes["volumes"][0]["used_mb"]}]
    assert not any(result["changed"] for result in (sandboxes, by_id, snapshots, templates, volumes))


def test_filters_select_resources(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    def names_of(result: dict[str, Any], key: str = "sandboxes") -> list[str]:
        return [each["name"] for each in result[key]]

    memory_target.play(
        {"grove.sandbox.sandbox_template": {"name": "web"}},
        {"grove.sandbox.sandbox": {"name": ["a", "b", "c", "d"], "template": "base"}},
        {"grove.sandbox.sandbox": {"name": "e", "template": "web", "state": "paused"}},
        {"grove.sandbox.sandbox_snapshot": {"name": ["s1", "s2"], "sandbox": ["a", "e"]}},
        {"grove.sandbox.sandbox_snapshot": {"name": "s1", "sandbox": "a"}},
        {"grove.sandbox.sandbox_fork": {"snapshot": "s1", "names": ["f"]}},
    )
    all_sandboxes, paused, both, web, forks, named, empty_list, later, snapshots_of_a, invalid = memory_target.play(
        info_task("sandbox"),
        info_task("sandbox", state=["paused"]),
        info_task("sandbox", state=["paused", "running"]),
        info_task("sandbox", template="web"),
        info_task("sandbox", snapshot="s1"),
        info_task("sandbox", name=["d", "a", "none-such"]),
        info_task("sandbox", name=[]),
        info_task("sandbox", started_after="2999-01-01T00:00:00Z"),
        info_task("sandbox_snapshot", sandbox="a"),
        info_task("sandbox", state=["asleep"]),
    )
    assert names_of(all_sandboxes) == names_of(both) == ["a", "b", "c", "d", "e", "f"]
    assert names_of(paused) == names_of(web) == ["e"]
    assert names_of(forks) == ["f"]
    assert names_of(named) == ["a", "d"]
    assert names_of(empty_list) == names_of(later) == []
    assert names_of(snapshots_of_a, "snapshots") == ["s1"]
    assert invalid["failed"] and invalid["failure"]["kind"] == "invalid"
    assert {method for method, _ in faulty_gateway.calls[-12:]} == {"GET"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_the_documentation_lists_every_returned_value(module: Path) -> None:
    return_values = documented_keys(module, "RETURN")
    lists = {key: entry for key, entry in return_values.items() if key in KINDS}
    assert lists, module.stem
    for key, entry in lists.items():
        keys = RESULT_KEYS[key] if module.stem == "sandbox_fork" else KEYS[KINDS[key]]
        assert list(entry["contains"]) == list(keys), (module.stem, key)


def test_every_module_is_in_both_action_groups_and_has_an_action_plugin() -> None:
    names = [module.stem for module in MODULES]
    runtime = yaml.safe_load((REPOSITORY / "meta" / "runtime.yml").read_text())
    assert runtime["action_groups"] == {"all": names, "gateway": names}
    assert sorted(plugin.stem for plugin in (REPOSITORY / "plugins" / "action").glob("*.py")) == names


def documented_keys(module: Path, variable: str) -> dict[str, Any]:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == variable:
            document: Any = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(document, dict)
            return document
    raise AssertionError(f"{module.name} has no {variable}")
