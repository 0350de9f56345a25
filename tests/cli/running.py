"""The result of running `sandboxctl` in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def check_success(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.err
    return outcome
