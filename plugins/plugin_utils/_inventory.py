# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Select the sandboxes of an inventory, and compute the names, groups and variables of their hosts."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import hide_unknown_values
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import make_sandbox_shape
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway

GATEWAY_KEYS = ("name", "url", "token", "token_file", "ca_path", "validate_certs", "timeout")
FILTER_KEYS = ("name", "state", "template", "metadata")
GROUPINGS = ("template", "head", "state", "metadata", "gateway")
INTERPRETER_PATHS = {"kvm_xfs": "/usr/bin/python3"}
"""The path of Python in templates, by kind of host. For other kinds, Ansible discovers the path."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RESERVED_NAMES = frozenset({"all", "ungrouped", "localhost"})
"""Names that hosts cannot have. For example, tasks for the control node would run in a sandbox called localhost."""


def observe(client: Client) -> list[dict[str, Any]]:
    """Return the shapes of all sandboxes of a gateway, plus the names of their templates and heads.

    In a plan session, values that only the run can know are None.
    """
    names_by_id = {each["templateID"]: (each.get("names") or [""])[0] for each in client.list_all("/templates")}
    names_by_id.update({each["snapshotID"]: (each.get("names") or [""])[0] for each in client.list_all("/snapshots")})
    sandboxes = []
    for detail in client.list_all("/sandboxes"):
        shape = make_sandbox_shape(detail)
        if not _NAME.fullmatch(str(shape["id"])):
            raise Failure(
                f"{client.address.url} returned the invalid sandbox id {shape['id']!r}: check that this is the URL of "
                "a sandbox gateway"
            )
        shape["template"] = detail.get("alias") or names_by_id.get(shape["template_id"]) or shape["template_id"]
        shape["head"] = names_by_id.get(shape["snapshot_id"]) or shape["snapshot_id"]
        sandboxes.append(hide_unknown_values(shape, client.plan_opened_at) if client.is_planning else shape)
    return sandboxes


def check_keys(mapping: Any, known_keys: tuple[str, ...], label: str) -> None:
    """Raise Failure if ``mapping`` is not a mapping or has an unknown key. ``label`` names it in the message."""
    if not isinstance(mapping, Mapping):
        raise Failure(f"{label} must be a mapping with the keys {', '.join(known_keys)}, not {mapping!r}")
    unknown_keys = [str(key) for key in mapping if key not in known_keys]
    if unknown_keys:
        raise Failure(f"{label} contains unknown keys ({', '.join(unknown_keys)}): use only {', '.join(known_keys)}")


def matches_filters(sandbox: Mapping[str, Any], filters: Mapping[str, Any]) -> bool:
    """Return whether the sandbox matches all filters. Each filter lists values, which can be globs."""
    for key in ("name", "state", "template"):
        patterns = _to_list(filters.get(key))
        values = [sandbox["template"], sandbox["template_id"]] if key == "template" else [sandbox[key]]
        if patterns and not any(fnmatchcase(str(value), pattern) for value in values for pattern in patterns):
            return False
    metadata = filters.get("metadata") or {}
    return all(
        any(fnmatchcase(sandbox["metadata"].get(key, ""), pattern) for pattern in _to_list(value))
        and key in sandbox["metadata"]
        for key, value in metadata.items()
    )


def make_host_name(sandbox: Mapping[str, Any], hostname: str, gateway: str, group_names: Container[str] = ()) -> str:
    """Return the name of the sandbox's host.

    Returns the sandbox's id if the name has another meaning in Ansible or is one of ``group_names``.
    """
    name = sandbox["name"]
    if hostname == "id" or not _NAME.fullmatch(name) or re.fullmatch(r"[\d.]+", name) or name in _RESERVED_NAMES:
        name = sandbox["id"]
    host = f"{name}.{gateway}" if hostname == "name_gateway" else name
    return sandbox["id"] if host in group_names else host


def list_groups(sandbox: Mapping[str, Any], gateway: str, group_by: list[str]) -> list[str]:
    """Return the names of the sandbox's groups, before they are sanitized."""
    groups = [f"{key}_{sandbox[key]}" for key in ("template", "head", "state") if key in group_by and sandbox[key]]
    if "metadata" in group_by:
        groups += [
            f"metadata_{key}_{value}" if value else f"metadata_{key}" for key, value in sandbox["metadata"].items()
        ]
    if "gateway" in group_by:
        groups.append(f"gateway_{gateway}")
    return groups


def make_host_variables(sandbox: Mapping[str, Any], gateway: Gateway, interpreter: str) -> dict[str, Any]:
    """Return the variables of the sandbox's host, which contain no API key."""
    variables: dict[str, Any] = {
        "ansible_connection": "grove.sandbox.sandbox",
        "ansible_host": sandbox["id"],
        "ansible_sandbox_gateway_url": gateway.url,
        "grove_sandbox": {**sandbox, "gateway": gateway.name},
    }
    if gateway.ca_path:
        variables["ansible_sandbox_ca_path"] = gateway.ca_path
    if not gateway.validate_certs:
        variables["ansible_sandbox_validate_certs"] = False
    if gateway.token_file:
        variables["ansible_sandbox_gateway_token_file"] = gateway.token_file
    interpreter = interpreter or INTERPRETER_PATHS.get(sandbox["backend"] or "", "")
    if interpreter:
        variables["ansible_python_interpreter"] = interpreter
    return variables


def _to_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
