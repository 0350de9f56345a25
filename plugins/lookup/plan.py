# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
name: plan
short_description: Return the plan of a check-mode run
version_added: "0.2.0"
description:
  - Returns the plan of this check-mode run so far, that is, the changes of the tasks before this one. The plan is the
    same document that the callback plugin P(grove.sandbox.plan#callback) saves in a file.
  - If the run has several plays, enable this callback, which records the failures of all plays. Without it, the plan of
    such a run cannot be applied.
  - Outside a check-mode run, the lookup fails.
  - Publish the plan with C(ansible.builtin.set_stats) in the last task of the last play. In AWX, it is then among the
    artifacts of the job, and a workflow passes it to its next job as the extra variable C(grove_sandbox_plan). A run
    with this variable makes only the changes in the plan.
author:
  - The grove.sandbox authors (@grove-sandbox)
options:
  plan_lifetime:
    description:
      - The number of seconds, at most a year, for which the plan can be applied.
    type: int
    default: 86400
    env:
      - name: GROVE_SANDBOX_PLAN_LIFETIME
    ini:
      - section: grove_sandbox
        key: plan_lifetime
notes:
  - Publish the plan as JSON text, as in the example. AWX writes the variables of a job as YAML with C(!unsafe), and
    ansible-core 2.19 and later convert strings in it, such as times, to other types.
  - If a task has failed on a host, or a host was unreachable, the plan says so in C(problems), and cannot be applied.
    Failures that the playbook ignores or rescues do not matter.
  - With the C(free) strategy, publish the plan in a separate play. Otherwise, the tasks of other hosts may not have
    finished yet.
  - The plan contains the options of the tasks. Everyone who can read the artifacts of a job can read these options.
    Secrets in C(env) are hashed.
"""

EXAMPLES = r"""
- name: Publish the plan
  ansible.builtin.set_stats:
    data:
      grove_sandbox_plan: "{{ lookup('grove.sandbox.plan') | to_json }}"
    aggregate: false
  when: ansible_check_mode
  run_once: true
"""

RETURN = r"""
_raw:
  description: One plan, as docs/plans.md describes it. Its strings are never evaluated as Jinja templates.
  type: list
  elements: dict
"""

from typing import TYPE_CHECKING, Any

from ansible import context
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_journal

if TYPE_CHECKING:
    from collections.abc import Mapping


class LookupModule(LookupBase):
    """Returns the plan of this check-mode run so far."""

    def run(self, terms: list[Any], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        self.set_options(var_options=variables, direct=kwargs)
        if terms:
            raise AnsibleLookupError(
                "the grove.sandbox.plan lookup accepts only the option plan_lifetime: remove all other arguments"
            )
        if not context.CLIARGS.get("check"):
            raise AnsibleLookupError(
                "only a check-mode run has a plan: run the playbook with --check, or skip this task in other runs with "
                "'when: ansible_check_mode'"
            )
        try:
            document = _plan_journal.make_plan(
                _plan_journal.list_playbook_names(),
                variables or {},
                self.get_option("plan_lifetime"),
            )
        except Failure as failure:
            raise AnsibleLookupError(failure.message) from None
        # Jinja templates in task options must not be evaluated, even if the configuration allows unsafe lookups.
        return [wrap_var(document)]
