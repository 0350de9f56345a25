"""Call the connection plugin in a separate process, as Ansible would, and print the results.

`python connect.py COLLECTIONS` reads ``{variables, gateways, become, calls: [[method, argument…]…]}`` as JSON and
writes ``{results: [{value} | {error, message}…], growth}``. Bytes are encoded as base64. ``growth`` is the increase in
the process's peak memory during the calls, in KiB.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import resource
import sys
from typing import Any


def main() -> None:
    from ansible.plugins.loader import become_loader, connection_loader, init_plugin_loader

    init_plugin_loader([sys.argv[1]])
    from ansible.errors import AnsibleError
    from ansible.playbook.play_context import PlayContext

    request = json.load(sys.stdin)
    connection = connection_loader.get("grove.sandbox.sandbox", PlayContext())
    from ansible_collections.grove.sandbox.plugins.plugin_utils import _gateways

    for sandbox, gateway in request.get("gateways", {}).items():
        _gateways.store_gateway(sandbox, _gateways.Gateway(**gateway))
    set_inventory_variables(connection, request["variables"])
    if request.get("become"):
        become_plugin = become_loader.get(request["become"].pop("method"))
        become_plugin.set_options(direct=request["become"])
        connection.set_become_plugin(become_plugin)
    memory_before, results = _read_peak_memory_kib(), []
    for method, *arguments in request["calls"]:
        try:
            results.append({"value": call_method(connection, method, arguments)})
        except AnsibleError as error:
            (kind, *_) = (each.__name__ for each in type(error).__mro__ if each.__module__ == "ansible.errors")
            results.append({"error": kind, "message": str(error)})
    json.dump({"results": results, "growth": _read_peak_memory_kib() - memory_before}, sys.stdout)


def set_inventory_variables(connection: Any, variables: dict[str, Any]) -> None:
    """Set the variables on an inventory host and on the connection, as Ansible does before it runs a task."""
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.vars.hostvars import HostVars
    from ansible.vars.manager import VariableManager

    loader = DataLoader()
    inventory = InventoryManager(loader, sources=["one,"])
    host = inventory.get_host("one")
    for name, value in variables.items():
        host.set_variable(name, value)
    variable_manager = VariableManager(loader, inventory)
    HostVars(inventory, variable_manager, loader)
    # As in a worker process.
    multiprocessing.current_process()._host = host  # type: ignore[attr-defined]
    connection.set_options(var_options=variables)
    connection.update_vars(variable_manager.get_vars(host=host))


def call_method(connection: Any, method: str, arguments: list[Any]) -> Any:
    if method == "become":
        return exec_command(connection, connection.become.build_become_command(arguments[0], connection._shell))
    if method == "exec_command":
        return exec_command(connection, arguments[0], base64.b64decode(arguments[1]) if arguments[1:] else None)
    return getattr(connection, method)(*arguments)


def exec_command(connection: Any, command: str, data: bytes | None = None) -> list[Any]:
    code, out, err = connection.exec_command(command, in_data=data)
    return [code, base64.b64encode(out).decode(), base64.b64encode(err).decode()]


def _read_peak_memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
