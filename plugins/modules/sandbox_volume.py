#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_volume
short_description: Declare volumes, and export and import them
version_added: "0.1.0"
description:
  - Ensures that the named volumes exist with the given size and snapshots, attached to exactly the given sandboxes, or
    that they do not exist. A volume is storage that outlives sandboxes and that any number of them can share.
  - Only the options that are set are compared with existing volumes. A volume can grow, even while mounted, but never
    shrink.
  - The module first detaches the volume from sandboxes that are not listed. It then takes snapshots, writes
    O(export_to), rolls back, grows and attaches the volume, and finally removes surplus snapshots.
options:
  name:
    description:
      - The name or names of the volumes. A name has 1 to 64 letters, digits, C(_), C(.) or C(-), and starts with a
        letter or digit. Sandboxes, snapshots, templates and volumes share one namespace.
    type: list
    elements: str
    required: true
    aliases: [names]
  state:
    description:
      - V(present) means that the volume exists. V(absent) means that it does not exist.
      - A volume is not removed while it is attached, has snapshots, or is captured in a snapshot of a sandbox. An empty
        list of O(attachments) detaches it first, and O(purge) removes its snapshots.
    type: str
    choices: [present, absent]
    default: present
  size_mb:
    description:
      - Size in MiB, at least 64. If not set, a new volume has the size of O(from_snapshot), or else 1024 MiB.
    type: int
  from_snapshot:
    description:
      - The volume snapshot to create a new volume from, as C(VOLUME@SNAPSHOT). If not set, a new volume is empty.
      - If the volume exists and was created from another source, the task fails, unless O(from_snapshot) no longer
        exists.
    type: str
  attachments:
    description:
      - The complete list of sandboxes that mount the volume, each at one path. An empty list means none.
      - Missing attachments are added and others removed while the sandboxes run. Programs that use a detached volume
        lose access to it.
      - With several names, or with O(state=absent), the list must be empty.
    type: list
    elements: dict
    suboptions:
      sandbox:
        description:
          - The sandbox, by name or id. It must be running for the volume to be attached.
        type: str
        required: true
      path:
        description:
          - The mount point, an absolute path of letters, digits, C(_), C(.), C(@), C(+), C(:), C(=) and C(-), outside
            the system directories. It is created if missing. A volume cannot be mounted inside another.
        type: str
        required: true
      read_only:
        description:
          - Whether the volume is mounted read-only.
        type: bool
        default: false
  snapshots:
    description:
      - Names of snapshots that the volume has. Missing snapshots are taken, even while the volume is attached. Other
        snapshots are kept, unless O(purge=true).
    type: list
    elements: str
  absent_snapshots:
    description:
      - Names of snapshots of the volume that do not exist afterwards. Unlike O(purge), this option never removes a
        snapshot that someone takes while the playbook runs.
    type: list
    elements: str
  rollback_to:
    description:
      - The snapshot to roll the volume back to, by name or id. The volume keeps its size. Later writes are lost. To
        take a snapshot first, list a new name in O(snapshots).
      - Every run rolls back, because the gateway cannot detect whether the volume has changed since.
    type: str
  export_to:
    description:
      - Path of a file on the host where the module runs. The task writes a snapshot of the volume to it. O(snapshots)
        must contain only the name of this snapshot, which is taken first if it does not exist.
      - If the file already contains this snapshot, nothing is changed. A file that contains another snapshot of a
        volume is replaced. With any other file, the task fails. The file gets its name when it is complete, and only
        its owner can read it. Other users lose their permissions for an existing file.
      - If the connection to the gateway is lost, run the task again. It continues where the export ended.
    type: path
  import_from:
    description:
      - Path of a file on the host where the module runs, to create the volume from. If the volume exists and was
        imported from a file with the same snapshot, its contents are not changed, even if the file no longer exists.
      - The volume has the size of the snapshot, unless O(size_mb) is larger.
      - If the connection to the gateway is lost, run the task again. It sends only the rest of the file.
    type: path
  trust:
    description:
      - Fingerprints of the gateways whose files are accepted by O(import_from), in addition to the importing gateway.
        C(sandboxctl snapshot signer) shows the fingerprint of a gateway.
    type: list
    elements: str
  force:
    description:
      - Whether to roll back even while the volume is attached read-write to a running or paused sandbox. The files then
        change while that sandbox uses them.
    type: bool
    default: false
  purge:
    description:
      - Whether to remove surplus snapshots of the volume, which are those that O(snapshots), if set, does not list.
      - With O(state=absent), all of its snapshots are removed, which would otherwise prevent the removal of the volume.
      - Captures in snapshots of sandboxes are removed only with those snapshots.
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
      - Check mode cannot predict failures that only the gateway's host can detect. For example, a volume or snapshot on
        a jail host cannot be removed if another program has cloned it.
      - Check mode does not know which files and directories earlier tasks of the run create. It predicts an import from
        the file that exists now. If O(import_from) does not exist, it refuses the task, and the plan shows that this
        depends on the earlier tasks. It does not check the directory of O(export_to); a run does before it takes the
        snapshot.
      - With O(age_identity), check mode decrypts only the beginning of the file. It detects a wrong key, but not a file
        that is incomplete or was changed. It needs the program C(age).
  idempotent:
    support: partial
    details:
      - O(rollback_to) rolls the volume back in every run.
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
- name: Create a volume for a code base that one sandbox writes and two sandboxes read
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

