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
  - Returns templates, all or those of the given names, in the order in which they were made. One that is being built,
    or whose build failed since the gateway was started, is among them.
options:
  name:
    description:
      - Only those of these names or ids. One that does not exist is no error.
    type: list
    elements: str
    aliases: [names]
extends_documentation_fragment:
  - grove.sandbox.gateway
  - grove.sandbox.attributes
attributes:
  diff_mode:
    support: none
    details:
      - It changes nothing.
author:
  - The grove.sandbox authors (@grove-sandbox)
seealso:
  - module: grove.sandbox.sandbox_template
"""

EXAMPLES = r"""
---
- name: All templates
  grove.sandbox.sandbox_template_info:
  register: there

- name: What one is built from
  grove.sandbox.sandbox_template_info:
    name: base
"""

RETURN = r"""
---
templates:
  description:
    - The templates.
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

from ansible_collections.grove.sandbox.plugins.module_utils import _info
from ansible_collections.grove.sandbox.plugins.module_utils._module import main as run_module


def main() -> None:
    run_module(_info.TEMPLATES)


if __name__ == "__main__":
    main()
