# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Share the plan of a run among its processes: the entries of a check-mode run, or the entries that a run has applied.

Ansible starts a process for each task, and their results may be censored (no_log), so they use files in the temporary
directory of the run, which Ansible removes at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible import constants as C
from ansible import context
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import callback_loader
from ansible.utils.collection_loader._collection_finder import _get_collection_playbook_path
from ansible.utils.vars import load_extra_vars
from ansible_collections.grove.sandbox.plugins.module_utils._approval import (
    make_approved_option,
    make_initial_state,
    shares_objects,
    update_state,
)
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_file
from ansible_collections.grove.sandbox.plugins.plugin_utils._plan_conditions import mark_dependent_entries
from ansible_collections.grove.sandbox.plugins.plugin_utils._task_path import make_portable_path

if TYPE_CHECKING:
    from ansible.playbook.task import Task

CALLBACK_NAME = "grove.sandbox.plan"
NO_LOG_REASON = "it has no_log, so its plan must not be saved"
EXTRA_VARIABLE = "grove_sandbox_plan"
"""An extra variable with the plan to apply itself, which a workflow can pass from one job to the next.

The value is the document, or its JSON text.
"""
_ENTRY_SUFFIX = ".entry.json"
_APPLIED_STATE_NAME = "applied.json"
_FAILURES_NAME = "failures.json"

OmittedEntry = tuple[dict[str, Any], list[str]]
"""An entry of the applied plan, and the names of the objects whose changes the run has not made."""


def load_applied_plan() -> dict[str, Any] | None:
    """Return the plan that this run applies, or None if it applies none. Raises Failure if it cannot be applied."""
    variables = load_extra_vars(DataLoader())
    if EXTRA_VARIABLE in variables:
        path = f"-e {EXTRA_VARIABLE}"
        plan = _plan_file.check(_read_variable(variables[EXTRA_VARIABLE]), path)
    else:
        callback = callback_loader.get(CALLBACK_NAME, class_only=True)
        path = C.config.get_config_value("apply", plugin_type="callback", plugin_name=callback._load_name)
        if not path:
            return None
        plan = _plan_file.load(path)
    if plan["problems"]:
        raise Failure(
            f"the plan is incomplete ({'; '.join(plan['problems'])}), so it cannot be applied: fix these "
            "problems, then make a new plan with a check-mode run"
        )
    # A plan that expires during the run is applied completely: making some of its changes would be worse than all.
    if not _has_begun():
        _plan_file.check_expiry(plan, path)
    return plan


def _has_begun() -> bool:
    """Return whether a task of this run has already used the plan."""
    return (make_journal_path() / _APPLIED_STATE_NAME).exists()


def _read_variable(value: Any) -> Any:
    """Return the document in an extra variable as plain JSON values, without Ansible's own types. Raises Failure."""
    if not value:
        raise Failure(
            f"the extra variable {EXTRA_VARIABLE} is empty, so there is no plan to apply: make a plan with a check "
            "run, and pass it in this variable"
        )
    if isinstance(value, str):
        return _plan_file.parse(value, f"-e {EXTRA_VARIABLE}")
    try:
        return json.loads(json.dumps(value))
    except TypeError as error:  # such as a time, which YAML reads from a string without quotes
        raise Failure(
            f"the extra variable {EXTRA_VARIABLE} is not JSON ({error}): pass the plan as JSON text"
        ) from None


def make_journal_path() -> Path:
    """Return the directory of this run, which its main process and all its workers share."""
    path = Path(C.DEFAULT_LOCAL_TMP) / CALLBACK_NAME
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def add_entry(entry: dict[str, Any]) -> None:
    """Add an entry to the plan of a check-mode run."""
    _write(f"{time.time_ns():020}-{os.getpid()}{_ENTRY_SUFFIX}", entry)


def make_task_path(task: Task) -> str:
    """Return the file and the line of a task, formatted as in a plan, or "" for an ad hoc command."""
    path, _separator, line = (task.get_path() or "").rpartition(":")
    if not path:
        return ""
    role = task._role
    role_arguments = (role.get_name(include_role_fqcn=False), role._role_path) if role is not None else ()
    return f"{make_portable_path(path, list_playbook_paths(), *role_arguments)}:{line}"


def describe_unknown_changes(task: str, path: str, reason: str) -> str:
    """Return why a plan is incomplete if the changes of a task are unknown. ``path``: see ``make_task_path``."""
    return f"the changes of task {task!r} ({path}) are unknown: {reason}"


def read_entries() -> list[dict[str, Any]]:
    """Return the entries of a check-mode run in the order of their execution."""
    return [_read(path) for path in sorted(make_journal_path().glob(f"*{_ENTRY_SUFFIX}"))]


def record_failures(failures: list[str]) -> None:
    """Record the failures of a check-mode run so far that the playbook neither rescues nor ignores.

    A playbook that the run has not reached is such a failure, until the run begins it.
    """
    _write(_FAILURES_NAME, failures)


