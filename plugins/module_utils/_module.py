# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The options that all modules share, and the entry point of a module on the managed host."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

from ansible.module_utils.basic import AnsibleModule, env_fallback
from ansible_collections.grove.sandbox.plugins.module_utils._age import contains_secret_key
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._info import Listing
from ansible_collections.grove.sandbox.plugins.module_utils._run import MASK, PASSWORD_OPTIONS, run

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._kinds import ResourceKind

URL_VARIABLE = "SANDBOX_GATEWAY_URL"
TOKEN_VARIABLE = "SANDBOX_GATEWAY_TOKEN"

COMMON_ARGUMENTS: dict[str, Any] = {
    "gateway_url": {
        "type": "str",
        "default": "unix:///run/sandbox-gateway/gateway.sock",
        "fallback": (env_fallback, [URL_VARIABLE]),
    },
    "gateway_token": {"type": "str", "no_log": True, "fallback": (env_fallback, [TOKEN_VARIABLE])},
    "ca_path": {"type": "path"},
    "validate_certs": {"type": "bool", "default": True},
    "gateway_timeout": {"type": "int", "default": 300},
    "check_run": {"type": "str"},
    "check_sessions": {"type": "dict"},
    "predict_only": {"type": "bool", "default": False},
    "approved_plan": {"type": "dict"},
    "is_async": {"type": "bool", "default": False},
    "from_action_plugin": {"type": "bool", "default": False},
}


def make_argument_spec(resource_kind: ResourceKind) -> dict[str, Any]:
    """Return the argument specification of ``resource_kind``, with the common options."""
    return copy.deepcopy({**COMMON_ARGUMENTS, **resource_kind.ARGUMENTS})


class _GatewayModule(AnsibleModule):
    def fail_json(self, msg: str, **result: Any) -> NoReturn:
        """Report Ansible's own errors, such as an unknown option, in the same form as all other failures."""
        super().fail_json(msg, **{"failure": Failure(msg).to_dict(), **result})


def main(resource_kind: ResourceKind) -> None:
    """Run ``resource_kind`` as a module."""
    # The invocation is not logged, because `env` may contain secrets. As a no_log option, `env` would not work: Ansible
    # would censor its values, even short ones, in all results.
    module = _GatewayModule(
        make_argument_spec(resource_kind), supports_check_mode=True, no_log=True, **resource_kind.RULES
    )
    if not isinstance(resource_kind, Listing) and not module.params["from_action_plugin"]:
        # Only the action plugin knows whether the run applies a plan, or records one.
        module.fail_json(
            "this module was started without its action plugin, for example by ansible.builtin.package, so it cannot "
            "know whether the run applies a plan: use the module itself as the action of a task"
        )
    result = run(resource_kind, module.params, check_mode=module.check_mode)
    if not module._diff:
        remove_diff(result)
    result["invocation"] = {"module_args": redact_options(module.params)}
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


def remove_diff(result: dict[str, Any]) -> None:
    result.pop("diff", None)


def redact_options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the options with their secrets masked."""
    redacted_options = {key: value for key, value in params.items() if key != "approved_plan"}
    for option in PASSWORD_OPTIONS:
        if redacted_options.get(option):
            redacted_options[option] = MASK
    for option in ("age_identity", "age_recipients"):
        # The task fails because of a key in place of a path or a recipient.
        if contains_secret_key(redacted_options.get(option)):
            redacted_options[option] = MASK
    if redacted_options.get("env"):
        redacted_options["env"] = dict.fromkeys(redacted_options["env"], MASK)
    return redacted_options
