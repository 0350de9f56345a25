"""Errors about objects in use look the same whether the engine or only the host knows the users."""

from __future__ import annotations

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.in_use import create_in_use_error, external_users_named
from sandbox_gateway.engine.references import References
from sandbox_gateway.errors import InUse, InUseExternally
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from tests.support.memory_host import MemoryHost

VOLUME = Volume(name="data")
VOLUME_SNAPSHOT = VolumeSnapshot(name="monday", volume=VOLUME.id, size_mb=64)


@pytest.mark.parametrize(
    ("record", "volume", "description", "resource"),
    [
        (Snapshot(names=["golden"]), "", "snapshot 'golden'", "snapshot"),
        (Snapshot(names=["web"], kind=SnapshotKind.TEMPLATE), "", "template 'web'", "template"),
        (VOLUME_SNAPSHOT, "data", "snapshot 'monday' of volume 'data'", "volume_snapshot"),
        (VOLUME, "", "volume 'data'", "volume"),
    ],
)
def test_users_that_only_the_host_knows_are_named_in_the_same_form(
    record: Snapshot | VolumeSnapshot | Volume, volume: str, description: str, resource: str
) -> None:
    host_error = InUseExternally(
        {"ZFS clone": {"p/a": "p/a", "p/b": "p/b"}, "hold": {"p@s": "p@s"}}, "Remove them first."
    )
    with pytest.raises(InUse) as error_info, external_users_named(record, volume):
        raise host_error
    assert (
        error_info.value.message
        == f"{description} is in use by 2 ZFS clones (p/a, p/b) and 1 hold (p@s). Remove them first."
    )
    assert error_info.value.blockers == ["p/a", "p/b", "p@s"]
    assert error_info.value.details["resource"] == resource
    assert [user["kind"] for user in error_info.value.details["users"]] == ["zfs_clone", "zfs_clone", "hold"]
    engine_error = create_in_use_error(
        record, {"sandbox": [Sandbox(name="box")]}, "Delete it.", is_busy=False, volume=volume
    )
    assert (
        engine_error is not None and engine_error.message == f"{description} is in use by 1 sandbox (box). Delete it."
    )


def test_other_errors_of_a_host_are_not_changed() -> None:
    with pytest.raises(InUse, match=r"^as it is$"), external_users_named(VOLUME):
        raise InUse("as it is")


def test_the_message_of_the_hosts_error_names_the_users() -> None:
    assert InUseExternally({"hold": {"p@s": "p@s"}}, "Release it.").message == "p@s"


def test_sandboxes_that_use_a_snapshot_are_found() -> None:
    context = Context(MemoryHost(), Config())
    index = context.index
    snapshot = Snapshot(names=["s"])
    index.put(snapshot)
    forked_sandbox = Sandbox(name="forked", forked_from=snapshot.id)
    rolled_back_sandbox = Sandbox(name="rolled-back", base=snapshot.id)
    paused_sandbox = Sandbox(name="paused", pause_snapshot=snapshot.id)
    for sandbox in (forked_sandbox, rolled_back_sandbox, paused_sandbox, Sandbox(name="unrelated")):
        index.put(sandbox)
    assert References(context).find_users(snapshot).sandboxes == [forked_sandbox, rolled_back_sandbox, paused_sandbox]
