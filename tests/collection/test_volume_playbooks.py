"""Test on a real gateway that a second run of each volume playbook changes nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collection.runner import TIMEOUT_SECONDS, find_ansible_playbook
from tests.support.gateway import Gateway
from tests.support.roles import make_environment
from tests.support.samples import mark_slow_except


def run_playbook(name: str, gateway: Gateway, template: str, scratch: Path) -> tuple[str, int]:
    """Run a playbook. Returns its output and the number of changed tasks."""
    options = ["-e", f"volumes_socket={gateway.socket}", "-e", f"volumes_template={template}"]
    result = subprocess.run(
        [find_ansible_playbook(), f"grove.sandbox.{name}", *options],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=make_environment(scratch),
        check=False,
    )
    recap_match = re.search(r"changed=(\d+)", result.stdout)
    assert result.returncode == 0 and recap_match, result.stdout + result.stderr
    return result.stdout, int(recap_match[1])


@pytest.fixture
def remove_volumes(shared_gateway: Gateway, template: str, tmp_path: Path) -> Iterator[None]:
    yield
    run_playbook("volumes_clean", shared_gateway, template, tmp_path)
    remaining_volumes = shared_gateway.client.get("/volumes").json()
    assert not {volume["name"] for volume in remaining_volumes}.intersection(
        {"code", "dataset", "dataset-next", "cache"}
    )
    assert run_playbook("volumes_clean", shared_gateway, template, tmp_path)[1] == 0


@pytest.mark.parametrize(
    "name", mark_slow_except(("volumes_dataset",), ("volumes_shared", "volumes_dataset", "volumes_cache"))
)
@pytest.mark.usefixtures("remove_volumes")
def test_each_playbook_is_idempotent(name: str, shared_gateway: Gateway, template: str, tmp_path: Path) -> None:
    output, changed = run_playbook(name, shared_gateway, template, tmp_path)
    assert changed > 3, output
    output, changed = run_playbook(name, shared_gateway, template, tmp_path)
    assert changed == 0, output
