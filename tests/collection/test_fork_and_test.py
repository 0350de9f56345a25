"""Test that playbooks/fork_and_test.yml tries variants in forks, promotes the best one, and removes the forks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collection import agents
from tests.collection.runner import find_ansible_playbook
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.memory_gateway import MemoryGateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("agents")) as server:
        yield server


@pytest.fixture
def web_id(gateway: MemoryGateway) -> Iterator[str]:
    with gateway.client() as api:
        response = api.post("/sandboxes", json={"templateID": "base", "name": "web"})
        assert response.status_code == 201, response.text
        yield response.json()["sandboxID"]
    gateway.clear()


def run_fork_and_test(scratch: Path, url: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    extra_variables = {"fork_source": "web", "fork_gateway_url": url, **variables}
    return subprocess.run(
        [find_ansible_playbook(), "-i", "localhost,", "grove.sandbox.fork_and_test", "-e", json.dumps(extra_variables)],
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(session.COLLECTIONS),
            "ANSIBLE_HOME": str(scratch / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        },
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=900,
    )


def make_variant_variables(scratch: Path, *commands: str) -> dict[str, Any]:
    """Return playbook variables with a variant for each command. A variant's score is the output of its command."""
    variants = [
        {"name": f"v{number}", "command": f"sh -c '({command}) > {scratch}/v{number}'"}
        for number, command in enumerate(commands)
    ]
    return {"fork_variants": variants, "fork_test": f"cat {scratch}/{{{{ fork_variant.name }}}}"}


@pytest.mark.parametrize(("best", "winner"), [("least", "v1"), pytest.param("most", "v2", marks=pytest.mark.slow)])
def test_the_best_variant_is_promoted_and_the_forks_are_removed(
    gateway: MemoryGateway, web_id: str, tmp_path: Path, best: str, winner: str
) -> None:
    failing_tasks_file = tmp_path / "failing.yml"
    failing_tasks_file.write_text(json.dumps([{"name": "Fail", "ansible.builtin.command": "false"}]))
    with gateway.client() as api:
        machine = gateway.machine(web_id)
        for _ in range(2):
            variables = make_variant_variables(
                tmp_path, "echo 10.5", "echo 9", "echo 100", "exit 3", "echo no number", ""
            )
            variables["fork_variants"][5] = {"name": "v5", "tasks": str(failing_tasks_file)}
            run = run_fork_and_test(tmp_path, gateway.unix_url, fork_best=best, **variables)
            assert run.returncode == 0, run.stdout + run.stderr
            assert f"web continues from web-try-{winner}" in run.stdout
            for out in ("v3 failed at Run the variant's command", "v4 failed at Test the result", "v5 failed at Fail"):
                assert out in run.stdout
            (remaining,) = api.get("/sandboxes").json()
            assert remaining["sandboxID"] == web_id and gateway.machine(web_id) is not machine
            assert api.get("/snapshots").json() == []
            machine = gateway.machine(web_id)


def test_the_sandbox_is_unchanged_if_no_variant_succeeds(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    with gateway.client() as api:
        machine_before = gateway.machine(web_id)
        run = run_fork_and_test(tmp_path, gateway.unix_url, **make_variant_variables(tmp_path, "exit 1", "exit 2"))
        assert run.returncode != 0 and "No variant passed its test" in run.stdout
        assert gateway.machine(web_id) is machine_before, "the machine was not replaced"
        assert [each["name"] for each in api.get("/sandboxes").json()] == ["web"]
        assert api.get("/snapshots").json() == []


def test_missing_variables_are_reported(tmp_path: Path) -> None:
    run = run_fork_and_test(tmp_path, "unix:///nowhere", fork_best="largest")
    assert run.returncode != 0 and "fork_best to least or most" in run.stdout + run.stderr


def test_the_default_variants_are_ranked(gateway: MemoryGateway, web_id: str, tmp_path: Path) -> None:
    """The agents share their files, so each variant needs a separate directory."""
    with gateway.client() as api:
        run = run_fork_and_test(tmp_path, gateway.unix_url, fork_packed=f"{tmp_path}/{{{{ inventory_hostname }}}}")
        assert run.returncode == 0, run.stdout + run.stderr
        scores = dict(re.findall(r"web-try-([\w-]+) (\d+)\.0", run.stdout.rpartition("best first:")[2]))
        assert len(scores) == 10 and [int(score) for score in scores.values()] == sorted(map(int, scores.values()))
        for name, score in scores.items():
            assert (tmp_path / f"web-try-{name}").stat().st_size == int(score)
        assert f"web continues from web-try-{next(iter(scores))}" in run.stdout
        assert [each["name"] for each in api.get("/sandboxes").json()] == ["web"]


@pytest.mark.slow
def test_the_best_variant_is_promoted_on_virtual_machines(
    shared_gateway: Gateway, template: str, tmp_path: Path
) -> None:
    """The source gets the winner's changes and keeps its id and its memory."""
    api = shared_gateway
    sandbox_id = api.call("POST", "/sandboxes", {"templateID": template, "name": "ab"})["sandboxID"]
    variants = [
        {"name": "plain", "tasks": "tasks/fork_copy.yml"},
        {"name": "packed", "command": "{{ fork_pack }} zlib 'compress(data, 9)'"},
    ]
    try:
        api.sh(sandbox_id, "mkdir -p /run/kept && echo in memory > /run/kept/mark")
        run = run_fork_and_test(tmp_path, api.url, fork_source="ab", fork_variants=variants)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "ab continues from ab-try-packed" in run.stdout
        lines = api.sh(sandbox_id, "cat /run/kept/mark; stat -c %s /var/tmp/packed /var/lib/dpkg/status").splitlines()
        assert lines[0] == "in memory" and int(lines[1]) < int(lines[2]) / 3
        names = [each["name"] for each in api.call("GET", "/sandboxes?limit=1000")]
        assert not [name for name in names if name.startswith("ab-try")]
    finally:
        api.client.delete("/sandboxes/ab")
