# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Arguments shared by modules and action plugins, and the entry point of modules on the managed host."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

from ansible.module_utils.basic import AnsibleModule, env_fallback
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._run import HIDDEN, run

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._thing import Thing

URL_VARIABLE = "SANDBOX_GATEWAY_URL"
TOKEN_VARIABLE = "SANDBOX_GATEWAY_TOKEN"

COMMON: dict[str, Any] = {
    "gateway_url": {
        "type": "str",
        "default": "unix:///run/sandbox-gateway/gateway.sock",
        "fallback": (env_fallback, [URL_VARIABLE]),
    },
    "gateway_token": {"type": "str", "no_log": True, "fallback": (env_fallback, [TOKEN_VARIABLE])},
    "ca_path": {"type": "path"},
    "validate_certs": {"type": "bool", "default": True},
    "gateway_timeout": {"type": "int", "default": 300},
}


def arguments(thing: Thing) -> dict[str, Any]:
    """Return the argument specification of ``thing``, with the common options."""
    return copy.deepcopy({**COMMON, **thing.ARGUMENTS})


class _Module(AnsibleModule):
    def fail_json(self, msg: str, **result: Any) -> NoReturn:
        """Give Ansible's own errors (an unknown option, a wrong type) the shape of all other failures."""
        super().fail_json(msg, **{"failure": Failure(msg).as_dict(), **result})


def main(thing: Thing) -> None:
    """Run ``thing`` as a module."""
    # The invocation is not logged, because `env` may hold secrets. As a no_log option, `env` would not work: Ansible
    # would censor its values, even short ones, in all results.
    module = _Module(arguments(thing), supports_check_mode=True, no_log=True, **thing.RULES)
    result = run(thing, module.params, check=module.check_mode)
    if not module._diff:
        del_diff(result)
    result["invocation"] = {"module_args": shown(module.params)}
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


def del_diff(result: dict[str, Any]) -> None:
    result.pop("diff", None)


def shown(params: dict[str, Any]) -> dict[str, Any]:
    """Return the options with their secrets hidden."""
    visible = dict(params)
    if visible.get("gateway_token"):
        visible["gateway_token"] = HIDDEN
    if visible.get("env"):
        visible["env"] = dict.fromkeys(visible["env"], HIDDEN)
    return visible
