#!/usr/bin/python
# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sandbox_template_info
short_description: List templates of sandboxes
version_added: "0.1.0"
description:
  - Returns all templates, or those with the given names, in the order of their creation. The list includes templates
    that are being built, and templates whose build has failed since the gateway started.
options:
  name:
    description:
      - Only entries with these names or ids. Unknown names are ignored.
    type: list
    elements: str
    aliases: [names]
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  check_mode:
    support: full
    details:
      - If another action starts the module without its action plugin, such as C(ansible.builtin.package) with C(use),
        the module returns the real objects, without the changes of earlier tasks in check mode.
  diff_mode:
    support: none
    details:
      - The module never changes anything.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox_template
"""

EXAMPLES = r"""
---
- name: List all templates
  grove.sandbox.sandbox_template_info:
  register: all_templates

- name: Get the recipe of one template
  grove.sandbox.sandbox_template_info:
    name: base
"""

RETURN = r"""
---
templates:
  description:
    - The templates.
  returned: always, unless the gateway cannot be reached
  type: list
  elements: dict
  contains:
    id: {description: Its id., type: str}
    name: {description: Its first name., type: str}
    names: {description: All its names., type: list, elements: str}
    description: {description: Its description., type: str}
    status: {description: "V(ready), V(building) or V(error).", type: str}
    build_id: {description: The id of its build., type: str}
    digest: {description: Digest of its recipe., type: str}
    outdated:
      description:
        - Whether it was built by a version of the gateway with a different agent or different settings.
        - V(null) if the gateway cannot determine it.
      type: bool
    recipe: {description: "Its recipe in canonical form, with the names of this module's options.", type: dict}
    memory: {description: How its memory was captured., type: str}
    memory_problem: {description: "Why its memory cannot be restored now; empty if it can.", type: str}
    cpus: {description: Number of virtual CPUs of a sandbox created from the template., type: int}
    memory_mb: {description: Memory of a sandbox created from the template in MiB., type: int}
    disk_mb: {description: Size of its disk in MiB., type: int}
    forks: {description: Number of existing sandboxes that were created from it., type: int}
    prewarm: {description: Number of its forks that the gateway keeps ready., type: int}
    created_at: {description: Time of creation (RFC 3339)., type: str}
    updated_at: {description: Time of the last change to its record (RFC 3339)., type: str}
    sandbox_host: {description: The name of its host., returned: in a fleet, type: str}
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

from ansible_collections.grove.sandbox.plugins.module_utils import _info
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_info.TEMPLATES)


if __name__ == "__main__":
    main()
