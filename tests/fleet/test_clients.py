"""Modules, inventories and sandboxctl in a fleet: the hosts of objects, and the placement of new sandboxes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _info, _sandbox, _snapshot, _template, _volume
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY
from ansible_collections.grove.sandbox.plugins.plugin_utils import _inventory
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway

from tests.cli.running import Outcome, Run, run_sandboxctl
from tests.collection.test_artifact_modules import run_task
from tests.fleet.world import FleetHost, Objects
from tests.support.memory_gateway import EXEC_KEY, MemoryGateway
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]
_numbers = itertools.count()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs `sandboxctl` at a gateway, given with ``gateway``."""

    def run_command(*args: str, gateway: MemoryGateway) -> Outcome:
        return run_sandboxctl(monkeypatch, capsys, *args, url=gateway.unix_url)

    return run_command


def _run_info(listing: Any, gateway: MemoryGateway, name: str) -> Any:
    (entry,) = run_task(listing, gateway, name=[name])[listing.plural]
    return entry


def _make_names(count: int) -> list[str]:
    """Return names that no other test uses."""
    return [f"placed-{next(_numbers)}" for _ in range(count)]


def _count_hosts(result: Any) -> dict[str, int]:
    assert not result.get("failed"), result
    return Counter(each[HOST_KEY] for each in result["sandboxes"])


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


def test_a_task_creates_a_sandbox_on_the_requested_host(pair: Pair) -> None:
    one, _ = pair
    (name,) = _make_names(1)
    options: dict[str, Any] = {"name": [name], "template": "base", "placement": {"host": "h2"}}
    for check in (True, False):
        created = run_task(_sandbox, one.gateway, check=check, **options)
        assert _count_hosts(created) == {"h2": 1} and created["changed"], check
    for host in pair:
        for check in (True, False):
            for changes in ({}, {"placement": None}, {"placement": {"host": "h1"}}, {"recreate": True}):
                result = run_task(_sandbox, host.gateway, check=check, **{**options, **changes})
                assert _count_hosts(result) == {"h2": 1} and not result["changed"], (host.name, check, changes)
    refused = run_task(_sandbox, one.gateway, **{**options, "name": _make_names(1), "placement": {"host": "h9"}})
    assert "no host can take the sandbox: h1 (not the requested host), h2 (not the requested host)" in refused["msg"]
    options = {"name": _make_names(1), "template": "base", "placement": {"labels": {"zone": 1}}}
    assert "it has no label 'zone'" in run_task(_sandbox, one.gateway, **options)["msg"]


def test_a_task_replaces_a_sandbox_on_the_requested_host(pair: Pair) -> None:
    one, _ = pair
    (name,) = _make_names(1)
    options: dict[str, Any] = {"name": [name], "template": "base", "recreate": True}
    assert _count_hosts(run_task(_sandbox, one.gateway, **options)) == {"h1": 1}
    options |= {"memory_mb": 1024, "cold_start": True, "placement": {"host": "h2"}}
    for check in (True, False):
        replaced = run_task(_sandbox, one.gateway, check=check, **options)
        assert _count_hosts(replaced) == {"h2": 1} and replaced["outcomes"][0]["actions"] == ["replace"], check
    assert not run_task(_sandbox, one.gateway, **options)["changed"]


def test_a_task_distributes_forks_over_the_hosts(pair: Pair) -> None:
    one, two = pair
    names = _make_names(4)
    options: dict[str, Any] = {"snapshot": "base", "names": names, "placement": {"strategy": "spread"}}
    hosts = []
    for check in (True, False):
        created = run_task(_fork, one.gateway, check=check, **options)
        assert _count_hosts(created) == {"h1": 2, "h2": 2} and created["changed"]
        assert [each["name"] for each in created["sandboxes"]] == names
        hosts.append([each[HOST_KEY] for each in created["sandboxes"]])
    assert hosts[0] == hosts[1], "check mode predicts the hosts"
    for host in pair:
        for check in (True, False):
            for changes in ({}, {"placement": None}, {"metadata": {}, "volumes": []}):
                result = run_task(_fork, host.gateway, check=check, **{**options, **changes})
                assert not result.get("failed") and not result["changed"], (host.name, check, changes, result)
    two.client().delete(f"/sandboxes/{names[0]}").raise_for_status()
    one.client().delete(f"/sandboxes/{names[1]}").raise_for_status()
    options["placement"] = {"host": "h2", "anti_affinity": False}
    assert run_task(_fork, two.gateway, **options)["changed"]
    removed = run_task(_fork, one.gateway, snapshot="base", names=names, state="absent")
    assert removed["changed"] and not removed.get("failed") and removed["sandboxes"] == []
    options = {"snapshot": "base", "names": _make_names(3), "placement": {"anti_affinity": True}}
    assert run_task(_fork, one.gateway, **options)["failure"]["kind"] == "no_space"


def test_forks_of_different_templates_with_one_name_are_no_copies(pair: Pair) -> None:
    one, two = pair
    (template,) = _make_names(1)
    one.gateway.build_template(template, setup=["true"])
    two.gateway.build_template(template, setup=["false"])
    names = _make_names(2)
    for host, name in zip(pair, names, strict=True):
        host.post("/sandboxes", {"templateID": host.get(f"/templates/{template}")["templateID"], "name": name})
    refused = run_task(_sandbox, one.gateway, name=[names[1]], template=template, recreate=True)
    assert f"is on host 'h2', but the gateway uses the template '{template}' of host 'h1'" in refused["msg"]
    refused = run_task(_fork, one.gateway, snapshot=template, names=names)
    assert refused["failure"]["kind"] == "conflict" and f"{names[1]!r} exists but is not a fork" in refused["msg"]


