# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The action plugins' one class: the module's work on the control node, where that is the same work."""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.errors import UnsupportedError
from ansible.plugins.action import ActionBase
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._client import DEFAULT_URL, Address
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._module import (
    TOKEN_VARIABLE,
    URL_VARIABLE,
    arguments,
)
from ansible_collections.grove.sandbox.plugins.module_utils._run import failed, run

SANDBOX = "grove.sandbox.sandbox"
"""The connection whose other end is a sandbox."""


class GatewayAction(ActionBase):
    """Runs ``thing`` in this process, or hands over to the module of the same name.

    In process saves most of a task's time. It is right where this process reaches the gateway the module would
    reach; see ``_in_process``.
    """

    thing: Any = None
    _supports_check_mode = True
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        del tmp
        args = self._arguments()
        if self._in_process(args):
            result.update(self._here(args))
        else:
            if self._connection.transport == SANDBOX and not self._task.args.get("gateway_token"):
                # Root inside reads what a module is given: the key of this process' environment stays here.
                args.pop("gateway_token", None)
            wrap_async = bool(self._task.async_val) and not self._connection.has_native_async
            result.update(self._execute_module(module_args=args, task_vars=task_vars, wrap_async=wrap_async))
        # It holds text of gateways and sandboxes.
        return dict(wrap_var(result))

    def _arguments(self) -> dict[str, Any]:
        """The task's options; the variables of this process' environment stand in for the two that were left out."""
        args = dict(self._task.args)
        for option, variable in (("gateway_url", URL_VARIABLE), ("gateway_token", TOKEN_VARIABLE)):
            if args.get(option) is None and os.environ.get(variable):
                args[option] = os.environ[variable]
        return args

    def _in_process(self, args: dict[str, Any]) -> bool:
        """Would the module, on its host and as its user, reach the same gateway in the same way?"""
        if self._task.async_val or self._play_context.become or self._task.become or any(self._task.environment or ()):
            return False
        if self._connection.transport == "local":
            return True
        if self._task.delegate_to or args.get("ca_path"):
            return False
        try:
            return not Address(str(args.get("gateway_url") or DEFAULT_URL)).local
        except Failure:
            return False

    def _here(self, args: dict[str, Any]) -> dict[str, Any]:
        rules = self.thing.RULES
        validated = ArgumentSpecValidator(
            arguments(self.thing),
            mutually_exclusive=rules.get("mutually_exclusive"),
            required_together=rules.get("required_together"),
            required_one_of=rules.get("required_one_of"),
            required_if=rules.get("required_if"),
            required_by=rules.get("required_by"),
        ).validate(args)
        if validated.error_messages:
            return failed(Failure("; ".join(map(self._sentence, validated.errors))))
        result = run(self.thing, validated.validated_parameters, check=self._task.check_mode)
        if not self._task.diff:
            result.pop("diff", None)
        return result

    def _sentence(self, error: Exception) -> str:
        """In the words that the module would use."""
        known = (
            f"Unsupported parameters for ({self._task.action}) module: " if isinstance(error, UnsupportedError) else ""
        )
        return f"{known}{error}"
