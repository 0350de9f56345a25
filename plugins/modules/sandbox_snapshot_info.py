#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_snapshot_info
short_description: List snapshots of sandboxes
version_added: "0.1.0"
description:
  - Returns snapshots, all or those that the options leave, in the order in which they were taken.
options:
  name:
    description:
      - Only those of these names or ids. One that does not exist is no error.
    type: list
    elements: str
    aliases: [names]
  sandbox:
    description:
      - Only those that were taken of this sandbox, by name or id.
    type: str
  template:
    description:
      - Only those that descend from this template, by name or id.
    type: str
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
  - module: grove.sandbox.sandbox_snapshot
"""

EXAMPLES = r"""
---
- name: What was captured of a sandbox
  grove.sandbox.sandbox_snapshot_info:
    sandbox: web
  register: captured

- name: One snapshot
  grove.sandbox.sandbox_snapshot_info:
    name: golden
"""

RETURN = r"""
---
snapshots:
  description:
    - The snapshots.
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    id: {description: Its id., type: str}
    name: {description: Its first name., type: str}
    names: {description: All its names., type: list, elements: str}
    description: {description: What was written beside it., type: str}
    status: {description: "V(ready), V(writing) or V(failed).", type: str}
    source_sandbox_id: {description: The sandbox it was taken of., type: str}
    origin_sandbox_id: {description: The sandbox at the far end of the chain of sources., type: str}
    template_id: {description: The template at the root of its descent., type: str}
    parent_snapshot_id: {description: The head of its source when it was taken., type: str}
    origin_id: {description: Its ultimate ancestor., type: str}
    memory: {description: "How its memory was captured; V(none): it has none.", type: str}
    memory_bytes_written: {description: Bytes of memory that were written for it., type: int}
    disk_bytes_unique: {description: Bytes on disk that it shares with nothing., type: int}
    pause_ms: {description: How long its source stood still for it., type: float}
    cpus: {description: Virtual CPUs of what is forked from it., type: int}
    memory_mb: {description: Memory of what is forked from it in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    mounts:
      description: The volumes that its source had, in the order of their paths; a fork has the same.
      type: list
      elements: dict
      contains:
        name: {description: "The volume; its id if it is there no more.", type: str}
        path: {description: Where it is mounted., type: str}
        read_only: {description: Whether it can only be read., type: bool}
    volumes: {description: The volumes that were captured at the same instant., type: list, elements: str}
    forks: {description: How many sandboxes were forked from it and exist., type: int}
    created_at: {description: When it was taken (RFC 3339)., type: str}
    expires_at: {description: When it may be removed (RFC 3339); V(null) for never., type: str}
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
    run_module(_info.SNAPSHOTS)


if __name__ == "__main__":
    main()
