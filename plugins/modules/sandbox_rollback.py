#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_rollback
short_description: Roll sandboxes back to a snapshot
version_added: "0.1.0"
description:
  - Restores the files and the memory of a snapshot in existing sandboxes, which keep their ids and names.
  - The gateway starts the restored state before it removes the current one, so nothing is lost if the start fails.
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
      - The snapshot to roll back to, by name or id. It can be any snapshot on the same kind of host, not only a
        snapshot of this sandbox.
    type: str
    required: true
  unless_clean:
    description:
      - Whether to skip a sandbox that descends from the snapshot and whose file system has not changed since. Changes
        in memory are not detected.
      - If V(false), every run rolls the sandbox back.
    type: bool
    default: true
  backup_name:
    description:
      - Name of a snapshot to take before the rollback, one for each sandbox. It is taken only if the sandbox is rolled
        back.
    type: list
    elements: str
  continue_on_error:
    description:
      - By default, nothing is changed if any name is invalid, and the task stops at the first action that fails.
      - If V(true), every name is tried, and RV(outcomes) contains each result. The task fails if any action failed.
    type: bool
    default: false
attributes:
  check_mode:
    support: partial
    details:
      - With O(unless_clean=true), check mode cannot know whether a running sandbox will have diverged by then. If the
        sandbox's disk does not show that it has diverged, check mode predicts no rollback. If an earlier task of the
        check-mode run has changed the sandbox, check mode predicts the rollback. In both cases, the plan contains the
        rollback, and shows that it depends on whether the sandbox has diverged.
      - Check mode cannot predict that a machine fails to start. If the gateway's host is almost full, it can only
        estimate whether there is room.
  idempotent:
    support: partial
    details:
      - With O(unless_clean=false), every run rolls back.
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
- name: Undo all changes since the snapshot, but keep them in another snapshot
  grove.sandbox.sandbox_rollback:
    sandbox: web
    snapshot: before-upgrade
    backup_name: web-after-upgrade

- name: Roll several sandboxes back to the same state in every run
  grove.sandbox.sandbox_rollback:
    sandbox: [ci-1, ci-2, ci-3]
    snapshot: golden
    unless_clean: false
"""

RETURN = r"""
---
sandboxes:
  description:
    - The sandboxes, in the given order.
    - In check mode, values that only a run creates (dates, addresses) are V(null); for ids, see
      the attribute C(check_mode).
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
sandbox:
  description: The only entry of RV(sandboxes), or V(null) if the sandbox does not exist.
  returned: if one name is given
  type: dict
backups:
  description:
    - The snapshots named in O(backup_name) that exist.
    - In check mode, values that only a run creates (dates, addresses) are V(null); for ids, see
      the attribute C(check_mode).
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
outcomes:
  description: The actions for each name; in check mode, the predicted ones. Empty if nothing had to be done.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything changed., type: bool}
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [rollback]}
    failed: {description: Whether an action failed., type: bool}
    failure: {description: "The failure, in the form of RV(failure); V(null) if there is none.", type: dict}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _rollback
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_rollback)


if __name__ == "__main__":
    main()
