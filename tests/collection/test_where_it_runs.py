"""Where a task runs: in the control node's process, or by the module on the managed host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.runner import Target, Task

TASK: Task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}


def ran_as_module(result: dict[str, Any]) -> bool:
    """Whether the task ran as a module: only a module reports its invocation."""
    return "invocation" in result


@pytest.mark.parametrize(
    ("keywords", "options", "module"),
    [
        ({}, (), False),
        ({"environment": {"ANY": "thing"}}, (), True),
        ({}, ("-e", "ansible_connection=elsewhere"), True),
    ],
    ids=["local", "environment", "not local"],
)
def test_a_loopback_address_belongs_to_the_managed_host(
    in_memory: Target, keywords: dict[str, Any], options: tuple[str, ...], module: bool
) -> None:
    (made,) = in_memory.play({**TASK, "diff": True}, keywords=keywords, options=options)
    assert made["changed"], made
    assert ran_as_module(made) is module
    (again,) = in_memory.play(TASK, keywords=keywords, options=options)
    assert not again["changed"]


def test_another_address_is_reached_from_the_control_node(in_memory: Target) -> None:
    # The address is reserved for documentation and does not answer; a module would have reported its invocation.
    task = {"grove.sandbox.sandbox": {**TASK["grove.sandbox.sandbox"], "gateway_url": "http://192.0.2.1:1"}}
    (result,) = in_memory.play({**task, "timeout": 5}, options=("-e", "ansible_connection=elsewhere"))
    assert result["failed"] and not ran_as_module(result)


def test_async_tasks(in_memory: Target) -> None:
    (made,) = in_memory.play({**TASK, "async": 60, "poll": 1})
    assert made["changed"] and made["sandbox"]["name"] == "box"


def test_environment_variables_replace_options(in_memory: Target) -> None:
    task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    variables = {"SANDBOX_GATEWAY_URL": in_memory.url, "SANDBOX_GATEWAY_TOKEN": ""}
    for options in ((), ("-e", "ansible_connection=elsewhere")):
        results = in_memory.play(task, options=options, environment=variables, keywords={"module_defaults": {}})
        assert not results[0].get("failed"), results


@pytest.mark.parametrize("group", ["all", "gateway"])
def test_options_of_an_action_group(in_memory: Target, group: str) -> None:
    defaults = {f"group/grove.sandbox.{group}": {"gateway_url": in_memory.url, "gateway_token": ""}}
    made, listed = in_memory.play(
        TASK, {"grove.sandbox.sandbox_info": {"name": ["box"]}}, keywords={"module_defaults": defaults}
    )
    assert made["changed"] and listed["sandboxes"] == [made["sandbox"]]
