"""Test what a check-mode run asks a gateway before it sends a task to a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible import constants as C
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _check_run

from sandbox_gateway.engine.plans.open_runs import OpenRuns
from sandbox_gateway.engine.plans.sessions import PlanSession, PlanSessions
from tests.support.memory_gateway import MemoryGateway

MOUNT = {"name": "data", "path": "/srv/data", "readOnly": True}


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryGateway]:
    """A gateway with the sandbox `web`, which mounts a volume, and the sandbox `plain`, which mounts none."""
    monkeypatch.setattr(C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(_check_run, "is_check_run", lambda: True)
    gateway = MemoryGateway(tmp_path, log={"level": "error"})
    try:
        gateway.build_template("base")
        with gateway.client() as client:
            for path, body in (
                ("/volumes", {"name": "data", "sizeMB": 64}),
                ("/volumes/data/snapshots", {"name": "old"}),
                ("/sandboxes", {"templateID": "base", "name": "web", "volumeMounts": [MOUNT]}),
                ("/sandboxes", {"templateID": "base", "name": "plain"}),
            ):
                client.post(path, json=body).raise_for_status()
        _check_run.record_session()
        yield gateway
    finally:
        gateway.end()


def require_machine(gateway: MemoryGateway, sandbox: str) -> set[str]:
    """Return the paths that the check before a task in check mode has requested."""
    with contextlib.closing(Client(gateway.unix_url)) as client:
        _check_run.require_machine(client, sandbox, check_mode=True)
        assert client.is_planning
        return client.requested_paths


def test_a_connection_notices_that_the_gateway_was_restarted(
    gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_machine(gateway, "web")
    original_open = PlanSessions.open

    def restart_and_open(self: PlanSessions, owner: str, run: str) -> PlanSession:
        self._sessions = OpenRuns()  # Sessions are only in memory.
        return original_open(self, owner, run)

    monkeypatch.setattr(PlanSessions, "open", restart_and_open)
    for _ in range(2):
        with pytest.raises(Failure, match="was restarted during this check-mode run"):
            require_machine(gateway, "web")


@pytest.mark.parametrize("check_mode", [True, False])
def test_the_guest_of_a_real_sandbox_writes_nothing_to_its_disk(gateway: MemoryGateway, check_mode: bool) -> None:
    with contextlib.closing(Client(gateway.unix_url)) as client:
        _check_run.require_machine(client, "web", check_mode=check_mode)
        assert client.is_planning is check_mode
    assert gateway.machine("web").sync_count == 0
    with gateway.client() as other_client:
        other_client.get("/sandboxes/web").raise_for_status()
    assert gateway.machine("web").sync_count == 1


CHANGES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "rolled back": [("POST", "/volumes/data/rollback", {"snapshot": "old"})],
    "enlarged": [("PATCH", "/volumes/data", {"sizeMB": 128})],
    "replaced": [
        ("DELETE", "/sandboxes/web/volumes/data", {}),
        ("DELETE", "/volumes/data/snapshots/old", {}),
        ("DELETE", "/volumes/data", {}),
        ("POST", "/volumes", {"name": "data", "sizeMB": 64}),
        ("POST", "/sandboxes/web/volumes", MOUNT),
    ],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_task_is_skipped_if_the_plan_changes_a_mounted_volume(
    gateway: MemoryGateway, changes: list[tuple[str, str, dict[str, Any]]]
) -> None:
    require_machine(gateway, "web")
    with contextlib.closing(Client(gateway.unix_url)) as planner:
        planner.enter_plan(_check_run.make_run_name())
        for method, path, body in changes:
            planner.call(method, path, body=body)
    message = "the plan changes the contents or the size of volume data, which sandbox web mounts"
    with pytest.raises(_check_run.PlannedMachineSkip, match=message):
        require_machine(gateway, "web")
    require_machine(gateway, "plain")


def test_a_task_is_not_skipped_because_another_client_changed_a_volume(gateway: MemoryGateway) -> None:
    with gateway.client() as other_client:
        other_client.post("/volumes/data/rollback", json={"snapshot": "old"}).raise_for_status()
    require_machine(gateway, "web")


def test_volumes_are_requested_only_for_a_sandbox_that_mounts_some(gateway: MemoryGateway) -> None:
    requested_volumes = {
        name: {path for path in require_machine(gateway, name) if path.startswith("/volumes")}
        for name in ("web", "plain")
    }
    assert requested_volumes == {"web": {"/volumes/data"}, "plain": set()}