def test_a_placement_that_cannot_apply_is_refused(pair: Pair) -> None:
    one, _ = pair
    options: dict[str, Any] = {"name": _make_names(2), "template": "base", "placement": {"anti_affinity": True}}
    assert "requests each sandbox on its own" in run_task(_sandbox, one.gateway, **options)["msg"]
    options = {"sandbox": "web", "names": _make_names(1), "placement": {"host": "h1"}}
    assert "the clones of a running sandbox stay on its host" in run_task(_fork, one.gateway, **options)["msg"]


@pytest.mark.parametrize("check", [True, False])
def test_a_task_with_a_placement_needs_a_fleet(tmp_path: Any, check: bool) -> None:
    gateway = MemoryGateway(tmp_path)
    try:
        gateway.build_template()
        run_task(_sandbox, gateway, name=["web"], template="base")
        placement = {"host": "h1"}
        for kind, options in (
            (_sandbox, {"name": ["new"], "template": "base"}),
            (_fork, {"snapshot": "base", "names": ["new"]}),
        ):
            refused = run_task(kind, gateway, check=check, placement=placement, **options)
            assert refused["failure"]["kind"] == "unsupported" and not refused["changed"]
            assert "remove this option, or upgrade the gateway and add the section [fleet]" in refused["msg"]
            for nothing in (None, {}, {"host": None, "labels": None, "strategy": None, "anti_affinity": None}):
                names = [f"without-{kind.__name__[-4:]}"]
                changes = {"name": names} if kind is _sandbox else {"names": names}
                result = run_task(kind, gateway, check=check, placement=nothing, **{**options, **changes})
                assert not result.get("failed"), result
        result = run_task(_sandbox, gateway, check=check, name=["web"], template="base", placement=placement)
        assert not result.get("failed") and not result["changed"], "it is ignored for an existing sandbox"
    finally:
        gateway.end()


def test_sandboxctl_cordons_hosts(pair: Pair, run: Run) -> None:
    one, two = pair
    first, second = _make_names(2)

    def read_rows() -> list[list[str]]:
        return [line.split()[:3] for line in run("host", "list", gateway=one.gateway).out.splitlines()]

    assert read_rows() == [["NAME", "STATE", "CORDONED"], ["h1", "running", "no"], ["h2", "running", "no"]]
    # Any gateway will do.
    assert run("host", "cordon", "h1", gateway=two.gateway).out == "h1 is cordoned\n"
    try:
        wait_until(lambda: read_rows()[1][2] == "yes")
        assert one.post("/sandboxes", {"templateID": "base", "name": first})["sandboxHost"] == "h2"
        refused = run("create", "base", "--host", "h1", gateway=one.gateway)
        assert refused.code == 4 and "`sandboxctl host uncordon h1`" in refused.err
    finally:
        assert run("host", "uncordon", "h1", gateway=one.gateway).out == "h1 is not cordoned\n"
    wait_until(lambda: read_rows()[1][2] == "no")
    assert one.post("/sandboxes", {"templateID": "base", "name": second})["sandboxHost"] == "h1"
    unknown = run("host", "cordon", "h9", gateway=one.gateway)
    assert unknown.code == 3 and "h9" in unknown.err
    with one.client(EXEC_KEY) as client:
        assert client.patch("/fleet/hosts/h1", json={"cordoned": True}).status_code == 403
    assert [each["name"] for each in run("host", "list", "--json", gateway=one.gateway).json] == ["h1", "h2"]


def test_sandboxctl_chooses_hosts(pair: Pair, run: Run, tmp_path: Any) -> None:
    one, _ = pair
    names = _make_names(5)

    def list_hosts(*args: str) -> list[str]:
        outcome = run(*args, "--json", gateway=one.gateway)
        assert outcome.code == 0, outcome.err
        return sorted(each["sandboxHost"] for each in outcome.json.get("sandboxes", [outcome.json]))

    assert list_hosts("create", "base", "--name", names[0], "--host", "h2") == ["h2"]
    assert list_hosts("create", "base", "--name", names[1], "--strategy", "local") == ["h1"]
    fork = ("snapshot", "fork", "base", "--names")
    assert list_hosts(*fork, ",".join(names[2:4]), "--anti-affinity") == ["h1", "h2"]
    assert list_hosts(*fork, names[4], "--host", "h2") == ["h2"]
    refused = run("create", "base", "--host-label", "zone=a", gateway=one.gateway)
    assert refused.code != 0 and "it has no label 'zone'" in refused.err
    refused = run("create", "base", "--strategy", "random", gateway=one.gateway)
    assert refused.code != 0 and "--strategy: " in refused.err
    alone = MemoryGateway(tmp_path)
    try:
        alone.build_template()
        refused = run("create", "base", "--host", "h2", gateway=alone)
        assert refused.code != 0
        assert "placement: not supported, because this gateway has only its own host" in refused.err
        assert run("create", "base", gateway=alone).code == 0
    finally:
        alone.end()
