"""One place words what is in use, whether the engine or only the host knows the users."""

from __future__ import annotations

import pytest

from sandbox_gateway.engine.references import in_use_error, named_outside_users
from sandbox_gateway.errors import InUse, UsedOutside
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot

VOLUME = Volume(name="data")
MONDAY = VolumeSnapshot(name="monday", volume=VOLUME.id, size_mb=64)


@pytest.mark.parametrize(
    ("record", "volume", "what", "resource"),
    [
        (Snapshot(names=["golden"]), "", "snapshot 'golden'", "snapshot"),
        (Snapshot(names=["web"], kind=SnapshotKind.TEMPLATE), "", "template 'web'", "template"),
        (MONDAY, "data", "snapshot 'monday' of volume 'data'", "volume_snapshot"),
        (VOLUME, "", "volume 'data'", "volume"),
    ],
)
def test_users_that_only_the_host_knows_are_named_in_the_same_form(
    record: Snapshot | VolumeSnapshot | Volume, volume: str, what: str, resource: str
) -> None:
    outside = UsedOutside({"ZFS clone": {"p/a": "p/a", "p/b": "p/b"}, "hold": {"p@s": "p@s"}}, "Remove them first.")
    with pytest.raises(InUse) as refused, named_outside_users(record, volume):
        raise outside
    assert refused.value.message == f"{what} is in use by 2 ZFS clones (p/a, p/b) and 1 hold (p@s). Remove them first."
    assert refused.value.blockers == ["p/a", "p/b", "p@s"]
    assert refused.value.details["resource"] == resource
    assert [user["kind"] for user in refused.value.details["users"]] == ["zfs_clone", "zfs_clone", "hold"]
    known = in_use_error(record, {"sandbox": [Sandbox(name="box")]}, "Go on.", busy=False, volume=volume)
    assert known is not None and known.message == f"{what} is in use by 1 sandbox (box). Go on."


def test_other_errors_of_a_host_pass() -> None:
    with pytest.raises(InUse, match=r"^as it is$"), named_outside_users(VOLUME):
        raise InUse("as it is")


def test_the_message_of_the_hosts_error_names_the_users_for_the_log() -> None:
    assert UsedOutside({"hold": {"p@s": "p@s"}}, "Release it.").message == "p@s"
