"""Return the result stored in the file $SAME_FILE without sending a request, to measure Ansible's own overhead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        del tmp
        return {**result, **json.loads(Path(os.environ["SAME_FILE"]).read_text())}
