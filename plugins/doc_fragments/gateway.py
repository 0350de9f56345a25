# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later


from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  gateway_url:
    description:
      - The address of the gateway, as C(unix:///path/to/gateway.sock), C(http://host:port) or C(https://host:port).
      - A socket or a loopback address refers to the managed host. The control node connects to any other address.
      - If not set, the environment variable E(SANDBOX_GATEWAY_URL) is used.
    type: str
    default: unix:///run/sandbox-gateway/gateway.sock
  gateway_token:
    description:
      - An API key from the gateway's key file. The Unix socket needs no key.
      - If not set, the environment variable E(SANDBOX_GATEWAY_TOKEN) is used. The variable of the control node is never
        passed to a module that runs inside a sandbox. If a fact or another task result sets O(gateway_url), O(ca_path)
        or O(validate_certs), the variable is not used and the task fails.
    type: str
  ca_path:
    description:
      - A PEM file with the CA certificates for verifying the gateway's certificate.
      - If not set, the system's CA certificates are used.
    type: path
  validate_certs:
    description:
      - Whether to verify the gateway's certificate.
    type: bool
    default: true
  gateway_timeout:
    description:
      - Time limit in seconds for the response to one request.
      - The module also retries a request for this long while the gateway reports that it is busy.
    type: int
    default: 300
  check_run:
    description:
      - A name that all tasks of one C(ansible-playbook --check) share. With it, each task sees what the tasks before it
        would have done. The action plugin sets it; do not set it yourself.
    type: str
  check_sessions:
    description:
      - The times at which earlier tasks opened their plan sessions. They show whether a gateway has been restarted
        since. The action plugin sets this option; do not set it yourself.
    type: dict
  approved_plan:
    description:
      - The part of the applied plan that concerns this task. The action plugin sets it; do not set it yourself.
    type: dict
  from_action_plugin:
    description:
      - Whether the action plugin of the same name has started the module. Only the action plugin knows whether the run
        applies a plan, so a module that can change something refuses to run without it. The action plugin sets it; do
        not set it yourself.
    type: bool
    default: false
  is_async:
    description:
      - Whether the task is asynchronous. The action plugin then does not receive the module's result, so the module
        must not add data for it. The action plugin sets this option; do not set it yourself.
    type: bool
    default: false
  predict_only:
    description:
      - Whether to hide this task's predicted changes from later tasks of the same check-mode run. The action plugin
        sets it for a task with C(check_mode=true), which changes nothing in a real run either; do not set it yourself.
    type: bool
    default: false
requirements:
  - Python 3.8 or newer on the host where the module runs (no other libraries)
notes:
  - If the control node can reach the same gateway, an action plugin of the same name does the work there, which is much
    faster. With C(become), C(environment), C(async), or a socket or loopback address on a host whose connection is not
    local, the module runs on the managed host.
  - Results, messages and logs never contain the key.
"""
