# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run modules and action plugins: observe, plan, apply unless in check mode, and report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, join
from ansible_collections.grove.sandbox.plugins.module_utils._info import Listing
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action, Plan, diff, predict

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._thing import Declared, Thing

HIDDEN = "********"


def run(thing: Thing, params: Mapping[str, Any], *, check: bool, client: Client | None = None) -> dict[str, Any]:
    """Make the changes that ``params`` request. With ``check``, only report them.

    Returns the module's result, with ``failed`` and ``failure`` in case of an error. Raises no exception for errors
    that a user can cause. The result has a ``diff``, unless ``thing`` is a Listing.
    """
    try:
        own = client or connect(params)
        try:
            result = (
                thing.result(own, params) if isinstance(thing, Listing) else _Run(thing, params, own, check).result()
            )
        finally:
            if client is None:
                own.close()
    except Failure as failure:
        result = failed(failure)
    return hide(result, secrets_of(params))


def connect(params: Mapping[str, Any]) -> Client:
    """Return a client for the gateway in the common options. Raises Failure."""
    return Client(
        params.get("gateway_url") or "",
        params.get("gateway_token") or "",
        params.get("ca_path") or "",
        params.get("validate_certs") is not False,
        params.get("gateway_timeout") or 300,
    )


def failed(failure: Failure, **more: Any) -> dict[str, Any]:
    return {"changed": False, **more, "failed": True, "msg": failure.message, "failure": failure.as_dict()}


class _Run:
    def __init__(self, thing: Declared, params: Mapping[str, Any], client: Client, check: bool) -> None:
        self.thing = thing
        self.client = client
        self.check = check
        self.continue_on_error = bool(params.get("continue_on_error"))
        self.want = thing.desired(params)
        self.failures: dict[str, Failure] = {}
        self.done: list[Action] = []

    def result(self) -> dict[str, Any]:
        have = self.thing.observe(self.client, self.want)
        plan: Plan = self.thing.plan(self.want, have)
        self.failures = dict(plan.refused)
        shapes = self.thing.things_of(self.want, have)
        if self.failures and not self.continue_on_error:
            return self._report(shapes)
        if plan.actions:
            self.client.require_version()
        if self.check:
            self.done = list(plan.actions)
            return self._report(predict(shapes, self.done))
        self._apply(plan)
        if self.done or self.failures:
            shapes = self._observe_again(shapes)
        return self._report(shapes)

    def _apply(self, plan: Plan) -> None:
        for action in plan.actions:
            names = [change.name for change in action.changes]
            if any(name in self.failures for name in names):
                continue
            try:
                problems = self.thing.apply(action, self.client)
            except Failure as failure:
                problems = dict.fromkeys(names, failure)
            self.failures.update(problems)
            kept = tuple(change for change in action.changes if change.name not in problems)
            if kept:
                self.done.append(Action(action.verb, kept, action.request))
            if problems and not self.continue_on_error:
                return

    def _observe_again(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self.thing.things_of(self.want, self.thing.observe(self.client, self.want))
        except Failure as failure:
            # The changes have been made, but reading the result failed: report that as a failure.
            self.failures.setdefault("", failure)
            return before

    def _report(self, shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        lists = self.thing.lists(self.want)
        result: dict[str, Any] = {
            "changed": bool(self.done),
            "outcomes": self._outcomes([name for names in lists.values() for name in names]),
            "diff": diff(self.done),
        }
        for key, names in lists.items():
            result[key] = [_shown(shapes[name], self.thing.SHOWN[key]) for name in names if name in shapes]
        found = result[self.thing.PLURAL]
        if len(lists[self.thing.PLURAL]) == 1:
            result[self.thing.SINGULAR] = found[0] if found else None
        if self.failures:
            return failed(join(self.failures, max(len(result["outcomes"]), 1)), **result)
        return result

    def _outcomes(self, names: list[str]) -> list[dict[str, Any]]:
        """Return one outcome for each name.

        The list is empty if nothing was done, because Ansible copies each result several times.
        """
        if not self.done and not self.failures:
            return []
        verbs: dict[str, list[str]] = {name: [] for name in names}
        for action in self.done:
            for change in action.changes:
                verbs.setdefault(change.name, []).append(action.verb)
        for name in self.failures:
            verbs.setdefault(name, [])
        return [
            {
                "name": name,
                "changed": bool(did),
                "actions": did,
                "failed": name in self.failures,
                "failure": self.failures[name].as_dict() if name in self.failures else None,
            }
            for name, did in verbs.items()
            if name
        ]


def _shown(shape: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: shape.get(key) for key in keys}


def secrets_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key, and the environment values that are long enough not to match other text by chance."""
    values = [
        params.get("gateway_token"),
        *((params.get("env") or {}) if isinstance(params.get("env"), dict) else {}).values(),
    ]
    return tuple(str(value) for value in values if value is not None and len(str(value)) >= 8)


def hide(value: Any, secrets: tuple[str, ...]) -> Any:
    """Return ``value`` with the secrets in its strings replaced."""
    if not secrets:
        return value
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, dict):
        return {key: hide(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(item, secrets) for item in value]
    return value
