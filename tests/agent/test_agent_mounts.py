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

    def inside(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--"]
        return subprocess.Popen([*enter, *argv], **options)

    def run(self, script: str) -> None:
        assert self.inside("sh", "-ec", script).wait(20) == 0

    def post(
        self, path: str, body: Any, *, source: str = GATEWAY, token: str = "", port: int = 0
    ) -> tuple[int, dict[str, Any]]:
        argv = (sys.executable, "-c", CLIENT, str(port or self._port), source, path, token)
        process = self.inside(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = process.communicate(json.dumps(body).encode(), 60)
        status, _, answer = out.decode().partition("\n")
        return int(status), json.loads(answer)

    def agree(self, *wanted: dict[str, Any]) -> tuple[list[str], list[str]]:
        status, answer = self.post("/mounts", {"mounts": list(wanted)})
        assert status == 200, answer
        return answer["mounted"], answer["unmounted"]

    def mounted(self) -> dict[str, str]:
        """Path → options of the mounts whose source is named vol-*."""
        lines = (line.split() for line in Path(f"/proc/{self.pid}/mounts").read_text().splitlines())
        return {fields[1]: fields[3] for fields in lines if fields[0].startswith("vol-")}


def volume(name: str, path: str = "", **changes: Any) -> dict[str, Any]:
    one = {"path": path or f"/mnt/{name}", "source": f"vol-{name}", "type": "tmpfs", "options": "size=1m"}
    return {**one, "readOnly": False, **changes}


@pytest.fixture
def machine(root: None, running: Any) -> Iterator[Machine]:
    argv = ["unshare", "--mount", "--uts", "--net", "--propagation", "private", "sh", "-c", NAMESPACE, "sh"]
    with running([*argv, sys.executable, "-m", "sandbox_agent", "--bind", "0.0.0.0", "--port", "0"]) as agent:
        assert not Path(f"/proc/{agent.process.pid}/ns/mnt").samefile("/proc/self/ns/mnt")
        yield Machine(agent)


def test_what_is_wanted_is_mounted_and_what_is_there_is_left_alone(machine):
    a, b = volume("a", "/mnt/deep/down/a"), volume("b", readOnly=True)
    assert machine.agree(a, b) == ([a["path"], b["path"]], [])
    options = machine.mounted()
    assert {"rw", "nosuid", "nodev", "size=1024k"} <= set(options[a["path"]].split(","))
    assert {"ro", "nosuid", "nodev"} <= set(options[b["path"]].split(","))
    machine.run("echo kept > /mnt/deep/down/a/file")
    assert machine.agree(b, a) == ([], [])
    machine.run("grep -q kept /mnt/deep/down/a/file")
    assert machine.agree(a) == ([], [b["path"]])
    assert list(machine.mounted()) == [a["path"]]
    machine.run("test -d /mnt/b")


@pytest.mark.parametrize("change", [{"readOnly": True}, {"source": "vol-other"}, {"options": "size=2m"}])
def test_what_is_mounted_otherwise_is_mounted_anew(machine, change):
    a = volume("a")
    machine.agree(a)
    assert machine.agree({**a, **change}) == ([a["path"]], [a["path"]])
    assert len(machine.mounted()) == 1
    assert machine.agree({**a, **change}) == ([], [])


def test_a_volume_in_use_is_taken_away_all_the_same(machine):
    a, inner = volume("a"), volume("inner", "/mnt/a/inner")
    machine.agree(a, inner)
    user = machine.inside("sh", "-c", "cd /mnt/a/inner && echo there && exec sleep 60", stdout=subprocess.PIPE)
    try:
        assert user.stdout
        assert user.stdout.readline() == b"there\n"
        assert machine.agree() == ([], ["/mnt/a/inner", "/mnt/a"])
        assert machine.mounted() == {}
    finally:
        user.kill()
        user.wait()


def test_what_others_mounted_is_not_touched_unless_it_hides_what_is_to_go(machine):
    machine.run("mkdir /mnt/mine /mnt/a; mount -t tmpfs vol-mine /mnt/mine")
    machine.agree(volume("a"))
    machine.run("mount -t tmpfs vol-over /mnt/a")
    assert machine.agree() == ([], ["/mnt/a"])
    assert list(machine.mounted()) == ["/mnt/mine"]


def test_what_somebody_unmounted_is_mounted_anew(machine):
    machine.agree(volume("a"))
    machine.run("umount /mnt/a")
    assert machine.agree(volume("a")) == (["/mnt/a"], [])


def test_new_ones_are_mounted_all_or_none(machine):
    machine.agree(volume("old"), volume("gone"))
    wanted = [volume("old"), volume("new"), volume("bad", type="nosuchfs")]
    status, answer = machine.post("/mounts", {"mounts": wanted})
    assert status == 400
    assert "/mnt/bad: this machine's kernel cannot mount nosuchfs" in answer["message"]
    assert list(machine.mounted()) == ["/mnt/old"]
    # The agent does not remember it as its own mount either.
    machine.run("mount -t tmpfs vol-new /mnt/new")
    assert machine.agree(volume("old")) == ([], [])
    assert sorted(machine.mounted()) == ["/mnt/new", "/mnt/old"]


def test_what_cannot_be_mounted_on_is_said(machine):
    machine.run("mkdir /mnt/real; ln -s real /mnt/link; touch /mnt/file")
    for path, reason in {
        "/mnt/link/sub": "symbolic link: mount on /mnt/real/sub",
        "/mnt/file": "cannot mount on /mnt/file: ",
        "/mnt/file/sub": "cannot mount on /mnt/file/sub: ",
    }.items():
        status, answer = machine.post("/mounts", {"mounts": [volume("a", path)]})
        assert status == 400 and reason in answer["message"], (status, answer)
    assert machine.mounted() == {}
    machine.run("test ! -e /mnt/real/sub")


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        "/mnt/a",
        ["/mnt/a"],
        [volume("a", "mnt/a")],
        [volume("a", "/")],
        [volume("a", "/mnt/../etc")],
        [volume("a", "/mnt//a")],
        [volume("a", "/mnt/a/")],
        [volume("a", "/mnt/a\0b")],
        [volume("a", source="")],
        [volume("a", type="")],
        [volume("a", options=5)],
        [volume("a"), volume("b", "/mnt/a")],
    ],
)
def test_nonsense_is_refused_before_anything_is_done(wanted):
    with pytest.raises(mounts.Failure) as refused:
        mounts._check({"mounts": wanted})
    assert refused.value.status == 400


