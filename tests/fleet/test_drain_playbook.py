"""The playbook drain_host, with sandboxctl on a fleet of in-memory hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.world import FleetHost, World
from tests.support.roles import make_environment
from tests.support.waiting import wait_until


@pytest.fixture
def sandboxctl_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    command = directory / "sandboxctl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sandbox_gateway.cli.main "$@"\n')
    command.chmod(0o755)
    return directory


def _play(directory: Path, gateway: FleetHost, *options: str) -> tuple[bool, str]:
    """Run the playbook for the host h1. Return whether it succeeded, and its output."""
    inventory = directory / "hosts.json"
    variables = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    inventory.write_text(json.dumps({"all": {"hosts": {"machine": {**variables, "fleet_name": "h1"}}}}))
    environment = make_environment(directory)
    environment |= {
        "PATH": f"{directory}:{environment.get('PATH', os.environ['PATH'])}",
        "SANDBOX_GATEWAY_URL": gateway.gateway.unix_url,
    }
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory)]
    argv += ["grove.sandbox.drain_host", "-e", "drain_hosts=machine", *options]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return result.returncode == 0, f"{result.stdout}{result.stderr}exit code {result.returncode}"


def _find_host(observer: FleetHost, name: str) -> Any:
    return next(host for host in observer.get("/fleet")["hosts"] if host["name"] == name)


def test_a_host_is_drained_once_and_uncordoned(world: World, sandboxctl_directory: Path) -> None:
    one, two = world.start("h1", "h2")
    one.gateway.build_template()
    one.post("/volumes", {"name": "data"})
    one.post("/sandboxes", {"templateID": "base", "name": "web"})
    mounts = [{"name": "data", "path": "/data"}]
    one.post("/sandboxes", {"templateID": "base", "name": "with-volume", "volumeMounts": mounts})
    wait_until(lambda: _find_host(two, "h1")["sandboxes"] == 2)
    succeeded, output = _play(sandboxctl_directory, two, "--check")
    assert succeeded and "Would cordon h1, and move 2 sandboxes" in output and "changed=1 " in output, output
    assert not _find_host(two, "h1")["cordoned"]
    succeeded, output = _play(sandboxctl_directory, two)
    assert not succeeded and "1 sandbox remains on h1" in output and "with-volume mounts the volume data" in output
    with one.client() as client:
        client.delete("/sandboxes/with-volume/volumes/data").raise_for_status()
    succeeded, output = _play(sandboxctl_directory, two)
    assert succeeded and "with-volume: moved to h2" in output and "changed=1 " in output, output
    assert [each["sandboxHost"] for each in one.get("/sandboxes")] == ["h2", "h2"]
    for options in ((), ("--check",)):
        wait_until(lambda: _find_host(two, "h1")["sandboxes"] == 0)
        succeeded, output = _play(sandboxctl_directory, two, *options)
        assert succeeded and "changed=0 " in output, output
    succeeded, output = _play(sandboxctl_directory, two, "-e", "drain_state=uncordoned")
    assert succeeded and "changed=1 " in output and not _find_host(one, "h1")["cordoned"]
    succeeded, output = _play(sandboxctl_directory, two, "-e", "drain_state=gone")
    assert not succeeded and "drain_state is 'gone'" in output
    succeeded, output = _play(sandboxctl_directory, two, "-e", "fleet_name=h9")
    assert not succeeded and "The fleet has no host h9, but h1, h2" in " ".join(output.split()), output
