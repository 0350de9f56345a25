"""Which way a task goes: in the process of the control node, or by the module on the managed host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.runner import Target, Task

TASK: Task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}


def by_module(result: dict[str, Any]) -> bool:
    """Only a module says how it was invoked."""
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
def test_a_loopback_address_is_the_managed_hosts(
    doubled: Target, keywords: dict[str, Any], options: tuple[str, ...], module: bool
) -> None:
    (made,) = doubled.play({**TASK, "diff": True}, keywords=keywords, options=options)
    assert made["changed"], made
    assert by_module(made) is module
    (again,) = doubled.play(TASK, keywords=keywords, options=options)
    assert not again["changed"]


def test_another_address_is_reached_from_the_control_node(doubled: Target) -> None:
    # Nobody is at that address of the documentation's; a module would have said how it was invoked.
    task = {"grove.sandbox.sandbox": {**TASK["grove.sandbox.sandbox"], "gateway_url": "http://192.0.2.1:1"}}
    (result,) = doubled.play({**task, "timeout": 5}, options=("-e", "ansible_connection=elsewhere"))
    assert result["failed"] and not by_module(result)


def test_asynchronously(doubled: Target) -> None:
    (made,) = doubled.play({**TASK, "async": 60, "poll": 1})
    assert made["changed"] and made["sandbox"]["name"] == "box"


def test_variables_of_the_environment_stand_in(doubled: Target) -> None:
    task = {"grove.sandbox.sandbox": {"name": "box", "template": "base"}}
    variables = {"SANDBOX_GATEWAY_URL": doubled.url, "SANDBOX_GATEWAY_TOKEN": ""}
    for options in ((), ("-e", "ansible_connection=elsewhere")):
        results = doubled.play(task, options=options, environment=variables, keywords={"module_defaults": {}})
        assert not results[0].get("failed"), results
