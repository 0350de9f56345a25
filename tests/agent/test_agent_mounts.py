"""POST /mounts mounts volumes.

The mounts are real, but in the test's own namespace; tmpfs stands in for network file systems.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_agent.machine import mounts

SOURCE_DIRECTORY = Path(__file__).parents[2] / "gateway/src"
GATEWAY_ADDRESS, OTHER_ADDRESS = "192.0.2.1", "192.0.2.2"

# A separate network whose default gateway is this machine itself, so that a test can send requests from there.
NAMESPACE_SCRIPT = """
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /mnt
ip link set lo up
ip link add d0 type veth peer name d1
ip addr add 192.0.2.2/24 dev d0
ip link set d0 up
ip link set d1 up
ip route add default via 192.0.2.1
ip addr add 192.0.2.1/32 dev lo
exec "$@"
"""

CLIENT_SCRIPT = """
import http.client, sys
connection = http.client.HTTPConnection("192.0.2.2", int(sys.argv[1]), timeout=30, source_address=(sys.argv[2], 0))
connection.request("POST", sys.argv[3], sys.stdin.buffer.read(), {"X-Access-Token": sys.argv[4]})
response = connection.getresponse()
print(response.status)
print(response.read().decode())
"""


class Machine:
    """A machine in new namespaces, with an agent that manages it."""

    def __init__(self, agent: Any) -> None:
        self.pid = agent.process.pid
        self._port = agent.port

    def start_process(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        enter_command = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--"]
        return subprocess.Popen([*enter_command, *argv], **options)

    def run(self, script: str) -> None:
        assert self.start_process("sh", "-ec", script).wait(20) == 0

    def post(
        self, path: str, body: Any, *, source: str = GATEWAY_ADDRESS, token: str = "", port: int = 0
    ) -> tuple[int, dict[str, Any]]:
        argv = (sys.executable, "-c", CLIENT_SCRIPT, str(port or self._port), source, path, token)
        process = self.start_process(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = process.communicate(json.dumps(body).encode(), 60)
        status, _, response = out.decode().partition("\n")
        return int(status), json.loads(response)

    def request_mounts(self, *desired_mounts: dict[str, Any]) -> tuple[list[str], list[str]]:
        status, response = self.post("/mounts", {"mounts": list(desired_mounts)})
        assert status == 200, response
        return response["mounted"], response["unmounted"]

    def list_mounts(self) -> dict[str, str]:
        """Return the options of each mount whose source is vol-*, by path."""
        rows = (line.split() for line in Path(f"/proc/{self.pid}/mounts").read_text().splitlines())
        return {fields[1]: fields[3] for fields in rows if fields[0].startswith("vol-")}


def make_mount(name: str, path: str = "", **changes: Any) -> dict[str, Any]:
    mount = {"path": path or f"/mnt/{name}", "source": f"vol-{name}", "type": "tmpfs", "options": "size=1m"}
    return {**mount, "readOnly": False, **changes}


@pytest.fixture
def machine(requires_root: None, running: Any) -> Iterator[Machine]:
    argv = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "sh", "-c", NAMESPACE_SCRIPT, "sh"]
    with running([*argv, sys.executable, "-m", "sandbox_agent", "--bind", "0.0.0.0", "--port", "0"]) as agent:
        assert not Path(f"/proc/{agent.process.pid}/ns/mnt").samefile("/proc/self/ns/mnt")
        yield Machine(agent)


def test_missing_mounts_are_added_and_existing_ones_kept(machine):
    a, b = make_mount("a", "/mnt/deep/down/a"), make_mount("b", readOnly=True)
    assert machine.request_mounts(a, b) == ([a["path"], b["path"]], [])
    options_by_path = machine.list_mounts()
    assert {"rw", "nosuid", "nodev", "size=1024k"} <= set(options_by_path[a["path"]].split(","))
    assert {"ro", "nosuid", "nodev"} <= set(options_by_path[b["path"]].split(","))
    machine.run("echo kept > /mnt/deep/down/a/file")
    assert machine.request_mounts(b, a) == ([], [])
    machine.run("grep -q kept /mnt/deep/down/a/file")
    assert machine.request_mounts(a) == ([], [b["path"]])
    assert list(machine.list_mounts()) == [a["path"]]
    machine.run("test -d /mnt/b")


@pytest.mark.parametrize("change", [{"readOnly": True}, {"source": "vol-other"}, {"options": "size=2m"}])
def test_a_mount_with_different_options_is_replaced(machine, change):
    a = make_mount("a")
    machine.request_mounts(a)
    assert machine.request_mounts({**a, **change}) == ([a["path"]], [a["path"]])
    assert len(machine.list_mounts()) == 1
    assert machine.request_mounts({**a, **change}) == ([], [])


def test_a_volume_in_use_can_be_unmounted(machine):
    a, inner = make_mount("a"), make_mount("inner", "/mnt/a/inner")
    machine.request_mounts(a, inner)
    process = machine.start_process(
        "sh", "-c", "cd /mnt/a/inner && echo there && exec sleep 60", stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == b"there\n"
        assert machine.request_mounts() == ([], ["/mnt/a/inner", "/mnt/a"])
        assert machine.list_mounts() == {}
    finally:
        process.kill()
        process.wait()


def test_foreign_mounts_are_kept_unless_they_hide_a_removed_volume(machine):
    machine.run("mkdir /mnt/mine /mnt/a; mount -t tmpfs vol-mine /mnt/mine")
    machine.request_mounts(make_mount("a"))
    machine.run("mount -t tmpfs vol-over /mnt/a")
    assert machine.request_mounts() == ([], ["/mnt/a"])
    assert list(machine.list_mounts()) == ["/mnt/mine"]


def test_a_manually_unmounted_volume_is_mounted_again(machine):
    machine.request_mounts(make_mount("a"))
    machine.run("umount /mnt/a")
    assert machine.request_mounts(make_mount("a")) == (["/mnt/a"], [])


def test_mounting_new_volumes_is_all_or_nothing(machine):
    machine.request_mounts(make_mount("old"), make_mount("gone"))
    desired_mounts = [make_mount("old"), make_mount("new"), make_mount("bad", type="nosuchfs")]
    status, response = machine.post("/mounts", {"mounts": desired_mounts})
    assert status == 400
    assert "cannot mount /mnt/bad, because this machine's kernel does not support nosuchfs" in response["message"]
    assert list(machine.list_mounts()) == ["/mnt/old"]
    # The agent also does not treat this path as its own mount.
    machine.run("mount -t tmpfs vol-new /mnt/new")
    assert machine.request_mounts(make_mount("old")) == ([], [])
    assert sorted(machine.list_mounts()) == ["/mnt/new", "/mnt/old"]


def test_an_unusable_mount_point_is_reported(machine):
    machine.run("mkdir /mnt/real; ln -s real /mnt/link; touch /mnt/file")
    for path, reason in {
        "/mnt/link/sub": "symbolic link: use /mnt/real/sub instead",
        "/mnt/file": "cannot mount on /mnt/file: ",
        "/mnt/file/sub": "cannot mount on /mnt/file/sub: ",
    }.items():
        status, response = machine.post("/mounts", {"mounts": [make_mount("a", path)]})
        assert status == 400 and reason in response["message"], (status, response)
    assert machine.list_mounts() == {}
    machine.run("test ! -e /mnt/real/sub")


@pytest.mark.parametrize(
    "desired_mounts",
    [
        None,
        "/mnt/a",
        ["/mnt/a"],
        [make_mount("a", "mnt/a")],
        [make_mount("a", "/")],
        [make_mount("a", "/mnt/../etc")],
        [make_mount("a", "/mnt//a")],
        [make_mount("a", "/mnt/a/")],
        [make_mount("a", "/mnt/a\0b")],
        [make_mount("a", source="")],
        [make_mount("a", type="")],
        [make_mount("a", options=5)],
        [make_mount("a"), make_mount("b", "/mnt/a")],
    ],
)
def test_an_invalid_request_changes_nothing(desired_mounts):
    with pytest.raises(mounts.Failure) as error:
        mounts._parse_mounts({"mounts": desired_mounts})
    assert error.value.status == 400


def test_mounting_requires_the_gateway_or_the_token(machine):
    body = {"mounts": [make_mount("a")]}
    assert machine.post("/mounts", body, source=OTHER_ADDRESS)[0] == 403, "without a token, only the gateway may mount"
    assert machine.list_mounts() == {}
    assert machine.post("/identity", {"accessToken": "s3cret"})[0] == 200
    assert machine.post("/mounts", body, source=OTHER_ADDRESS)[0] == 401
    assert machine.post("/mounts", body, source=OTHER_ADDRESS, token="wrong")[0] == 401
    assert machine.list_mounts() == {}
    assert machine.post("/mounts", body, source=OTHER_ADDRESS, token="s3cret")[0] == 200
    assert machine.post("/mounts", {"mounts": []})[0] == 200
    assert machine.list_mounts() == {}


def test_a_restarted_agent_unmounts_only_its_own_mounts(machine):
    machine.run("mkdir /mnt/mine; mount -t tmpfs vol-mine /mnt/mine")
    machine.request_mounts(make_mount("a"))
    second_agent = machine.start_process(
        *(sys.executable, "-m", "sandbox_agent", "--bind", "0.0.0.0", "--port", "0"),
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY)},
    )
    try:
        assert second_agent.stderr
        port = int(second_agent.stderr.readline().decode().rpartition(":")[2])
        assert machine.post("/mounts", {"mounts": []}, port=port)[1]["unmounted"] == ["/mnt/a"]
        assert list(machine.list_mounts()) == ["/mnt/mine"]
    finally:
        second_agent.kill()
        second_agent.wait()


def test_an_unmanaged_agent_mounts_nothing(fresh_agent):
    fresh_agent.post_ok("/identity", {"accessToken": "s3cret"})
    fresh_agent.headers = {"X-Access-Token": "s3cret"}
    status, response = fresh_agent.post("/mounts", {"mounts": [make_mount("a", "/nonexistent/a")]})
    assert status == 400 and "does not manage" in response["message"]
    assert not Path("/nonexistent").exists()


def test_a_hung_call_times_out():
    start_time = time.monotonic()
    assert mounts._run_with_timeout(lambda: time.sleep(60) or 0, 0.2) == errno.ETIMEDOUT
    assert time.monotonic() - start_time < 5


def test_the_errno_of_a_failed_call_is_returned():
    def fail() -> int:
        raise OSError(errno.ESTALE, "stale")

    assert mounts._run_with_timeout(fail, 10) == errno.ESTALE
    assert mounts._run_with_timeout(lambda: 0, 10) == 0


def test_the_module_is_imported_on_demand():
    script = "import sys, sandbox_agent.agent; print('sandbox_agent.machine.mounts' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE_DIRECTORY)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == "False\n"
