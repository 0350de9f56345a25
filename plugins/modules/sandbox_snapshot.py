#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_snapshot
short_description: Capture sandboxes
version_added: "0.1.0"
description:
  - Snapshots of the given names exist, or do not exist. A snapshot is taken of a sandbox while it runs, and holds its
    file system and, where the host can, its memory.
  - A name is taken once; if there is a snapshot of that name of the same sandbox, nothing is changed.
options:
  name:
    description:
      - The name or names of the snapshots. Names are 1 to 64 letters, digits, C(_), C(.) or C(-), starting with a
        letter or digit; sandboxes, snapshots, templates and volumes share them.
    type: list
    elements: str
    required: true
    aliases: [names]
  sandbox:
    description:
      - The sandbox to capture, by name or id; or one for each of O(name), in the same order.
      - Required if O(state=present).
    type: list
    elements: str
    aliases: [sandboxes]
  state:
    description:
      - V(present), it exists; V(absent), it does not exist.
    type: str
    choices: [present, absent]
    default: present
  description:
    description:
      - What to write beside it.
    type: str
  memory:
    description:
      - V(auto), the memory is captured where the host can; V(none), the file system alone is.
    type: str
    choices: [auto, none]
    default: auto
  volumes:
    description:
      - Volumes that the sandbox has mounted, by name, to be captured at the same instant. All of them are, or nothing.
      - What is captured of a volume goes with the snapshot. A fork has the volumes themselves, unless it asks for a
        clone.
    type: list
    elements: str
  expires_in:
    description:
      - After how many seconds it may be removed; it then goes when nobody uses it. If not set, never.
      - It is given when it is taken, and not compared with anything for a snapshot that exists.
    type: int
  retention:
    description:
      - The rule under which it is taken. The snapshots of a sandbox that were taken under a rule are a series, and the
        newest one's rule says which of them stay; the gateway removes the others when nobody uses them.
      - The newest stays in every case, and so does what is in use. What was taken without a rule stays.
      - It is given when it is taken, and not compared with anything for a snapshot that exists.
    type: dict
    suboptions:
      keep_last:
        description:
          - The newest so many stay.
        type: int
      keep_daily:
        description:
          - The newest of each of so many days (UTC) that have one stays.
        type: int
      max_age:
        description:
          - What is older than so many seconds goes, even if another rule would keep it.
        type: int
  when_changed:
    description:
      - If V(true), a sandbox whose file system has not changed since its last snapshot is not captured again; the last
        snapshot is returned instead, if it holds O(volumes). Changes in memory or in volumes alone do not count.
    type: bool
    default: false
  when_unused:
    description:
      - With O(state=absent), what is in use is normally refused, with the names of its users.
      - If V(true), it is hidden now and removed with the last sandbox that was made from it.
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
  - module: grove.sandbox.sandbox_volume
  - module: grove.sandbox.sandbox_snapshot_info
"""

EXAMPLES = r"""
---
- name: Capture a sandbox while it runs
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    sandbox: web

- name: Capture several, each only if it changed since its last snapshot
  grove.sandbox.sandbox_snapshot:
    name: [web-monday, db-monday]
    sandbox: [web, db]
    when_changed: true

- name: Capture a sandbox and its data at one instant, for a week
  grove.sandbox.sandbox_snapshot:
    name: with-data
    sandbox: web
    volumes: [data]
    expires_in: 604800

- name: Capture it every night, keep a week of nights and nothing older than a month
  grove.sandbox.sandbox_snapshot:
    name: "web-{{ now(utc=true, fmt='%Y-%m-%d') }}"
    sandbox: web
    retention:
      keep_daily: 7
      max_age: 2592000

- name: Remove a snapshot, or hide it until its last fork is gone
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    state: absent
    when_unused: true
"""

RETURN = r"""
---
snapshots:
  description:
    - The snapshots of the given names that exist, in the order of the names. With O(when_changed=true) the last
      snapshot stands for one that was not needed.
    - In check mode, what exists only after the run (ids, dates, addresses) is V(null).
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
snapshot:
  description: The one entry of RV(snapshots), or V(null) if it does not exist.
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
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [capture]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_snapshot)


if __name__ == "__main__":
    main()
