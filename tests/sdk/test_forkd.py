"""Test that the unmodified, published ``forkd`` client works with a live gateway."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forkd import CommandResult, Controller, ControllerError, Sandbox

from tests.sdk.coverage import covers
from tests.sdk.servers import Server
from tests.support import forkd_command, session

SpawnFunction = Callable[..., list[str]]
_EXIT_TIMEOUT_SECONDS = 20


@pytest.fixture(autouse=True)
def target(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address in FORKD_TARGET. Also sets the other variables that users must set, and adds `forkd` to PATH."""
    address = f"127.0.0.1:{session.allocate_port()}"
    forkd_command.install(tmp_path)
    monkeypatch.setenv("FORKD_URL", server.url)
    monkeypatch.setenv("FORKD_TOKEN", server.key)
    monkeypatch.setenv("FORKD_TARGET", address)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return address


@pytest.fixture
def controller(server: Server) -> Iterator[Controller]:
    """A client of the gateway. Everything that the test creates is removed when the test ends."""
    client = Controller(timeout=120)
    yield client
    for sandbox in client.list_sandboxes():
        client.kill_sandbox(sandbox["id"])
    for snapshot in reversed(client.list_snapshots()):
        if snapshot["tag"] != server.template:
            client.delete_snapshot(snapshot["tag"])


@pytest.fixture
def spawn_sandboxes(controller: Controller, server: Server) -> SpawnFunction:
    def spawn_tagged(tag: str = server.template, **options: Any) -> list[str]:
        return [sandbox["id"] for sandbox in controller.spawn_sandboxes(tag, **options)]

    return spawn_tagged


def check_refused(status: int, call: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ControllerError) as error_info:
        call(*args, **options)
    assert error_info.value.status == status, error_info.value
    message: str = error_info.value.body["error"]
    return message


def run_shell(controller: Controller, sandbox_id: str, script: str) -> str:
    result = controller.exec_command(sandbox_id, ["/bin/sh", "-c", script])
    assert result["exit_code"] == 0, result
    return str(result["stdout"])


@pytest.mark.core
@covers("Controller.spawn_sandboxes", "Controller.list_sandboxes", "Controller.get_sandbox", "Controller.kill_sandbox")
def test_sandboxes_are_spawned_listed_and_killed(server, controller, spawn_sandboxes):
    sandbox_ids = spawn_sandboxes(n=2, per_child_netns=True, memory_limit_mib=256)
    sandbox = controller.get_sandbox(sandbox_ids[0])
    assert sandbox["snapshot_tag"] == server.template and sandbox["memory_limit_mib"] == 256
    assert sandbox["guest_addr"].endswith(":8888")
    assert [each["id"] for each in controller.list_sandboxes()] == sandbox_ids
    assert "not found" in check_refused(404, spawn_sandboxes, "nothing")
    controller.kill_sandbox(sandbox_ids[0])
    assert [each["id"] for each in controller.list_sandboxes()] == sandbox_ids[1:]
    assert "not found" in check_refused(404, controller.get_sandbox, sandbox_ids[0])


@covers(
    "Controller.spawn_sandboxes",
    note="`prewarm`, `hugepages` and `per_child_netns` are ignored; `live_fork` is refused",
)
def test_options_for_speed_are_ignored(controller, spawn_sandboxes):
    (sandbox_id,) = spawn_sandboxes(per_child_netns=True, prewarm=True, hugepages=True)
    assert controller.ping_sandbox(sandbox_id)["pong"] is True
    assert "live_fork" in check_refused(400, spawn_sandboxes, live_fork=True)


@pytest.mark.usefixtures("requires_memory")
def test_a_memory_limit_other_than_the_snapshots_is_refused(spawn_sandboxes):
    assert "256 MiB of memory" in check_refused(400, spawn_sandboxes, memory_limit_mib=512)


