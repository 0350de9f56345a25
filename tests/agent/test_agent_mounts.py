"""POST /mounts: mounts are real, in the test's own namespace; tmpfs stands in for network file systems."""

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

SOURCE = Path(__file__).parents[2] / "gateway/src"
GATEWAY, OTHER = "192.0.2.1", "192.0.2.2"

# A separate network whose default gateway is this machine itself, so that a test can send requests from there.
NAMESPACE = """
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

CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("192.0.2.2", int(sys.argv[1]), timeout=30, source_address=(sys.argv[2], 0))
connection.request("POST", sys.argv[3], sys.stdin.buffer.read(), {"X-Access-Token": sys.argv[4]})
response = connection.getresponse()
print(response.status)
print(response.read().decode())
"""


class Machine:
    """A managing agent in its own namespaces."""

    def __init__(self, agent: Any) -> None:
        self.pid = agent.process.pid
        self._port = agent.port

    def namespace_command(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--"]
        return subprocess.Popen([*enter, *argv], **options)

    def run(self, script: str) -> None:
        assert self.namespace_command("sh", "-ec", script).wait(20) == 0

    def post(
        self, path: str, body: Any, *, source: str = GATEWAY, token: str = "", port: int = 0
    ) -> tuple[int, dict[str, Any]]:
        argv = (sys.executable, "-c", CLIENT, str(port or self._port), source, path, token)
        process = self.namespace_command(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = process.communicate(json.dumps(body).encode(), 60)
        status, _, answer = out.decode().partition("\n")
        return int(status), json.loads(answer)

    def check_agreement(self, *wanted: dict[str, Any]) -> tuple[list[str], list[str]]:
        status, answer = self.post("/mounts", {"mounts": list(wanted)})
        assert status == 200, answer
        return answer["mounted"], answer["unmounted"]

    def mounted(self) -> dict[str, str]:
        """Path → options of the mounts whose source is named vol-*."""
        lines = (line.split() for line in Path(f"/proc/{self.pid}/mounts").read_text().splitlines())
        return {fields[1]: fields[3] for fields in lines if fields[0].startswith("vol-")}


def volume_request(name: str, path: str = "", **changes: Any) -> dict[str, Any]:
    one = {"path": path or f"/mnt/{name}", "source": f"vol-{name}", "type": "tmpfs", "options": "size=1m"}
    return {**one, "readOnly": False, **changes}


@pytest.fixture
def machine(root: None, running: Any) -> Iterator[Machine]:
    argv = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "sh", "-c", NAMESPACE, "sh"]
    with running([*argv, sys.executable, "-m", "sandbox_agent", "--bind", "0.0.0.0", "--port", "0"]) as agent:
        assert not Path(f"/proc/{agent.process.pid}/ns/mnt").samefile("/proc/self/ns/mnt")
        yield Machine(agent)


def test_missing_mounts_are_added_and_others_kept(machine):
    a, b = volume_request("a", "/mnt/deep/down/a"), volume_request("b", readOnly=True)
    assert machine.check_agreement(a, b) == ([a["path"], b["path"]], [])
    options = machine.mounted()
    assert {"rw", "nosuid", "nodev", "size=1024k"} <= set(options[a["path"]].split(","))
    assert {"ro", "nosuid", "nodev"} <= set(options[b["path"]].split(","))
    machine.run("echo kept > /mnt/deep/down/a/file")
    assert machine.check_agreement(b, a) == ([], [])
    machine.run("grep -q kept /mnt/deep/down/a/file")
    assert machine.check_agreement(a) == ([], [b["path"]])
    assert list(machine.mounted()) == [a["path"]]
    machine.run("test -d /mnt/b")


@pytest.mark.parametrize("change", [{"readOnly": True}, {"source": "vol-other"}, {"options": "size=2m"}])
def test_a_mount_with_other_options_is_replaced(machine, change):
    a = volume_request("a")
    machine.check_agreement(a)
    assert machine.check_agreement({**a, **change}) == ([a["path"]], [a["path"]])
    assert len(machine.mounted()) == 1
    assert machine.check_agreement({**a, **change}) == ([], [])


def test_a_volume_in_use_can_be_unmounted(machine):
    a, inner = volume_request("a"), volume_request("inner", "/mnt/a/inner")
    machine.check_agreement(a, inner)
    user = machine.namespace_command(
        "sh", "-c", "cd /mnt/a/inner && echo there && exec sleep 60", stdout=subprocess.PIPE
    )
    try:
        assert user.stdout
        assert user.stdout.readline() == b"there\n"
        assert machine.check_agreement() == ([], ["/mnt/a/inner", "/mnt/a"])
        assert machine.mounted() == {}
    finally:
        user.kill()
        user.wait()


def test_foreign_mounts_stay_unless_they_hide_a_removed_one(machine):
    machine.run("mkdir /mnt/mine /mnt/a; mount -t tmpfs vol-mine /mnt/mine")
    machine.check_agreement(volume_request("a"))
    machine.run("mount -t tmpfs vol-over /mnt/a")
    assert machine.check_agreement() == ([], ["/mnt/a"])
    assert list(machine.mounted()) == ["/mnt/mine"]


def test_a_volume_unmounted_by_hand_is_mounted_again(machine):
    machine.check_agreement(volume_request("a"))
    machine.run("umount /mnt/a")
    assert machine.check_agreement(volume_request("a")) == (["/mnt/a"], [])


def test_new_volumes_are_mounted_all_or_none(machine):
    machine.check_agreement(volume_request("old"), volume_request("gone"))
    wanted = [volume_request("old"), volume_request("new"), volume_request("bad", type="nosuchfs")]
    status, answer = machine.post("/mounts", {"mounts": wanted})
    assert status == 400
    assert "/mnt/bad: this machine's kernel cannot mount nosuchfs" in answer["message"]
    assert list(machine.mounted()) == ["/mnt/old"]
    # The agent does not remember it as its own mount either.
    machine.run("mount -t tmpfs vol-new /mnt/new")
    assert machine.check_agreement(volume_request("old")) == ([], [])
    assert sorted(machine.mounted()) == ["/mnt/new", "/mnt/old"]


def test_an_unusable_mount_point_is_reported(machine):
    machine.run("mkdir /mnt/real; ln -s real /mnt/link; touch /mnt/file")
    for path, reason in {
        "/mnt/link/sub": "symbolic link: use /mnt/real/sub instead",
        "/mnt/file": "cannot mount on /mnt/file: ",
        "/mnt/file/sub": "cannot mount on /mnt/file/sub: ",
    }.items():
        status, answer = machine.post("/mounts", {"mounts": [volume_request("a", path)]})
        assert status == 400 and reason in answer["message"], (status, answer)
    assert machine.mounted() == {}
    machine.run("test ! -e /mnt/real/sub")


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        "/mnt/a",
        ["/mnt/a"],
        [volume_request("a", "mnt/a")],
        [volume_request("a", "/")],
        [volume_request("a", "/mnt/../etc")],
        [volume_request("a", "/mnt//a")],
        [volume_request("a", "/mnt/a/")],
        [volume_request("a", "/mnt/a\0b")],
        [volume_request("a", source="")],
        [volume_request("a", type="")],
        [volume_request("a", options=5)],
        [volume_request("a"), volume_request("b", "/mnt/a")],
    ],
)
def test_an_invalid_request_changes_nothing(wanted):
    with pytest.raises(mounts.Failure) as refused:
        mounts._check({"mounts": wanted})
    assert refused.value.status == 400


