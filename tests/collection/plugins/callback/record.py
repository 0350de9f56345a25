"""Write the result of every task as a line of JSON to the file that RECORD_FILE names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: record
type: aggregate
short_description: Record results for tests
description: Writes results as JSON.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "record"
    CALLBACK_NEEDS_ENABLED = True

    def _record(self, result: Any, **fields: Any) -> None:
        with Path(os.environ["RECORD_FILE"]).open("a") as file:
            file.write(json.dumps({**result._result, **fields}, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._record(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._record(result, failed=True)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._record(result, failed=True)