def test_only_the_gateway_and_who_has_the_token_are_obeyed(machine):
    a = {"mounts": [volume("a")]}
    assert machine.post("/mounts", a, source=OTHER)[0] == 403, "no token was given out: only the gateway, then"
    assert machine.mounted() == {}
    assert machine.post("/identity", {"accessToken": "s3cret"})[0] == 200
    assert machine.post("/mounts", a, source=OTHER)[0] == 401
    assert machine.post("/mounts", a, source=OTHER, token="wrong")[0] == 401
    assert machine.mounted() == {}
    assert machine.post("/mounts", a, source=OTHER, token="s3cret")[0] == 200
    assert machine.post("/mounts", {"mounts": []})[0] == 200
    assert machine.mounted() == {}


def test_an_agent_started_anew_knows_what_is_the_agents(machine):
    machine.run("mkdir /mnt/mine; mount -t tmpfs vol-mine /mnt/mine")
    machine.agree(volume("a"))
    second = machine.inside(
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


def test_an_unmanaged_agent_mounts_nothing(fresh):
    fresh.ok("/identity", {"accessToken": "s3cret"})
    fresh.headers = {"X-Access-Token": "s3cret"}
    status, answer = fresh.post("/mounts", {"mounts": [volume("a", "/nonexistent/a")]})
    assert status == 400 and "does not manage" in answer["message"]
    assert not Path("/nonexistent").exists()


def test_work_that_hangs_is_given_up():
    started = time.monotonic()
    assert mounts._run_with_timeout(lambda: time.sleep(60) or 0, 0.2) == errno.ETIMEDOUT
    assert time.monotonic() - started < 5


def test_work_tells_its_error():
    def fails() -> int:
        raise OSError(errno.ESTALE, "stale")

    assert mounts._run_with_timeout(fails, 10) == errno.ESTALE
    assert mounts._run_with_timeout(lambda: 0, 10) == 0


def test_it_is_loaded_by_the_first_request_only():
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
