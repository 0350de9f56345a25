"""Test the connection plugin with a real gateway and real agents, and once with a real machine."""

from __future__ import annotations

import base64
import grp
import hashlib
import json
import os
import pwd
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.collection import agents
from tests.collection.runner import Target, find_ansible_playbook
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway

LARGE_FILE_BYTES = 200 << 20
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("agents")) as server:
        yield server


@pytest.fixture
def web_id(gateway: MemoryGateway) -> Iterator[str]:
    """The id of a running sandbox named web."""
    with gateway.client() as api:
        response = api.post("/sandboxes", json={"templateID": "base", "name": "web"})
        assert response.status_code == 201, response.text
        yield response.json()["sandboxID"]
        api.delete("/sandboxes/web")


def call_plugin(*method_calls: list[Any], variables: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Call methods of the plugin in a separate process, and return the results (see connect.py)."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.collection.connect", str(session.COLLECTIONS)],
        input=json.dumps({"variables": variables, "calls": method_calls, **options}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=session.REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(session.REPOSITORY), "ANSIBLE_LOCALHOST_WARNING": "0"},
    )
    assert process.returncode == 0, process.stderr
    response = json.loads(process.stdout)
    assert isinstance(response, dict)
    return response


def make_connection_variables(gateway: MemoryGateway) -> dict[str, dict[str, str]]:
    return {
        "socket": {"ansible_host": "web", "ansible_sandbox_gateway_url": gateway.unix_url},
        "tcp": {
            "ansible_host": "web",
            "ansible_sandbox_gateway_url": gateway.url,
            "ansible_sandbox_gateway_token": EXEC_KEY,
        },
    }


def check_success(result: dict[str, Any]) -> tuple[int, bytes, bytes]:
    assert "value" in result, result
    code, out, err = result["value"]
    return code, base64.b64decode(out), base64.b64decode(err)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("endpoint", ["socket", "tcp"])
def test_commands_return_exit_codes_and_output(gateway: MemoryGateway, web_id: str, endpoint: str) -> None:
    binary_input = bytes(range(256)) * 8192
    response = call_plugin(
        ["exec_command", "printf 'a\\0b'; printf 'c\\377' >&2; exit 7"],
        ["exec_command", "kill -9 $$"],
        ["exec_command", "read line || echo nothing to read; pwd; id -un"],
        ["exec_command", "cat", encode(binary_input)],
        ["exec_command", "head -c 3", encode(binary_input)],
        ["exec_command", "exec <&-; echo done", encode(binary_input)],
        ["exec_command", "sleep 60 >/dev/null 2>&1 & echo gone"],
        ["exec_command", f"head -c {20 << 20} /dev/zero"],
        ["exec_command", "exec /nowhere/to/be/found"],
        variables=make_connection_variables(gateway)[endpoint],
    )
    failed, killed, user, echoed, partly_read, closed_stdin, background, large_output, missing_program = map(
        check_success, response["results"]
    )
    assert failed == (7, b"a\0b", b"c\xff")
    assert killed == (137, b"", b"")
    home_directory = pwd.getpwnam("root").pw_dir
    assert user == (0, f"nothing to read\n{home_directory}\nroot\n".encode(), b"")
    assert echoed == (0, binary_input, b"")
    assert partly_read == (0, binary_input[:3], b"")
    assert closed_stdin == (0, b"done\n", b"")
    assert background == (0, b"gone\n", b"")
    assert large_output == (0, bytes(20 << 20), b"")
    assert missing_program[0] == 127 and b"/nowhere/to/be/found" in missing_program[2]


