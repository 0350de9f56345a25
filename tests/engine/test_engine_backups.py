"""Test that the playbook nightly_backups writes files from which restore_backup creates what was removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collection.plays import empty_gateway
from tests.collection.recipes import PlaybookRunner, check_refusal, check_success
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE, World


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    if not world.abilities.transfer:
        pytest.skip(f"{world.kind} declares that it can neither export nor import")
    directory = session.get_run_dir() / "backups"
    directory.mkdir(exist_ok=True)
    with world_gateway(world, directory) as gateway:
        yield gateway
        empty_gateway(gateway.url)


def test_a_removed_sandbox_and_its_volume_are_restored_from_nightly_backups(gateway: Gateway, tmp_path: Path) -> None:
    playbook_runner, directory = PlaybookRunner(tmp_path, gateway.url), tmp_path / "backups"
    gateway.call("POST", "/volumes", {"name": "data", "sizeMB": 64})
    mounts = [{"name": "data", "path": "/srv/data"}]
    body = {"templateID": TEMPLATE, "name": "web", "metadata": {"team": "blue"}, "volumeMounts": mounts}
    sandbox_id = gateway.call("POST", "/sandboxes", body)["sandboxID"]
    gateway.sh(sandbox_id, "echo on its disk >/root/file; echo on the volume >/srv/data/file; sync")

    def back_up(stamp: str, changed_count: int, *options: str) -> None:
        variables = {"backup_directory": str(directory), "backup_volumes": "data", "backup_stamp": stamp}
        run = playbook_runner.run_documented_play("nightly_backups", *options, backup_keep=1, **variables)
        check_success(run, changed_count)

    back_up("1", 3, "--check")
    assert not directory.exists() and gateway.call("GET", "/snapshots") == []
    back_up("1", 3)
    back_up("1", 0)
    gateway.sh(sandbox_id, "echo of the second night >>/root/file; echo of the second night >>/srv/data/file; sync")
    back_up("2", 4)
    back_up("2", 0)
    assert sorted(path.name for path in directory.iterdir()) == ["data@2.volume", "web@2.snapshot"]

    empty_gateway(gateway.url)
    assert gateway.call("GET", "/volumes") == [] and gateway.call("GET", "/snapshots") == []
    for name, file, changed_count in (("web", "web@2.snapshot", 2), ("data", "data@2.volume", 1)):
        variables = {"restore_file": str(directory / file), "restore_name": name}
        check_success(playbook_runner.run_documented_play("restore_backup", "--check", **variables), changed_count)
        check_success(playbook_runner.run_documented_play("restore_backup", **variables), changed_count)
        check_success(playbook_runner.run_documented_play("restore_backup", **variables), 0)
    sandbox_id = gateway.call("GET", "/sandboxes?name=web")[0]["sandboxID"]
    gateway.call("POST", f"/sandboxes/{sandbox_id}/volumes", mounts[0])
    files = gateway.sh(sandbox_id, "cat /root/file /srv/data/file").splitlines()
    assert files == ["on its disk", "of the second night", "on the volume", "of the second night"]
    # The name belongs to an object that was not restored from this file.
    gateway.call("POST", "/volumes", {"name": "other", "sizeMB": 64})
    run = playbook_runner.run_documented_play(
        "restore_backup", restore_file=str(directory / "data@2.volume"), restore_name="other"
    )
    check_refusal(run, "volume 'other' already exists and was created, not imported")
