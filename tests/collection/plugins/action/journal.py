"""An action that adds an entry to the journal of a check-mode run, as the actions of the collection do."""

from __future__ import annotations

import json
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_journal


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _plan_journal.add_entry(json.loads(self._task.args["entry"]))
        return result