def make_plan(playbooks: Iterable[str], variables: Mapping[str, Any], lifetime_seconds: int) -> dict[str, Any]:
    """Return the plan of a check-mode run so far. Raises Failure if the lifetime is not allowed.

    ``variables``: the variables of the current task.
    """
    run_entries = read_entries()
    problems = [*_find_failures(variables), *(entry["problem"] for entry in run_entries if "problem" in entry)]
    return _plan_file.make_document(
        mark_dependent_entries(entry for entry in run_entries if "problem" not in entry),
        playbooks=playbooks,
        problems=dict.fromkeys(problems),  # All hosts and items of a task have the same problem.
        created_at=datetime.now(timezone.utc),
        lifetime_seconds=lifetime_seconds,
    )


def _find_failures(variables: Mapping[str, Any]) -> list[str]:
    """Return the failures so far that the playbook neither rescues nor ignores, as reasons why a plan is incomplete."""
    path = make_journal_path() / _FAILURES_NAME
    if path.exists():
        failures: list[str] = _read(path)
        return failures
    if not _has_one_play():
        return [f"it is unknown whether tasks failed, because the callback {CALLBACK_NAME} is not enabled"]
    active_hosts = variables.get("ansible_play_hosts", [])
    return [
        f"a task failed on host {host}, or the host was unreachable"
        for host in variables.get("ansible_play_hosts_all", [])
        if host not in active_hosts
    ]


def _has_one_play() -> bool:
    paths = list_playbook_paths()
    if len(paths) != 1:
        return not paths  # an ad hoc command
    try:
        plays = DataLoader().load_from_file(paths[0])
    except AnsibleError:  # It is encrypted.
        return False
    return len(plays) == 1 and not any(key.endswith("import_playbook") for key in plays[0])


def list_playbook_names() -> list[str]:
    """Return the names of the playbooks on the command line of this run, without their directories."""
    return [Path(path).name for path in list_playbook_paths()]


def list_playbook_paths() -> list[str]:
    """Return the paths of the playbooks on the command line of this run."""
    arguments = context.CLIARGS.get("args", ())
    if isinstance(arguments, str):  # the pattern of an ad hoc command
        return []
    # An argument can be a playbook of a collection, such as grove.sandbox.plan.
    resources = [(argument, _get_collection_playbook_path(argument)) for argument in arguments]
    return [resource[1] if resource else argument for argument, resource in resources]


@contextlib.contextmanager
def task_approved(plan: dict[str, Any], task_key: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the part of a plan that concerns a task, as the option ``approved_plan``.

    If several hosts declare the same objects in the task, the other hosts wait until this context ends, because they
    must see the changes of this host. ``task_key``: the host and path of the task. Raises Failure if an earlier task
    has used a different plan.
    """
    with contextlib.ExitStack() as stack:
        if shares_objects(plan["entries"], task_key):
            lock_name = hashlib.sha256(task_key["path"].encode()).hexdigest()
            stack.enter_context(_locked(f"{lock_name}.lock"))
        with _locked_state() as state:
            _require_same_plan(state, plan)
            if "digest" not in state:
                _write(_APPLIED_STATE_NAME, {**state, "digest": plan["digest"]})
            option = make_approved_option(plan["entries"], task_key, state)
        yield option


def mark_entry_used(usage: dict[str, Any]) -> None:
    """Record that a task has used an entry. ``usage``: the value of ``_run.PLAN_KEY`` in the task's result."""
    with _locked_state() as state:
        update_state(state, usage)
        _write(_APPLIED_STATE_NAME, state)


def list_omitted_entries(plan: dict[str, Any]) -> tuple[list[OmittedEntry], list[OmittedEntry]]:
    """Return the entries with changes that this run has not made: the entries that it needed, and the unneeded ones.

    Each entry comes with the names of the objects of these changes. Raises Failure if the run has used a different
    plan.
    """
    with _locked_state() as state:
        _require_same_plan(state, plan)
    omitted, unneeded = [], []
    for number, entry in enumerate(plan["entries"]):
        planned_names = [change["name"] for action in entry["actions"] for change in action["changes"]]
        omitted_names = state["omitted"][str(number)] if number in state["used"] else planned_names
        unneeded_names = state["unneeded"].get(str(number), [])
        for entries, names in ((omitted, omitted_names), (unneeded, unneeded_names)):
            if names:
                entries.append((entry, list(dict.fromkeys(names))))
    return omitted, unneeded


def _require_same_plan(state: dict[str, Any], plan: dict[str, Any]) -> None:
    if state.get("digest", plan["digest"]) != plan["digest"]:
        raise Failure("the plan has been replaced since the run began, so this task does nothing: start the run again")


@contextlib.contextmanager
def _locked_state() -> Iterator[dict[str, Any]]:
    """Lock and yield the state of this run, such as the entries that it has used; see ``make_initial_state``."""
    path = make_journal_path() / _APPLIED_STATE_NAME
    with _locked("lock"):
        yield _read(path) if path.exists() else make_initial_state()


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with (make_journal_path() / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(name: str, data: Any) -> None:
    path = make_journal_path() / name
    temporary_path = path.with_suffix(f".{os.getpid()}")
    temporary_path.write_text(json.dumps(data), encoding="utf-8")
    temporary_path.rename(path)
