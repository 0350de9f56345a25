"""/identity sets the identity of a fork, for callers with the right to do so.

An agent that manages its machine runs in new namespaces (mounts, hostname, network), with a copy of /etc. It has no
right to set the clock, which has no namespace.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import tty
from pathlib import Path

import pytest

SEED = base64.b64encode(os.urandom(64)).decode()
FULL_IDENTITY = {
    "sandboxID": "0123456789ab",
    "hostname": "sibling-1",
    "machineID": "0123456789abcdef0123456789abcdef",
    "entropy": SEED,
    "accessToken": "s3cret",
    "env": {"GREETING": "hello"},
    "dns": ["192.0.2.1", "2001:db8::1"],
}
CAP_SYS_TIME = 25


def test_an_unmanaged_agent_reports_skipped_steps(fresh_agent):
    hostnames = socket.gethostname(), Path("/etc/hostname").exists() and Path("/etc/hostname").read_text()
    response = fresh_agent.post_ok(
        "/identity", {**FULL_IDENTITY, "accessToken": "", "time": time.time() + 999, "growDisk": True}
    )
    skipped_steps = {reason.partition(":")[0] for reason in response["skipped"]}
    assert skipped_steps == {"entropy", "time", "hostname", "hostname file", "machine-id", "resolv.conf", "growDisk"}
    assert response["hostname"] == socket.gethostname() and response["bootID"]
    assert hostnames == (
        socket.gethostname(),
        Path("/etc/hostname").exists() and Path("/etc/hostname").read_text(),
    )


def test_every_route_except_health_needs_the_token(fresh_agent):
    fresh_agent.post_ok("/identity", {"accessToken": "one"})
    for method, path in (
        ("POST", "/exec"),
        ("POST", "/identity"),
        ("POST", "/freeze"),
        ("POST", "/sync"),
        ("GET", "/files?path=/etc/passwd"),
        ("POST", "/files?path=/tmp/agent-test-never"),
        ("POST", "/process.Process/Start"),
        ("POST", "/filesystem.Filesystem/Remove"),
        ("GET", "/nowhere"),
    ):
        for headers in ({}, {"X-Access-Token": ""}, {"X-Access-Token": "two"}, {"X-Access-Token": "ön"}):
            status, data = fresh_agent.request(method, path, b"{}" if method == "POST" else None, headers)
            assert status == 401 and b"X-Access-Token" in data, (path, headers)
    assert fresh_agent.request("GET", "/health") == (204, b"")
    fresh_agent.headers = {"X-Access-Token": "one"}
    fresh_agent.post_ok("/exec", {"args": ["true"]})
    # A caller with the token can replace or remove the token.
    fresh_agent.post_ok("/identity", {"accessToken": "two"})
    assert fresh_agent.post("/exec", {"args": ["true"]})[0] == 401
    fresh_agent.headers = {"X-Access-Token": "two"}
    fresh_agent.post_ok("/identity", {"env": {}})
    assert fresh_agent.request("POST", "/exec", b"{}", {"X-Access-Token": ""})[0] == 401
    fresh_agent.post_ok("/identity", {"accessToken": ""})
    fresh_agent.headers = {}
    fresh_agent.post_ok("/exec", {"args": ["true"]})


def test_accepted_changes_apply_to_later_requests(fresh_agent):
    for round in range(20):
        body = {"env": {"ROUND": str(round)}, "accessToken": f"token-{round}", "wait": False}
        assert fresh_agent.post_ok("/identity", body) == {"accepted": True}
        fresh_agent.headers = {"X-Access-Token": f"token-{round}"}
        response = fresh_agent.post_ok("/exec", {"args": ["/bin/sh", "-c", "echo $ROUND"]})
        assert base64.b64decode(response["stdout"]).decode().strip() == str(round)


def test_every_process_gets_the_environment(fresh_agent):
    def read_environment() -> list[str]:
        script = 'echo "$GREETING $E2B_SANDBOX_ID"'
        exec_output = base64.b64decode(fresh_agent.post_ok("/exec", {"args": ["sh", "-c", script]})["stdout"])
        process_output = fresh_agent.start("sh", "-c", script).read_to_end()[0]
        assert exec_output == process_output
        return exec_output.decode().rstrip("\n").split(" ")

    assert read_environment() == ["", ""]
    fresh_agent.post_ok("/identity", {"sandboxID": "0123456789ab", "env": {"GREETING": "hello"}})
    assert read_environment() == ["hello", "0123456789ab"]
    fresh_agent.post_ok("/identity", {"dns": []})
    assert read_environment() == ["hello", "0123456789ab"]
    fresh_agent.post_ok("/identity", {"env": {}})
    assert read_environment() == ["", "0123456789ab"]
    assert fresh_agent.start("sh", "-c", "echo $GREETING", envs={"GREETING": "mine"}).read_to_end()[0] == b"mine\n"


@pytest.mark.parametrize(
    "body",
    [
        {"hostname": "a b"},
        {"hostname": "x" * 65},
        {"hostname": 1},
        {"machineID": "xyz"},
        {"machineID": "0123"},
        {"entropy": base64.b64encode(b"short").decode()},
        {"entropy": base64.b64encode(b"x" * 1000).decode()},
        {"time": "now"},
        {"time": -1},
        {"accessToken": "a\nb"},
        {"accessToken": 5},
        {"env": {"A=": "x"}},
        {"dns": ["example.org"]},
        {"dns": ["192.0.2.1\nnameserver 192.0.2.2"]},
        {"dns": "192.0.2.1"},
    ],
)
def test_an_invalid_identity_changes_nothing(agent, body):
    status, response = agent.post("/identity", {"sandboxID": "feedfeedfeed", **body})
    assert status == 400, response
    assert b"feedfeedfeed" not in base64.b64decode(agent.post_ok("/exec", {"args": ["env"]})["stdout"])


def test_an_unmanaged_agent_only_syncs_on_freeze(agent):
    response = agent.post_ok("/freeze", {"seconds": 5})
    assert response["frozen"] is False and "does not manage" in response["skipped"][0]
    agent.post_ok("/thaw")
    agent.post_ok("/sync")
    assert agent.post("/freeze", {"seconds": 3600})[0] == 400


# A separate network whose default gateway is this machine itself, so that a test can send requests from there.
NAMESPACE_SCRIPT = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /sys/firmware
mount --bind "$1" /etc
ip link set lo up
ip link add d0 type veth peer name d1
ip addr add 192.0.2.2/24 dev d0
ip link set d0 up
ip link set d1 up
ip route add default via 192.0.2.1
ip addr add 192.0.2.1/32 dev lo
shift
exec setpriv --bounding-set=-sys_time --inh-caps=-sys_time -- "$@"
"""

