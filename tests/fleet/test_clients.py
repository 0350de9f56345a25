"""The names of hosts in the results of modules, in inventories and in the output of sandboxctl."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _info, _sandbox, _snapshot, _template, _volume
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY
from ansible_collections.grove.sandbox.plugins.plugin_utils import _inventory
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway

from sandbox_gateway.cli import main as sandboxctl
from tests.api.memory_gateway import MemoryGateway
from tests.api.test_artifact_modules import run_task
from tests.cli.running import Outcome, Run
from tests.fleet.test_forwarding import Objects
from tests.fleet.world import FleetHost

Pair = tuple[FleetHost, FleetHost]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `sandboxctl` at a gateway, given with ``gateway``."""

    def run_command(*args: str, gateway: MemoryGateway) -> Outcome:
        monkeypatch.setenv("SANDBOX_GATEWAY_URL", gateway.unix_url)
        monkeypatch.setattr(sys, "argv", ["sandboxctl", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        capsys.readouterr()
        with pytest.raises(SystemExit) as error_info:
            sandboxctl.main()
            sys.exit(0)
        out, err = capsys.readouterr()
        return Outcome(int(error_info.value.code or 0), out, err)

    return run_command


def _run_info(listing: Any, gateway: MemoryGateway, name: str) -> Any:
    (entry,) = run_task(listing, gateway, name=[name])[listing.plural]
    return entry


@pytest.mark.parametrize("check", [True, False])
def test_results_of_modules_name_the_host(pair: Pair, check: bool) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    names = objects.names
    for kind, listing, options in (
        (_sandbox, _info.SANDBOXES, {"name": [names["sandbox"]]}),
        (_snapshot, _info.SNAPSHOTS, {"name": [names["snapshot"]], "sandbox": [names["sandbox"]]}),
        (_template, _info.TEMPLATES, {"name": [names["template"]]}),
        (_volume, _info.VOLUMES, {"name": [names["volume"]]}),
    ):
        if kind is not _template:  # it would compare the recipe
            result = run_task(kind, one.gateway, check=check, **options)
            assert result[kind.SINGULAR][HOST_KEY] == "h2", result
        assert _run_info(listing, one.gateway, options["name"][0])[HOST_KEY] == "h2"
    forks = [f"{names['snapshot']}-a", f"{names['snapshot']}-b"]
    result = run_task(_fork, two.gateway, check=check, snapshot=names["snapshot"], names=forks, volumes=[])
    assert [each[HOST_KEY] for each in result["sandboxes"]] == ["h2", "h2"], result
    new_name = f"new-{names['sandbox']}"
    result = run_task(_sandbox, one.gateway, check=check, name=[new_name], template="base")
    assert result["sandbox"][HOST_KEY] == "h1" and result["changed"]


def test_results_without_a_fleet_name_no_host(tmp_path: Any, run: Run) -> None:
    gateway = MemoryGateway(tmp_path)
    try:
        gateway.build_template()
        for check in (True, False):
            result = run_task(_sandbox, gateway, check=check, name=["web"], template="base")
            assert result["changed"] and HOST_KEY not in result["sandbox"]
        assert HOST_KEY not in _run_info(_info.SANDBOXES, gateway, "web")
        assert "HOST" not in run("list", gateway=gateway).out
        assert "sandboxHost" not in run("show", "web", gateway=gateway).out
        client = Client(gateway.unix_url)
        assert HOST_KEY not in _inventory.observe(client)[0]
        client.close()
    finally:
        gateway.end()


def test_the_inventory_names_the_host_of_each_sandbox(pair: Pair) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    client = Client(one.gateway.unix_url)
    try:
        sandboxes = {each["name"]: each for each in _inventory.observe(client)}
    finally:
        client.close()
    variables = _inventory.make_host_variables(sandboxes[name], Gateway(one.gateway.unix_url), "")
    assert variables["grove_sandbox"][HOST_KEY] == "h2"


def test_sandboxctl_names_the_host_of_each_object(pair: Pair, run: Run) -> None:
    one, two = pair
    names = Objects(two, with_template=True).names
    for command, name in (
        (["list"], names["sandbox"]),
        (["snapshot", "list"], names["snapshot"]),
        (["template", "list"], names["template"]),
        (["volume", "list"], names["volume"]),
    ):
        heading, *rows = run(*command, gateway=one.gateway).out.splitlines()
        assert heading.split()[:2] == ["NAME", "HOST"]
        assert next(row.split()[:2] for row in rows if row.startswith(f"{name} ")) == [name, "h2"]
        shown = run(*command[:-1], "show", name, gateway=one.gateway).out
        assert "sandboxHost h2" in " ".join(shown.split())
        entries = run(*command, "--json", gateway=one.gateway).json
        entry = next(each for each in entries if name in (each.get("name"), *each.get("names", [])))
        assert entry["sandboxHost"] == "h2"
