#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_volume
short_description: Declare volumes
version_added: "0.1.0"
description:
  - Volumes of the given names exist, with the given size and snapshots, attached to exactly the given sandboxes; or do
    not exist. A volume is storage that outlives sandboxes and that any number of them have at once.
  - Only what is set is compared with what is there. A volume grows, also while it is mounted, and never shrinks.
  - Where several things differ, whoever shall not have the volume lets go of it first; then it is captured, rolled
    back, grown and attached, and snapshots are removed last.
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
      - V(present), it exists; V(absent), it does not exist.
      - A volume that a sandbox has, that has snapshots, or of which a snapshot of a sandbox holds a capture, is not
        removed; O(attachments) and O(purge) say what may be undone for it.
    type: str
    choices: [present, absent]
    default: present
  size_mb:
    description:
      - How much fits in, in MiB, at least 64. If not set, a new volume has the size of O(from_snapshot), or else 1024.
    type: int
  from_snapshot:
    description:
      - What a new volume holds, as C(VOLUME@SNAPSHOT). If not set, nothing.
      - A volume that was made from something else is refused. Where that snapshot is gone, it cannot be told any more.
    type: str
  attachments:
    description:
      - The sandboxes that have it, each at one path; exactly these. A list that is empty is none.
      - What differs is detached and attached while the sandbox runs. Programs in a sandbox that use a volume which is
        detached find that it is gone.
      - With several names, and with O(state=absent), only a list that is empty can be given.
    type: list
    elements: dict
    suboptions:
      sandbox:
        description:
          - The sandbox, by name or id. It must exist, and to be given the volume it must run.
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
  snapshots:
    description:
      - Names of snapshots of it that exist. One that is missing is taken now, whoever has the volume; others stay,
        unless O(purge=true).
    type: list
    elements: str
  rollback_to:
    description:
      - The snapshot, by name or id, whose content the volume gets back; it stays as large as it is. What was written
        since is lost; O(snapshots) can name one to be taken before.
      - It is done every time, for nothing tells whether a volume was written to since.
    type: str
  force:
    description:
      - Whether O(rollback_to) is also done while a sandbox, running or paused, has the volume and can write to it. That
        sandbox finds other files than it left.
    type: bool
    default: false
  purge:
    description:
      - Whether snapshots of it that were not asked for are removed; with O(state=absent), all of them, which are
        otherwise a reason to refuse; else, where O(snapshots) is given, those that are not in it.
      - What snapshots of sandboxes hold of it goes with these only.
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
attributes:
  idempotent:
    support: partial
    details:
      - O(rollback_to) changes the volume every time.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_fork
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_volume_info
"""

EXAMPLES = r"""
---
- name: A volume for a code base, which one sandbox writes and two read
  grove.sandbox.sandbox_volume:
    name: code
    size_mb: 2048
    attachments:
      - sandbox: writer
        path: /srv/code
      - sandbox: reader-1
        path: /srv/code
        read_only: true
      - sandbox: reader-2
        path: /srv/code
        read_only: true

- name: More room, and a snapshot of it
  grove.sandbox.sandbox_volume:
    name: code
    size_mb: 4096
    snapshots: [monday]

- name: A second one that begins as that snapshot
  grove.sandbox.sandbox_volume:
    name: code-experiment
    from_snapshot: code@monday

- name: Undo what was written since, with nobody using it; keep what it was
  grove.sandbox.sandbox_volume:
    name: code
    attachments: []
    snapshots: [monday, before-rollback]
    rollback_to: monday

- name: Remove both, whoever has them, with their snapshots
  grove.sandbox.sandbox_volume:
    name: [code-experiment, code]
    state: absent
    attachments: []
    purge: true
"""

RETURN = r"""
---
volumes:
  description:
    - The volumes of the given names that exist, in the order of the names.
    - In check mode, what exists only after the run (dates, what is used) is V(null).
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    name: {description: Its name., type: str}
    size_mb: {description: "What fits in, in MiB.", type: int}
    used_mb: {description: "What is in it, in MiB; V(null) where the host cannot tell.", type: int}
    attachments:
      description: The sandboxes that have it, in the order of their names.
      type: list
      elements: dict
      contains:
        sandbox: {description: The sandbox., type: str}
        sandbox_id: {description: Its id., type: str}
        path: {description: Where it is mounted., type: str}
        read_only: {description: Whether the sandbox can only read it., type: bool}
        state: {description: "The state of the sandbox, V(running) or V(paused).", type: str}
    snapshots: {description: The names of its snapshots., type: list, elements: str}
    captured_by:
      description: The ids of the snapshots of sandboxes that hold what was captured of it with them.
      type: list
      elements: str
    from_snapshot: {description: The id of the volume snapshot it was made from; empty for none., type: str}
    owner_sandbox_id:
      description:
        - The sandbox whose own clone it is; it goes with the last sandbox that has it. Empty for any other.
      type: str
    stuck:
      description: What does not let go of it, in sentences; the gateway tries again.
      type: list
      elements: str
    created_at: {description: When it was made (RFC 3339)., type: str}
volume:
  description: The one entry of RV(volumes), or V(null) if it does not exist.
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
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [create, attach]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _volume
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_volume)


if __name__ == "__main__":
    main()
