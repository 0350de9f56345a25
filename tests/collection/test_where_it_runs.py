"""Test whether a task runs in a process on the control node or as a module on the managed host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.runner import Target, Task

TASK: Task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}


def has_run_as_module(result: dict[str, Any]) -> bool:
    """Return whether the task ran as a module. Only modules report their invocation."""
    return "invocation" in result


@pytest.mark.parametrize(
    ("keywords", "options", "is_module"),
    [
        ({}, (), False),
        ({"environment": {"ANY": "thing"}}, (), True),
        ({}, ("-e", "ansible_connection=elsewhere"), True),
    ],
    ids=["local", "environment", "not local"],
)
def test_a_loopback_address_belongs_to_the_managed_host(
    memory_target: Target, keywords: dict[str, Any], options: tuple[str, ...], is_module: bool
) -> None:
    (created,) = memory_target.play({**TASK, "diff": True}, keywords=keywords, options=options)
    assert created["changed"], created
    assert has_run_as_module(created) is is_module
    (repeated,) = memory_target.play(TASK, keywords=keywords, options=options)
    assert not repeated["changed"]


def test_another_address_is_reached_from_the_control_node(memory_target: Target) -> None:
    # The address is reserved for documentation and is not reachable. A module would have reported its invocation.
    task = {"grove.sandbox.sandbox": {**TASK["grove.sandbox.sandbox"], "gateway_url": "http://192.0.2.1:1"}}
    (result,) = memory_target.play({**task, "timeout": 5}, options=("-e", "ansible_connection=elsewhere"))
    assert result["failed"] and not has_run_as_module(result)


def test_async_tasks_succeed(memory_target: Target) -> None:
    (created,) = memory_target.play({**TASK, "async": 60, "poll": 1})
    assert created["changed"] and created["sandbox"]["name"] == "box"


def test_environment_variables_replace_options(memory_target: Target) -> None:
    task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    variables = {"SANDBOX_GATEWAY_URL": memory_target.url, "SANDBOX_GATEWAY_TOKEN": ""}
    for options in ((), ("-e", "ansible_connection=elsewhere")):
        results = memory_target.play(task, options=options, environment=variables, keywords={"module_defaults": {}})
        assert not results[0].get("failed"), results


@pytest.mark.parametrize("group", ["all", "gateway"])
def test_module_defaults_of_an_action_group_apply(memory_target: Target, group: str) -> None:
    module_defaults = {f"group/grove.sandbox.{group}": {"gateway_url": memory_target.url, "gateway_token": ""}}
    created, listed = memory_target.play(
        TASK, {"grove.sandbox.sandbox_info": {"name": ["box"]}}, keywords={"module_defaults": module_defaults}
    )
    assert created["changed"] and listed["sandboxes"] == [created["sandbox"]]
