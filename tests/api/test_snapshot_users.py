"""Test that check mode predicts which snapshots are in use, on a host whose snapshots depend on one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import DependentSnapshotsHost


@pytest.fixture
def gateway_with_dependent_snapshots(tmp_path: Path) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path, DependentSnapshotsHost())
    try:
        gateway.build_template()
        yield gateway
    finally:
        gateway.end()


def _post_json(api: httpx.Client, route: str, body: dict[str, Any]) -> Any:
    response = api.post(route, json=body)
    assert response.status_code < 300, response.text
    return response.json()


def test_check_mode_predicts_refusals_from_the_listed_users(gateway_with_dependent_snapshots: MemoryGateway) -> None:
    with gateway_with_dependent_snapshots.client() as api:
        _post_json(api, "/sandboxes", {"templateID": "base", "name": "a"})
        _post_json(api, "/sandboxes/a/snapshots", {"name": "rolled-back-to"})
        _post_json(api, "/sandboxes/a/rollback", {"snapshotID": "rolled-back-to"})
        _post_json(api, "/volumes", {"name": "v"})
        _post_json(
            api, "/sandboxes", {"templateID": "base", "name": "b", "volumeMounts": [{"name": "v", "path": "/d"}]}
        )
        snapshot = _post_json(api, "/sandboxes/b/snapshots", {"name": "with-volume", "volumes": ["v"]})
        _post_json(api, "/volumes", {"name": "w", "fromSnapshot": snapshot["volumes"][0]["snapshotID"]})
        _post_json(api, "/sandboxes/b/snapshots", {"name": "unused"})
        expected_users = {"rolled-back-to": [("sandbox", "a")], "with-volume": [("volume", "w")], "unused": []}
        client = Client(gateway_with_dependent_snapshots.unix_url)
        for name, users in expected_users.items():
            listed_users = api.get(f"/snapshots/{name}").json()["users"]
            assert [(each["kind"], each["name"]) for each in listed_users] == users
            desired_state = _snapshot.parse_desired_state({"name": [name], "state": "absent"})
            plan = _snapshot.plan(desired_state, _snapshot.observe(client, desired_state))
            is_refused = api.delete(f"/snapshots/{name}").status_code == 409
            assert bool(users) == is_refused == bool(plan.failures), name
            for failure in plan.failures.values():
                assert failure.kind == "in_use" and failure.blockers == [user for _, user in users]
        assert all("users" not in each for each in api.get("/snapshots").json())