CLIENT_SCRIPT = """
import http.client, sys
connection = http.client.HTTPConnection("192.0.2.2", int(sys.argv[1]), timeout=30, source_address=(sys.argv[2], 0))
connection.request("POST", sys.argv[3], sys.stdin.buffer.read(), {"X-Access-Token": sys.argv[4]})
response = connection.getresponse()
print(response.status)
print(response.read().decode())
"""


@pytest.fixture
def serial_line():
    """The serial port to the host, as (descriptor of the host's end, path of the machine's end)."""
    host_fd, port_fd = os.openpty()
    tty.setraw(port_fd)
    yield host_fd, os.ttyname(port_fd)
    os.close(port_fd)
    with contextlib.suppress(OSError):
        os.close(host_fd)


@pytest.fixture
def machine(requires_root, tmp_path, running, serial_line):
    """A machine in new namespaces, as (the agent that manages it, path of its /etc)."""
    etc_directory = tmp_path / "etc"
    shutil.copytree("/etc", etc_directory, symlinks=True, ignore_dangling_symlinks=True)
    for name in ("hostname", "machine-id", "resolv.conf"):
        (etc_directory / name).unlink(missing_ok=True)
        (etc_directory / name).write_text(f"old {name}\n")
    argv = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "sh", "-c", NAMESPACE_SCRIPT, "sh"]
    argv += [
        str(etc_directory),
        sys.executable,
        "-m",
        "sandbox_agent",
        "--bind",
        "0.0.0.0",
        "--port",
        "0",
        "--line",
        serial_line[1],
    ]
    hostname_before = socket.gethostname()
    with running(argv) as agent:
        for kind in ("uts", "mnt"):
            assert not Path(f"/proc/{agent.process.pid}/ns/{kind}").samefile(f"/proc/self/ns/{kind}")
        process_status = Path(f"/proc/{agent.process.pid}/status").read_text()
        effective_capabilities = next(
            line.split()[1] for line in process_status.splitlines() if line.startswith("CapEff")
        )
        assert not int(effective_capabilities, 16) >> CAP_SYS_TIME & 1, "the agent could set this machine's clock"
        yield agent, etc_directory
    assert socket.gethostname() == hostname_before