- name: Grow it and take a snapshot
  grove.sandbox.sandbox_volume:
    name: code
    size_mb: 4096
    snapshots: [monday]

- name: Create a second volume from that snapshot
  grove.sandbox.sandbox_volume:
    name: code-experiment
    from_snapshot: code@monday

- name: Detach it and roll it back; keep its current contents in a snapshot
  grove.sandbox.sandbox_volume:
    name: code
    attachments: []
    snapshots: [monday, before-rollback]
    rollback_to: monday

- name: Take a snapshot of a volume, and write it to a file on the managed host
  grove.sandbox.sandbox_volume:
    name: code
    snapshots: [tuesday]
    export_to: /srv/code-tuesday.volume

- name: Write it to a file that only the owner of a key can decrypt
  grove.sandbox.sandbox_volume:
    name: code
    snapshots: [tuesday]
    export_to: /srv/code-tuesday.volume.age
    age_recipients: [age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p]

- name: Create a volume from a file that another gateway has written
  grove.sandbox.sandbox_volume:
    name: code-restored
    import_from: /srv/code-tuesday.volume
    trust: ["{{ exporting_gateway_fingerprint }}"]

- name: Remove both with their snapshots, even if they are attached
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
    - The named volumes that exist, in the given order.
    - In check mode, values that only a run creates (dates, used space) are V(null).
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: Its name., type: str}
    size_mb: {description: Its capacity in MiB., type: int}
    used_mb: {description: Used space in MiB; V(null) if the host cannot determine it., type: int}
    attachments:
      description: The sandboxes that it is attached to, sorted by name.
      type: list
      elements: dict
      contains:
        sandbox: {description: The name of the sandbox., type: str}
        sandbox_id: {description: Its id., type: str}
        path: {description: The mount point., type: str}
        read_only: {description: Whether the volume is mounted read-only., type: bool}
        state: {description: "The state of the sandbox, V(running) or V(paused).", type: str}
    snapshots: {description: The names of its snapshots., type: list, elements: str}
    captured_by:
      description: Ids of the sandbox snapshots that contain a capture of it, oldest first.
      type: list
      elements: str
    from_snapshot: {description: Id of the volume snapshot it was created from; empty for none., type: str}
    imported_from:
      description:
        - The id, in the gateway that exported it, of the snapshot that it was imported from; empty if it was not
          imported.
      type: str
    owner_sandbox_id:
      description:
        - The sandbox for which it was cloned, or empty. A clone is removed when its last attachment is removed.
      type: str
    stuck:
      description: Messages about unmounts that fail on the host and that the gateway retries.
      type: list
      elements: str
    created_at: {description: Time of creation (RFC 3339)., type: str}
    sandbox_host: {description: The name of its host., returned: in a fleet, type: str}
volume:
  description: The only entry of RV(volumes), or V(null) if the volume does not exist.
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
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [create, attach]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _volume
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_volume)


if __name__ == "__main__":
    main()
