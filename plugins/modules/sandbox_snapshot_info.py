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
  - Returns all snapshots, or those that match the options, in the order of their capture.
options:
  name:
    description:
      - Only entries with these names or ids. Unknown names are ignored.
    type: list
    elements: str
    aliases: [names]
  sandbox:
    description:
      - Only snapshots of this sandbox, given by name or id.
    type: str
  template:
    description:
      - Only snapshots that descend from this template, given by name or id.
    type: str
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
  - module: grove.sandbox.sandbox_snapshot
"""

EXAMPLES = r"""
---
- name: List the snapshots of a sandbox
  grove.sandbox.sandbox_snapshot_info:
    sandbox: web
  register: web_snapshots

- name: Get one snapshot
  grove.sandbox.sandbox_snapshot_info:
    name: golden
"""

RETURN = r"""
---
snapshots:
  description:
    - The snapshots.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    id: {description: Its id., type: str}
    name: {description: Its first name., type: str}
    names: {description: All its names., type: list, elements: str}
    description: {description: Its description., type: str}
    status: {description: "V(ready), V(writing) or V(failed).", type: str}
    source_sandbox_id: {description: The sandbox that it captures., type: str}
    origin_sandbox_id: {description: The first sandbox in the chain of sources., type: str}
    template_id: {description: The template at the root of its lineage., type: str}
    parent_snapshot_id: {description: The head of its source at the time of the capture., type: str}
    origin_id: {description: The first ancestor in its lineage., type: str}
    memory: {description: "How its memory was captured; V(none) if it has no memory.", type: str}
    memory_problem: {description: "Why its memory cannot be restored now; empty if it can.", type: str}
    memory_bytes_written: {description: Bytes of memory that the capture wrote., type: int}
    disk_bytes_unique: {description: Bytes on the disk that only this snapshot uses., type: int}
    pause_ms: {description: "How long the capture paused its source, in milliseconds.", type: float}
    cpus: {description: Virtual CPUs of its forks., type: int}
    memory_mb: {description: Memory of its forks in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    mounts:
      description: The volumes that its source had, sorted by path. Forks get the same volumes by default.
      type: list
      elements: dict
      contains:
        name: {description: "The name of the volume; its id if the volume no longer exists.", type: str}
        path: {description: The mount point., type: str}
        read_only: {description: Whether the volume is mounted read-only., type: bool}
    volumes: {description: The volumes that were captured at the same instant., type: list, elements: str}
    forks: {description: Number of existing sandboxes that were forked from it., type: int}
    prewarm: {description: Number of its forks that the gateway keeps ready., type: int}
    imported_from:
      description: The id that it has in the gateway that exported it; empty if it was not imported.
      type: str
    created_at: {description: Time of the capture (RFC 3339)., type: str}
    expires_at: {description: Time from which the gateway may remove it (RFC 3339); V(null) for never., type: str}
    backend: {description: The kind of its host., type: str}
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
    run_module(_info.SNAPSHOTS)


if __name__ == "__main__":
    main()
