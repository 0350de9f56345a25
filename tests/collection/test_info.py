"""Test the ``*_info`` modules, and that the documentation lists every return value of each module."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.grove.sandbox.plugins.module_utils._fork import RESULT_KEYS
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY, KEYS_BY_KIND

from tests.collection.conftest import each_execution
from tests.collection.runner import Target, Task
from tests.support.faulty_gateway import FaultyGateway
from tests.support.session import REPOSITORY

MODULE_FILES = sorted((REPOSITORY / "plugins" / "modules").glob("*.py"))
KINDS_BY_RESULT_KEY = {
    "sandboxes": "sandbox",
    "snapshots": "snapshot",
    "backups": "snapshot",
    "templates": "template",
    "volumes": "volume",
}


def make_info_task(kind: str, **options: Any) -> Task:
    return {f"grove.sandbox.{kind}_info": options}


@each_execution
def test_info_modules_return_the_same_fields_as_the_other_modules(target: Target, keywords: dict[str, Any]) -> None:
    box, golden, data = (target.make_name(name) for name in ("box", "golden", "data"))
    *_, volume, captured, changed = target.verify(
        {"grove.sandbox.sandbox": {"name": box, "template": target.template}},
        {"grove.sandbox.sandbox_volume": {"name": data, "size_mb": 64, "snapshots": ["monday"]}},
        {"grove.sandbox.sandbox_snapshot": {"name": golden, "sandbox": box}},
        {"grove.sandbox.sandbox": {"name": box, "metadata": {"team": target.make_name("blue")}}},
        keywords=keywords,
    )
    sandboxes, by_id, snapshots, templates, volumes = target.play(
        make_info_task("sandbox", metadata={"team": target.make_name("blue")}, diverged=True),
        {**make_info_task("sandbox", name=changed["sandbox"]["id"]), "check_mode": True},
        make_info_task("sandbox_snapshot", sandbox=box),
        make_info_task("sandbox_template", name=target.template),
        make_info_task("sandbox_volume", name=[data]),
        keywords=keywords,
    )
    has_diverged = sandboxes["sandboxes"][0]["diverged"]
    assert isinstance(has_diverged, bool) and changed["sandbox"]["diverged"] is None
    assert sandboxes["sandboxes"] == [{**changed["sandbox"], "diverged": has_diverged}]
    assert by_id["sandboxes"] == [changed["sandbox"]]
    assert snapshots["snapshots"] == [captured["snapshot"]]
    assert [template["name"] for template in templates["templates"]] == [target.template]
    assert volumes["volumes"] == [{**volume["volume"], "used_mb": volumes["volumes"][0]["used_mb"]}]
    assert not any(result["changed"] for result in (sandboxes, by_id, snapshots, templates, volumes))


def test_filters_select_resources(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    def list_names(result: dict[str, Any], key: str = "sandboxes") -> list[str]:
        return [each["name"] for each in result[key]]

    memory_target.play(
        {"grove.sandbox.sandbox_template": {"name": "web"}},
        {"grove.sandbox.sandbox": {"name": ["a", "b", "c", "d"], "template": "base"}},
        {"grove.sandbox.sandbox": {"name": "e", "template": "web", "state": "paused"}},
        {"grove.sandbox.sandbox_snapshot": {"name": ["s1", "s2"], "sandbox": ["a", "e"]}},
        {"grove.sandbox.sandbox_snapshot": {"name": "s1", "sandbox": "a"}},
        {"grove.sandbox.sandbox_fork": {"snapshot": "s1", "names": ["f"]}},
    )
    all_sandboxes, paused, paused_and_running, web, forks, named, empty_list, later, snapshots_of_a, invalid = (
        memory_target.play(
            make_info_task("sandbox"),
            make_info_task("sandbox", state=["paused"]),
            make_info_task("sandbox", state=["paused", "running"]),
            make_info_task("sandbox", template="web"),
            make_info_task("sandbox", snapshot="s1"),
            make_info_task("sandbox", name=["d", "a", "none-such"]),
            make_info_task("sandbox", name=[]),
            make_info_task("sandbox", started_after="2999-01-01T00:00:00Z"),
            make_info_task("sandbox_snapshot", sandbox="a"),
            make_info_task("sandbox", state=["asleep"]),
        )
    )
    assert list_names(all_sandboxes) == list_names(paused_and_running) == ["a", "b", "c", "d", "e", "f"]
    assert list_names(paused) == list_names(web) == ["e"]
    assert list_names(forks) == ["f"]
    assert list_names(named) == ["a", "d"]
    assert list_names(empty_list) == list_names(later) == []
    assert list_names(snapshots_of_a, "snapshots") == ["s1"]
    assert invalid["failed"] and invalid["failure"]["kind"] == "invalid"
    assert {method for method, _ in faulty_gateway.calls[-12:]} == {"GET"}


@pytest.mark.parametrize("module", MODULE_FILES, ids=lambda module: module.stem)
def test_the_documentation_lists_every_return_value(module: Path) -> None:
    return_values = load_documentation(module, "RETURN")
    resource_lists = {key: entry for key, entry in return_values.items() if key in KINDS_BY_RESULT_KEY}
    assert resource_lists, module.stem
    for key, entry in resource_lists.items():
        expected_keys = RESULT_KEYS[key] if module.stem == "sandbox_fork" else KEYS_BY_KIND[KINDS_BY_RESULT_KEY[key]]
        assert list(entry["contains"]) == [*expected_keys, HOST_KEY], (module.stem, key)


def test_every_module_is_in_both_action_groups_and_has_an_action_plugin() -> None:
    names = [module.stem for module in MODULE_FILES]
    runtime_config = yaml.safe_load((REPOSITORY / "meta" / "runtime.yml").read_text())
    assert runtime_config["action_groups"] == {"all": names, "gateway": names}
    assert sorted(plugin.stem for plugin in (REPOSITORY / "plugins" / "action").glob("*.py")) == names


def load_documentation(module: Path, variable: str) -> dict[str, Any]:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == variable:
            document: Any = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(document, dict)
            return document
    raise AssertionError(f"{module.name} has no {variable}")
