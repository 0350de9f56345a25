from __future__ import annotations

import pytest

from tests.cli.running import Outcome, Run, run_sandboxctl
from tests.support.memory_gateway import MemoryGateway


@pytest.fixture
def run(memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `sandboxctl` with the given arguments, over the unix socket unless ``url`` is set."""
    for name in ("SANDBOX_GATEWAY_TOKEN", "SANDBOX_GATEWAY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)

    def run_command(*args: str, url: str = memory_gateway.unix_url, token: str = "", stdin: bytes = b"") -> Outcome:
        monkeypatch.setenv("SANDBOX_GATEWAY_TOKEN", token)
        return run_sandboxctl(monkeypatch, capsys, *args, url=url, stdin=stdin)

    return run_command
