"""Test that a task succeeds if another client creates the same object while the task runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

from tests.support.memory_gateway import MemoryGateway
from tests.unit.plugins.test_plans import run_task


@pytest.fixture
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("races"), log={"level": "error"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


class LateClient(Client):
    """A client whose first change waits until another client has made, or is making, the change ``other_change``."""

    other_change: Any = None

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        if self.other_change is not None:
            make_change, self.other_change = self.other_change, None
            make_change()
        return super().post(path, body)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("sandbox", {"name": ["box"], "template": "base"}),
        ("snapshot", {"name": ["mark"], "sandbox": ["web"]}),
        ("fork", {"snapshot": "golden", "count": 2, "name_prefix": "try"}),
        ("volume", {"name": ["data"], "size_mb": 64}),
    ],
)
def test_an_object_that_another_client_creates_in_the_meantime_is_used(
    gateway: MemoryGateway, kind: str, params: dict[str, Any]
) -> None:
    client, late_client = Client(gateway.unix_url), LateClient(gateway.unix_url)
    for setup in (
        ("sandbox", {"name": ["web"], "template": "base"}),
        ("snapshot", {"name": ["golden"], "sandbox": ["web"]}),
    ):
        run_task(client, *setup)
    late_client.other_change = lambda: run_task(client, kind, params)
    result = run_task(late_client, kind, params)
    assert not result.get("failed") and not result["changed"], result


def test_a_task_waits_until_another_client_has_created_the_object(gateway: MemoryGateway) -> None:
    client, late_client = Client(gateway.unix_url), LateClient(gateway.unix_url)
    params = {"name": ["box"], "template": "base"}
    reservation = gateway.engine.index.reserved(["box"])
    reservation.__enter__()

    def create_later() -> None:
        def create() -> None:
            gateway.loop.call_soon_threadsafe(reservation.__exit__, None, None, None)
            run_task(client, "sandbox", params)

        threading.Timer(1, create).start()

    late_client.other_change = create_later
    result = run_task(late_client, "sandbox", params)
    assert not result.get("failed"), result
    assert [each["name"] for each in client.list_all("/sandboxes")] == ["box"]


def test_an_object_that_the_task_cannot_use_is_refused(gateway: MemoryGateway) -> None:
    client, late_client = Client(gateway.unix_url), LateClient(gateway.unix_url)
    late_client.other_change = lambda: run_task(client, "volume", {"name": ["box"], "size_mb": 64})
    result = run_task(late_client, "sandbox", {"name": ["box"], "template": "base"})
    assert result["failed"] and "'box' is taken by a volume" in result["msg"], result
