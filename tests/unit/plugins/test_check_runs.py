"""Test what a check run asks a gateway before it sends a task to a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible import constants as C
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.plugin_utils import _check_run

from tests.api.memory_gateway import MemoryGateway


@pytest.mark.parametrize("check_mode", [True, False])
def test_the_guest_of_a_real_sandbox_writes_nothing_to_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_mode: bool
) -> None:
    monkeypatch.setattr(C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(_check_run, "is_check_run", lambda: True)
    gateway = MemoryGateway(tmp_path, log={"level": "error"})
    client = Client(gateway.unix_url)
    try:
        gateway.build_template("base")
        client.post("/sandboxes", {"templateID": "base", "name": "web"})
        _check_run.record_session()
        _check_run.require_machine(client, "web", check_mode=check_mode)
        assert client.is_planning is check_mode
        assert gateway.machine("web").sync_count == 0
        with gateway.client() as other_client:
            other_client.get("/sandboxes/web").raise_for_status()
        assert gateway.machine("web").sync_count == 1
    finally:
        client.close()
        gateway.end()