@pytest.mark.core
@covers(
    "Controller.exec_command",
    note="the exit code is 127 if the program does not exist, and 137 if it times out; `stderr` gives the reason",
)
@covers("Controller.ping_sandbox", note="`numpy_version` is always `None`")
def test_exec_returns_output_and_exit_code(controller, spawn_sandboxes):
    (sandbox_id,) = spawn_sandboxes()
    script = "import sys; print(2 + 2); print('ä', file=sys.stderr); sys.exit(3)"
    result = controller.exec_command(sandbox_id, ["python3", "-c", script])
    assert result == {"stdout": "4\n", "stderr": "ä\n", "exit_code": 3}
    missing_result = controller.exec_command(sandbox_id, ["no-such-program"])
    assert missing_result["exit_code"] == 127 and "no-such-program" in missing_result["stderr"]
    timeout_result = controller.exec_command(sandbox_id, ["sh", "-c", "echo started; sleep 60"], timeout_secs=2)
    assert (
        timeout_result["stdout"] == "started\n"
        and timeout_result["exit_code"] == 137
        and "within 2 s" in timeout_result["stderr"]
    )
    large_result = controller.exec_command(sandbox_id, ["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"])
    assert large_result["stdout"] == "x" * 3_000_000
    assert controller.ping_sandbox(sandbox_id) == {"pong": True, "numpy_version": None}
    for call in (controller.ping_sandbox, lambda id: controller.exec_command(id, ["true"])):
        assert "not found" in check_refused(404, call, "nothing")


@pytest.mark.core
@covers("Controller.eval_code", note="runs Python in the sandbox's interpreter")
def test_eval_keeps_the_interpreters_state(controller, spawn_sandboxes):
    (sandbox_id,) = spawn_sandboxes()
    assert controller.eval_code(sandbox_id, "counter = 41")["error"] is None
    assert controller.eval_code(sandbox_id, "counter + 1") == {"result": "42", "error": None, "exit_code": 0}
    failed_result = controller.eval_code(sandbox_id, "1 / 0")
    assert (
        failed_result["result"] is None
        and "ZeroDivisionError" in failed_result["error"]
        and failed_result["exit_code"] != 0
    )
    assert controller.eval_code(sandbox_id, "counter")["result"] == "41"
    assert "not found" in check_refused(404, controller.eval_code, "nothing", "1")


@pytest.mark.core
@covers(
    "Controller.branch_sandbox",
    note="`full` and `diff` are the same; `live` is refused; `wait=False` also waits for the snapshot",
)
@covers("Controller.list_snapshots", note="the list includes templates")
@covers("Controller.delete_snapshot", note="fails with 409 while sandboxes made from the snapshot exist")
def test_branches_contain_files(server, controller, spawn_sandboxes):
    (source,) = spawn_sandboxes()
    earlier_tags = {snapshot["tag"] for snapshot in controller.list_snapshots()}
    run_shell(controller, source, "echo first >/root/state")
    first_branch = controller.branch_sandbox(source, tag="checkpoint-1", mode="full")
    assert (
        first_branch["tag"] == "checkpoint-1" and first_branch["branched_from"] == source and first_branch["bootable"]
    )
    assert (
        first_branch["status"] == "ready"
        and first_branch["pause_ms"] >= server.abilities.memory
        and first_branch["dir"]
    )
    assert (
        ("memory" in first_branch)
        == ("vmstate" in first_branch)
        == ("diff_physical_bytes" in first_branch)
        == server.abilities.memory
    )
    assert all(Path(first_branch[key]).stat().st_size for key in ("memory", "vmstate") if key in first_branch)
    run_shell(controller, source, "echo second >/root/state")
    second_branch = controller.branch_sandbox(source, diff=True, wait=False)
    assert second_branch["tag"] == f"branch-{source}-1" and second_branch["status"] == "ready"
    current_tags = {snapshot["tag"] for snapshot in controller.list_snapshots()}
    assert (
        current_tags - earlier_tags == {first_branch["tag"], second_branch["tag"]} and server.template in current_tags
    )
    (child,) = spawn_sandboxes(first_branch["tag"])
    (sibling,) = spawn_sandboxes(second_branch["tag"])
    assert [run_shell(controller, each, "cat /root/state") for each in (child, sibling)] == ["first\n", "second\n"]
    assert run_shell(controller, source, "cat /root/state") == "second\n"
    assert child in check_refused(409, controller.delete_snapshot, first_branch["tag"])
    controller.kill_sandbox(child)
    controller.delete_snapshot(first_branch["tag"])
    assert "not found" in check_refused(404, controller.delete_snapshot, first_branch["tag"])
    controller.kill_sandbox(source)
    assert run_shell(controller, spawn_sandboxes(second_branch["tag"])[0], "cat /root/state") == "second\n", (
        "the snapshot outlives its source"
    )