def test_commands_and_files_use_the_remote_user(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(0o755)
    target_dir = tmp_path / "target"
    target_dir.mkdir(mode=0o777)
    target_dir.chmod(0o777)
    source, group = tmp_path / "source.txt", grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name
    source.write_text("text")
    variables = {**make_connection_variables(gateway)["socket"], "ansible_user": "nobody"}
    response = call_plugin(
        ["exec_command", "id -un; touch /etc/hostname 2>/dev/null || echo no"],
        ["put_file", str(source), str(target_dir / "put")],
        variables=variables,
    )
    assert check_success(response["results"][0])[:2] == (0, b"nobody\nno\n")
    assert "value" in response["results"][1]
    assert (target_dir / "put").owner() == "nobody" and (target_dir / "put").group() == group
    (refused,) = call_plugin(["exec_command", "id"], variables={**variables, "ansible_user": "nosuchuser"})["results"]
    assert refused["error"] == "AnsibleConnectionFailure" and "'nosuchuser' does not exist" in refused["message"]


FILE_NAMES = ["plain", "a b  c", "qu'o\"te$HOME;`id`", "grün-日本", "per%20cent?x=1&y#z+", "-n\nline"]


def test_files_with_any_name_and_contents_are_transferred(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    source, empty_file = tmp_path / "source", tmp_path / "empty"
    file_contents = bytes(range(256)) * 300 + os.urandom(4097)
    source.write_bytes(file_contents)
    empty_file.touch()
    method_calls: list[list[str]] = []
    for number, name in enumerate(FILE_NAMES):
        inside, downloaded = tmp_path / "in side" / name, tmp_path / f"back-{number}"
        method_calls += [
            ["put_file", str(source), str(inside)],
            ["fetch_file", str(inside), str(downloaded)],
            ["put_file", str(empty_file), str(inside)],
            ["exec_command", f"wc -c < {shlex.quote(str(inside))}"],
            ["fetch_file", str(inside), f"{downloaded}.2"],
        ]
    results = call_plugin(*method_calls, variables=make_connection_variables(gateway)["tcp"])["results"]
    for number, name in enumerate(FILE_NAMES):
        file_results = results[number * 5 : number * 5 + 5]
        assert all("value" in result for result in file_results), (name, file_results)
        assert (tmp_path / f"back-{number}").read_bytes() == file_contents, name
        assert check_success(file_results[3])[1].strip() == b"0", name
        assert (tmp_path / f"back-{number}.2").read_bytes() == b"", name


@pytest.mark.parametrize("endpoint", ["socket", "tcp"])
def test_large_files_are_transferred_with_little_memory(
    gateway: MemoryGateway, web_id: str, tmp_path: Path, endpoint: str
) -> None:
    source, inside, downloaded = tmp_path / "source", tmp_path / "inside", tmp_path / "back"
    block, digest = os.urandom(1 << 20), hashlib.sha256()
    with source.open("wb") as file:
        for number in range(LARGE_FILE_BYTES >> 20):
            chunk = number.to_bytes(8, "big") + block[8:]
            file.write(chunk)
            digest.update(chunk)
    agent_memory_before, own_memory_before = (
        read_peak_memory_kib(gateway, web_id),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    variables = make_connection_variables(gateway)[endpoint]
    response = call_plugin(
        ["put_file", str(source), str(inside)], ["fetch_file", str(inside), str(downloaded)], variables=variables
    )
    assert all("value" in result for result in response["results"]), response
    assert inside.stat().st_size == LARGE_FILE_BYTES and compute_sha256(downloaded) == digest.hexdigest()
    assert response["growth"] < 16 << 10, "the plugin held the file in memory"
    assert read_peak_memory_kib(gateway, web_id) - agent_memory_before < 16 << 10, "the agent held the file in memory"
    # The gateway runs in this process.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own_memory_before < 32 << 10, (
        "the gateway held the file in memory"
    )


def read_peak_memory_kib(gateway: MemoryGateway, sandbox: str) -> int:
    machine = gateway.machine(sandbox)
    assert isinstance(machine, agents.AgentMachine)
    status = Path(f"/proc/{machine.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def compute_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def test_failed_transfers_are_reported(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    response = call_plugin(
        ["put_file", str(tmp_path / "missing"), "/tmp/x"],
        ["put_file", str(tmp_path / "there"), str(tmp_path)],
        ["fetch_file", str(tmp_path / "missing"), str(tmp_path / "back")],
        ["fetch_file", str(tmp_path), str(tmp_path / "back")],
        ["exec_command", "echo still here"],
        variables=make_connection_variables(gateway)["tcp"],
    )
    missing_source, upload_to_directory, missing_remote_file, directory_download, later_command = response["results"]
    assert missing_source["error"] == "AnsibleFileNotFound"
    for result in (upload_to_directory, missing_remote_file, directory_download):
        assert result["error"] == "AnsibleError" and str(tmp_path) in result["message"], result
    assert "not a regular file" in upload_to_directory["message"] and "a directory" in directory_download["message"]
    assert not (tmp_path / "back").exists()
    assert check_success(later_command)[1] == b"still here\n"


@pytest.mark.parametrize("endpoint", ["socket", "tcp"])
def test_calls_share_one_connection(gateway: MemoryGateway, web_id: str, tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "file").write_text("x")
    method_calls = [["exec_command", "true"], ["put_file", str(tmp_path / "file"), str(tmp_path / "copy")]] * 10
    nodelay_flags: list[bool] = []
    original_connection_made = H11Protocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        server_socket = transport.get_extra_info("socket")
        nodelay_flags.append(
            endpoint == "socket" or bool(server_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        )
        original_connection_made(self, transport)

    with mock.patch.object(H11Protocol, "connection_made", connection_made):
        response = call_plugin(
            *method_calls, ["reset"], ["exec_command", "true"], variables=make_connection_variables(gateway)[endpoint]
        )
    assert all("value" in result for result in response["results"]), response
    assert len(nodelay_flags) == 2, "one before the reset, one after"
    assert all(nodelay_flags), "without TCP_NODELAY, each response waits 40 ms for an acknowledgement"


def test_tls_verifies_the_certificate(tmp_path: Path) -> None:
    certificate, key, source = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "sent"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    source.write_bytes(os.urandom(5_000_001))
    with agents.running_gateway(tmp_path, server={"tls_cert": str(certificate), "tls_key": str(key)}) as server:
        with server.client() as api:
            api.post("/sandboxes", json={"templateID": "base", "name": "web"}).raise_for_status()
        variables = {
            "ansible_host": "web",
            "ansible_sandbox_gateway_url": server.url.replace("http", "https", 1),
            "ansible_sandbox_gateway_token": EXEC_KEY,
        }
        method_calls = [
            ["exec_command", "cat", encode(source.read_bytes())],
            ["put_file", str(source), str(tmp_path / "inside")],
            ["fetch_file", str(tmp_path / "inside"), str(tmp_path / "back")],
        ]
        command_result, *files = call_plugin(
            *method_calls, variables={**variables, "ansible_sandbox_ca_path": str(certificate)}
        )["results"]
        assert check_success(command_result) == (0, source.read_bytes(), b"")
        assert files == [{"value": None}] * 2 and (tmp_path / "back").read_bytes() == source.read_bytes()
        (unchecked,) = call_plugin(
            ["exec_command", "true"], variables={**variables, "ansible_sandbox_validate_certs": False}
        )["results"]
        assert check_success(unchecked)[0] == 0
        (refused,) = call_plugin(["exec_command", "true"], variables=variables)["results"]
        assert refused["error"] == "AnsibleConnectionFailure" and "was not accepted" in refused["message"]


def test_keys_come_from_variables_files_or_the_inventory(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{EXEC_KEY}\n")
    tcp_variables = {"ansible_host": web_id, "ansible_sandbox_gateway_url": gateway.url}
    accepted_settings: list[dict[str, Any]] = [
        {"variables": {**tcp_variables, "ansible_sandbox_gateway_token": ADMIN_KEY}},
        {"variables": {**tcp_variables, "ansible_sandbox_gateway_token_file": str(key_file)}},
        {"variables": tcp_variables, "gateways": {web_id: {"url": gateway.url, "token": EXEC_KEY}}},
        # Values from the inventory plugin override other variables of the host.
        {
            "variables": {**tcp_variables, "ansible_sandbox_validate_certs": "false"},
            "gateways": {web_id: {"url": gateway.url, "token_file": str(key_file)}},
        },
        {
            "variables": {**tcp_variables, "ansible_sandbox_gateway_token": EXEC_KEY},
            "gateways": {web_id: {"url": gateway.url, "token": READ_KEY}},
        },
    ]
    for settings in accepted_settings:
        assert check_success(call_plugin(["exec_command", "true"], **settings)["results"][0])[0] == 0, settings
    # An entry of another gateway under the same id does not apply to this one.
    other_gateways = {web_id: {"url": "http://192.0.2.1:1", "token": EXEC_KEY}}
    (result,) = call_plugin(["exec_command", "true"], variables=tcp_variables, gateways=other_gateways)["results"]
    assert result["error"] == "AnsibleConnectionFailure" and "does not accept" in result["message"]
    for key, message in ((READ_KEY, "has scope read"), ("x" * 20, "does not accept the key"), ("", "does not accept")):
        (result,) = call_plugin(
            ["exec_command", "true"], variables={**tcp_variables, "ansible_sandbox_gateway_token": key}
        )["results"]
        assert result["error"] == "AnsibleConnectionFailure" and message in result["message"]
        assert not key or key not in result["message"]


def test_unreachable_sandboxes_are_reported(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    variables = make_connection_variables(gateway)["socket"]
    method_calls = [["exec_command", "true"], ["put_file", str(tmp_path / "file"), "/tmp/x"]]
    method_calls.append(["fetch_file", "/etc/hostname", str(tmp_path / "back")])
    with gateway.client() as api:
        api.post("/sandboxes/web/pause").raise_for_status()
    for result in call_plugin(*method_calls, variables=variables)["results"]:
        assert result["error"] == "AnsibleConnectionFailure" and "is paused" in result["message"], result
    for result in call_plugin(*method_calls, variables={**variables, "ansible_host": "0" * 12})["results"]:
        assert result["error"] == "AnsibleConnectionFailure" and "not found" in result["message"], result
    for url, message in (
        (f"unix://{tmp_path}/none.sock", "check that sandbox-gateway is running"),
        ("http://127.0.0.1:9", "nothing listens"),
        ("ftp://x", "is not the address of a gateway"),
    ):
        (result,) = call_plugin(method_calls[0], variables={**variables, "ansible_sandbox_gateway_url": url})["results"]
        assert result["error"] == "AnsibleConnectionFailure" and message in result["message"], result


@pytest.mark.parametrize("verb", ["pause", "rollback", "kill"])
def test_a_machine_that_stops_during_a_command_is_unreachable(
    gateway: MemoryGateway, web_id: str, tmp_path: Path, verb: str
) -> None:
    start_marker = tmp_path / "begun"

    def stop_machine() -> None:
        while not start_marker.exists():
            time.sleep(0.02)
        with gateway.client() as api:
            if verb == "kill":
                api.delete("/sandboxes/web").raise_for_status()
            elif verb == "pause":
                api.post("/sandboxes/web/pause").raise_for_status()
            else:
                api.post("/sandboxes/web/rollback", json={"snapshotID": "before"}).raise_for_status()

    if verb == "rollback":
        with gateway.client() as api:
            api.post("/sandboxes/web/snapshots", json={"name": "before"}).raise_for_status()
    stop_thread = threading.Thread(target=stop_machine)
    stop_thread.start()
    started_at = time.monotonic()
    first_result, second_result = call_plugin(
        ["exec_command", f"touch {start_marker}; sleep 60"],
        ["exec_command", "echo again"],
        variables=make_connection_variables(gateway)["tcp"],
    )["results"]
    stop_thread.join()
    assert time.monotonic() - started_at < 30
    assert first_result["error"] == "AnsibleConnectionFailure" and "was closed" in first_result["message"], first_result
    if verb == "rollback":
        assert check_success(second_result)[1] == b"again\n"
        with gateway.client() as api:
            api.delete("/sandboxes/web")
            api.delete("/snapshots/before").raise_for_status()
    else:
        assert second_result["error"] == "AnsibleConnectionFailure", second_result


def test_a_silent_agent_times_out(gateway: MemoryGateway, web_id: str) -> None:
    machine = gateway.machine(web_id)
    assert isinstance(machine, agents.AgentMachine)
    variables = {**make_connection_variables(gateway)["socket"], "ansible_sandbox_gateway_timeout": 2}
    method_calls = [
        ["exec_command", "sleep 5; echo done"],
        ["exec_command", "sleep 5; cat | wc -c", encode(bytes(LARGE_FILE_BYTES >> 8))],
    ]
    slow_command, slow_reader = call_plugin(*method_calls, variables=variables)["results"]
    assert check_success(slow_command)[1] == b"done\n", "a command can run for longer while the agent sends heartbeats"
    assert int(check_success(slow_reader)[1]) == LARGE_FILE_BYTES >> 8, "a command can delay reading its input"
    os.kill(machine.pid, signal.SIGSTOP)
    try:
        (result,) = call_plugin(["exec_command", "true"], variables=variables)["results"]
    finally:
        os.kill(machine.pid, signal.SIGCONT)
    assert result["error"] == "AnsibleConnectionFailure" and "neither data nor a heartbeat for 2 s" in result["message"]


FAKE_SUDO_SCRIPT = """#!/bin/sh
# Reads one byte at a time, as sudo does, because the input after the line is for the command.
prompt=password:
while [ "${1#-}" != "$1" ]; do
    case $1 in -p) prompt=$2; shift 2 ;; -u) shift 2 ;; -n) silent=1; shift ;; *) shift ;; esac
done
[ -z "$silent" ] || { echo "sudo: a password is required" >&2; exit 1; }
for attempt in 1 2 3; do
    printf '%s' "$prompt" >&2
    read -r given || exit 1
    echo >&2
    [ "$given" != 'right "one"' ] || exec "$@"
    echo "Sorry, try again." >&2
done
exit 1
"""


def test_become_sends_the_password(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    fake_sudo = tmp_path / "sudo"
    fake_sudo.write_text(FAKE_SUDO_SCRIPT)
    fake_sudo.chmod(0o755)
    variables = {**make_connection_variables(gateway)["socket"], "ansible_user": "root"}
    become_options = {
        "method": "sudo",
        "become_exe": str(fake_sudo),
        "become_user": "nobody",
        "become_pass": 'right "one"',
    }
    method_call = ["become", "echo out; echo err >&2; exit 5"]
    code, out, err = check_success(
        call_plugin(method_call, variables=variables, become=dict(become_options))["results"][0]
    )
    assert code == 5 and out.endswith(b"out\n") and out.startswith(b"BECOME-SUCCESS") and err == b"err\n"
    started_at = time.monotonic()
    (wrong_password,) = call_plugin(
        method_call, variables=variables, become={**become_options, "become_pass": "wrong"}
    )["results"]
    assert wrong_password["error"] == "AnsibleError" and "the password was not accepted" in wrong_password["message"]
    assert "wrong" not in wrong_password["message"] and time.monotonic() - started_at < 30
    del become_options["become_pass"]
    (missing_password,) = call_plugin(method_call, variables=variables, become=become_options)["results"]
    assert missing_password["error"] == "AnsibleError" and "requires a password" in missing_password["message"]


# --- plays -----------------------------------------------------------------------------------------------------------


def play(gateway: MemoryGateway, scratch: Path, *tasks: dict[str, Any], **variables: Any) -> list[dict[str, Any]]:
    """Run tasks in the sandbox `web` and return their results."""
    target = Target(gateway.unix_url, scratch)
    extra_variables = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": "web",
        "ansible_remote_tmp": str(scratch),
    }
    extra_variables |= {
        "ansible_sandbox_gateway_url": gateway.unix_url,
        "ansible_python_interpreter": PYTHON,
        **variables,
    }
    return target.play(*tasks, options=("-e", json.dumps(extra_variables)))


def test_common_modules_work_in_a_play(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("a", "b c", "ü"):
        (tree / "deep").mkdir(parents=True, exist_ok=True)
        (tree / "deep" / name).write_text(name)
    su_to_nobody = {"become": True, "become_user": "nobody", "become_method": "su", "become_flags": "-s /bin/sh"}
    results = play(
        gateway,
        tmp_path,
        {"ansible.builtin.setup": {"gather_subset": "!all"}},
        {"ansible.builtin.copy": {"src": f"{tree}/", "dest": f"{tmp_path}/copied/", "mode": "preserve"}},
        {"ansible.builtin.command": "echo run"},
        {"ansible.builtin.command": "echo run", "become": True},
        {"ansible.builtin.fetch": {"src": f"{tmp_path}/copied/deep/b c", "dest": f"{tmp_path}/fetched", "flat": True}},
        {"ansible.builtin.raw": "echo raw; exit 3"},
        {"ansible.builtin.command": "sleep 1", "async": 30, "poll": 1},
        {"ansible.builtin.raw": "id -un", **su_to_nobody},
        {"ansible.builtin.wait_for_connection": {"timeout": 10}},
    )
    facts, copied, run, become, fetched, raw, async_result, su, waited = results
    assert facts["ansible_facts"]["ansible_user_id"] == "root"
    assert copied["changed"] and (tmp_path / "copied/deep/ü").read_text() == "ü"
    assert run["stdout"] == become["stdout"] == "run"
    assert fetched["changed"] and (tmp_path / "fetched").read_text() == "b c"
    assert raw["rc"] == 3 and raw["stdout"] == "raw\n"
    assert async_result["rc"] == 0 and su["stdout"] == "nobody\n"
    assert not waited.get("failed")
    results_without_pipelining = play(gateway, tmp_path, {"ansible.builtin.ping": None}, ansible_pipelining=False)
    assert results_without_pipelining[0]["ping"] == "pong"


def test_each_loop_item_has_its_own_user(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    users = ["root", "nobody", "root"]
    task = {"ansible.builtin.raw": "id -un", "vars": {"ansible_user": "{{ item }}"}, "loop": users}
    (result,) = play(gateway, tmp_path, task)
    assert [item["stdout"].strip() for item in result["results"]] == users


def test_a_paused_sandbox_is_reported_as_unreachable(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    with gateway.client() as api:
        api.post("/sandboxes/web/pause").raise_for_status()
    (result,) = play(gateway, tmp_path, {"ansible.builtin.ping": None, "ignore_unreachable": True})
    assert result["unreachable"] and "is paused: resume it first" in result["msg"]
    assert "Traceback" not in json.dumps(result)


# --- a machine -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_play_runs_in_a_fork_of_a_real_machine(shared_gateway: Gateway, template: str, tmp_path: Path) -> None:
    """The play uses the inventory and connection plugins, as several users, on a fork of a running virtual machine."""
    api = shared_gateway
    source_id = api.call("POST", "/sandboxes", {"templateID": template, "name": "plugins"})["sandboxID"]
    try:
        api.sh(source_id, "useradd -m app && echo fork point > /home/app/mark && chown app /home/app/mark")
        snapshot_id = api.call("POST", f"/sandboxes/{source_id}/snapshots", {"name": "plugins-golden"})["snapshotID"]
        api.call("POST", f"/snapshots/{snapshot_id}/fork", {"names": ["plugins-fork"], "metadata": {"role": "a-b"}})
        inventory_content = {
            "plugin": "grove.sandbox.sandboxes",
            "gateways": [{"url": api.url}],
            "filters": {"name": "plugins-*"},
            "strict": True,
        }
        inventory, playbook, source_file = tmp_path / "sandboxes.yml", tmp_path / "book.yml", tmp_path / "sent"
        inventory.write_text(json.dumps(inventory_content))
        source_file.write_bytes(os.urandom(3 << 20))
        playbook.write_text(json.dumps([_make_play_for_fork(tmp_path)]))
        process = subprocess.run(
            [find_ansible_playbook(), "-i", str(inventory), str(playbook)],
            env={
                **os.environ,
                "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
                "ANSIBLE_HOME": str(tmp_path / "home"),
                "LC_ALL": "C.UTF-8",
            },
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        assert "ok=6" in process.stdout, process.stdout + process.stderr
        assert (tmp_path / "said").read_text() == "plugins-fork app\n"
        assert (tmp_path / "back").read_bytes() == source_file.read_bytes()
        assert api.sh(source_id, "ls -A /home/app | grep -v '^[.]'") == "mark\n", "the source is unchanged"
    finally:
        for name in ("plugins-fork", "plugins"):
            api.client.delete(f"/sandboxes/{name}")
        api.client.delete("/snapshots/plugins-golden")


def _make_play_for_fork(scratch: Path) -> dict[str, Any]:
    """Return a play that uses few modules, because modules are slow in an emulated machine."""
    return {
        "hosts": "head_plugins_golden:&metadata_role_a_b",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.assert": {"that": "ansible_python_interpreter == '/usr/bin/python3'"}},
            {"ansible.builtin.copy": {"src": f"{scratch}/sent", "dest": "/home/app/a file", "owner": "app"}},
            {
                "ansible.builtin.raw": "cat mark && echo {{ inventory_hostname }} $(id -un) > said && stat -c %U a*",
                "vars": {"ansible_user": "app"},
                "register": "by_login",
                "failed_when": "by_login.stdout_lines != ['fork point', 'app']",
            },
            {
                "ansible.builtin.command": "id -un",
                "become": True,
                "become_user": "app",
                "become_method": "su",
                "register": "by_su",
                "failed_when": "by_su.stdout != 'app'",
            },
            {"ansible.builtin.fetch": {"src": "/home/app/said", "dest": f"{scratch}/said", "flat": True}},
            {"ansible.builtin.fetch": {"src": "/home/app/a file", "dest": f"{scratch}/back", "flat": True}},
        ],
    }
