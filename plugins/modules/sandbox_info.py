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
  - Returns all sandboxes, or those that match the options, in the order of their creation.
options:
  name:
    description:
      - Only entries with these names or ids. Unknown names are ignored.
    type: list
    elements: str
    aliases: [names]
  state:
    description:
      - Only sandboxes in one of these states.
    type: list
    elements: str
    choices: [running, paused]
  metadata:
    description:
      - Only sandboxes with all of these metadata entries.
    type: dict
  template:
    description:
      - Only sandboxes that descend from this template, given by name or id.
    type: str
  snapshot:
    description:
      - Only sandboxes that were created from this snapshot (or template), given by name or id.
    type: str
  started_after:
    description:
      - Only sandboxes that were started after this time (RFC 3339, for example C(2026-11-21T22:00:00Z)).
    type: str
  diverged:
    description:
      - Whether to check if the file system of each sandbox has changed since its head. This takes a short time for each
        running sandbox.
    type: bool
    default: false
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
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_fork
"""

EXAMPLES = r"""
---
- name: List the running sandboxes of the blue team
  grove.sandbox.sandbox_info:
    state: [running]
    metadata:
      team: blue
  register: blue_sandboxes

- name: List the forks of a snapshot, and check whether they have changed
  grove.sandbox.sandbox_info:
    snapshot: golden
    diverged: true
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    id: {description: Its id; it never changes., type: str}
    name: {description: Its name., type: str}
    state: {description: V(running) or V(paused)., type: str}
    state_reason: {description: Why it is paused or stalled without a request; empty otherwise., type: str}
    template_id: {description: The template at the root of its lineage., type: str}
    forked_from: {description: The snapshot or template it was created from; it never changes., type: str}
    snapshot_id: {description: "Its head, the snapshot that it currently descends from.", type: str}
    parent_sandbox_id: {description: The sandbox it was forked from; empty if created from a template., type: str}
    diverged:
      description: >-
        Whether its file system has changed since its head. V(null) if the module did not check, if the agent did not
        answer in time, or if check mode cannot know it.
      type: bool
    cpus: {description: Virtual CPUs., type: int}
    memory_mb: {description: Memory in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    metadata: {description: Its metadata., type: dict}
    network:
      description: Its network policy.
      type: dict
      contains:
        allow_internet: {description: Whether it can reach every address that is not denied., type: bool}
        allow_out: {description: "Addresses, networks and names that are always reachable.", type: list, elements: str}
        deny_out: {description: Addresses and networks that are not reachable., type: list, elements: str}
    volumes:
      description: Its volumes, sorted by path.
      type: list
      elements: dict
      contains:
        name: {description: The name of the volume., type: str}
        path: {description: The mount point., type: str}
        read_only: {description: Whether the volume is mounted read-only., type: bool}
    created_at: {description: Time of creation (RFC 3339)., type: str}
    started_at: {description: Time of its last start (RFC 3339)., type: str}
    end_at: {description: End of its lifetime (RFC 3339); V(null) for never., type: str}
    address: {description: "Address of its ports, as seen from the gateway's host; V(null) while paused.", type: str}
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
    run_module(_info.SANDBOXES)


if __name__ == "__main__":
    main()