def test_invalid_branches_are_refused(server, controller, spawn_sandboxes):
    earlier_tags = [snapshot["tag"] for snapshot in controller.list_snapshots()]
    (source,) = spawn_sandboxes()
    assert "mode live is not supported" in check_refused(400, controller.branch_sandbox, source, mode="live")
    assert "1 to 64" in check_refused(400, controller.branch_sandbox, source, tag="a b")
    for options in ({"diff": True, "measure_diff": True}, {"mode": "diff", "measure_diff": True}):
        assert "measure_diff" in check_refused(400, controller.branch_sandbox, source, **options)
    assert "not found" in check_refused(404, controller.branch_sandbox, "nothing")
    assert server.template in check_refused(409, controller.branch_sandbox, source, tag=server.template)
    assert [snapshot["tag"] for snapshot in controller.list_snapshots()] == earlier_tags


def test_only_one_of_two_concurrent_branches_gets_a_tag(controller, spawn_sandboxes):
    def try_branch(sandbox_id: str) -> int:
        try:
            controller.branch_sandbox(sandbox_id, tag="wanted")
        except ControllerError as error:
            return error.status
        return 201

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(try_branch, spawn_sandboxes(n=2))) == [201, 409]


def test_branch_numbers_survive_a_restart(server, controller, spawn_sandboxes):
    (source,) = spawn_sandboxes()
    for number in (1, 2):
        assert controller.branch_sandbox(source)["tag"] == f"branch-{source}-{number}"
        controller.delete_snapshot(f"branch-{source}-{number}")
    server.gateway.restart()
    assert controller.branch_sandbox(source)["tag"] == f"branch-{source}-3"
    assert controller.ping_sandbox(source)["pong"] is True


@pytest.mark.core
@pytest.mark.usefixtures("requires_memory")
def test_grandchildren_keep_the_interpreters_state(controller, spawn_sandboxes):
    (source,) = spawn_sandboxes()
    controller.eval_code(source, "import random; secret = random.random(); generation = 1")
    secret = controller.eval_code(source, "secret")["result"]
    controller.branch_sandbox(source, tag="one", mode="diff")
    (child,) = spawn_sandboxes("one")
    controller.eval_code(child, "generation += 1")
    controller.branch_sandbox(child, tag="two", mode="full")
    controller.kill_sandbox(source)
    controller.kill_sandbox(child)
    controller.delete_snapshot("one")
    for grandchild in spawn_sandboxes("two", n=2):
        assert controller.eval_code(grandchild, "generation, secret")["result"] == f"(2, {secret})"


@pytest.mark.core
@covers("Sandbox", "Sandbox.create", "Sandbox.kill", note="requires the command `forkd` (see above)")
@covers("Sandbox.eval", note="runs Python and returns the `repr()` of the result")
@covers("Sandbox.ping", note="`numpy_version` is always `None`")
@covers("Sandbox.commands.run")
def test_the_command_creates_and_removes_a_sandbox(server, controller, target):
    with Sandbox.create(server.template, target) as sandbox:
        assert len(controller.list_sandboxes()) == 1
        assert sandbox.commands.run("echo hello; exit 3") == CommandResult("hello\n", "", 3)
        assert sandbox.commands.run(["printf", "%s", "a b"]) == CommandResult("a b", "", 0)
        missing_result = sandbox.commands.run(["no-such-program"])
        assert missing_result.exit_code == 127 and "no-such-program" in missing_result.stderr
        timeout_result = sandbox.commands.run("sleep 60", timeout=2)
        assert timeout_result.exit_code == 137 and "within 2 s" in timeout_result.stderr
        assert sandbox.ping()["pong"] is True
        sandbox.eval("counter = 41")
        assert sandbox.eval("counter + 1") == "42"
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            sandbox.eval("1 / 0")
    assert controller.list_sandboxes() == []
    with pytest.raises(RuntimeError, match="'nothing' not found"):
        Sandbox("nothing", target)


def test_the_command_attaches_to_a_sandbox_of_the_controller(controller, spawn_sandboxes, target):
    (sandbox_id,) = spawn_sandboxes()
    with subprocess.Popen(["forkd", "attach", sandbox_id], stdout=subprocess.DEVNULL) as process:
        try:
            forkd_command.wait_until_listening(target)
            sandbox = Sandbox(target=target, spawn=False)
            sandbox.commands.run("echo through the port >/root/state")
            assert run_shell(controller, sandbox_id, "cat /root/state") == "through the port\n"
        finally:
            process.terminate()
            assert process.wait(_EXIT_TIMEOUT_SECONDS) == 0
    sandbox.kill()
    assert [each["id"] for each in controller.list_sandboxes()] == [sandbox_id]
