"""Test the output, errors and exit codes of `sandboxctl`, run in this process against a running gateway."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_gateway.hosts.base import Log, MemoryDisk, SlowCommand, StorageCommands
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot
from tests.cli.running import SANDBOXCTL_COMMAND, Run, check_success
from tests.support.certificates import create_certificate
from tests.support.memory_gateway import ADMIN_KEY, READ_KEY, MemoryGateway
from tests.support.memory_host import MemoryHost
from tests.support.waiting import wait_until


def test_the_readme_walkthrough_works(run: Run) -> None:
    assert "one" in check_success(run("create", "base", "--name", "one", "--memory", "256M", "-m", "team=red")).out
    check_success(run("exec", "one", "--", "write", "k", "before"))
    snapshot = check_success(
        run("snapshot", "create", "one", "--name", "s1", "--keep-last", "9", "--max-age", "7d", "--json")
    ).json
    assert snapshot["retention"] == {"keepLast": 9, "keepDaily": None, "maxAge": 604800}
    check_success(run("exec", "one", "write", "k", "after"))
    assert snapshot["snapshotID"] in check_success(run("rollback", "one", "s1")).out
    assert check_success(run("exec", "one", "read", "k")).out == "before"
    forks = check_success(run("snapshot", "fork", "s1", "-n", "3", "--json")).json
    assert len(forks["sandboxes"]) == 3
    assert len(check_success(run("clone", "one", "--names", "a,b", "--json")).json["sandboxes"]) == 2
    tree = check_success(run("tree")).out
    assert all(word in tree for word in ("template", "base", "one", "s1", "└──"))
    outcome = run("snapshot", "delete", "s1")
    assert outcome.code == 4 and "--when-unused" in outcome.err
    assert "is hidden" in check_success(run("snapshot", "delete", "s1", "--when-unused")).err
    check_success(run("kill", "one", "a", "b"))
    assert [item["state"] for item in check_success(run("list", "--json")).json] == ["running"] * 3


def test_show_and_health_report_a_memory_root_that_is_not_mounted(run: Run, memory_gateway: MemoryGateway) -> None:
    host, original_room = memory_gateway.host, memory_gateway.host.available_room
    run("create", "base", "--name", "one")
    snapshot = check_success(run("snapshot", "create", "one", "--name", "s1", "--json")).json
    assert "memoryProblem" not in check_success(run("snapshot", "show", "s1")).out
    problem = "/memory is not mounted, because /memory/0123456789ab does not exist"
    try:
        host.memory_problems[snapshot["snapshotID"]] = problem
        details = check_success(run("snapshot", "show", "s1")).out
        assert re.search(rf"^memoryProblem +{problem}$", details, re.MULTILINE)
        host.available_room = replace(original_room, memory_disk=MemoryDisk("/memory", 1 << 30, 2 << 30))
        assert "memory root /memory: 1.0 GiB of 2.0 GiB free" in check_success(run("health")).out.splitlines()
        host.available_room = replace(original_room, memory_disk=MemoryDisk("/memory", problem=problem))
        assert f"memory root /memory: {problem}" in check_success(run("health")).out.splitlines()
    finally:
        host.available_room = original_room
        host.memory_problems.clear()


def test_health_and_metrics_report_hung_commands(run: Run, memory_gateway: MemoryGateway) -> None:
    def read_metrics() -> dict[str, str]:
        with memory_gateway.client(READ_KEY) as client:
            return dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[:1] != "#")

    assert not any("zfs" in name for name in read_metrics()), "this host runs no commands of ZFS"
    commands = [SlowCommand("zfs snapshot", "p/a", 1e9, False), SlowCommand("zfs destroy", "p/b", 1e9 + 1, True)]
    try:
        memory_gateway.host.current_storage_commands = StorageCommands(commands, 3)
        status_line, *lines = check_success(run("health")).out.splitlines()
        assert status_line.startswith("degraded: memory, version")
        assert "has been running since 2001-09-09T01:46:40Z: zfs snapshot p/a" in lines
        assert "has been stuck in the kernel since 2001-09-09T01:46:41Z: zfs destroy p/b" in lines
        with memory_gateway.client("") as keyless_client:
            health = keyless_client.get("/health").json()
        assert health["status"] == "degraded" and "slowCommands" not in health
        metrics = read_metrics()
        assert metrics["sandbox_gateway_zfs_slow_commands"] == "2.0"
        assert metrics["sandbox_gateway_zfs_timeouts_total"] == "3.0"
        memory_gateway.host.current_storage_commands = StorageCommands([], 3)
        assert check_success(run("health")).out.startswith("ok: ")
        metrics = read_metrics()
        assert metrics["sandbox_gateway_zfs_slow_commands"] == "0.0"
        assert metrics["sandbox_gateway_zfs_timeouts_total"] == "3.0"
    finally:
        memory_gateway.host.current_storage_commands = None


def test_tables_are_printed_by_default(run: Run) -> None:
    run("create", "base", "--name", "one", "--timeout", "2h")
    run("snapshot", "create", "one", "--name", "s1")
    sandbox_table = check_success(run("list")).out
    assert re.search(r"^NAME +ID +STATE", sandbox_table)
    assert re.search(r"one +[0-9a-f]{12} +running +base +[0-9a-f]{12} +1 +256 MiB +\d+ s +ends in 119 m", sandbox_table)
    snapshot_table = check_success(run("snapshot", "list")).out
    assert re.search(r"s1 +[0-9a-f]{12} +[0-9a-f]{12} +incremental +4.0 KiB +1.5 KiB +6.2 ms +0", snapshot_table)
    assert re.search(
        r"base +[0-9a-f]{12} +ready +1 +256 MiB +2 GiB +incremental", check_success(run("template", "list")).out
    )
    details = check_success(run("show", "one")).out
    assert "256 MiB" in details and "AccessToken" not in details
    assert (
        "KiB" in check_success(run("snapshot", "show", "s1")).out
        and "debootstrap" in check_success(run("template", "show", "base")).out
    )
    assert check_success(run("usage", "one")).out == "disk 195 KiB, memory 3.0 MiB\n"
    status_line, disk_line, memory_line = check_success(run("health")).out.splitlines()
    assert status_line.startswith("ok: memory, version")
    assert disk_line.startswith("disk: 50.0 GiB of 100 GiB free, ") and disk_line.endswith(" promised to sandboxes")
    assert memory_line == "memory: 8.0 GiB of 16.0 GiB free, 256 MiB promised to sandboxes"


def test_a_stalled_sandbox_is_shown_with_the_reason(run: Run, memory_gateway: MemoryGateway) -> None:
    run("create", "base", "--name", "one")
    host, original_room = memory_gateway.host, memory_gateway.host.available_room
    sandbox = memory_gateway.engine.sandboxes.get("one")
    try:
        host.available_room = replace(original_room, disk_free=0)
        host.stalled_instances.add(sandbox.instance)
        wait_until(lambda: "no space left" in run("show", "one", "--json").json["stateReason"])
        assert f"stopped, because the disk has no space left: {sandbox.id}" in check_success(run("health")).out
        refusal = run("snapshot", "create", "one", "--name", "more")
        assert refusal.code != 0 and "less than 512 MiB of disk space free" in refusal.err
    finally:
        host.available_room = original_room
    wait_until(lambda: run("show", "one", "--json").json["stateReason"] == "")


def test_only_json_is_printed_to_standard_output(run: Run) -> None:
    run("create", "base", "--name", "one")
    for command in (("list",), ("show", "one"), ("snapshot", "list"), ("template", "list"), ("tree",), ("health",)):
        assert run(*command, "--json").json is not None
        assert run("--json", *command).json is not None
    outcome = check_success(run("template", "build", "base", "-p", "python3", "--json"))
    assert outcome.json["buildStatus"] == "ready"


def test_empty_lists_print_a_hint(run: Run) -> None:
    outcome = check_success(run("list"))
    assert outcome.out == "" and "sandboxctl create" in outcome.err
    assert check_success(run("list", "--json")).json == []


def test_exec_forwards_input_output_and_exit_code(run: Run) -> None:
    run("create", "base", "--name", "one")
    outcome = run("exec", "one", "--", "exit", "42")
    assert outcome.code == 42 and outcome.err == "leaving\n" and outcome.out == ""
    assert check_success(run("exec", "-i", "one", "cat", stdin=b"through\n")).out == "through\n"
    received_options = check_success(run("exec", "-e", "A=b=c", "--cwd", "/srv", "--user", "nobody", "one", "env")).json
    assert received_options == {"env": {"A": "b=c"}, "cwd": "/srv", "user": "nobody"}
    assert run("exec", "one", "nosuch").code == 127
    assert run("--json", "exec", "one", "exit", "3").json["exitCode"] == 3


def test_a_sandbox_is_paused_resumed_renamed_and_promoted(run: Run) -> None:
    run("create", "base", "--name", "one")
    check_success(run("pause", "one"))
    assert "paused" in check_success(run("list", "--state", "paused")).out
    assert "running" in check_success(run("resume", "one", "--timeout", "1h")).out
    assert "uno" in check_success(run("rename", "one", "uno")).out
    fork_id = check_success(run("clone", "uno", "--json")).json["sandboxes"][0]["sandboxID"]
    run("exec", fork_id, "write", "k", "won")
    assert "uno" in check_success(run("promote", fork_id)).out
    assert run("exec", "uno", "read", "k").out == "won"


def test_building_a_template_prints_its_log(memory_gateway: MemoryGateway, run: Run, tmp_path: Path) -> None:
    first_outcome = check_success(
        run("template", "build", "web", "-p", "nginx,curl", "--setup", "touch /x", "--memory", "1G")
    )
    assert "$ touch /x" in first_outcome.err and "ready" in first_outcome.err
    assert re.search(r"web +[0-9a-f]{12} +ready +1 +1 GiB", first_outcome.out)
    second_outcome = check_success(
        run("template", "build", "web", "-p", "curl", "-p", "nginx", "--setup", "touch /x", "--memory", "1G")
    )
    assert second_outcome.err == "", "the same recipe is not built again"
    toml_recipe_file = tmp_path / "recipe.toml"
    toml_recipe_file.write_text('name = "filed"\nsetup = ["touch /y"]\nmemoryMB = 128\n')
    assert check_success(run("template", "build", "-f", str(toml_recipe_file), "--json")).json["recipe"]["setup"] == [
        "touch /y"
    ]
    json_recipe_file = tmp_path / "recipe.json"
    json_recipe_file.write_text('{"setup": ["touch /z"]}')
    assert check_success(run("template", "build", "named", "-f", str(json_recipe_file), "--json")).json["names"] == [
        "named"
    ]
    failed_outcome = run("template", "build", "bad", "--setup", "fail")
    assert re.search(r"the template could not be built: the set-up command .* failed", failed_outcome.err)
    assert failed_outcome.code == 1 and "exit code 1" in failed_outcome.err and "fix the recipe" in failed_outcome.err
    check_success(run("template", "delete", "web", "filed", "named"))
    assert run("template", "show", "web").code == 3


def test_a_template_is_built_from_a_dockerfile(memory_gateway: MemoryGateway, run: Run, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM registry.test/app:1\nCOPY run.sh /opt/\nCMD /opt/run.sh\n")
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "run.sh").write_text("#!/bin/sh\n")
    build = ("template", "build", "web", "--dockerfile", str(dockerfile))
    outcome = run(*build)
    assert outcome.code == 2 and "the source 'run.sh' (line 2 of the Dockerfile) matches no file" in outcome.err
    with_context = (*build, "--context", str(tmp_path / "context"))
    recipe = check_success(run(*with_context, "--setup", "touch /x", "--json")).json["recipe"]
    assert recipe["image"] == "registry.test/app:1" and recipe["setupNetwork"] is False
    assert recipe["setup"][1] == "touch /x" and '"cmd": ["/bin/sh", "-c", "/opt/run.sh"]' in recipe["startCommand"]
    assert check_success(run(*with_context, "--setup", "touch /x")).err == "", "the same recipe is not built again"
    recipe = check_success(run(*with_context, "--setup-network", "--start-command", "true", "--json")).json["recipe"]
    assert recipe["setupNetwork"] is True and recipe["startCommand"] == "true"
    dockerfile.write_text("FROM registry.test/app:1\nADD x y\n")
    for arguments, code, message in (
        (build, 1, "line 2 of the Dockerfile: ADD is not supported"),
        ((*build, "--image", "app"), 2, "a Dockerfile cannot be combined with image"),
        ((*build, "--from", "rootfs"), 2, "a Dockerfile cannot be combined with --from rootfs"),
        (("template", "build", "web", "--context", "."), 2, "--context is valid only with --dockerfile"),
        ((*build[:-1], str(tmp_path / "missing")), 2, "missing does not exist"),
    ):
        outcome = run(*arguments)
        assert (outcome.code, "Traceback" in outcome.err) == (code, False) and message in outcome.err, outcome
    check_success(run("template", "delete", "web"))


def test_the_password_for_a_registry_is_read_from_a_file_or_the_standard_input(
    memory_gateway: MemoryGateway, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins: list[RegistryLogin | None] = []

    async def build_base(base: Snapshot, recipe: Recipe, digest: str, log: Log, login: RegistryLogin | None) -> str:
        logins.append(login)
        return await MemoryHost.build_base(memory_gateway.host, base, recipe, digest, log)

    monkeypatch.setattr(memory_gateway.host, "build_base", build_base)
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    build = ("template", "build", "--image", "registry.test/app:1", "--registry-username", "reader")
    outcomes = [
        check_success(run(*build, "filed", "--registry-password-file", str(file))),
        check_success(run(*build, "piped", "--registry-password-file", "-", stdin=b"hunter3\r\n")),
        check_success(run(*build, "filed", "--json", "--registry-password-file", str(file))),
    ]
    assert logins == [RegistryLogin("reader", "hunter2"), RegistryLogin("reader", "hunter3")], "the third build exists"
    outcomes.append(run(*build, "incomplete"))
    assert outcomes[-1].code == 2 and "send both a user name and a password" in outcomes[-1].err
    for contents in (b"", b"\n", b"hunter4\nhunter5\n", b"hunter6\xff", b"hunter7" * 10_000):
        file.write_bytes(contents)
        outcomes.append(run(*build, "refused", "--registry-password-file", str(file)))
        assert outcomes[-1].code == 2 and str(file) in outcomes[-1].err and "Traceback" not in outcomes[-1].err
    outcomes.append(run(*build, "refused", "--registry-password-file", str(tmp_path / "missing")))
    assert outcomes[-1].code == 2 and "cannot be read: No such file" in outcomes[-1].err
    assert not any("hunter" in outcome.out + outcome.err for outcome in outcomes)
    check_success(run("template", "delete", "filed", "piped"))


@pytest.mark.parametrize(
    ("text", "name"), [("name = ", "bad.toml"), ("[1]", "bad.json"), ("{", "bad.json"), ("", "missing.toml")]
)
def test_invalid_recipe_files_are_refused(run: Run, tmp_path: Path, text: str, name: str) -> None:
    if text:
        (tmp_path / name).write_text(text)
    outcome = run("template", "build", "x", "-f", str(tmp_path / name))
    assert outcome.code == 2 and "recipe" in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("show", "nothing"), 3, "sandboxctl list"),
        (("create", "nothing"), 3, "template list"),
        (("snapshot", "show", "nothing"), 3, "snapshot list"),
        (("kill", "nothing", "nobody"), 3, "'nobody' not found"),
        (("create", "base", "--name", "one"), 4, "choose a different name"),
        (("resume", "one"), 4, "already running"),
        (("create", "base", "--memory", "-4"), 2, "not a size"),
        (("create", "base", "--memory", "1M"), 2, "--memory: "),
        (("create", "base", "--timeout", "soon"), 2, "not a duration"),
        (("create", "base", "-m", "novalue"), 2, "KEY=VALUE"),
        (("create", "base", "--name", "a b"), 2, "not allowed"),
        (("template", "build"), 2, "needs a name"),
        (("snapshot", "fork", "base", "--memory", "1G"), 1, "boot from its disk with --cold-start"),
    ],
)
def test_failures_have_a_message_and_an_exit_code(run: Run, args: tuple[str, ...], code: int, words: str) -> None:
    check_success(run("create", "base", "--name", "one"))
    outcome = run(*args)
    assert outcome.code == code, outcome.err
    assert words in outcome.err and outcome.out == ""
    assert outcome.err.startswith("sandboxctl: ") and "Traceback" not in outcome.err


def test_usage_errors_exit_with_code_2(run: Run) -> None:
    for args in (("nonsense",), ("create",), ("list", "--nope"), ("clone", "one", "-n", "0"), ("exec", "one")):
        assert run(*args).code == 2


def test_best_effort_keeps_the_successful_forks(memory_gateway: MemoryGateway, run: Run) -> None:
    run("create", "base", "--name", "one")
    memory_gateway.host.failing_names = {"b"}
    partial_outcome = run("clone", "one", "--names", "a,b", "--best-effort")
    assert (
        partial_outcome.code == 1
        and "a" in partial_outcome.out
        and "b was not created: no machine for b" in partial_outcome.err
    )
    failed_outcome = run("clone", "one", "--names", "c,b")
    assert failed_outcome.code == 1 and failed_outcome.out == ""
    assert run("show", "c").code == 3
    assert run("kill", "--ignore-missing", "c", "a").code == 0


def test_a_key_is_required_over_tcp(memory_gateway: MemoryGateway, run: Run, tmp_path: Path) -> None:
    outcome = run("list", url=memory_gateway.url)
    assert outcome.code == 5 and "SANDBOX_GATEWAY_TOKEN" in outcome.err
    assert run("list", url=memory_gateway.url, token=READ_KEY).code == 0
    assert run("create", "base", url=memory_gateway.url, token=READ_KEY).code == 5
    key_file = tmp_path / "key"
    key_file.write_text(f"{ADMIN_KEY}\n")
    assert run("--token-file", str(key_file), "create", "base", url=memory_gateway.url).code == 0
    assert run("--token-file", str(tmp_path / "none"), "list", url=memory_gateway.url).code == 2


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("unix:///nowhere/gateway.sock", 5, "cannot reach"),
        ("http://127.0.0.1:9", 5, "cannot reach"),
        ("ftp://here", 2, "unix:///path"),
    ],
)
def test_unreachable_gateways_are_reported(run: Run, url: str, code: int, words: str) -> None:
    outcome = run("list", url=url)
    assert outcome.code == code and words in outcome.err and "Traceback" not in outcome.err


def test_every_page_of_a_long_list_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandbox_gateway.cli import client

    run("create", "base", "--name", "one")
    run("clone", "one", "-n", "4")
    original_remove_empty = client._remove_empty_params
    monkeypatch.setattr(
        client,
        "_remove_empty_params",
        lambda params: original_remove_empty({**params, "limit": 2} if "limit" in params else params),
    )
    assert len(check_success(run("list", "--json")).json) == 5


def test_a_gateway_with_tls_is_trusted_only_with_its_certificate_authority(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = create_certificate(tmp_path)
    gateway = MemoryGateway(tmp_path, server={"tls_cert": str(cert), "tls_key": str(key)})
    url = f"https://localhost:{gateway.port}"
    try:
        refusal = run("list", url=url, token=READ_KEY)
        assert refusal.code == 5 and "certificate verify failed" in refusal.err and "SSL_CERT_FILE" in refusal.err
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert check_success(run("list", "--json", url=url, token=READ_KEY)).json == []
        assert run("list", url=url, token="wrong-key-0123456789").code == 5
    finally:
        gateway.end()


def test_help_is_quick_and_complete() -> None:
    started_at = time.monotonic()
    result = subprocess.run(
        [*SANDBOXCTL_COMMAND, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    elapsed_seconds = time.monotonic() - started_at
    for word in ("template", "create", "exec", "rollback", "clone", "promote", "tree", "events", "Exit codes"):
        assert word in result.stdout
    assert elapsed_seconds < 5


def test_events_are_printed_as_json_lines(memory_gateway: MemoryGateway, run: Run) -> None:
    queue_count = len(memory_gateway.engine.events._queues)
    watcher = subprocess.Popen(
        [*SANDBOXCTL_COMMAND, "--url", memory_gateway.unix_url, "events", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    try:
        deadline = time.monotonic() + 20
        while len(memory_gateway.engine.events._queues) == queue_count and time.monotonic() < deadline:
            time.sleep(0.05)
        run("create", "base", "--name", "one")
        event = json.loads(watcher.stdout.readline())
        assert event["type"] == "sandbox.created" and event["name"] == "one"
    finally:
        watcher.terminate()
        watcher.wait(30)
        watcher.stdout.close()


def test_progress_is_shown_on_a_terminal(memory_gateway: MemoryGateway, run: Run) -> None:
    """Progress goes to the terminal (here a pseudo-terminal), and JSON to standard output."""
    import os
    import pty

    run("create", "base", "--name", "one")
    memory_gateway.host.fork_seconds = 0.2
    screen, terminal = pty.openpty()
    try:
        result = subprocess.run(
            [
                *SANDBOXCTL_COMMAND,
                "--url",
                memory_gateway.unix_url,
                "clone",
                "one",
                "-n",
                "3",
                "--concurrency",
                "1",
                "--json",
            ],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
            timeout=60,
            check=True,
        )
        screen_text = os.read(screen, 1 << 16).decode()
    finally:
        os.close(screen)
        os.close(terminal)
    assert len(json.loads(result.stdout)["sandboxes"]) == 3
    assert "cloning one" in screen_text and "1/3" in screen_text


def test_forks_are_prewarmed(run: Run) -> None:
    run("create", "base", "--name", "one")
    snapshot = check_success(run("snapshot", "create", "one", "--name", "warm", "--prewarm", "1", "--json")).json
    assert snapshot["prewarm"]["target"] == 1
    wait_until(lambda: "1 of 1 ready" in check_success(run("snapshot", "show", "warm")).out)
    assert check_success(run("snapshot", "prewarm", "warm", "2")).out in ("1 of 2 ready\n", "2 of 2 ready\n")
    assert check_success(run("snapshot", "prewarm", "warm", "0", "--json")).json["target"] == 0
    check_success(run("template", "build", "base", "-p", "python3", "--prewarm", "1"))
    wait_until(lambda: "1 of 1 ready" in check_success(run("template", "show", "base")).out)
    check_success(run("snapshot", "prewarm", "base", "0"))
    refusal = run("snapshot", "prewarm", "warm", "65")
    assert refusal.code != 0 and "prewarm.maximum" in refusal.err


def test_a_failed_boot_shows_the_end_of_the_console(run: Run, memory_gateway: MemoryGateway) -> None:
    memory_gateway.host.failed_boot_console = "Loading\r\nKernel panic: no init found\r\n"
    try:
        outcome = run("create", "base", "--name", "one", "--cold-start")
        assert outcome.code == 1 and outcome.out == ""
        assert outcome.err.endswith(
            "The last lines of the guest's console:\n  Loading\n  Kernel panic: no init found\n"
        )
        build_outcome = run("template", "build", "unbootable")
        assert build_outcome.code == 1 and build_outcome.err.count("Kernel panic: no init found") >= 1
    finally:
        memory_gateway.host.failed_boot_console = None
