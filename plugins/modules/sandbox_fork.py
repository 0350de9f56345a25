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
  - Ensures that the requested siblings run. Missing siblings are forked in one request, which is all-or-nothing by
    default. Dead siblings, which are paused because their machine or host stopped and not because of a request, are
    replaced. With O(exact=true), surplus siblings are removed.
  - If a sandbox has one of the names but is not such a sibling, the task fails, unless O(recreate=true).
options:
  snapshot:
    description:
      - The snapshot to fork, by name or id. A template works as well.
      - Exactly one of O(snapshot) and O(sandbox) is required.
    type: str
  sandbox:
    description:
      - The sandbox to clone, by name or id. If siblings are missing, its current state is captured. The capture is
        removed when the last clone is removed.
    type: str
  state:
    description:
      - V(present) means that the siblings exist. V(absent) means that they do not exist.
    type: str
    choices: [present, absent]
    default: present
  names:
    description:
      - The names of the siblings.
      - One of O(names) and O(name_prefix) is required.
    type: list
    elements: str
  count:
    description:
      - Number of siblings. Their names are O(name_prefix) followed by C(-1), C(-2), …
    type: int
  name_prefix:
    description:
      - The prefix of the siblings' names.
      - With O(state=absent) and without O(count), all siblings with such names are removed.
    type: str
  exact:
    description:
      - Whether to remove surplus siblings. With O(name_prefix), these are other siblings whose names are the prefix and
        a number; with O(names), all other forks of the snapshot or clones of the sandbox.
    type: bool
    default: false
  concurrency:
    description:
      - Number of siblings that are forked in parallel. If not set, the gateway's configuration decides.
    type: int
  atomic:
    description:
      - Whether the request that forks missing siblings is all-or-nothing. If V(false), as many siblings as possible are
        forked, and the task still fails if any fork failed.
      - A request that replaces existing siblings is always all-or-nothing.
    type: bool
    default: true
  metadata:
    description:
      - Keys and values to store with each sibling, as strings. They replace all of its existing metadata.
    type: dict
  timeout:
    description:
      - Lifetime of each sibling in seconds, counted from its creation; V(-1) for no limit. The gateway removes the
        sibling when its lifetime ends.
      - If not set, the gateway's configuration sets the lifetime of new siblings, and existing siblings keep theirs. A
        difference of up to ten seconds is ignored.
    type: int
  paused:
    description:
      - Whether the siblings are paused instead of running.
    type: bool
    default: false
  cold_start:
    description:
      - Whether new siblings boot from the disk of the snapshot, without the captured memory.
      - This option is ignored for existing siblings.
    type: bool
    default: false
  cpus:
    description:
      - Number of virtual CPUs of each sibling. If not set, each sibling has as many CPUs as the snapshot or sandbox.
      - A snapshot with memory can only be forked with the same CPUs and memory, unless O(cold_start=true).
    type: int
  memory_mb:
    description:
      - Memory of each sibling in MiB. If not set, each sibling has as much memory as the snapshot or sandbox.
    type: int
  volumes:
    description:
      - The complete list of volumes mounted in each sibling, each at one path. An empty list means none.
      - In a running sibling, the module attaches missing volumes and detaches others.
      - If not set, new siblings get the volumes that the source of the snapshot had, and existing siblings keep their
        volumes.
    type: list
    elements: dict
    suboptions:
      name:
        description:
          - The name of the volume. It must exist; create it with the module M(grove.sandbox.sandbox_volume).
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
      clone:
        description:
          - Whether each new sibling gets its own clone of the volume's capture in the snapshot, instead of the shared
            volume. The snapshot must include a capture of this volume; a sandbox to clone must have the volume
            mounted.
          - The gateway chooses the name of the clone, and removes the clone once no sandbox uses it.
        type: bool
        default: false
  placement:
    description:
      - Which hosts of a fleet may get new siblings. Only hosts with a copy of the snapshot can be chosen. The siblings
        of one task are created on all chosen hosts, or on none.
      - If not set, the gateway that receives the request chooses the host whose copy it uses; if it has one itself,
        this is its own host.
      - This option is ignored for existing siblings. Creating siblings with it fails if the gateway is not a member of
        a fleet, or is too old for fleets. It is not valid with O(sandbox).
    type: dict
    suboptions:
      host:
        description:
          - Only this host. A cordoned host is refused.
        type: str
      labels:
        description:
          - Only hosts that have all these labels.
        type: dict
      strategy:
        description:
          - V(local) prefers the host of the gateway, or else the one with the most free memory. V(spread) distributes
            the sandboxes evenly. V(pack) uses as few hosts as possible.
          - If not set, V(spread) for several siblings, and V(local) for one.
        type: str
        choices: [local, spread, pack]
      anti_affinity:
        description:
          - Whether each sibling that the task creates gets a host of its own.
        type: bool
  recreate:
    description:
      - If V(true), a sandbox that differs in a fixed property is replaced, and its contents are lost. The old sandbox
        is removed once the new one runs.
    type: bool
    default: false
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
      - Check mode cannot predict that a machine fails to start. If the gateway's host is almost full, it can only
        estimate whether there is room.
      - Check mode predicts the hosts of new sandboxes. A run that applies the plan uses the same hosts; any other run
        may choose differently, because O(placement) depends on the free memory of the hosts at that time.
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
- name: Ensure that a snapshot has exactly ten siblings, ci-1 to ci-10
  grove.sandbox.sandbox_fork:
    snapshot: golden
    count: 10
    name_prefix: ci
    exact: true

- name: Reduce the siblings to three
  grove.sandbox.sandbox_fork:
    snapshot: golden
    count: 3
    name_prefix: ci
    exact: true

- name: Clone a running sandbox twice
  grove.sandbox.sandbox_fork:
    sandbox: web
    names: [web-a, web-b]
    metadata:
      experiment: colours

- name: Fork two siblings that share a data set, each with its own clone of a captured cache
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

- name: Distribute thirty siblings over the hosts of a fleet in one zone
  grove.sandbox.sandbox_fork:
    snapshot: golden
    count: 30
    name_prefix: ci
    placement:
      strategy: spread
      labels:
        zone: a

- name: Remove all siblings
  grove.sandbox.sandbox_fork:
    snapshot: golden
    name_prefix: ci
    state: absent
"""

RETURN = r"""
---
sandboxes:
  description:
    - The requested sandboxes that exist, in the given order, with the fields that most playbooks need.
      M(grove.sandbox.sandbox_info) returns all details.
    - In check mode, values that only a run creates (addresses) are V(null); for ids, see
      the attribute C(check_mode).
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    id: {description: Its id; it never changes., type: str}
    name: {description: Its name., type: str}
    state: {description: V(running) or V(paused)., type: str}
    address: {description: "Address of its ports, as seen from the gateway's host; V(null) while paused.", type: str}
    forked_from: {description: The snapshot or template it was created from; it never changes., type: str}
    snapshot_id: {description: "Its head, the snapshot that it currently descends from.", type: str}
    volumes:
      description: Its volumes, sorted by path.
      type: list
      elements: dict
      contains:
        name: {description: The name of the volume., type: str}
        path: {description: The mount point., type: str}
        read_only: {description: Whether the volume is mounted read-only., type: bool}
    sandbox_host: {description: The name of its host., returned: in a fleet, type: str}
sandbox:
  description: The only entry of RV(sandboxes), or V(null) if the sandbox does not exist.
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
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [fork]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _fork
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_fork)


if __name__ == "__main__":
    main()
