# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
name: plan
type: notification
short_description: Show and save the plan of a check-mode run
version_added: "0.2.0"
description:
  - At the end of C(ansible-playbook --check), prints one table of all changes that the tasks of this collection would
    make, by gateway and kind. Each line shows the task of the change, and its file and line.
  - The signs are C(+) for created, C(~) for changed, C(-) for removed and C(↺) for rolled back.
  - The table also contains the known costs (disk, memory and pauses), the values that only the run can know, the
    predicted failures, and the reasons why the plan is incomplete.
  - At the end of a run that applies a plan, prints the planned changes that the run did not make or did not need, or a
    message that it made all of them. In all other runs without C(--check), prints nothing.
  - At the end of a check-mode run, also ends its plan sessions in the gateways. Without this plugin, they end later.
author:
  - The grove.sandbox authors (@grove-sandbox)
requirements:
  - Enable the plugin with C(callbacks_enabled = grove.sandbox.plan) in the C([defaults]) section of C(ansible.cfg), or
    with the environment variable C(ANSIBLE_CALLBACKS_ENABLED).
options:
  plan_file:
    description:
      - The file in which a check-mode run saves the plan as JSON.
      - A check-mode run removes this file when it starts, so that a failed run does not leave an earlier plan behind.
    type: path
    env:
      - name: GROVE_SANDBOX_PLAN_FILE
    ini:
      - section: grove_sandbox
        key: plan_file
  plan_lifetime:
    description:
      - The number of seconds, at most a year, for which the plan in O(plan_file) can be applied.
    type: int
    default: 86400
    env:
      - name: GROVE_SANDBOX_PLAN_LIFETIME
    ini:
      - section: grove_sandbox
        key: plan_lifetime
  apply:
    description:
      - The plan file to apply. The action plugins of this collection then refuse all changes that are not in the plan.
    type: path
    env:
      - name: GROVE_SANDBOX_APPLY
    ini:
      - section: grove_sandbox
        key: apply
notes:
  - The plan file contains the options of the tasks. Only its owner can read it.
"""

EXAMPLES = r"""
# In ansible.cfg: show the plan after every check-mode run
# [defaults]
# callbacks_enabled = grove.sandbox.plan

# On the command line: show the plan and save it
# ANSIBLE_CALLBACKS_ENABLED=grove.sandbox.plan GROVE_SANDBOX_PLAN_FILE=plan.json ansible-playbook --check site.yml
"""

import atexit
import contextlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible import constants as C
from ansible import context
from ansible.plugins.callback import CallbackBase
from ansible.utils.color import ANSIBLE_COLOR
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, make_printable
from ansible_collections.grove.sandbox.plugins.plugin_utils import _check_run, _plan_file, _plan_journal, _plan_table

if TYPE_CHECKING:
    from ansible.executor.stats import AggregateStats
    from ansible.executor.task_result import TaskResult
    from ansible.playbook import Playbook
    from ansible.playbook.play import Play
    from ansible.playbook.task import Task

_COLLECTION_PREFIX = "grove.sandbox."
_ACTION_KEYS = frozenset(("failure", "outcomes", "module_stdout", "ansible_job_id"))
"""Keys of results of which each action of this collection returns one at least."""
_MAX_SKIPPED_TASKS = 20
_MAX_LINE_CHARACTERS = 500
_FILE_WIDTH = 120
"""Columns of the table if the output is not a terminal. Log viewers, such as AWX's, can scroll."""


