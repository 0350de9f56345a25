#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_snapshot
short_description: Capture sandboxes, and transfer snapshots
version_added: "0.1.0"
description:
  - Ensures that the named snapshots exist or do not exist. A snapshot captures the file system of a running sandbox
    and, where the host supports it, its memory.
  - A snapshot can be written to a file with O(export_to), and created from a file with O(import_from). The file
    contains everything on the disk and in the memory of the sandbox, including secrets. O(age_recipients) encrypts it.
  - A snapshot can be pushed to an OCI registry with O(push_to), and created from one with O(pull_from). The gateway
    transfers only what the other side lacks.
  - If the sandbox already has a snapshot of that name, nothing is changed.
options:
  name:
    description:
      - The name or names of the snapshots. A name has 1 to 64 letters, digits, C(_), C(.) or C(-), and starts with a
        letter or digit. Sandboxes, snapshots, templates and volumes share one namespace.
    type: list
    elements: str
    required: true
    aliases: [names]
  sandbox:
    description:
      - The sandbox to capture, by name or id. With several names, list one sandbox for each entry of O(name), in the
        same order.
      - If O(state=present), this option, O(export_to), O(import_from), O(push_to) or O(pull_from) is required.
    type: list
    elements: str
    aliases: [sandboxes]
  state:
    description:
      - V(present) means that the snapshot exists. V(absent) means that it does not exist.
    type: str
    choices: [present, absent]
    default: present
  description:
    description:
      - Text to store with the snapshot.
    type: str
  memory:
    description:
      - V(auto) also captures the memory on hosts that support it. V(none) captures only the file system.
    type: str
    choices: [auto, none]
    default: auto
  volumes:
    description:
      - Names of mounted volumes to capture at the same instant. If one volume cannot be captured, no snapshot is taken.
      - The capture of a volume is removed with the snapshot. A fork mounts the volume itself, unless it requests a
        clone.
    type: list
    elements: str
  expires_in:
    description:
      - Number of seconds after which the gateway removes the snapshot, as soon as it is unused. If not set, the
        snapshot is kept.
      - This option is ignored if the snapshot already exists.
    type: int
  retention:
    description:
      - The retention rule of the snapshot. All snapshots of a sandbox that have a rule form a series. The rule of the
        newest snapshot decides which snapshots are kept; the gateway removes the others once they are unused.
      - The newest snapshot, snapshots in use, and snapshots without a rule are always kept.
      - This option is ignored if the snapshot already exists.
    type: dict
    suboptions:
      keep_last:
        description:
          - How many of the newest snapshots to keep.
        type: int
      keep_daily:
        description:
          - Number of days (UTC) for which to keep the newest snapshot of the day. Days without a snapshot do not count.
        type: int
      max_age:
        description:
          - Maximum age in seconds. Older snapshots are removed even if another rule would keep them.
        type: int
  prewarm:
    description:
      - Number of forks to keep ready, so that new sandboxes start in milliseconds. Each uses memory of the host like a
        running sandbox. Forks with volumes, with other sizes or with a cold start do not use them.
      - If set, the number of an existing snapshot is changed. If not set, an existing snapshot keeps its number, and a
        new snapshot has none.
      - Only hosts of virtual machines support numbers other than V(0), and only for snapshots with memory.
    type: int
  export_to:
    description:
      - Path of a file on the host where the module runs. The task writes the snapshot to it. With O(sandbox), the
        snapshot is taken first if it does not exist.
      - If the file already contains this snapshot, nothing is changed. A file that contains another snapshot,
        or this one without its memory (C(sandboxctl snapshot export --no-memory)), is replaced. With any other file,
        the task fails. The file gets its name when it is complete, and only its owner can read it. Other users lose
        their permissions for an existing file.
      - If the connection to the gateway is lost, run the task again. It continues where the export ended.
      - A snapshot with O(volumes) cannot be exported.
    type: path
  export_since:
    description:
      - Name or id of a snapshot or template of the same gateway. The file of O(export_to) then contains only what
        differs from it. Another gateway can import the file only after it has imported this snapshot or template, from
        a file or as a part of one with O(export_since).
      - On jail hosts, it must be the template or snapshot from which the sandbox was forked, or to which it was last
        rolled back, or an earlier snapshot that was taken since then. On hosts of virtual machines, any other snapshot
        will do, but the file is small only if the two share most of their data.
      - A file that contains the snapshot, but not since this one, is replaced.
    type: str
  import_from:
    description:
      - Path of a file on the host where the module runs, to create the snapshot from. If the snapshot exists
        and was imported from a file with the same snapshot, nothing is changed, even if the file no longer exists.
      - If the memory in the file cannot be restored on the gateway's host, only the disk is imported.
        RV(snapshots[].memory) is then V(none).
      - If the connection to the gateway is lost, run the task again. It sends only the rest of the file.
    type: path
  push_to:
    description:
      - C(REGISTRY/REPOSITORY:TAG) in an OCI registry that the gateway's configuration allows. The gateway pushes the
        snapshot to it. With O(sandbox), the snapshot is taken first if it does not exist.
      - If the tag already names this snapshot, nothing is changed. If it names anything else, the tag is moved.
      - A snapshot with O(volumes) cannot be pushed.
    type: str
  pull_from:
    description:
      - C(REGISTRY/REPOSITORY:TAG) or C(REGISTRY/REPOSITORY@DIGEST) in an OCI registry, to create the snapshot from. If
        the snapshot exists and was created from the same snapshot, nothing is changed, even if the artifact no longer
        exists.
      - If the memory cannot be restored on the gateway's host, only the disk is pulled. RV(snapshots[].memory) is then
        V(none).
    type: str
  trust:
    description:
      - Fingerprints of the gateways whose snapshots are accepted by O(import_from) and O(pull_from), in addition to the
        importing gateway. C(sandboxctl snapshot signer) shows the fingerprint of a gateway.
    type: list
    elements: str
  when_changed:
    description:
      - If V(true), a sandbox whose file system has not changed since its last snapshot is not captured again if that
        snapshot includes O(volumes). The module returns the last snapshot instead. Changes in memory or volumes are not
        detected.
    type: bool
    default: false
  when_unused:
    description:
      - By default, O(state=absent) fails if the snapshot is in use. The message lists the resources that use it.
      - If V(true), the snapshot is hidden now and removed when its last sandbox is removed.
    type: bool
    default: false
  continue_on_error:
    description:
      - By default, nothing is changed if any name is invalid, and the task stops at the first action that fails.
      - If V(true), every name is tried, and RV(outcomes) contains each result. The task fails if any action failed.
    type: bool
    default: false
