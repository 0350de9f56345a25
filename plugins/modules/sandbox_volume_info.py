#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_volume_info
short_description: List volumes
version_added: "0.1.0"
description:
  - Returns all volumes, or those with the given names, in the order of their creation.
options:
  name:
    description:
      - Only entries with these names. Unknown names are ignored.
    type: list
    elements: str
    aliases: [names]
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  check_mode:
    support: full
    details:
      - If another action starts the module without its action plugin, such as C(ansible.builtin.package) with C(use),
        the module returns the real objects, without the changes of earlier tasks in check mode.
  diff_mode:
    support: none
    details:
      - The module never changes anything.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox_volume
"""

EXAMPLES = r"""
---
- name: List all volumes and their attachments
  grove.sandbox.sandbox_volume_info:
  register: all_volumes

- name: List the snapshots of one volume
  grove.sandbox.sandbox_volume_info:
    name: data
"""

RETURN = r"""
---
volumes:
  description:
    - The volumes.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: Its name., type: str}
    size_mb: {description: Its capacity in MiB., type: int}
    used_mb: {description: Used space in MiB; V(null) if the host cannot determine it., type: int}
    attachments:
      description: The sandboxes that it is attached to, sorted by name.
      type: list
      elements: dict
      contains:
        sandbox: {description: The name of the sandbox., type: str}
        sandbox_id: {description: Its id., type: str}
        path: {description: The mount point., type: str}
        read_only: {description: Whether the volume is mounted read-only., type: bool}
        state: {description: "The state of the sandbox, V(running) or V(paused).", type: str}
    snapshots: {description: The names of its snapshots., type: list, elements: str}
    captured_by:
      description: Ids of the sandbox snapshots that contain a capture of it, oldest first.
      type: list
      elements: str
    from_snapshot: {description: Id of the volume snapshot it was created from; empty for none., type: str}
    imported_from:
      description:
        - The id, in the gateway that exported it, of the snapshot that it was imported from; empty if it was not
          imported.
      type: str
    owner_sandbox_id:
      description:
        - The sandbox for which it was cloned, or empty. A clone is removed when its last attachment is removed.
      type: str
    stuck:
      description: Messages about unmounts that fail on the host and that the gateway retries.
      type: list
      elements: str
    created_at: {description: Time of creation (RFC 3339)., type: str}
    sandbox_host: {description: The name of its host., returned: in a fleet, type: str}
failure:
  description: The failure in machine-readable form.
  returned: failure
  type: dict
  contains:
    kind:
      description: >-
        A stable identifier of the kind of failure, such as V(not_found), V(in_use), V(name_taken), V(conflict),
        V(invalid), V(no_space), V(busy), V(unsupported), V(timeout), V(backend_failed), V(unavailable),
        V(unauthorized), V(forbidden), V(unreachable), V(not_a_gateway) or V(too_old).
      type: str
    message: {description: The same text as RV(msg)., type: str}
    blockers: {description: Ids or names of the resources that prevent the change., type: list, elements: str}
    status: {description: HTTP status of the gateway's response; V(null) without a response., type: int}
msg:
  description: The error message, with a remedy.
  returned: failure
  type: str
"""

from ansible_collections.grove.sandbox.plugins.module_utils import _info
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_info.VOLUMES)


if __name__ == "__main__":
    main()
