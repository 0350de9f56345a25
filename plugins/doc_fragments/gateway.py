# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later


from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  gateway_url:
    description:
      - Where the gateway listens, as C(unix:///path/to/gateway.sock), C(http://host:port) or C(https://host:port).
      - A socket or a loopback address is one of the managed host; any other address is reached from the control node.
      - If not set, the environment variable E(SANDBOX_GATEWAY_URL) is used.
    type: str
    default: unix:///run/sandbox-gateway/gateway.sock
  gateway_token:
    description:
      - A key of the gateway's key file. Over the unix socket none is needed.
      - If not set, the environment variable E(SANDBOX_GATEWAY_TOKEN) is used. That of the control node is not given to
        a module that runs inside a sandbox.
    type: str
  ca_path:
    description:
      - A file with the certificates of the authorities that may vouch for the gateway, in PEM form.
      - If not set, those of the system.
    type: path
  validate_certs:
    description:
      - Whether the gateway's certificate is checked.
    type: bool
    default: true
  gateway_timeout:
    description:
      - How long the gateway may take to answer one request, in seconds.
      - This is also how long a gateway that says it is busy is asked again.
    type: int
    default: 300
requirements:
  - Python 3.8 or newer, with nothing but its standard library, where the module runs
notes:
  - An action plugin of the same name does the work on the control node wherever that reaches the same gateway, which
    saves most of a task's time. With C(become), C(environment), C(async), or a socket or loopback address on a host
    whose connection is not local, the module runs on the managed host.
  - The key is in no result, message or log.
"""