extends_documentation_fragment:
  - grove.sandbox.age
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  check_mode:
    support: partial
    details:
      - With O(when_changed=true), check mode cannot know whether a running sandbox will have diverged by then. If the
        sandbox's disk does not show that it has diverged, check mode predicts no snapshot. If an earlier task of the
        check-mode run has changed the sandbox, check mode predicts the snapshot. In both cases, the plan contains the
        snapshot, and shows that it depends on whether the sandbox has diverged.
      - Check mode does not know which files and directories earlier tasks of the run create. It predicts an import from
        the file that exists now. If O(import_from) does not exist, it refuses the task, and the plan shows that this
        depends on the earlier tasks. It does not check the directory of O(export_to); a run does before it takes the
        snapshot.
      - With O(age_identity), check mode decrypts only the beginning of the file. It detects a wrong key, but not a file
        that is incomplete or was changed. It needs the program C(age).
      - Check mode pushes nothing. If O(pull_from) does not exist, it refuses the task, and the plan shows that this
        depends on the earlier tasks. With O(push_to) or O(pull_from), check mode needs a key with the scope C(admin),
        because the gateway contacts the registry.
      - If the gateway's host is almost full, check mode can only estimate whether there is room.
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

- name: Capture several sandboxes, each only if it has changed since its last snapshot
  grove.sandbox.sandbox_snapshot:
    name: [web-monday, db-monday]
    sandbox: [web, db]
    when_changed: true

- name: Capture a sandbox and its data volume at one instant, and keep the snapshot for a week
  grove.sandbox.sandbox_snapshot:
    name: with-data
    sandbox: web
    volumes: [data]
    expires_in: 604800

- name: Capture it every night; keep seven nightly snapshots and none older than a month
  grove.sandbox.sandbox_snapshot:
    name: "web-{{ now(utc=true, fmt='%Y-%m-%d') }}"
    sandbox: web
    retention:
      keep_daily: 7
      max_age: 2592000

- name: Keep two forks of it ready
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    sandbox: web
    prewarm: 2

- name: Write a snapshot to a file on the managed host
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    export_to: /srv/before-upgrade.snapshot

- name: Write only what has changed since yesterday's snapshot
  grove.sandbox.sandbox_snapshot:
    name: tuesday
    sandbox: web
    export_to: /srv/tuesday.snapshot
    export_since: monday

- name: Write a snapshot to a file that only the owner of a key can decrypt
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    export_to: /srv/before-upgrade.snapshot.age
    age_recipients: [age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p]

- name: Create a snapshot from the encrypted file
  grove.sandbox.sandbox_snapshot:
    name: decrypted
    import_from: /srv/before-upgrade.snapshot.age
    age_identity: /root/backup-key.txt

- name: Create a snapshot from a file that another gateway has written
  grove.sandbox.sandbox_snapshot:
    name: restored
    import_from: /srv/before-upgrade.snapshot
    trust: ["{{ exporting_gateway_fingerprint }}"]

- name: Take a snapshot, and push it to a registry
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    sandbox: web
    push_to: registry.example/team/env:before

- name: Create a snapshot that a different gateway has pushed
  grove.sandbox.sandbox_snapshot:
    name: pulled
    pull_from: registry.example/team/env:before
    trust: ["{{ pushing_gateway_fingerprint }}"]

- name: Remove a snapshot, or hide it until its last fork is removed
  grove.sandbox.sandbox_snapshot:
    name: before-upgrade
    state: absent
    when_unused: true
"""

RETURN = r"""
---
snapshots:
  description:
    - The named snapshots that exist, in the given order. With O(when_changed=true), the list contains the last snapshot
      in place of a snapshot that was skipped.
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
snapshot:
  description: The only entry of RV(snapshots), or V(null) if the snapshot does not exist.
  returned: if one name is given
  type: dict
outcomes:
  description: The actions for each name; in check mode, the predicted ones. Empty if nothing had to be done.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything changed., type: bool}
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [capture]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _snapshot
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_snapshot)


if __name__ == "__main__":
    main()