def _build_namespace_command(agent) -> list[str]:
    return ["nsenter", f"--net=/proc/{agent.process.pid}/ns/net", "--"]


def post_from_address(agent, path, body, *, source="192.0.2.1", token=""):
    """Send a POST request from the address ``source`` in the agent's network."""
    result = subprocess.run(
        [*_build_namespace_command(agent), sys.executable, "-c", CLIENT_SCRIPT, str(agent.port), source, path, token],
        input=json.dumps(body).encode(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    status, _, response = result.stdout.decode().partition("\n")
    return int(status), json.loads(response)


def run_script(agent, script, token="s3cret"):
    status, response = post_from_address(agent, "/exec", {"args": ["sh", "-c", script]}, token=token)
    assert status == 200, response
    return base64.b64decode(response["stdout"]).decode()


def test_a_managed_machine_applies_its_identity(machine):
    agent, etc_directory = machine
    assert run_script(agent, "cat /etc/hostname /etc/machine-id /etc/resolv.conf", "") == (
        "old hostname\nold machine-id\nold resolv.conf\n"
    )
    status, response = post_from_address(agent, "/identity", FULL_IDENTITY)
    assert status == 200
    assert (response["hostname"], response["machineID"]) == ("sibling-1", FULL_IDENTITY["machineID"])
    assert response["skipped"] == [], response
    assert run_script(agent, "hostname; cat /etc/hostname /etc/machine-id /etc/resolv.conf; echo $GREETING") == (
        f"sibling-1\nsibling-1\n{FULL_IDENTITY['machineID']}\nnameserver 192.0.2.1\nnameserver 2001:db8::1\nhello\n"
    )
    # None of it is written to disk.
    for name in ("hostname", "machine-id", "resolv.conf"):
        assert (etc_directory / name).read_text() == f"old {name}\n"
    # Shorter contents replace longer contents completely.
    post_from_address(agent, "/identity", {"hostname": "s", "dns": ["192.0.2.9"]}, token="s3cret")
    assert run_script(agent, "cat /etc/hostname /etc/resolv.conf") == "s\nnameserver 192.0.2.9\n"


def test_the_gateway_can_set_the_identity_without_a_token(machine):
    agent, _ = machine
    assert post_from_address(agent, "/identity", {"accessToken": "first"}, source="192.0.2.2")[0] == 200
    assert post_from_address(agent, "/identity", {"accessToken": "mine"}, source="192.0.2.2")[0] == 401
    assert post_from_address(agent, "/identity", {"accessToken": "second"}, source="192.0.2.1")[0] == 200
    assert post_from_address(agent, "/exec", {"args": ["true"]}, source="192.0.2.1")[0] == 401
    assert post_from_address(agent, "/exec", {"args": ["true"]}, source="192.0.2.1", token="second")[0] == 200


def receive_bytes(host_fd, size, seconds=10.0):
    """Return up to ``size`` bytes that the agent sends over the line."""
    data, deadline = b"", time.monotonic() + seconds
    while len(data) < size and select.select([host_fd], [], [], max(0, deadline - time.monotonic()))[0]:
        data += os.read(host_fd, size - len(data))
    return data


def make_probe(text):
    return b"?" + text.encode().ljust(16, b".")


def send_identity(host_fd, body):
    """Send a probe over the line, then the identity."""
    probe = make_probe(os.urandom(8).hex())
    os.write(host_fd, probe)
    assert receive_bytes(host_fd, len(probe)) == probe
    os.write(host_fd, b"=" + (body if isinstance(body, bytes) else json.dumps(body).encode()))


def test_requests_wait_until_the_identity_is_applied(machine, serial_line):
    (agent, _), (host_fd, _) = machine, serial_line
    for round in range(20):
        send_identity(
            host_fd, {"env": {"ROUND": str(round)}, "accessToken": f"token-{round}", "hostname": f"sibling-{round}"}
        )
        assert run_script(agent, "echo $ROUND $(hostname)", f"token-{round}") == f"{round} sibling-{round}\n"


def test_requests_wait_between_the_probe_and_the_identity(machine, serial_line):
    (agent, _), (host_fd, _) = machine, serial_line
    os.write(host_fd, make_probe("who"))
    assert receive_bytes(host_fd, 17) == make_probe("who")
    outputs: list[str] = []
    thread = threading.Thread(target=lambda: outputs.append(run_script(agent, "echo $N", "")))
    thread.start()
    thread.join(0.7)
    assert thread.is_alive() and not outputs
    # A fork of a machine in exactly this state receives another probe.
    os.write(host_fd, make_probe("again"))
    assert receive_bytes(host_fd, 17) == make_probe("again")
    os.write(host_fd, b'={"env": {"N": "1"}}')
    thread.join(30)
    assert outputs == ["1\n"]


def test_an_identity_for_another_machine_is_ignored(machine, serial_line):
    (agent, _), (host_fd, _) = machine, serial_line
    send_identity(host_fd, {"env": {"N": "1"}})
    assert run_script(agent, "echo $N", "") == "1\n"
    os.write(host_fd, b'={"env": {"N": "2"}}')
    time.sleep(0.2)
    assert run_script(agent, "echo $N", "") == "1\n"


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'{"env": {"N": "2"}, "hostname": "a b"}', b"\xff" * 4000])
def test_invalid_messages_on_the_line_are_ignored(machine, serial_line, body):
    (agent, _), (host_fd, _) = machine, serial_line
    send_identity(host_fd, {"env": {"N": "1"}})
    assert run_script(agent, "echo $N", "") == "1\n"
    send_identity(host_fd, body)
    assert run_script(agent, "echo $N", "") == "1\n"
    send_identity(host_fd, {"env": {"N": "3"}})
    assert run_script(agent, "echo $N", "") == "3\n"


