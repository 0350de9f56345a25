"""Write the host, task, status and result of every task as a line of JSON to the file that RECORD_FILE names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: record_tasks
type: aggregate
short_description: Record tasks for tests
description: Writes results with their hosts and tasks as JSON.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "record_tasks"
    CALLBACK_NEEDS_ENABLED = True

    def _record(self, result: Any, status: str) -> None:
        entry = {
            "host": result._host.get_name(),
            "task": result._task.get_name(),
            "status": status,
            "result": result._result,
        }
        with Path(os.environ["RECORD_FILE"]).open("a") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._record(result, "ok")

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._record(result, "skipped")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._record(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._record(result, "unreachable")