class CallbackModule(CallbackBase):
    """Builds the plan of a check-mode run from the journal of its tasks."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "grove.sandbox.plan"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._playbooks: list[str] = []
        self._play: Play | None = None
        self._possible_failures: list[tuple[str, str]] = []
        """The host and the description of each recent failure. The playbook may have rescued these failures."""
        self._failures: dict[str, None] = {}
        """The descriptions of the failures that make the plan incomplete, in the order in which they occurred."""
        self._skipped_tasks: dict[str, set[str]] = {}
        """The hosts that have skipped each task of this collection."""

    def v2_playbook_on_start(self, playbook: Playbook) -> None:
        if not context.CLIARGS.get("check"):
            # The workers inherit the plan. If it cannot be applied, each task reports that.
            with contextlib.suppress(Failure):
                if not self._playbooks and _plan_journal.load_applied_plan() is not None:
                    # Every playbook of the run has its own statistics, and a failure may prevent later playbooks.
                    atexit.register(self._end_sessions)
                    atexit.register(self._print_omitted_changes)
            self._playbooks.append(Path(playbook._file_name).name)
            return
        plan_path = self.get_option("plan_file")
        if not self._playbooks:
            # Every playbook of the run has its own statistics, and an interrupted run has none.
            atexit.register(self._end_sessions)
            if plan_path:
                self._remove_old_plan(plan_path)
        self._playbooks.append(Path(playbook._file_name).name)
        self._record_problems()

    def v2_playbook_on_play_start(self, play: Play) -> None:
        self._record_failures()
        self._play = play

    def v2_playbook_on_task_start(self, task: Task, is_conditional: bool) -> None:
        self._record_failures()

    def v2_playbook_on_handler_task_start(self, task: Task) -> None:
        self._record_failures()

    def v2_runner_on_failed(self, result: TaskResult, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            host = result._host.get_name()
            self._possible_failures.append((host, _describe_failure(host)))
        if context.CLIARGS.get("check") and (reason := _find_early_failure(result._task, result._result)):
            path = _plan_journal.make_task_path(result._task)
            self._failures[_plan_journal.describe_unknown_changes(result._task.get_name(), path, reason)] = None
            self._record_problems()

    def v2_runner_on_unreachable(self, result: TaskResult) -> None:
        host = result._host.get_name()
        self._possible_failures.append((host, _describe_unreachable_host(host)))

    def v2_runner_on_skipped(self, result: TaskResult) -> None:
        if context.CLIARGS.get("check") and _can_change(result._task):
            task = f"{result._task.get_name()} ({_plan_journal.make_task_path(result._task)})"
            self._skipped_tasks.setdefault(task, set()).add(result._host.get_name())

    v2_runner_item_on_skipped = v2_runner_on_skipped

    def _record_failures(self, *descriptions: str) -> None:
        """Record ``descriptions`` and the failures since the last call, for the lookup in the next task."""
        # Ansible removes a host from its play if a failure is neither ignored nor rescued, but for some failures only
        # after it has reported them.
        removed_hosts = self._play._removed_hosts if self._play is not None else ()
        lasting_failures = [description for host, description in self._possible_failures if host in removed_hosts]
        self._possible_failures.clear()
        if context.CLIARGS.get("check") and {*lasting_failures, *descriptions} - self._failures.keys():
            self._failures.update(dict.fromkeys((*lasting_failures, *descriptions)))
            self._record_problems()

    def _record_problems(self) -> None:
        # Ansible loads a playbook only after it has run the previous one. If loading fails, no more statistics follow.
        names = _plan_journal.list_playbook_names()[len(self._playbooks) :]
        unreached = [f"the check-mode run has not reached {', '.join(names)}"] if names else []
        _plan_journal.record_failures([*self._failures, *unreached])

    def _end_sessions(self) -> None:
        for message in _check_run.end_sessions():
            self._display.v(make_printable(message))

    def v2_playbook_on_stats(self, stats: AggregateStats) -> None:
        if not context.CLIARGS.get("check"):
            return
        try:
            self._record_failures(*_list_failures(stats))
            document = _plan_journal.make_plan(self._playbooks, {}, self.get_option("plan_lifetime"))
            self._print_table(document)
            self._print_skipped_tasks()
            if self.get_option("plan_file"):
                self._save(self.get_option("plan_file"), document)
        except Failure as failure:
            self._display.error(failure.message)

    def _print_omitted_changes(self) -> None:
        """After a run that applied a plan, print the planned changes that the run has not made."""
        try:
            if (plan := _plan_journal.load_applied_plan()) is None:
                return
            omitted_entries, unneeded_entries = _plan_journal.list_omitted_entries(plan)
        except Failure:
            return  # Each task has reported this failure.
        if not omitted_entries and not unneeded_entries and _plan_table.has_changes(plan):
            self._display.display("\nAll changes in the plan were made.")
        self._print_entries("In the plan, but not made:", omitted_entries)
        self._print_entries("In the plan, but not needed, because the sandboxes had not diverged:", unneeded_entries)

    def _print_entries(self, title: str, entries: list[_plan_journal.OmittedEntry]) -> None:
        if entries:
            self._display.display(f"\n{title}")
        for entry, names in entries:
            text = f"  {entry['host']}: {entry['task']} ({entry['path']}): {', '.join(names)[:200]}"
            self._display.display(make_printable(text))

    def _remove_old_plan(self, path: str) -> None:
        try:
            _plan_file.remove(path)
        except Failure as failure:
            self._display.error(failure.message)

    def _print_table(self, document: dict[str, Any]) -> None:
        width = self._display.columns if sys.stdout.isatty() else _FILE_WIDTH
        # A log file has no colours.
        self._display.display(_plan_table.render(document, width, color=ANSIBLE_COLOR), screen_only=True)
        self._display.display(_plan_table.render(document, _FILE_WIDTH, color=False), log_only=True)

    def _print_skipped_tasks(self) -> None:
        if self._skipped_tasks:
            self._display.display("\nSkipped, so not in the plan. The run may find that their conditions are true:")
        for task, hosts in itertools.islice(self._skipped_tasks.items(), _MAX_SKIPPED_TASKS):
            self._display.display(make_printable(f"  {task} on {', '.join(sorted(hosts))}"[:_MAX_LINE_CHARACTERS]))
        if (remaining_count := len(self._skipped_tasks) - _MAX_SKIPPED_TASKS) > 0:
            self._display.display(f"  and {remaining_count} more")

    def _save(self, path: str, document: dict[str, Any]) -> None:
        _plan_file.save(path, document)
        self._display.display(f"\nThe plan is in {path}. Its digest begins with {document['digest'][:12]}.")
        if document["problems"]:
            self._display.display("It cannot be applied, because it is incomplete.", color=C.COLOR_ERROR)
        else:
            self._display.display(f"It can be applied until {document['expires_at']}.")


def _find_early_failure(task: Task, result: dict[str, Any]) -> str:
    """Return why a task of this collection has failed before its action began, or "".

    Such as a template that uses a value which only the run can know. The plan then has no entry for the task, even if
    the playbook ignores or rescues the failure.
    """
    if not _can_change(task):
        return ""
    items = result.get("results")
    # Ansible removes the key "failed" from the results for callbacks, but not from those of items.
    failed_results = [result] if items is None else [item for item in items if item.get("failed")]
    for each in failed_results:
        if _ACTION_KEYS.isdisjoint(each):
            return _plan_journal.NO_LOG_REASON if task.no_log else str(each.get("msg") or "it failed")
    return ""


def _can_change(task: Task) -> bool:
    """Return whether a task runs a module of this collection that can change something."""
    action = str(getattr(task, "resolved_action", None) or task.action)
    return action.startswith(_COLLECTION_PREFIX) and not action.endswith("_info")


def _list_failures(stats: AggregateStats) -> list[str]:
    """Describe the failures in a run's statistics, which do not count ignored or rescued failures."""
    hosts = sorted(stats.processed)
    failures = [_describe_failure(host) for host in hosts if stats.failures.get(host)]
    return failures + [_describe_unreachable_host(host) for host in hosts if stats.dark.get(host)]


def _describe_failure(host: str) -> str:
    return f"a task failed on host {host}"


def _describe_unreachable_host(host: str) -> str:
    return f"host {host} was unreachable"