def test_the_agent_does_not_busy_loop_after_the_host_hangs_up(machine, serial_line):
    (agent, _), (host_fd, _) = machine, serial_line
    send_identity(host_fd, {"env": {"N": "1"}})
    assert run_script(agent, "echo $N", "") == "1\n"
    os.write(host_fd, make_probe("who"))
    assert receive_bytes(host_fd, 17)
    os.close(host_fd)
    assert run_script(agent, "echo $N", "") == "1\n"

    def read_cpu_ticks() -> int:
        return sum(map(int, Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    ticks_before = read_cpu_ticks()
    time.sleep(0.5)
    assert read_cpu_ticks() - ticks_before < 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_failure_to_set_the_clock_is_reported(machine):
    agent, _ = machine
    _, response = post_from_address(agent, "/identity", {"time": time.time() + 3600})
    assert [reason.partition(":")[0] for reason in response["skipped"]] == ["time"]
    assert abs(float(run_script(agent, "date +%s", "")) - time.time()) < 60


def test_a_restarted_agent_keeps_its_token_and_mounts(machine):
    """The first agent keeps running. The second agent runs in the same namespaces and loads the saved state."""
    agent, _ = machine
    post_from_address(agent, "/identity", FULL_IDENTITY)
    enter_command = ["nsenter", "--mount", "--uts", "--net", f"--target={agent.process.pid}", "--"]
    second_agent = subprocess.Popen(
        [*enter_command, sys.executable, "-m", "sandbox_agent", "--bind", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "gateway/src")},
    )
    try:
        assert second_agent.stderr
        line = second_agent.stderr.readline()
        assert "listening" in line, line
        client_script = CLIENT_SCRIPT.replace("192.0.2.2", "127.0.0.1")
        port = line.strip().rpartition(":")[2]
        result = subprocess.run(
            [*_build_namespace_command(agent), sys.executable, "-c", client_script, port, "127.0.0.1", "/exec", ""],
            input=b"{}",
            capture_output=True,
            check=True,
        )
        assert result.stdout.startswith(b"401")
    finally:
        second_agent.kill()
        second_agent.wait()
    mount_table = Path(f"/proc/{agent.process.pid}/mounts").read_text()
    assert mount_table.count(" /etc/hostname ") == 1
    assert run_script(agent, "stat -c %a /run/sandbox/agent.json") == "600\n"
