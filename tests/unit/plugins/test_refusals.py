"""The errors for objects in use: the modules' own, and the gateway's with the options of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

from sandbox_gateway.engine import in_use
from sandbox_gateway.errors import InUse
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from tests.support.faulty_gateway import FaultyGateway

BOX = Sandbox(name="box", forked_from="", head="")
TWIN = Sandbox(name="twin", forked_from="", head="")
GOLDEN = Snapshot(kind=SnapshotKind.SNAPSHOT, names=["golden"])
DATA = Volume(name="data", size_mb=64)
MONDAY = VolumeSnapshot(name="monday", volume=DATA.id, size_mb=64)


@pytest.fixture
def client(gateway: FaultyGateway) -> Iterator[Client]:
    gateway.reset()
    client = Client(gateway.url)
    yield client
    client.close()
    gateway.reset()


def test_the_gateways_error_for_a_snapshot_names_when_unused() -> None:
    error = in_use.create_snapshot_in_use_error(GOLDEN, sandboxes=[BOX, TWIN], cloned_volumes=[], is_busy=False)
    assert error is not None
    expected = _refusals.create_in_use_error("snapshot", "golden", {"sandbox": ["box", "twin"]})
    assert _refusals.name_options(error.message, error.details) == expected.message
    assert "when_unused: true" in expected.message and "when=unused" not in expected.message


def test_the_gateways_error_for_a_volume_names_purge() -> None:
    error = create_volume_error(own_snapshots=[MONDAY])
    assert _refusals.name_options(error.message, error.details) == (
        "volume 'data' is in use by 1 mount (box) and 1 snapshot (monday): detach or remove them first, or set "
        "purge: true to remove its snapshots as well"
    )


def test_the_gateways_error_for_a_rollback_names_force() -> None:
    error = in_use.create_volume_mounted_error(DATA, writers=[BOX], is_busy=False)
    assert error is not None
    assert _refusals.name_options(error.message, error.details) == (
        "volume 'data' is in use by 1 read-write mount (box): detach it first, or set force: true, which changes the "
        "files while programs use them"
    )


def test_errors_without_parameters_stay_unchanged() -> None:
    error = create_volume_error(own_snapshots=[])
    assert error.details["overrides"] == []
    for details in (error.details, {}, {"overrides": ["something newer"]}):
        assert _refusals.name_options(error.message, details) == error.message


def create_volume_error(own_snapshots: list[VolumeSnapshot]) -> InUse:
    error = in_use.create_volume_in_use_error(
        DATA, mounting_sandboxes=[BOX], sandbox_snapshots=[], own_snapshots=own_snapshots, clones=[], is_busy=False
    )
    assert error is not None
    return error


def test_every_parameter_that_the_gateway_names_has_an_option() -> None:
    errors = [
        in_use.create_snapshot_in_use_error(GOLDEN, sandboxes=[BOX], cloned_volumes=[], is_busy=False),
        create_volume_error(own_snapshots=[MONDAY]),
        in_use.create_volume_snapshot_in_use_error(MONDAY, DATA, sandbox_snapshots=[GOLDEN], clones=[], is_busy=False),
        in_use.create_volume_mounted_error(DATA, writers=[BOX], is_busy=False),
    ]
    parameters = {parameter for error in errors if error is not None for parameter in error.details["overrides"]}
    assert parameters == _refusals._REMEDIES.keys()


def test_the_client_replaces_the_parameters(client: Client) -> None:
    client.post("/volumes", {"name": "data", "sizeMB": 64})
    client.post("/volumes/data/snapshots", {"name": "monday"})
    with pytest.raises(Failure) as error_info:
        client.delete("/volumes/data")
    assert (error_info.value.kind, error_info.value.status) == ("in_use", 409)
    assert error_info.value.message == (
        "volume 'data' is in use by 1 snapshot (monday): detach or remove them first, or set purge: true to remove its "
        "snapshots as well"
    )


ATTACHMENT = {"sandbox": "box", "sandbox_id": "b0"}


@pytest.mark.parametrize(
    ("users", "message", "blockers"),
    [
        (
            {"attachments": [ATTACHMENT], "snapshots": [], "captured_by": []},
            "volume 'data' is mounted in box (set attachments: [] to detach it)",
            ["b0"],
        ),
        (
            {"attachments": [ATTACHMENT], "snapshots": ["monday"], "captured_by": ["c0"]},
            "volume 'data' is mounted in box (set attachments: [] to detach it) and has snapshots: monday (set "
            "purge: true to remove them as well) and is part of snapshots of sandboxes (c0), which must be removed "
            "first",
            ["b0", "monday", "c0"],
        ),
    ],
)
def test_the_error_for_a_volume_names_all_users(users: dict[str, Any], message: str, blockers: list[str]) -> None:
    failure = _refusals.create_volume_in_use_error("data", **users)
    assert (failure.message, failure.kind, failure.blockers) == (message, "in_use", blockers)
