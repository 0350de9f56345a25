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
  - Ensures that the named sandboxes exist in the given state and with the given properties, or that they do not exist.
  - Only the options that are set are compared with existing sandboxes. Some properties of a sandbox cannot change
    (its source, CPUs, memory and disk). If one of them differs, the task fails, unless O(recreate=true).
options:
  name:
    description:
      - The name or names of the sandboxes. A name has 1 to 64 letters, digits, C(_), C(.) or C(-), and starts with a
        letter or digit. Sandboxes, snapshots, templates and volumes share one namespace.
    type: list
    elements: str
    required: true
    aliases: [names]
  state:
    description:
      - V(present) means that the sandbox exists, whether running or paused. V(running) and V(paused) mean that it
        exists in that state. V(absent) means that it does not exist.
      - A sandbox that V(present) creates is started.
    type: str
    choices: [present, running, paused, absent]
    default: present
  template:
    description:
      - Name or id of the template to create the sandbox from.
      - Creating a sandbox requires O(template) or O(snapshot).
    type: str
  snapshot:
    description:
      - Name or id of the snapshot to create the sandbox from.
    type: str
  cpus:
    description:
      - Number of virtual CPUs. If not set, a new sandbox has as many CPUs as its source.
      - A snapshot with memory can only be forked with the same CPUs and memory, unless O(cold_start=true).
    type: int
  memory_mb:
    description:
      - Memory in MiB. If not set, a new sandbox has as much memory as its source.
    type: int
  disk_mb:
    description:
      - Size of the disk in MiB. If not set, the disk of a new sandbox is as large as the disk of its source.
    type: int
  cold_start:
    description:
      - Whether a new sandbox boots from the disk of its source, without the captured memory.
      - This option is ignored if the sandbox already exists.
    type: bool
    default: false
  env:
    description:
      - Environment variables of all processes in a new sandbox. Results, messages and logs do not show their values.
      - This option is ignored if the sandbox already exists.
    type: dict
  metadata:
    description:
      - Keys and values to store with the sandbox, as strings. They replace all of its existing metadata.
    type: dict
  timeout:
    description:
      - Lifetime of the sandbox in seconds, counted from its creation; V(-1) for no limit. The gateway removes the
        sandbox when its lifetime ends.
      - If not set, the gateway's configuration sets the lifetime of a new sandbox. A difference of up to ten seconds is
        ignored.
    type: int
  network:
    description:
      - The network policy for outgoing connections. A sandbox can never reach services of the host or other sandboxes.
    type: dict
    suboptions:
      allow_internet:
        description:
          - Whether the sandbox can reach every address that O(network.deny_out) does not list. If not set, V(true) for
            a new sandbox.
        type: bool
      allow_out:
        description:
          - Addresses, networks or domain names that are always reachable.
          - V(*.example.com) stands for all subdomains of example.com. Domain names need a policy that denies all other
            addresses, with O(network.allow_internet=false) or V(0.0.0.0/0) in O(network.deny_out). Jail hosts refuse
            them.
          - Cloud metadata addresses are reachable only if an entry lies within their range, such as V(169.254.169.254).
        type: list
        elements: str
      deny_out:
        description:
          - Addresses or networks that are not reachable.
        type: list
        elements: str
  volumes:
    description:
      - The complete list of volumes mounted in the sandbox, each at one path. An empty list means none.
      - The module attaches missing volumes and detaches others while the sandbox runs. Programs that use a detached
        volume lose access to it.
      - If not set, a new sandbox gets the volumes that the source of O(snapshot) had, and an existing sandbox keeps its
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
  placement:
    description:
      - Which hosts of a fleet may get new sandboxes. Only hosts with a copy of the template or snapshot can be chosen.
      - If not set, the gateway that receives the request chooses the host whose copy it uses; if it has one itself,
        this is its own host.
      - This option is ignored if the sandbox already exists. Creating a sandbox with it fails if the gateway is not a
        member of a fleet, or is too old for fleets.
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
          - If not set, V(local). The module requests each sandbox on its own. To distribute several sandboxes evenly,
            use M(grove.sandbox.sandbox_fork).
        type: str
        choices: [local, spread, pack]
      anti_affinity:
        description:
          - Not valid with several names, because the module requests each sandbox on its own. Use
            M(grove.sandbox.sandbox_fork) instead.
        type: bool
  recreate:
    description:
      - If V(true), a sandbox that differs in a fixed property is replaced, and its contents are lost. The old sandbox
        is removed once the new one runs. Requires O(template) or O(snapshot).
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
  - module: grove.sandbox.sandbox_fork
  - module: grove.sandbox.sandbox_rollback
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_template
  - module: grove.sandbox.sandbox_volume
  - module: grove.sandbox.sandbox_info
"""

EXAMPLES = r"""
---
- name: Create a sandbox from a template
  grove.sandbox.sandbox:
    name: web
    template: base
    metadata:
      team: blue

- name: Create two sandboxes without network access, for an hour
  grove.sandbox.sandbox:
    name: [untrusted-1, untrusted-2]
    template: base
    timeout: 3600
    network:
      allow_internet: false

- name: Mount a volume read-only
  grove.sandbox.sandbox:
    name: web
    volumes:
      - name: data
        path: /srv/data
        read_only: true

- name: Pause it overnight and keep its memory
  grove.sandbox.sandbox:
    name: web
    state: paused

- name: Replace it with one that has more memory and boots from the template's disk; its contents are lost
  grove.sandbox.sandbox:
    name: web
    template: base
    memory_mb: 512
    cold_start: true
    state: running
    recreate: true

- name: Create a sandbox on one host of a fleet
  grove.sandbox.sandbox:
    name: web
    template: base
    placement:
      host: h2

- name: Remove them
  grove.sandbox.sandbox:
    name: [web, untrusted-1, untrusted-2]
    state: absent
"""

RETURN = r"""
---
sandboxes:
  description:
    - The named sandboxes that exist, in the given order.
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
outcomes:
  description: The actions for each name; in check mode, the predicted ones. Empty if nothing had to be done.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    name: {description: The name., type: str}
    changed: {description: Whether anything changed., type: bool}
    actions: {description: "The actions, in order.", type: list, elements: str, sample: [create]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _sandbox
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_sandbox)


if __name__ == "__main__":
    main()
