# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Compute the variables of a host as the operator set them, without facts and other task results.

Plugins receive values without their origin, and facts override inventory variables. Therefore this module computes
the variables again, with empty stores for task results.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.inventory.host import Host
from ansible.template import Templar
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure


class _EmptyFactCache(dict):  # type: ignore[type-arg]
    """A fact cache that contains no facts for any host."""

    def get(self, key: Any, default: Any = None) -> Any:
        return {}


_TASK_RESULT_STORES = {"_fact_cache": _EmptyFactCache, "_nonpersistent_fact_cache": dict, "_vars_cache": dict}
"""Ansible's stores of task results: facts; set_fact and registered variables; include_vars."""


def find_task_host() -> str:
    """Return the name of the running task's host. Raises Failure if it cannot be determined reliably.

    ``inventory_hostname`` is not reliable, because a fact with that name overrides it.
    """
    host = getattr(multiprocessing.current_process(), "_host", None)
    if not isinstance(host, Host):
        raise Failure(
            "the host of this task is unknown, because this strategy plugin or release of ansible-core provides it "
            "only in variables that facts can override: use ansible-core 2.16 to 2.19 with a built-in strategy, or a "
            "newer release of grove.sandbox"
        )
    return str(host.name)


class OperatorVariables(Mapping):  # type: ignore[type-arg]
    """The variables of the host ``name``, with unevaluated templates.

    ``hostvars`` is Ansible's variable of that name. If ``task`` (as loaded from the playbook) is set, the variables
    include the variables of the task, its play, its role and its blocks. The constructor raises Failure if this release
    of Ansible stores variables differently.
    """

    def __init__(self, hostvars: Any, name: str, task: Any = None) -> None:
        variable_manager = hostvars._variable_manager
        missing_stores = [store for store in _TASK_RESULT_STORES if store not in vars(variable_manager)]
        if missing_stores:
            raise Failure(
                f"this release of ansible-core does not provide {', '.join(missing_stores)}, so inventory "
                "variables and facts cannot be distinguished: use ansible-core 2.16 to 2.19, or a newer "
                "release of grove.sandbox"
            )
        manager_copy = object.__new__(type(variable_manager))
        vars(manager_copy).update(
            vars(variable_manager), **{store: create_store() for store, create_store in _TASK_RESULT_STORES.items()}
        )
        inventory, self._loader = hostvars._inventory, hostvars._loader
        # Templates that refer to other hosts must not see their facts either.
        type(hostvars)(inventory, manager_copy, self._loader)
        play = task._parent._play if task is not None else None
        self._values = manager_copy.get_vars(play=play, host=inventory.get_host(name) or Host(name), task=task)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def evaluate(self, name: str) -> Any:
        """Evaluate a variable, using only these variables. Raises Failure."""
        try:
            return self.template(self._values[name])
        except AnsibleError as error:
            raise Failure(
                f"{name} cannot be evaluated using only variables from the inventory, add_host and "
                f"the command line ({error}): remove facts and task results from it, because they must not "
                "decide where the gateway's key is sent"
            ) from None

    def template(self, value: Any, **extra: Any) -> Any:
        """Evaluate the templates in ``value``, using these variables and ``extra``. Raises AnsibleError."""
        return Templar(loader=self._loader, variables={**self._values, **extra}).template(value)

    def remove(self, names: set[str]) -> None:
        self._values = {key: value for key, value in self._values.items() if key not in names}
        if isinstance(self._values.get("vars"), dict):
            self._values["vars"] = {key: value for key, value in self._values["vars"].items() if key not in names}

    def add(self, values: Mapping[str, Any]) -> None:
        self._values.update(values)


