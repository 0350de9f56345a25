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
  - Returns volumes, all or those of the given names, in the order in which they were made.
options:
  name:
    description:
      - Only those of these names. One that does not exist is no error.
    type: list
    elements: str
    aliases: [names]
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  diff_mode:
    support: none
    details:
      - It changes nothing.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox_volume
"""

EXAMPLES = r"""
---
- name: All volumes, and who has them
  grove.sandbox.sandbox_volume_info:
  register: there

- name: The snapshots of one
  grove.sandbox.sandbox_volume_info:
    name: data
"""

RETURN = r"""
---
volumes:
  description:
    - The volumes.
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    name: {description: Its name., type: str}
    size_mb: {description: "What fits in, in MiB.", type: int}
    used_mb: {description: "What is in it, in MiB; V(null) where the host cannot tell.", type: int}
    attachments:
      description: The sandboxes that have it, in the order of their names.
      type: list
      elements: dict
      contains:
        sandbox: {description: The sandbox., type: str}
        sandbox_id: {description: Its id., type: str}
        path: {description: Where it is mounted., type: str}
        read_only: {description: Whether the sandbox can only read it., type: bool}
        state: {description: "The state of the sandbox, V(running) or V(paused).", type: str}
    snapshots: {description: The names of its snapshots., type: list, elements: str}
    captured_by:
      description: The ids of the snapshots of sandboxes that hold what was captured of it with them.
      type: list
      elements: str
    from_snapshot: {description: The id of the volume snapshot it was made from; empty for none., type: str}
    owner_sandbox_id:
      description:
        - The sandbox whose own clone it is; it goes with the last sandbox that has it. Empty for any other.
      type: str
    stuck:
      description: What does not let go of it, in sentences; the gateway tries again.
      type: list
      elements: str
    created_at: {description: When it was made (RFC 3339)., type: str}
failure:
  description: What went wrong.
  returned: failure
  type: dict
  contains:
    kind:
      description: >-
        A stable word for it, such as V(not_found), V(in_use), V(name_taken), V(conflict), V(invalid), V(no_space),
        V(busy), V(unsupported), V(timeout), V(backend_failed), V(unauthorized), V(forbidden), V(unreachable),
        V(not_a_gateway) or V(too_old).
      type: str
    message: {description: The same sentence as in RV(msg)., type: str}
    blockers: {description: Ids or names of what stands in the way., type: list, elements: str}
    status: {description: HTTP status of the gateway's answer; V(null) where it was not asked., type: int}
msg:
  description: What went wrong and how to mend it.
  returned: failure
  type: str
"""

from ansible_collections.grove.sandbox.plugins.module_utils import _info
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_info.VOLUMES)


if __name__ == "__main__":
    main()
