"""Test that the error of a failed boot contains the last console output, which is kept after QEMU exits."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, World

BREAK_INIT_COMMAND = (
    "rm /sbin/init && printf '#!/bin/sh\\necho \\033[31mbroken-init >/dev/console\\n' >/sbin/init && sync"
)


def test_the_error_of_a_failed_boot_contains_the_console(runner: EngineRunner, world: World) -> None:
    if world.kind != "kvm_xfs":
        pytest.skip("a jail has no console")
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["broken"])))
    runner.shell("broken", f"{BREAK_INIT_COMMAND} && chmod +x /sbin/init && sync")
    runner.do(runner.engine.snapshots.create("broken", name="unbootable", memory="none"))
    with pytest.raises(BackendFailed, match="the sandbox did not start") as error_info:
        runner.do(runner.engine.forks.create("unbootable", ForkSpec(names=["cold"], cold_start=True)))
    error: Any = error_info.value
    console = error.details["console"]
    assert any(line.endswith("broken-init") for line in console), error.message
    assert any("Kernel panic" in line for line in console), error.message
    assert error.message.endswith("\n  ".join(["The last lines of the guest's console:", *console]))
    assert [sandbox.name for sandbox in runner.engine.sandboxes.list()] == ["broken"]
