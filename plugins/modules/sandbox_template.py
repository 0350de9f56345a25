#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_template
short_description: Build templates of sandboxes
version_added: "0.1.0"
description:
  - Templates of the given names exist and are built from the given recipe, or do not exist.
  - A recipe is a whole; what a task does not set of it has the default given here. The same recipe again changes
    nothing. Another recipe builds a new template, which then takes the name over; sandboxes made from the old one
    live on, and it goes with the last of them.
  - The module waits for the build; if it fails, the message shows the end of its log.
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
      - V(present), it exists and is built from the recipe; V(absent), it does not exist.
    type: str
    choices: [present, absent]
    default: present
  from:
    description:
      - What the file system is built from; V(debootstrap), Debian packages; V(rootfs), the directory or tarball
        O(path).
    type: str
    choices: [debootstrap, rootfs]
    default: debootstrap
  suite:
    description:
      - Debian suite.
    type: str
    default: bookworm
  mirror:
    description:
      - APT mirror to build from. If empty, the sources of the gateway's host.
    type: str
    default: ""
  packages:
    description:
      - Debian packages to install. Their order does not matter.
    type: list
    elements: str
    default: []
  path:
    description:
      - Absolute path of a directory or (also compressed) tarball on the gateway's host.
      - Required if O(from=rootfs). That the content at the path changed is not noticed if the path stays the same.
    type: str
    default: ""
  setup:
    description:
      - Commands that are run in the booted sandbox, as root through C(/bin/sh -c), one after another.
    type: list
    elements: str
    default: []
  start_command:
    description:
      - A command that is started after O(setup) and runs on when the template is captured.
    type: str
    default: ""
  ready_probe:
    description:
      - A command that is run every half second until it exits with 0; then the template is captured.
    type: str
    default: ""
  ready_timeout:
    description:
      - How long O(ready_probe) may take to succeed, in seconds.
    type: float
    default: 60
  setup_timeout:
    description:
      - How long O(setup) may take, in seconds.
    type: float
    default: 1800
  cpus:
    description:
      - Virtual CPUs of a sandbox made from it.
    type: int
    default: 1
  memory_mb:
    description:
      - Memory of a sandbox made from it, in MiB.
    type: int
    default: 256
  disk_mb:
    description:
      - Size of the disk of a sandbox made from it, in MiB.
    type: int
    default: 2048
  wait_timeout:
    description:
      - How long to wait for the build, in seconds; V(0), do not wait.
    type: int
    default: 3600
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
  - module: grove.sandbox.sandbox
  - module: grove.sandbox.sandbox_snapshot
  - module: grove.sandbox.sandbox_template_info
"""

EXAMPLES = r"""
---
- name: A template with a web server that already runs
  grove.sandbox.sandbox_template:
    name: web-base
    packages: [nginx-light, curl]
    setup:
      - echo hello > /var/www/html/index.html
    start_command: nginx -g 'daemon off;'
    ready_probe: curl -fs http://localhost/
    memory_mb: 512

- name: A template from a tarball on the gateway's host
  grove.sandbox.sandbox_template:
    name: from-image
    from: rootfs
    path: /srv/images/base.tar.zst

- name: Remove them, once nothing uses them any more
  grove.sandbox.sandbox_template:
    name: [web-base, from-image]
    state: absent
    when_unused: true
"""

RETURN = r"""
---
templates:
  description:
    - The templates of the given names that exist, in the order of the names.
    - In check mode, what exists only after the run (ids, dates, addresses) is V(null).
  returned: always, unless the gateway could not be asked
  type: list
  elements: dict
  contains:
    id: {description: Its id., type: str}
    name: {description: Its first name., type: str}
    names: {description: All its names., type: list, elements: str}
    description: {description: What was written beside it., type: str}
    status: {description: "V(ready), V(building) or V(error).", type: str}
    build_id: {description: The build it comes from., type: str}
    digest: {description: Digest of its recipe., type: str}
    recipe: {description: "Its recipe in canonical form, in the words of this module's options.", type: dict}
    memory: {description: How its memory was captured., type: str}
    cpus: {description: Virtual CPUs of a sandbox made from it., type: int}
    memory_mb: {description: Memory of a sandbox made from it in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    forks: {description: How many sandboxes were made from it and exist., type: int}
    created_at: {description: When it was made (RFC 3339)., type: str}
    updated_at: {description: When its record last changed (RFC 3339)., type: str}
template:
  description: The one entry of RV(templates), or V(null) if it does not exist.
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
    actions: {description: "What was done, in order.", type: list, elements: str, sample: [build]}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_template)


if __name__ == "__main__":
    main()
