# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
---
name: sandboxes
short_description: Use the sandboxes of one or more gateways as hosts
version_added: "0.1.0"
description:
  - Lists the sandboxes of the gateways in the inventory file, groups them, and sets the connection plugin
    P(grove.sandbox.sandbox#connection) for them.
  - The name of the inventory file must end in C(sandboxes.yml) or C(sandboxes.yaml).
  - Text from the owner of a sandbox (names, metadata) is never evaluated as a Jinja template.
author:
  - The grove.sandbox authors (@grove-sandbox)
options:
  plugin:
    description:
      - Marks the file as an inventory of this plugin.
    type: str
    required: true
    choices: [grove.sandbox.sandboxes]
  gateways:
    description:
      - The gateways to query. If not set, the plugin queries the gateway at the default of O(gateways[].url).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description:
          - The name of the gateway in groups and host names. Required if there are several gateways.
        type: str
        default: default
      url:
        description:
          - The address of the gateway as seen from the control node, as C(unix:///path/to/gateway.sock),
            C(http://host:port) or C(https://host:port). Can be a Jinja template.
          - If not set, the environment variable E(SANDBOX_GATEWAY_URL) is used, or else the socket
            C(unix:///run/sandbox-gateway/gateway.sock).
        type: str
      token:
        description:
          - An API key from the gateway's key file. Can be a Jinja template, or encrypted by Ansible Vault. The Unix
            socket needs no key.
          - Listing sandboxes requires the scope C(read); running tasks in them requires C(exec).
          - The key does not become a variable. It is passed to the connection inside the process that reads this file.
          - If neither this nor O(gateways[].token_file) is set, the environment variable E(SANDBOX_GATEWAY_TOKEN) is
            used.
        type: str
      token_file:
        description:
          - A file that contains only an API key.
        type: path
      ca_path:
        description:
          - A PEM file with the CA certificates for verifying the gateway's certificate.
          - If not set, the system's CA certificates are used.
        type: path
      validate_certs:
        description:
          - Whether to verify the gateway's certificate.
        type: bool
        default: true
      timeout:
        description:
          - Time limit in seconds for each response of the gateway.
        type: int
        default: 30
  filters:
    description:
      - Conditions that a sandbox must meet to become a host. It must match all filters.
      - Each filter is a value or a list of values, one of which must match. Values can be globs.
    type: dict
    default: {}
    suboptions:
      name:
        description:
          - Names of sandboxes.
        type: list
        elements: str
      state:
        description:
          - V(running), V(paused) or both. A paused sandbox becomes a host, but is unreachable.
        type: list
        elements: str
      template:
        description:
          - Names or ids of templates at the root of a sandbox's lineage.
        type: list
        elements: str
      metadata:
        description:
          - Metadata keys with the required values.
        type: dict
  hostname:
    description:
      - The form of host names. V(name) is the name of the sandbox; V(name_gateway) appends a dot and the name of the
        gateway; V(id) is the id of the sandbox.
      - The default is V(name) for one gateway, and V(name_gateway) for several.
      - If the name has another meaning in Ansible, such as C(localhost) or the name of a group, the id becomes the name
        of the host. If another host already has the name, V(name_gateway) is used instead of V(name).
    type: str
    choices: [name, name_gateway, id]
  group_by:
    description:
      - The groups to create, with names such as C(template_base), C(head_golden), C(state_running),
        C(metadata_team_blue) and C(gateway_default).
      - Characters that group names cannot contain are replaced with C(_).
    type: list
    elements: str
    choices: [template, head, state, metadata, gateway]
    default: [template, head, state, metadata, gateway]
  python_interpreter:
    description:
      - The C(ansible_python_interpreter) of the hosts.
      - The default is C(/usr/bin/python3) for sandboxes on C(kvm_xfs) hosts. For other sandboxes, Ansible discovers the
        interpreter.
    type: str
  strict:
    description:
      - If V(true), an unreachable gateway or a Jinja template that cannot be evaluated is an error.
      - If V(false), it causes a warning, and the inventory contains the hosts of the other gateways.
      - The same applies to a host of a fleet that does not answer the fleet's gateway.
extends_documentation_fragment:
  - constructed
  - inventory_cache
notes:
  - Each host has a variable C(grove_sandbox) with the fields that the modules return for a sandbox, plus C(template),
    C(head) and C(gateway), which hold names. In a fleet, C(grove_sandbox.sandbox_host) is the name of the sandbox's
    host.
  - The cache holds only these variables.
  - In a check-mode run, a C(meta) task with C(refresh_inventory) lists the sandboxes as the tasks before it would leave
    them, if those tasks use the same gateway and API key as the inventory. Ids of new sandboxes begin with
    C(known-after-apply-). The cache never contains such sandboxes.
"""

EXAMPLES = r"""
# The gateway in SANDBOX_GATEWAY_URL, or else the local gateway
plugin: grove.sandbox.sandboxes
---
# The running sandboxes of two teams on two gateways
plugin: grove.sandbox.sandboxes
gateways:
  - name: east
    url: https://east.example:8700
    token: "{{ lookup('ansible.builtin.env', 'EAST_KEY') }}"
  - name: west
    url: https://west.example:8700
    token_file: ~/.config/sandbox/west.key
    ca_path: /etc/ssl/my-authority.pem
filters:
  state: running
  metadata:
    team: [blue, "green-*"]
strict: true
---
# Additional groups and variables
plugin: grove.sandbox.sandboxes
keyed_groups:
  - key: grove_sandbox.backend
    prefix: kind
groups:
  changed: grove_sandbox.snapshot_id != grove_sandbox.forked_from
compose:
  ansible_user: grove_sandbox.metadata.user | default('root')
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/sandboxes
cache_timeout: 60
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._client import DEFAULT_URL, Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _inventory
from ansible_collections.grove.sandbox.plugins.plugin_utils._check_run import enter_session
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway, store_gateway


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    NAME = "grove.sandbox.sandboxes"

    def verify_file(self, path: str) -> bool:
        return super().verify_file(path) and path.endswith(("sandboxes.yml", "sandboxes.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        try:
            sources = self._read_sources(Path(path).parent)
            _inventory.check_keys(self.get_option("filters"), _inventory.FILTER_KEYS, "filters")
        except Failure as failure:
            raise AnsibleParserError(f"{path}: {failure}") from None
        sandboxes_by_gateway = self._find_sandboxes(sources, self.get_cache_key(path), cache)
        sandboxes_and_gateways = [
            (sandbox, source.gateway)
            for source in sources
            for sandbox in sandboxes_by_gateway.get(source.cache_key, [])
            if _inventory.matches_filters(sandbox, self.get_option("filters"))
        ]
        sandbox_group_names = {
            name for sandbox, gateway in sandboxes_and_gateways for name in self._list_groups(sandbox, gateway)
        }
        group_names = sandbox_group_names | set(self.inventory.groups) | set(self.get_option("groups"))
        for sandbox, gateway in sandboxes_and_gateways:
            self._add_host(
                self._choose_host_name(sandbox, gateway, group_names, has_several_gateways=len(sources) > 1),
                sandbox,
                gateway,
            )

    def _read_sources(self, directory: Path) -> list[_Source]:
        entries = self.get_option("gateways") or [{}]
        sources = []
        for number, entry in enumerate(entries, 1):
            label = f"gateway {number} of {len(entries)}"
            _inventory.check_keys(entry, _inventory.GATEWAY_KEYS, label)
            if len(entries) > 1 and not entry.get("name"):
                raise Failure(f"{label} has no name: give each gateway a name, or list only one gateway")
            sources.append(_Source(entry, self._evaluate, directory))
        names = [source.gateway.name for source in sources]
        if len(set(names)) < len(names):
            raise Failure(
                f"several gateways have the same name ({', '.join(names)}): use a different name for each gateway"
            )
        return sources

    def _evaluate(self, value: Any) -> str:
        """Decrypt a value of the inventory file, or evaluate its Jinja template. The file is as trusted as a play."""
        return str(self.templar.template(value)) if isinstance(value, str) else str(value or "")

    def _report_missing_hosts(self, source: _Source) -> None:
        message = (
            f"the inventory lacks the sandboxes of these hosts behind gateway {source.gateway.name}, because they do "
            f"not answer: {', '.join(source.missing_hosts)}"
        )
        if self.get_option("strict"):
            raise AnsibleParserError(message)
        self.display.warning(message)

    def _find_sandboxes(self, sources: list[_Source], cache_key: str, cache: bool) -> dict[str, list[dict[str, Any]]]:
        """Return the sandboxes of each gateway, using the cache if it is enabled."""
        is_cache_enabled = self.get_option("cache")
        sandboxes_by_gateway: dict[str, list[dict[str, Any]]] = {}
        if is_cache_enabled and cache:
            with contextlib.suppress(KeyError):
                sandboxes_by_gateway = dict(self._cache[cache_key])
        uncached_sources = [source for source in sources if source.cache_key not in sandboxes_by_gateway]
        for source in uncached_sources:
            try:
                sandboxes_by_gateway[source.cache_key] = source.observe()
            except Failure as failure:
                message = f"the sandboxes of gateway {source.gateway.name} are not in the inventory: {failure}"
                if self.get_option("strict"):
                    raise AnsibleParserError(message) from None
                self.display.warning(message)
                continue
            if source.missing_hosts:
                self._report_missing_hosts(source)
        # Another run must not find sandboxes that exist only in the plan of this run.
        if is_cache_enabled and uncached_sources and not any(source.is_planned for source in uncached_sources):
            self._cache[cache_key] = sandboxes_by_gateway
        return sandboxes_by_gateway

    def _list_groups(self, sandbox: dict[str, Any], gateway: Gateway) -> list[str]:
        groups = _inventory.list_groups(sandbox, gateway.name, self.get_option("group_by"))
        return [self._sanitize_group_name(group) for group in groups]

    def _choose_host_name(
        self, sandbox: dict[str, Any], gateway: Gateway, group_names: set[str], *, has_several_gateways: bool
    ) -> str:
        """Return an unused host name that is not the name of a group, so that tasks run on the right host."""
        host_name_form = self.get_option("hostname") or ("name_gateway" if has_several_gateways else "name")
        host = _inventory.make_host_name(sandbox, host_name_form, gateway.name, group_names)
        if host in self.inventory.hosts:
            fallback_name = _inventory.make_host_name(sandbox, "name_gateway", gateway.name, group_names)
            self.display.warning(
                f"a host {host} already exists, so the sandbox with that name becomes the host {fallback_name}"
            )
            host = fallback_name
        return host

    def _add_host(self, host: str, sandbox: dict[str, Any], gateway: Gateway) -> None:
        self.inventory.add_host(host)
        store_gateway(sandbox["id"], gateway)
        variables = _inventory.make_host_variables(sandbox, gateway, self.get_option("python_interpreter") or "")
        for key, value in variables.items():
            # Mark text as unsafe even if it has no braces, because a `#jinja2:` header can set other delimiters.
            self.inventory.set_variable(host, key, wrap_var(value))
        for group in self._list_groups(sandbox, gateway):
            self.inventory.add_host(host, self.inventory.add_group(group))
        strict = self.get_option("strict")
        host_variables = self.inventory.get_host(host).get_vars()
        self._set_composite_vars(self.get_option("compose"), host_variables, host, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), host_variables, host, strict=strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), host_variables, host, strict=strict)


class _Source:
    """One gateway in the inventory file. ``cache_key`` identifies its sandboxes in the cache.

    ``is_planned``: whether the sandboxes were observed in a plan session. ``missing_hosts``: the hosts of a fleet that
    did not answer.
    """

    def __init__(self, entry: dict[str, Any], evaluate: Any, directory: Path) -> None:
        token, token_file = evaluate(entry.get("token")), _expand_path(evaluate(entry.get("token_file")), directory)
        if not token and not token_file:
            token = os.environ.get("SANDBOX_GATEWAY_TOKEN", "")
        self.gateway = Gateway(
            evaluate(entry.get("url")) or os.environ.get("SANDBOX_GATEWAY_URL") or DEFAULT_URL,
            token=token,
            token_file=token_file,
            ca_path=_expand_path(evaluate(entry.get("ca_path")), directory),
            validate_certs=boolean(entry.get("validate_certs", True)),
            name=evaluate(entry.get("name")) or "default",
        )
        self._timeout = float(entry.get("timeout") or 30)
        self.cache_key = f"{self.gateway.name} {self.gateway.url}"
        self.is_planned = False
        self.missing_hosts: list[str] = []

    def observe(self) -> list[dict[str, Any]]:
        """Return the gateway's sandboxes, as they are in this run's plan session if there is one. Raises Failure."""
        gateway = self.gateway
        client = Client(gateway.url, gateway.read_key(), gateway.ca_path, gateway.validate_certs, self._timeout)
        try:
            self.is_planned = enter_session(client)
            client.accepts_incomplete_lists = True
            sandboxes = _inventory.observe(client)
            self.missing_hosts = sorted(client.missing_hosts)
            return sandboxes
        finally:
            client.close()


def _expand_path(text: str, directory: Path) -> str:
    return str(directory / Path(text).expanduser()) if text else ""
