# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The interfaces that ``_run``, the modules and the action plugins use for each kind of resource."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
    from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
    from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action, Plan

Params = Mapping[str, Any]
"""Options of a task, validated by the argument specification."""
Shapes = Mapping[str, Mapping[str, Any]]
"""The shapes of resources, by the names in the task's options."""


class ManagedKind(Protocol):
    """A Python module, such as ``_sandbox``, that plans and applies changes to one kind of resource."""

    SINGULAR: str
    PLURAL: str
    """Keys of the result: one resource, and the list of resources."""
    RESULT_KEYS: dict[str, tuple[str, ...]]
    """For each list in the result, the keys of its entries, in order."""
    ARGUMENTS: dict[str, Any]
    """The argument specification without the common options."""
    RULES: dict[str, Any]
    """Constraints between options, as keyword arguments of AnsibleModule."""

    @staticmethod
    def parse_desired_state(params: Params) -> Any:
        """Return the requested state in canonical form. Raises Failure."""

    @staticmethod
    def observe(client: Client, want: Any) -> Any:
        """Return the current state that a plan needs. Raises Failure."""

    @staticmethod
    def list_named_paths(want: Any, have: Any) -> Iterable[str]:
        """Return the paths of the objects that the task depends on, other than those that it declares."""

    @staticmethod
    def plan(want: Any, have: Any) -> Plan:
        """Return the plan that changes ``have`` into ``want``. Sends no requests."""

    @staticmethod
    def apply(action: Action, client: Client) -> dict[str, Failure]:
        """Carry out one action. Returns the failures by name if only some of its changes failed. Raises Failure."""

    @staticmethod
    def get_result_lists(want: Any) -> dict[str, tuple[str, ...]]:
        """Return the keys of the result's lists, in order, with the names of the resources in each list."""

    @staticmethod
    def get_resources_by_name(want: Any, have: Any) -> Shapes:
        """Return the shapes of the existing resources, by the names that ``get_result_lists`` returns."""


class ListedKind(Protocol):
    """An instance of ``_info.Listing``, which a read-only module uses to list one kind of resource."""

    @property
    def ARGUMENTS(self) -> dict[str, Any]:
        """See ManagedKind."""

    @property
    def RULES(self) -> dict[str, Any]:
        """See ManagedKind."""

    def make_result(self, client: Client, params: Params) -> dict[str, Any]:
        """Return the module's result. Raises Failure."""


ResourceKind = Union[ManagedKind, ListedKind]