class OperatorTask:
    """A task as written in its playbook, evaluated with only the operator's variables.

    ``task`` is the running task, whose templates Ansible has already evaluated. ``hostvars`` is Ansible's variable of
    that name.
    """

    def __init__(self, task: Any, hostvars: Any) -> None:
        # Load the task again, because the running task no longer has its templates.
        self._task = type(task).load(task.get_ds(), block=task._parent, role=task._role, loader=hostvars._loader)
        self._action = task.resolved_action
        self._hostvars = hostvars
        self._variables: OperatorVariables | None = None

    def has_option(self, name: str, value: Any) -> bool:
        """Return whether the operator set the option to ``value``. Raises Failure.

        Tries all items of the task's loop, because a running task does not reveal its current item.
        """
        args = self._task.args
        if name in args and (args[name] == value or self._evaluates_to(args[name], value)):
            return True
        # One template can provide all options.
        option_templates = [args[key] for key in ("_variable_params", "_raw_params") if key in args]
        return any(
            self._evaluates_to(template, value, name)
            for template in (*option_templates, *self._list_applicable_defaults())
        )

    def has_environment_variable(self, name: str, value: Any) -> bool:
        """Return whether the operator set the variable in the task's ``environment`` to ``value``. Raises Failure."""
        return any(self._evaluates_to(template, value, name) for template in self._task.environment or ())

    def _list_applicable_defaults(self) -> list[Any]:
        """Return the entries of ``module_defaults`` that apply to the task."""
        groups = (self._task._parent._play._action_groups or {}).get(self._action, [])
        names = {self._action, *(f"group/{group}" for group in groups)}
        return [entry for each in self._task.module_defaults or () for name, entry in each.items() if name in names]

    def _evaluates_to(self, template: Any, value: Any, key: str = "") -> bool:
        """Return whether ``template``, or its entry ``key``, evaluates to ``value``. Raises Failure."""
        variables = self._make_operator_variables()
        for extra in self._list_loop_variables(self._task, variables):
            try:
                result = template
                if key:
                    result = result if isinstance(result, Mapping) else variables.template(result, **extra)
                    if not isinstance(result, Mapping) or key not in result:
                        continue
                    result = result[key]
                if variables.template(result, **extra) == value:
                    return True
            except AnsibleError:
                continue
        return False

    def _make_operator_variables(self) -> OperatorVariables:
        if self._variables is None:
            variables = OperatorVariables(self._hostvars, find_task_host(), self._task)
            includes = [each for each in _iterate_ancestors(self._task) if _get_loop(each) is not None]
            variables.remove({name for each in includes for name in _find_loop_variable_names(each)})
            # Ansible stores the evaluated loop item of an include as a variable of the included tasks.
            for each in reversed(includes):
                for extra in self._list_loop_variables(each, variables):
                    if all(each.vars.get(name) == value for name, value in extra.items()):
                        variables.add(extra)
                        break
            self._variables = variables
        return self._variables

    def _list_loop_variables(self, task: Any, variables: OperatorVariables) -> list[dict[str, Any]]:
        """Return the loop variables of each item, or one empty dict for a task without a loop."""
        loop = _get_loop(task)
        if loop is None:
            return [{}]
        try:
            items = variables.template(loop)
        except AnsibleError:
            return []
        if not isinstance(items, list) or task.loop_with not in (None, "items", "list"):
            return []
        if task.loop_with == "items":
            items = [each for item in items for each in (item if isinstance(item, list) else [item])]
        name, index = _find_loop_variable_names(task)
        return [{name: item, **({index: number} if index else {})} for number, item in enumerate(items)]


def _get_loop(task: Any) -> Any:
    return getattr(task, "loop", None)


def _find_loop_variable_names(task: Any) -> tuple[str, str]:
    """Return the names of the loop variable and the index variable. The second is empty if there is no index."""
    loop_control = task.loop_control
    return (loop_control.loop_var or "item", loop_control.index_var or "") if loop_control is not None else ("item", "")


def _iterate_ancestors(task: Any) -> Iterator[Any]:
    """Yield the blocks, includes and other parents of the task, starting with the innermost."""
    parent = task._parent
    while parent is not None:
        yield parent
        parent = parent._parent
