"""The error of a failed boot contains the end of the guest's console, also in the results of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _sandbox, _template
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._run import run

from sandbox_gateway.cli.failure import create_failure_from_response
from sandbox_gateway.engine.boot_failure import MAX_LINE_LENGTH, MAX_LINES, extract_last_lines
from tests.support.memory_gateway import MemoryGateway, create_sandbox

CONSOLE = "Loading\r\n\x1b[31m[    1.1] EXT4-fs error\x1b[0m\r\n\r\nKernel panic: no init found\r\n"
CONSOLE_LINES = ["Loading", "[    1.1] EXT4-fs error", "Kernel panic: no init found"]
COLD_START = {"coldStart": True}


@pytest.fixture
def broken_host(memory_gateway: MemoryGateway) -> Iterator[Any]:
    yield memory_gateway.host
    memory_gateway.host.failed_boot_console = None


def test_the_error_contains_the_end_of_the_console(api: httpx.Client, broken_host: Any) -> None:
    broken_host.failed_boot_console = CONSOLE
    response = api.post("/sandboxes", json={"templateID": "base", "name": "one", **COLD_START})
    error = response.json()
    assert response.status_code == 500 and error["kind"] == "backend_failed"
    assert error["details"] == {"console": CONSOLE_LINES}
    console_text = "\n  ".join(["The last lines of the guest's console:", *CONSOLE_LINES])
    assert error["message"].startswith("the sandbox did not start: its machine stopped.") and error["message"].endswith(
        console_text
    )
    assert api.get("/sandboxes").json() == [] and broken_host.machines == {}
    assert console_text in create_failure_from_response(500, error).message


def test_the_error_of_a_failed_resume_contains_the_console(api: httpx.Client, broken_host: Any) -> None:
    create_sandbox(api, name="one")
    assert api.post("/sandboxes/one/pause", json={"memory": False}).status_code == 204
    broken_host.failed_boot_console = CONSOLE
    assert api.post("/sandboxes/one/resume").json()["details"] == {"console": CONSOLE_LINES}
    broken_host.failed_boot_console = None
    assert api.post("/sandboxes/one/resume").status_code == 201


def test_the_error_of_a_fork_with_memory_contains_no_console(api: httpx.Client, broken_host: Any) -> None:
    broken_host.failed_boot_console = CONSOLE
    error = api.post("/sandboxes", json={"templateID": "base"}).json()
    assert "did not start" in error["message"] and "console" not in error["message"] and "details" not in error


def test_without_output_the_error_does_not_mention_the_console(api: httpx.Client, broken_host: Any) -> None:
    broken_host.failed_boot_console = "\r\n \x1b[0m\n"
    error = api.post("/sandboxes", json={"templateID": "base", **COLD_START}).json()
    assert "did not start" in error["message"] and "console" not in error["message"] and "details" not in error


def test_the_error_of_each_fork_contains_the_console(api: httpx.Client, broken_host: Any) -> None:
    broken_host.failed_boot_console = CONSOLE
    forks = api.post("/snapshots/base/fork", json={"count": 2, "atomic": False, **COLD_START}).json()
    assert forks["sandboxes"] == []
    assert ["no init found" in error["message"] for error in forks["errors"]] == [True, True]


def test_the_build_log_contains_the_console(api: httpx.Client, broken_host: Any) -> None:
    broken_host.failed_boot_console = CONSOLE
    build = api.post("/templates", json={"name": "broken"}).json()
    route = f"/templates/{build['templateID']}/builds/{build['buildID']}"
    with api.stream("GET", f"{route}/logs", params={"follow": "true"}) as response:
        log_lines = list(response.iter_lines())
    assert [line.strip() for line in log_lines[-3:]] == CONSOLE_LINES
    assert "no init found" in api.get(f"{route}/status").json()["errorMessage"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (_sandbox, {"name": ["one"], "template": "base", "cold_start": True}),
        (_fork, {"snapshot": "base", "names": ["a", "b"], "cold_start": True}),
        (_template, {"name": ["unbootable"], "wait": True, "wait_timeout": 60}),
    ],
)
def test_module_errors_contain_the_console(
    memory_gateway: MemoryGateway, broken_host: Any, kind: Any, options: dict[str, Any]
) -> None:
    broken_host.failed_boot_console = CONSOLE
    defaults = {name: option.get("default") for name, option in kind.ARGUMENTS.items()}
    result = run(kind, {**defaults, **options}, check_mode=False, client=Client(memory_gateway.unix_url))
    assert result["failed"] and not result["changed"] and result["failure"]["kind"] == "backend_failed"
    assert "did not start" in result["msg"] and all(f"\n  {line}" in result["msg"] for line in CONSOLE_LINES), result[
        "msg"
    ]


def test_a_guest_cannot_make_the_error_long_or_control_terminals() -> None:
    console = "".join(f"line {number} {'x' * 1000}\x1b]0;title\x07\u202e\n" for number in range(10_000))
    console_lines = extract_last_lines(console)
    assert len(console_lines) == MAX_LINES and max(map(len, console_lines)) == MAX_LINE_LENGTH
    assert {*"".join(console_lines)} <= {*"line 0123456789x"}
    assert extract_last_lines("y" * 1_000_000) == ["y" * MAX_LINE_LENGTH]
    assert extract_last_lines("") == []


def test_the_dump_after_a_kernel_panic_is_left_out() -> None:
    dump = "".join(f"[    2.9] RAX: {number:016x}\n" for number in range(40))
    console = f"sh: 1: cannot open /sbin/init\n[    2.9] Kernel panic - not syncing: Attempted to kill init!\n{dump}"
    assert extract_last_lines(console) == [
        "sh: 1: cannot open /sbin/init",
        "[    2.9] Kernel panic - not syncing: Attempted to kill init!",
    ]
