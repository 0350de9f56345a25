#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_rollback
short_description: Bring sandboxes back to a snapshot
version_added: "0.1.0"
description:
  - A sandbox is what a snapshot holds, files and memory, under its own id and name.
  - The new state is brought up beside the old; nothing is lost if it does not come up.
options:
  sandbox:
    description:
      - The sandbox or sandboxes, by name or id.
    type: list
    elements: str
    required: true
    aliases: [name, names, sandboxes]
  snapshot:
    description:
      - The snapshot to go back to, by name or id; any snapshot of the same kind of host, not only the sandbox's own.
    type: str
    required: true
  unless_clean:
    description:
      - Whether a sandbox that descends from the snapshot, and whose file system has not changed since, is left alone.
        Changes in memory alone do not count.
      - If V(false), it is rolled back in any case, every time.
    type: bool
    default: true
  backup_name:
    description:
      - Name of a snapshot to take before the rollback, one for each sandbox. It is taken only if there is a rollback.
    type: list
    elements: str
  continue_on_error:
    description:
      - Normally, if anything stands in the way of one name, nothing is done at all; and if something fails on the
        way, what comes after it is not tried.
      - If V(true), every name is tried, RV(outcomes) says how each went, and the task fails at its end if one did.
    type: bool
    default: false
attributes:
  idempotent:
    support: partial
    details:
      - With O(unless_clean=false) every run changes something.
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_snapshot
"""

EXAMPLES = r"""
---
- name: Undo what was done since the snapshot, but keep it
  grove.sandbox.sandbox_rollback:
    sandbox: web
    snapshot: before-upgrade
    backup_name: web-after-upgrade

- name: The same state for all, in any case
  grove.sandbox.sandbox_rollback:
    sandbox: [ci-1, ci-2, ci-3]
    snapshot: golden
    unless_clean: false
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes, in the order given.
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
backups:
  description:
    - The snapshots named in O(backup_name) that exist.
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
outcomes:
  description: What was done for each name, or in check mode would be; empty where nothing was for any.
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything was done for it., type: bool}
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [rollback]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _rollback
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_rollback)


if __name__ == "__main__":
    main()
