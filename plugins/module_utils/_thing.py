# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Interfaces of one kind of resource, used by ``_run``, the modules and the action plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
    from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
    from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action, Plan

Params = Mapping[str, Any]
"""Options of a task, validated by the argument specification."""
Shapes = Mapping[str, Mapping[str, Any]]
"""Resources in the form of results, by the name that the user gave."""


class Declared(Protocol):
    """A sibling module such as ``_sandbox`` that plans and applies changes to one kind of resource."""

    SINGULAR: str
    PLURAL: str
    """Keys of a result: one resource, and the list of them."""
    SHOWN: dict[str, tuple[str, ...]]
    """For each list of a result, the keys of its entries in order."""
    ARGUMENTS: dict[str, Any]
    """The argument specification without the common options."""
    RULES: dict[str, Any]
    """Rules between options, in the form of AnsibleModule's arguments."""

    @staticmethod
    def desired(params: Params) -> Any:
        """Return the requested state in canonical form. Raises Failure."""

    @staticmethod
    def observe(client: Client, want: Any) -> Any:
        """Return the current state, as far as a plan needs it. Raises Failure."""

    @staticmethod
    def plan(want: Any, have: Any) -> Plan:
        """Return the actions that lead from ``have`` to ``want``. Sends no requests."""

    @staticmethod
    def apply(action: Action, client: Client) -> dict[str, Failure]:
        """Carry out one action. Returns failures by name if the action can fail in part. Raises Failure."""

    @staticmethod
    def lists(want: Any) -> dict[str, tuple[str, ...]]:
        """Return the lists of a result, in order, and the names in each."""

    @staticmethod
    def things_of(want: Any, have: Any) -> Shapes:
        """Return the shapes of existing resources, by the names in ``lists``."""


class Listed(Protocol):
    """A ``Listing`` of ``_info``: one kind of resource for a read-only module."""

    @property
    def ARGUMENTS(self) -> dict[str, Any]:
        """See Declared."""

    @property
    def RULES(self) -> dict[str, Any]:
        """See Declared."""

    def result(self, client: Client, params: Params) -> dict[str, Any]:
        """Return the module's result. Raises Failure."""


Thing = Union[Declared, Listed]
