# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The variables of a host that only the operator can set: of the inventory, of add_host and of the command line.

A connection plugin gets values, not where they are from, and facts go before the variables of an inventory. So the
variables are computed a second time, as if no task had returned anything yet.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.inventory.host import Host
from ansible.template import Templar
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure


class _NoFacts(dict):  # type: ignore[type-arg]
    """A fact cache without facts of any host."""

    def get(self, key: Any, default: Any = None) -> Any:
        return {}


_RETURNED_BY_TASKS = {"_fact_cache": _NoFacts, "_nonpersistent_fact_cache": dict, "_vars_cache": dict}
"""Where Ansible keeps what tasks return: facts; set_fact and registered variables; include_vars."""


def host_of_task() -> str:
    """The name of the host that the running task is for. Raises Failure where this release of Ansible does not tell.

    It is not ``inventory_hostname``: a fact of that name overrides Ansible's own.
    """
    host = getattr(multiprocessing.current_process(), "_host", None)
    if not isinstance(host, Host):
        raise Failure(
            "this strategy or release of ansible-core does not say for which host a task is, except in variables that "
            "facts override: use ansible-core 2.16 to 2.19 with a strategy of its own, or a newer release of "
            "grove.sandbox"
        )
    return str(host.name)


class OperatorVariables(Mapping):  # type: ignore[type-arg]
    """Those of the host ``name``, their templates not evaluated. ``hostvars`` is Ansible's variable of that name.

    Raises Failure where this release of Ansible keeps variables in another way.
    """

    def __init__(self, hostvars: Any, name: str) -> None:
        theirs = hostvars._variable_manager
        missing = [store for store in _RETURNED_BY_TASKS if store not in vars(theirs)]
        if missing:
            raise Failure(
                f"this release of ansible-core keeps no {', '.join(missing)}, so the variables of the inventory cannot "
                "be told from facts: use ansible-core 2.16 to 2.19, or a newer release of grove.sandbox"
            )
        manager = object.__new__(type(theirs))
        vars(manager).update(vars(theirs), **{store: make() for store, make in _RETURNED_BY_TASKS.items()})
        inventory, self._loader = hostvars._inventory, hostvars._loader
        # Templates that name other hosts see no facts of those, either.
        type(hostvars)(inventory, manager, self._loader)
        self._values = manager.get_vars(host=inventory.get_host(name) or Host(name))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def evaluate(self, name: str) -> Any:
        """The value of a variable, where templates see no other variables than these. Raises Failure."""
        try:
            return Templar(loader=self._loader, variables=self._values).template(self._values[name])
        except AnsibleError as error:
            raise Failure(
                f"{name} cannot be evaluated with the variables of the inventory, of add_host and of the command line "
                f"alone ({error}): facts and results of tasks must not decide where the gateway's key goes"
            ) from None
