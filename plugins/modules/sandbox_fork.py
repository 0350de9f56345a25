#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_fork
short_description: Fork a snapshot, or clone a sandbox, into siblings
version_added: "0.1.0"
description:
  - Exactly the siblings that are asked for run; missing ones are forked, all in one request and by default all or
    none; dead ones (paused though nobody asked for it, because the machine ended) are replaced; with O(exact=true)
    surplus ones are removed.
  - A sandbox of one of the names that is no such sibling is refused, unless O(recreate=true).
options:
  snapshot:
    description:
      - The snapshot to fork, by name or id. A template works as well.
      - Exactly one of O(snapshot) and O(sandbox) is needed.
    type: str
  sandbox:
    description:
      - The sandbox to clone, by name or id. It is captured, as it is now, if siblings are missing; the capture goes
        with the last of them.
    type: str
  state:
    description:
      - V(present), the siblings exist; V(absent), they do not exist.
    type: str
    choices: [present, absent]
    default: present
  names:
    description:
      - The names of the siblings.
      - One of O(names) and O(name_prefix) is needed.
    type: list
    elements: str
  count:
    description:
      - How many siblings there shall be. They are named O(name_prefix) with C(-1), C(-2), … after it.
    type: int
  name_prefix:
    description:
      - What the names of the siblings begin with.
      - With O(state=absent) and no O(count), all siblings that are named by it are removed.
    type: str
  exact:
    description:
      - Whether siblings that were not asked for are removed. With O(name_prefix) these are the siblings named with
        the prefix and a number; with O(names), all siblings of the snapshot, or all clones of the sandbox.
    type: bool
    default: false
  concurrency:
    description:
      - How many are forked at the same time. If not set, what the gateway's configuration says.
    type: int
  atomic:
    description:
      - Whether missing siblings are forked all or none. If V(false), as many as can be are; the task still fails if
        one could not.
      - Where a sibling takes the place of an old one, it is all or none in any case.
    type: bool
    default: true
  metadata:
    description:
      - What to write beside each, as strings; it replaces what is there.
    type: dict
  paused:
    description:
      - Whether they are paused, rather than run.
    type: bool
    default: false
  cold_start:
    description:
      - Whether new siblings boot from the disk of the snapshot rather than going on from its memory.
      - It is not compared with anything for siblings that exist.
    type: bool
    default: false
  cpus:
    description:
      - Virtual CPUs of each. If not set, those of the snapshot or sandbox.
      - A snapshot that holds memory can only be forked with its own cpus and memory, unless O(cold_start=true).
    type: int
  memory_mb:
    description:
      - Memory of each in MiB. If not set, that of the snapshot or sandbox.
    type: int
  volumes:
    description:
      - The volumes that each has, at one path each; exactly these. A list that is empty is none.
      - What differs in a sibling that runs is detached and attached.
      - If not set, new siblings have the volumes that the source of the snapshot had, and those that exist are left as
        they are.
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
      clone:
        description:
          - Whether each new sibling has a clone of its own, of what the snapshot holds of the volume, instead of the
            volume that all share. The snapshot must have been taken with this volume among its O(volumes); a sandbox
            that is cloned must have it mounted.
          - The gateway names the clone, and removes it with the last sandbox that has it.
        type: bool
        default: false
  recreate:
    description:
      - If V(true), a sandbox that differs in what cannot change is replaced, which loses what is in it. The old one
        goes when the new one lives.
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
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_volume
"""

EXAMPLES = r"""
---
- name: Exactly ten siblings of a snapshot, ci-1 to ci-10
  grove.sandbox.sandbox_fork:
    snapshot: golden
    count: 10
    name_prefix: ci
    exact: true

- name: Fewer of them
  grove.sandbox.sandbox_fork:
    snapshot: golden
    count: 3
    name_prefix: ci
    exact: true

- name: Two clones of a running sandbox, as it is now
  grove.sandbox.sandbox_fork:
    sandbox: web
    names: [web-a, web-b]
    metadata:
      experiment: colours

- name: Two more, which share a data set and have a clone each of what was captured of a cache
  grove.sandbox.sandbox_fork:
    snapshot: golden
    names: [train-a, train-b]
    volumes:
      - name: data
        path: /srv/data
        read_only: true
      - name: cache
        path: /srv/cache
        clone: true

- name: Remove all of them
  grove.sandbox.sandbox_fork:
    snapshot: golden
    name_prefix: ci
    state: absent
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes of the names asked for that exist, in the order of the names, with what one goes on with. All there
      is to know of them is told by M(grove.sandbox.sandbox_info).
    - In check mode, what exists only after the run (ids, addresses) is V(null).
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    id: {description: Its id; it never changes., type: str}
    name: {description: Its name., type: str}
    state: {description: V(running) or V(paused)., type: str}
    address: {description: "Where its ports are reached, on the gateway's host; V(null) while it is paused.", type: str}
    forked_from: {description: The snapshot or template it was made from; it never changes., type: str}
    snapshot_id: {description: "Its head: the snapshot it descends from now.", type: str}
    volumes:
      description: Its volumes, in the order of their paths.
      type: list
      elements: dict
      contains:
        name: {description: The volume., type: str}
        path: {description: Where it is mounted., type: str}
        read_only: {description: Whether the sandbox can only read it., type: bool}
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
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [fork]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _fork
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_fork)


if __name__ == "__main__":
    main()
