# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later


from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    support: full
    description: Can run in check mode and predict the changes of a run.
  diff_mode:
    support: full
    description: Returns the state before and after each change, including predicted changes in check mode.
  idempotent:
    support: full
    description: A second run changes nothing, unless the resources have been changed in between.
  platform:
    support: full
    platforms: posix
    description: Systems on which the module runs.
  action_group:
    support: full
    description: The common options of all modules in the group can be set once with C(module_defaults).
    membership:
      - grove.sandbox.all
      - grove.sandbox.gateway
"""
