"""The result of running `sandboxctl` in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox_gateway.cli import main as sandboxctl


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]
SANDBOXCTL_COMMAND = [sys.executable, "-m", "sandbox_gateway.cli.main"]


def run_sandboxctl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str, url: str, stdin: bytes = b""
) -> Outcome:
    monkeypatch.setenv("SANDBOX_GATEWAY_URL", url)
    monkeypatch.setattr(sys, "argv", ["sandboxctl", *args])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    capsys.readouterr()
    with pytest.raises(SystemExit) as error_info:
        sandboxctl.main()
        sys.exit(0)
    out, err = capsys.readouterr()
    return Outcome(int(error_info.value.code or 0), out, err)


def check_success(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome
