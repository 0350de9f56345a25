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
    description: Can run in check mode and return what a run would change, without changing it.
  diff_mode:
    support: full
    description: Returns what is changed, or in check mode would be, before and after.
  idempotent:
    support: full
    description: Run a second time, with nothing else changed meanwhile, it changes nothing.
  platform:
    support: full
    platforms: posix
    description: Systems the module runs on.
  action_group:
    support: full
    description: Options common to all modules of the group can be set once with C(module_defaults).
    membership:
      - grove.sandbox.all
"""
