"""Test durable snapshots on a jail/ZFS host through the HTTP endpoints and the command line.

The daemon runs as a process on real ZFS. Some tests change the pool without the daemon's knowledge.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zfs_core

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.jail_zfs.storage.host_lock import OWNER_PROPERTY
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE_PROPERTY, RECORD_PROPERTY
from tests.support import pools
from tests.support.gateway import Gateway
from tests.support.jail_world import JailZfsWorld, make_shim_environment
from tests.support.worlds import TEMPLATE

_SANDBOXCTL = Path(sys.executable).with_name("sandboxctl")
_WORD_FILE = "/root/word"


class JailGateway(Gateway):
    """A daemon on a jail/ZFS host that uses test doubles of FreeBSD's commands."""

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
            for name, value in make_shim_environment().items():
                patch.setenv(name, value)
            super().start(seconds=seconds)

    def list_snapshot_names(self, **params: Any) -> list[str]:
        """Return the names of the snapshots that the gateway lists."""
        return [name for item in self.call("GET", "/snapshots", params=params) for name in item["names"]]

    def list_zfs_snapshot_ids(self) -> set[str]:
        """Return the ids of the snapshots in ZFS, except for the template's."""
        tree = zfs_core.get_tree(self.dataset, ("defer_destroy",))
        names = {name for name, facts in tree.items() if "@" in name and not facts["defer_destroy"].is_on}
        return {name.partition("@")[2] for name in names if not name.endswith("@base")}

    def run_sandboxctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        argv = [str(_SANDBOXCTL), "--url", self.url, *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def gateway(jail_zfs_world: JailZfsWorld, tmp_path: Path) -> Iterator[JailGateway]:
    """Start a gateway on its own dataset, with a sandbox `source` whose word file contains "first"."""
    settings = jail_zfs_world.make_config()
    gateway = JailGateway(tmp_path, settings)
    try:
        gateway.start()
        gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source", "timeout": -1})
        gateway.sh("source", f"echo first >{_WORD_FILE}")
        yield gateway
    finally:
        problems = gateway.end()
        jail_zfs_world.clean_up(settings)
    assert not problems, "; ".join(problems)


def read_word(gateway: Gateway, sandbox: str) -> str:
    return gateway.sh(sandbox, f"cat {_WORD_FILE}").strip()


def test_snapshots_can_be_managed_over_http(gateway: JailGateway) -> None:
    body = {"name": "mark", "description": "before the change"}
    snapshot = gateway.call("POST", "/sandboxes/source/snapshots", body, status=201)
    assert (snapshot["status"], snapshot["memory"], snapshot["names"]) == ("ready", "none", ["mark"])
    assert snapshot["zfsSnapshot"].startswith(f"{gateway.dataset}/sandboxes/")
    assert gateway.list_zfs_snapshot_ids() == {snapshot["snapshotID"]} and zfs_core.lzc_exists(snapshot["zfsSnapshot"])
    gateway.sh("source", f"echo second >{_WORD_FILE}")
    later_snapshot = gateway.call("POST", "/sandboxes/source/snapshots", {"name": "later"}, status=201)
    assert later_snapshot["parentSnapshotID"] == snapshot["snapshotID"]

    assert gateway.list_snapshot_names() == gateway.list_snapshot_names(sandboxID="source") == ["mark", "later"]
    assert gateway.list_snapshot_names(name="mark") == ["mark"] and gateway.list_snapshot_names(sandboxID="other") == []
    first_page = gateway.client.get("/snapshots?limit=1")
    token = first_page.headers["x-next-token"]
    assert first_page.json() == [snapshot] and gateway.list_snapshot_names(limit=1, nextToken=token) == ["later"]
    for ref in ("mark", snapshot["snapshotID"]):
        assert gateway.call("GET", f"/snapshots/{ref}") == {**snapshot, "users": []}

    forks = gateway.call("POST", "/snapshots/mark/fork", {"names": ["left", "right"]}, status=201)["sandboxes"]
    gateway.sh("left", f"echo of the left one >{_WORD_FILE}")
    assert (read_word(gateway, "right"), read_word(gateway, "source")) == ("first", "second")
    refusal = gateway.call("DELETE", "/snapshots/mark", status=409)
    assert refusal["kind"] == "in_use" and set(refusal["blockers"]) == {item["sandboxID"] for item in forks}
    assert "2 sandboxes" in refusal["message"] and "left, right" in refusal["message"]
    assert gateway.call("GET", "/snapshots/mark")["forks"] == 2, "the refused request changed something"
    for name in ("left", "right"):
        gateway.call("DELETE", f"/sandboxes/{name}", status=204)
    gateway.call("DELETE", "/snapshots/mark", status=204)
    assert "not found" in gateway.call("GET", "/snapshots/mark", status=404)["message"]
    assert gateway.list_snapshot_names() == ["later"] and gateway.list_zfs_snapshot_ids() == {
        later_snapshot["snapshotID"]
    }
    assert read_word(gateway, "source") == "second"


def test_a_snapshot_survives_its_source_and_a_restart(gateway: JailGateway) -> None:
    snapshot = gateway.call("POST", "/sandboxes/source/snapshots", {"name": "mark"})
    gateway.call("DELETE", "/sandboxes/source", status=204)
    gateway.kill()
    gateway.start()
    listed_snapshot = gateway.call("GET", "/snapshots/mark")
    assert (
        listed_snapshot["snapshotID"] == snapshot["snapshotID"]
        and listed_snapshot["sourceSandboxID"] == snapshot["sourceSandboxID"]
    )
    assert zfs_core.lzc_exists(listed_snapshot["zfsSnapshot"])
    gateway.call("POST", "/snapshots/mark/fork", {"names": ["late"]}, status=201)
    assert read_word(gateway, "late") == "first"
    assert "late" in gateway.call("DELETE", "/snapshots/mark", status=409)["message"]
    gateway.call("DELETE", "/sandboxes/late", status=204)
    gateway.call("DELETE", "/snapshots/mark", status=204)
    assert gateway.list_zfs_snapshot_ids() == set()
    assert zfs_core.list_datasets(f"{gateway.dataset}/sandboxes", depth=1)[1:] == []


def test_snapshots_can_be_managed_with_sandboxctl(gateway: JailGateway) -> None:
    assert "mark" in gateway.run_sandboxctl("snapshot", "create", "source", "--name", "mark").stdout
    assert "mark" in gateway.run_sandboxctl("snapshot", "list", "--sandbox", "source").stdout
    output = gateway.run_sandboxctl("snapshot", "show", "mark").stdout
    assert gateway.call("GET", "/snapshots/mark")["zfsSnapshot"] in output
    assert gateway.run_sandboxctl("snapshot", "fork", "mark", "--names", "left,right").returncode == 0
    assert read_word(gateway, "left") == "first"
    refusal = gateway.run_sandboxctl("snapshot", "delete", "mark")
    assert refusal.returncode == 4 and "left, right" in refusal.stderr and "sandboxctl kill" in refusal.stderr
    deletion = gateway.run_sandboxctl("snapshot", "delete", "mark", "--when-unused")
    assert deletion.returncode == 0 and "is hidden" in deletion.stderr
    assert gateway.run_sandboxctl("snapshot", "show", "mark").returncode == 3
    assert gateway.list_zfs_snapshot_ids(), "the forks of the snapshot still need it"
    assert gateway.run_sandboxctl("kill", "left", "right", "source").returncode == 0
    assert gateway.list_zfs_snapshot_ids() == set(), "the snapshot was not removed after its last user"


def test_a_snapshot_destroyed_with_zfs_is_not_listed_after_a_restart(gateway: JailGateway) -> None:
    for name in ("kept", "lost"):
        gateway.call("POST", "/sandboxes/source/snapshots", {"name": name})
    pools.run("zfs", "destroy", gateway.call("GET", "/snapshots/lost")["zfsSnapshot"])
    gateway.restart()
    assert gateway.list_snapshot_names() == ["kept"]
    gateway.call("GET", "/snapshots/lost", status=404)
    gateway.call("POST", "/snapshots/lost/fork", {}, status=404)
    gateway.call("POST", "/snapshots/kept/fork", {"names": ["fork"]}, status=201)
    assert read_word(gateway, "fork") == read_word(gateway, "source") == "first"
    recreated_snapshot = gateway.call("POST", "/sandboxes/source/snapshots", {"name": "lost"}, status=201)
    assert recreated_snapshot["snapshotID"] in gateway.list_zfs_snapshot_ids(), (
        "the name of the lost snapshot cannot be used again"
    )


def test_damaged_properties_do_not_prevent_startup(gateway: JailGateway, jail_zfs_world: JailZfsWorld) -> None:
    snapshots = {
        name: gateway.call("POST", "/sandboxes/source/snapshots", {"name": name})
        for name in ("good", "torn", "short", "empty", "noise")
    }
    datasets_before = set(zfs_core.list_datasets(gateway.dataset))
    gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "broken", "timeout": -1})
    (broken_dataset,) = set(zfs_core.list_datasets(gateway.dataset)) - datasets_before
    gateway.stop()
    jail_zfs_world.damage_snapshots(
        gateway.settings, **{name: snapshots[name]["snapshotID"] for name in ("torn", "short", "empty")}
    )
    for name, prop, value in (
        (snapshots["noise"]["zfsSnapshot"], RECORD_PROPERTY, "two\nlines\tlocal\nand more"),
        (broken_dataset, RECORD_PROPERTY, "{not json"),
        (gateway.dataset, OWNER_PROPERTY, "nobody knows"),
    ):
        pools.run("zfs", "set", f"{prop}={value}", name)
    gateway.start()
    assert gateway.list_snapshot_names() == ["good"]
    assert [item["name"] for item in gateway.call("GET", "/sandboxes")] == ["source"]
    log_text = gateway.log_file.read_text()
    for name in (
        snapshots["torn"]["zfsSnapshot"],
        snapshots["short"]["zfsSnapshot"],
        snapshots["noise"]["zfsSnapshot"],
        broken_dataset,
    ):
        assert zfs_core.local_props(name)[QUARANTINE_PROPERTY] and name in log_text, (
            "the snapshot was not quarantined and reported"
        )
    assert zfs_core.lzc_exists(snapshots["empty"]["zfsSnapshot"]), "a snapshot without a record was removed"
    gateway.call("POST", "/snapshots/good/fork", {"names": ["fork"]}, status=201)
    assert read_word(gateway, "fork") == read_word(gateway, "source") == "first"


def test_two_gateways_cannot_share_a_dataset(gateway: JailGateway, tmp_path: Path) -> None:
    gateway.call("POST", "/sandboxes/source/snapshots", {"name": "mark"})
    other_host = gateway.settings.host.model_copy(update={"state_root": tmp_path / "elsewhere"})
    for settings, reason in (
        (gateway.settings, "another gateway on this machine uses"),
        (gateway.settings.model_copy(update={"host": other_host}), "belongs to a gateway that is still running"),
    ):
        second_gateway = JailGateway(tmp_path, settings)
        with pytest.raises(RuntimeError, match=reason):
            second_gateway.start()
        assert second_gateway.process is not None and second_gateway.process.returncode == 2
        second_gateway.client.close()
        assert gateway.list_snapshot_names() == ["mark"] and read_word(gateway, "source") == "first", (
            "the first gateway no longer works"
        )
    successor = JailGateway(tmp_path, gateway.settings)
    gateway.stop()
    try:
        successor.start()
        assert successor.list_snapshot_names() == ["mark"] and read_word(successor, "source") == "first"
    finally:
        assert successor.stop() == 0
        successor.client.close()
    gateway.start()
