#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox
short_description: Declare sandboxes
version_added: "0.1.0"
description:
  - Sandboxes of the given names exist, in the given state and with the given properties, or do not exist.
  - Only what is set is compared with what is there. What cannot change while a sandbox lives (its source, its cpus,
    memory and disk) is refused if it differs, unless O(recreate=true).
options:
  name:
    description:
      - The name or names. Names are 1 to 64 letters, digits, C(_), C(.) or C(-), starting with a letter or digit;
        sandboxes, snapshots, templates and volumes share them.
    type: list
    elements: str
    required: true
    aliases: [names]
  state:
    description:
      - V(present), it exists, running or paused; V(running) and V(paused), it exists in that state; V(absent), it
        does not exist.
      - A sandbox that is made with V(present) runs.
    type: str
    choices: [present, running, paused, absent]
    default: present
  template:
    description:
      - Name or id of the template it is made from.
      - To make a sandbox, this or O(snapshot) is needed.
    type: str
  snapshot:
    description:
      - Name or id of the snapshot it is made from.
    type: str
  cpus:
    description:
      - Virtual CPUs. If not set, a new sandbox has those of its source.
      - A snapshot that holds memory can only be forked with its own cpus and memory, unless O(cold_start=true).
    type: int
  memory_mb:
    description:
      - Memory in MiB. If not set, a new sandbox has that of its source.
    type: int
  disk_mb:
    description:
      - Size of the disk in MiB. If not set, a new sandbox has that of its source.
    type: int
  cold_start:
    description:
      - Whether a new sandbox boots from the disk of its source rather than going on from its memory.
      - It is not compared with anything for a sandbox that exists.
    type: bool
    default: false
  env:
    description:
      - Environment of every process that is started in a new sandbox. The values are in no result, message or log.
      - It is given at creation only, and not compared with anything for a sandbox that exists.
    type: dict
  metadata:
    description:
      - What to write beside it, as strings; it replaces what is there.
    type: dict
  timeout:
    description:
      - How long it may live, in seconds from when it was made; V(-1) for ever. Afterwards the gateway ends it.
      - If not set, a new sandbox lives as long as the gateway's configuration says. A difference of up to ten seconds
        is none.
    type: int
  network:
    description:
      - What it may reach outside itself. The host's services and other sandboxes it never reaches.
    type: dict
    suboptions:
      allow_internet:
        description:
          - Whether it reaches anything that O(network.deny_out) does not name. For a new sandbox, V(true) if not set.
        type: bool
      allow_out:
        description:
          - Addresses or networks it reaches in any case.
          - Clouds' metadata addresses are reached only if an entry lies within their range, such as V(169.254.169.254).
        type: list
        elements: str
      deny_out:
        description:
          - Addresses or networks it does not reach.
        type: list
        elements: str
  volumes:
    description:
      - The volumes that it has, each at one path; exactly these. A list that is empty is none.
      - What differs is detached and attached while it runs. Programs in it that use a volume which is detached find
        that it is gone.
      - If not set, a new sandbox has the volumes that the source of O(snapshot) had, and one that exists is left as it
        is.
    type: list
    elements: dict
    suboptions:
      name:
        description:
          - The volume. It must exist; the module M(grove.sandbox.sandbox_volume) makes it.
        type: str
        required: true
      path:
        description:
          - Where it is mounted; an absolute path of letters, digits and C(_), C(.), C(@), C(+), C(:), C(=) or C(-),
            outside what the system needs. It is made if it is not there. No two volumes are mounted inside each other.
        type: str
        required: true
      read_only:
        description:
          - Whether the sandbox can only read it.
        type: bool
        default: false
  recreate:
    description:
      - If V(true), a sandbox that differs in what cannot change is replaced, which loses what is in it. The old one
        goes when the new one lives. O(template) or O(snapshot) must say what to make it from.
    type: bool
    default: false
  continue_on_error:
    description:
      - Normally, if anything stands in the way of one name, nothing is done at all; and if something fails on the
        way, what comes after it is not tried.
      - If V(true), every name is tried, RV(outcomes) says how each went, and the task fails at its end if one did.
    type: bool
    default: false
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox_fork
  - module: grove.sandbox.sandbox_rollback
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_template
  - module: grove.sandbox.sandbox_volume
  - module: grove.sandbox.sandbox_info
"""

EXAMPLES = r"""
---
- name: A sandbox from a template
  grove.sandbox.sandbox:
    name: web
    template: base
    metadata:
      team: blue

- name: Two sandboxes that cannot reach anything, for an hour
  grove.sandbox.sandbox:
    name: [untrusted-1, untrusted-2]
    template: base
    timeout: 3600
    network:
      allow_internet: false

- name: It has a volume, which it can only read
  grove.sandbox.sandbox:
    name: web
    volumes:
      - name: data
        path: /srv/data
        read_only: true

- name: Stop it for the night, with its memory
  grove.sandbox.sandbox:
    name: web
    state: paused

- name: Replace it by one with more memory, which boots from the template's disk; what is in it is lost
  grove.sandbox.sandbox:
    name: web
    template: base
    memory_mb: 512
    cold_start: true
    state: running
    recreate: true

- name: Remove them
  grove.sandbox.sandbox:
    name: [web, untrusted-1, untrusted-2]
    state: absent
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes of the given names that exist, in the order of the names.
    - In check mode, what exists only after the run (ids, dates, addresses) is V(null).
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
sandbox:
  description: The one entry of RV(sandboxes), or V(null) if it does not exist.
  returned: when one name is given
  type: dict
outcomes:
  description: What was done for each name, or in check mode would be; empty where nothing was for any.
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything was done for it., type: bool}
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [create]}
    failed: {description: Whether it failed., type: bool}
    failure: {description: "The failure, as RV(failure); V(null) without one.", type: dict}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _sandbox
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_sandbox)


if __name__ == "__main__":
    main()
