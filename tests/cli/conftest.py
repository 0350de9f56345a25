from __future__ import annotations

import io
import sys

import pytest

from sandbox_gateway.cli import main as sandboxctl
from tests.api.memory_gateway import MemoryGateway
from tests.cli.running import Outcome, Run


@pytest.fixture
def run(memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `sandboxctl` with the given arguments, over the unix socket unless ``url`` is set."""
    for name in ("SANDBOX_GATEWAY_TOKEN", "SANDBOX_GATEWAY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)

    def run_command(*args: str, url: str = memory_gateway.unix_url, token: str = "", stdin: bytes = b"") -> Outcome:
        monkeypatch.setenv("SANDBOX_GATEWAY_URL", url)
        monkeypatch.setenv("SANDBOX_GATEWAY_TOKEN", token)
        monkeypatch.setattr(sys, "argv", ["sandboxctl", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as error_info:
            sandboxctl.main()
            sys.exit(0)
        out, err = capsys.readouterr()
        return Outcome(int(error_info.value.code or 0), out, err)

    return run_command