def test_only_the_gateway_or_the_token_can_mount(machine):
    a = {"mounts": [volume_request("a")]}
    assert machine.post("/mounts", a, source=OTHER)[0] == 403, "no token was given out: only the gateway, then"
    assert machine.mounted() == {}
    assert machine.post("/identity", {"accessToken": "s3cret"})[0] == 200
    assert machine.post("/mounts", a, source=OTHER)[0] == 401
    assert machine.post("/mounts", a, source=OTHER, token="wrong")[0] == 401
    assert machine.mounted() == {}
    assert machine.post("/mounts", a, source=OTHER, token="s3cret")[0] == 200
    assert machine.post("/mounts", {"mounts": []})[0] == 200
    assert machine.mounted() == {}


def test_a_restarted_agent_knows_its_mounts(machine):
    machine.run("mkdir /mnt/mine; mount -t tmpfs vol-mine /mnt/mine")
    machine.check_agreement(volume_request("a"))
    second = machine.namespace_command(
        *(sys.executable, "-m", "sandbox_agent", "--bind", "0.0.0.0", "--port", "0"),
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    try:
        assert second.stderr
        port = int(second.stderr.readline().decode().rpartition(":")[2])
        assert machine.post("/mounts", {"mounts": []}, port=port)[1]["unmounted"] == ["/mnt/a"]
        assert list(machine.mounted()) == ["/mnt/mine"]
    finally:
        second.kill()
        second.wait()


def test_an_unmanaged_agent_mounts_nothing(fresh_agent):
    fresh_agent.post_ok("/identity", {"accessToken": "s3cret"})
    fresh_agent.headers = {"X-Access-Token": "s3cret"}
    status, answer = fresh_agent.post("/mounts", {"mounts": [volume_request("a", "/nonexistent/a")]})
    assert status == 400 and "does not manage" in answer["message"]
    assert not Path("/nonexistent").exists()


def test_hanging_work_times_out():
    started = time.monotonic()
    assert mounts._run_with_timeout(lambda: time.sleep(60) or 0, 0.2) == errno.ETIMEDOUT
    assert time.monotonic() - started < 5


def test_errors_of_work_are_passed_on():
    def fail() -> int:
        raise OSError(errno.ESTALE, "stale")

    assert mounts._run_with_timeout(fail, 10) == errno.ESTALE
    assert mounts._run_with_timeout(lambda: 0, 10) == 0


def test_the_module_is_loaded_by_the_first_request():
    script = "import sys, sandbox_agent.agent; print('sandbox_agent.machine.mounts' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "False\n"
