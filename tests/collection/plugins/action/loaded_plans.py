"""An action that returns which plan files its process has loaded or inherited."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_file


class ActionModule(ActionBase):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        return {**result, "paths": [*_plan_file._loaded_plans]}
