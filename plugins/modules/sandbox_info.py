#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_info
short_description: List sandboxes
version_added: "0.1.0"
description:
  - Returns sandboxes, all or those that the options leave, in the order in which they were made.
options:
  name:
    description:
      - Only those of these names or ids. One that does not exist is no error.
    type: list
    elements: str
    aliases: [names]
  state:
    description:
      - Only those in one of these states.
    type: list
    elements: str
    choices: [running, paused]
  metadata:
    description:
      - Only those that have all of this written beside them.
    type: dict
  template:
    description:
      - Only those that descend from this template, by name or id.
    type: str
  snapshot:
    description:
      - Only those that were made from this snapshot (or template), by name or id.
    type: str
  started_after:
    description:
      - Only those that were started after this moment (RFC 3339, as in C(2026-11-21T22:00:00Z)).
    type: str
  diverged:
    description:
      - Whether to look, for each, if its file system changed since its head. That takes a moment for each that runs.
    type: bool
    default: false
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
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_fork
"""

EXAMPLES = r"""
---
- name: All that run for the blue team
  grove.sandbox.sandbox_info:
    state: [running]
    metadata:
      team: blue
  register: found

- name: The forks of a snapshot, and whether each changed since
  grove.sandbox.sandbox_info:
    snapshot: golden
    diverged: true
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes.
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    id: {description: Its id; it never changes., type: str}
    name: {description: Its name., type: str}
    state: {description: V(running) or V(paused)., type: str}
    state_reason: {description: Why it is paused where nobody asked for it; else empty., type: str}
    template_id: {description: The template at the root of its descent., type: str}
    forked_from: {description: The snapshot or template it was made from; it never changes., type: str}
    snapshot_id: {description: "Its head: the snapshot it descends from now.", type: str}
    parent_sandbox_id: {description: The sandbox it was forked from; empty for one made from a template., type: str}
    diverged:
      description: Whether its file system changed since its head; V(null) where that was not looked at.
      type: bool
    cpus: {description: Virtual CPUs., type: int}
    memory_mb: {description: Memory in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    metadata: {description: What was written beside it., type: dict}
    network:
      description: What it may reach outside itself.
      type: dict
      contains:
        allow_internet: {description: Anything but what is denied below., type: bool}
        allow_out: {description: Reachable in any case., type: list, elements: str}
        deny_out: {description: Not reachable., type: list, elements: str}
    volumes:
      description: Its volumes, in the order of their paths.
      type: list
      elements: dict
      contains:
        name: {description: The volume., type: str}
        path: {description: Where it is mounted., type: str}
        read_only: {description: Whether the sandbox can only read it., type: bool}
    created_at: {description: When it was made (RFC 3339)., type: str}
    started_at: {description: When it was started (RFC 3339)., type: str}
    end_at: {description: When its time is up (RFC 3339); V(null) for never., type: str}
    address: {description: "Where its ports are reached, on the gateway's host; V(null) while it is paused.", type: str}
    backend: {description: The kind of its host., type: str}
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
    run_module(_info.SANDBOXES)


if __name__ == "__main__":
    main()
