"""Write the start time of each task and the final statistics of the play to the file $CLOCK_FILE as lines of JSON.

The plugin does not read results, because Ansible copies a result for each callback plugin that reads it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: clock
type: aggregate
short_description: Record when tasks start
description: Writes the start times of tasks as JSON.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "clock"
    CALLBACK_NEEDS_ENABLED = True

    def _write_event(self, **data: Any) -> None:
        with Path(os.environ["CLOCK_FILE"]).open("a") as file:
            file.write(json.dumps({"at": time.perf_counter(), **data}) + "\n")

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._write_event(task=task.name)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._write_event(hosts={host: stats.summarize(host) for host in stats.processed})
