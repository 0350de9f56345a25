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
    description: >-
      Predicts a whole play. In C(ansible-playbook --check), each task sees what the tasks before it would have done.
      Values that only the run can know are V(null), and the ids of objects that only the run creates are
      C(known-after-apply-) followed by a number; later tasks can use these ids. A task with the keyword
      C(check_mode=true) changes nothing in a real run either. It also sees what the tasks before it would have done,
      but later tasks do not see its changes, and the ids of its new objects are V(null). In a run without C(--check),
      or if the gateway is too old to have plan sessions, a task in check mode is predicted on its own.
  diff_mode:
    support: full
    description: >-
      Returns the state before and after each change. In check mode, these are the predicted changes to the state that
      the tasks before it would have left. Ids that are known only after the run are C(known-after-apply-) followed by
      a number.
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
