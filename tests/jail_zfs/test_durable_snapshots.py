"""Durable snapshots on a jail/ZFS host, from outside: the five endpoints and the commands, against the daemon as a
process with real ZFS below it; and changes to the pool behind the daemon's back.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway import zfs
from sandbox_gateway.config import Config
from sandbox_gateway.hosts.jail_zfs.storage.ownership import OWNER
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import HEAD, QUARANTINE
from tests.jail_zfs import pools
from tests.support.gateway import Gateway
from tests.support.jail_world import JailZfsWorld, shim_environment
from tests.support.worlds import TEMPLATE

_SANDBOXCTL = Path(sys.executable).with_name("sandboxctl")
_WORD = "/root/word"


class JailGateway(Gateway):
    """A daemon on a jail/ZFS host; finds FreeBSD's commands in the tests' shim."""

    def __init__(self, scratch: Path, settings: Config) -> None:
        network = {"prefix": settings.network.prefix, "subnet": settings.network.subnet}
        host = {"kind": "jail_zfs", "state_root": str(settings.host.state_root)}
        super().__init__(
            scratch, {"host": host, "jail_zfs": {"dataset": settings.jail_zfs.dataset}, "network": network}
        )
        self.settings = settings
        self.state_root = settings.host.state_root

    @property
    def dataset(self) -> str:
        return self.settings.jail_zfs.dataset

    def start(self, *, seconds: float = 90) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in shim_environment().items():
                patch.setenv(name, value)
            super().start(seconds=seconds)

    def snapshot_names(self, **params: Any) -> list[str]:
        """Names of the snapshots in the list."""
        return [name for item in self.call("GET", "/snapshots", params=params) for name in item["names"]]

    def zfs_snapshot_ids(self) -> set[str]:
        """Ids of ZFS's snapshots, except for the template's."""
        rows = zfs.get_tree(self.dataset, ("defer_destroy",))
        alive = {name for name, facts in rows.items() if "@" in name and not facts["defer_destroy"].is_on}
        return {name.partition("@")[2] for name in alive if not name.endswith("@base")}

    def sandboxctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [str(_SANDBOXCTL), "--url", self.url, *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def source(jail_zfs_world: JailZfsWorld, tmp_path: Path) -> Iterator[JailGateway]:
    """A gateway on its own dataset, with a sandbox `source` whose file contains the word: first."""
    settings = jail_zfs_world.config()
    gateway = JailGateway(tmp_path, settings)
    try:
        gateway.start()
        gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source", "timeout": -1})
        gateway.sh("source", f"echo first >{_WORD}")
        yield gateway
    finally:
        problems = gateway.end()
        jail_zfs_world.forget(settings)
    assert not problems, "; ".join(problems)


def read_word(gateway: Gateway, sandbox: str) -> str:
    return gateway.sh(sandbox, f"cat {_WORD}").strip()


def test_the_five_endpoints(source: JailGateway) -> None:
    body = {"name": "mark", "description": "before the change"}
    taken = source.call("POST", "/sandboxes/source/snapshots", body, status=201)
    assert (taken["status"], taken["memory"], taken["names"]) == ("ready", "none", ["mark"])
    assert taken["zfsSnapshot"].startswith(f"{source.dataset}/sandboxes/")
    assert source.zfs_snapshot_ids() == {taken["snapshotID"]} and zfs.lzc_exists(taken["zfsSnapshot"])
    source.sh("source", f"echo second >{_WORD}")
    later = source.call("POST", "/sandboxes/source/snapshots", {"name": "later"}, status=201)
    assert later["parentSnapshotID"] == taken["snapshotID"]

    assert source.snapshot_names() == source.snapshot_names(sandboxID="source") == ["mark", "later"]
    assert source.snapshot_names(name="mark") == ["mark"] and source.snapshot_names(sandboxID="other") == []
    page = source.client.get("/snapshots?limit=1")
    token = page.headers["x-next-token"]
    assert page.json() == [taken] and source.snapshot_names(limit=1, nextToken=token) == ["later"]
    for ref in ("mark", taken["snapshotID"]):
        assert source.call("GET", f"/snapshots/{ref}") == taken

    made = source.call("POST", "/snapshots/mark/fork", {"names": ["left", "right"]}, status=201)["sandboxes"]
    source.sh("left", f"echo of the left one >{_WORD}")
    assert (read_word(source, "right"), read_word(source, "source")) == ("first", "second")
    refused = source.call("DELETE", "/snapshots/mark", status=409)
    assert refused["kind"] == "in_use" and set(refused["blockers"]) == {item["sandboxID"] for item in made}
    assert "2 sandboxes" in refused["message"] and "left, right" in refused["message"]
    assert source.call("GET", "/snapshots/mark")["forks"] == 2, "a refusal changes nothing"
    for name in ("left", "right"):
        source.call("DELETE", f"/sandboxes/{name}", status=204)
    source.call("DELETE", "/snapshots/mark", status=204)
    assert "not found" in source.call("GET", "/snapshots/mark", status=404)["message"]
    assert source.snapshot_names() == ["later"] and source.zfs_snapshot_ids() == {later["snapshotID"]}
    assert read_word(source, "source") == "second"


def test_a_snapshot_outlives_its_source_and_the_daemon(source: JailGateway) -> None:
    taken = source.call("POST", "/sandboxes/source/snapshots", {"name": "mark"})
    source.call("DELETE", "/sandboxes/source", status=204)
    source.kill_9()
    source.start()
    kept = source.call("GET", "/snapshots/mark")
    assert kept["snapshotID"] == taken["snapshotID"] and kept["sourceSandboxID"] == taken["sourceSandboxID"]
    assert zfs.lzc_exists(kept["zfsSnapshot"])
    source.call("POST", "/snapshots/mark/fork", {"names": ["late"]}, status=201)
    assert read_word(source, "late") == "first"
    assert "late" in source.call("DELETE", "/snapshots/mark", status=409)["message"]
    source.call("DELETE", "/sandboxes/late", status=204)
    source.call("DELETE", "/snapshots/mark", status=204)
    assert source.zfs_snapshot_ids() == set()
    assert zfs.list_datasets(f"{source.dataset}/sandboxes", depth=1)[1:] == []


def test_the_snapshot_commands(source: JailGateway) -> None:
    assert "mark" in source.sandboxctl("snapshot", "create", "source", "--name", "mark").stdout
    assert "mark" in source.sandboxctl("snapshot", "list", "--sandbox", "source").stdout
    shown = source.sandboxctl("snapshot", "show", "mark").stdout
    assert source.call("GET", "/snapshots/mark")["zfsSnapshot"] in shown
    assert source.sandboxctl("snapshot", "fork", "mark", "--names", "left,right").returncode == 0
    assert read_word(source, "left") == "first"
    refused = source.sandboxctl("snapshot", "delete", "mark")
    assert refused.returncode == 4 and "left, right" in refused.stderr and "sandboxctl kill" in refused.stderr
    hidden = source.sandboxctl("snapshot", "delete", "mark", "--when-unused")
    assert hidden.returncode == 0 and "is hidden" in hidden.stderr
    assert source.sandboxctl("snapshot", "show", "mark").returncode == 3
    assert source.zfs_snapshot_ids(), "its forks stand on it"
    assert source.sandboxctl("kill", "left", "right", "source").returncode == 0
    assert source.zfs_snapshot_ids() == set(), "it went with the last of its users"


def test_a_snapshot_destroyed_by_hand_is_gone_after_a_restart(source: JailGateway) -> None:
    for name in ("kept", "lost"):
        source.call("POST", "/sandboxes/source/snapshots", {"name": name})
    pools.run("zfs", "destroy", source.call("GET", "/snapshots/lost")["zfsSnapshot"])
    source.restart()
    assert source.snapshot_names() == ["kept"]
    source.call("GET", "/snapshots/lost", status=404)
    source.call("POST", "/snapshots/lost/fork", {}, status=404)
    source.call("POST", "/snapshots/kept/fork", {"names": ["fork"]}, status=201)
    assert read_word(source, "fork") == read_word(source, "source") == "first"
    again = source.call("POST", "/sandboxes/source/snapshots", {"name": "lost"}, status=201)
    assert again["snapshotID"] in source.zfs_snapshot_ids(), "its name is free again"


def test_damaged_properties_do_not_prevent_a_start(source: JailGateway, jail_zfs_world: JailZfsWorld) -> None:
    taken = {
        name: source.call("POST", "/sandboxes/source/snapshots", {"name": name})
        for name in ("good", "torn", "short", "empty", "noise")
    }
    before = set(zfs.list_datasets(source.dataset))
    source.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "broken", "timeout": -1})
    (broken,) = set(zfs.list_datasets(source.dataset)) - before
    source.stop()
    jail_zfs_world.damage(source.settings, **{name: taken[name]["snapshotID"] for name in ("torn", "short", "empty")})
    for name, prop, value in (
        (taken["noise"]["zfsSnapshot"], HEAD, "two\nlines\tlocal\nand more"),
        (broken, HEAD, "{not json"),
        (source.dataset, OWNER, "nobody knows"),
    ):
        pools.run("zfs", "set", f"{prop}={value}", name)
    source.start()
    assert source.snapshot_names() == ["good"]
    assert [item["name"] for item in source.call("GET", "/sandboxes")] == ["source"]
    log = source.log_file.read_text()
    for name in (taken["torn"]["zfsSnapshot"], taken["short"]["zfsSnapshot"], taken["noise"]["zfsSnapshot"], broken):
        assert zfs.local_props(name)[QUARANTINE] and name in log, "it is left where it is, marked, and said"
    assert zfs.lzc_exists(taken["empty"]["zfsSnapshot"]), "what bears no record is not ours to remove"
    source.call("POST", "/snapshots/good/fork", {"names": ["fork"]}, status=201)
    assert read_word(source, "fork") == read_word(source, "source") == "first"


def test_two_gateways_cannot_share_a_dataset(source: JailGateway, tmp_path: Path) -> None:
    source.call("POST", "/sandboxes/source/snapshots", {"name": "mark"})
    elsewhere = source.settings.host.model_copy(update={"state_root": tmp_path / "elsewhere"})
    for settings, reason in (
        (source.settings, "another gateway on this machine uses"),
        (source.settings.model_copy(update={"host": elsewhere}), "belongs to a gateway that is still running"),
    ):
        rival = JailGateway(tmp_path, settings)
        with pytest.raises(RuntimeError, match=reason):
            rival.start()
        assert rival.process is not None and rival.process.returncode == 2
        rival.client.close()
        assert source.snapshot_names() == ["mark"] and read_word(source, "source") == "first", "the first goes on"
    successor = JailGateway(tmp_path, source.settings)
    source.stop()
    try:
        successor.start()
        assert successor.snapshot_names() == ["mark"] and read_word(successor, "source") == "first"
    finally:
        assert successor.stop() == 0
        successor.client.close()
    source.start()
