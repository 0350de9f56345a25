"""Test that every scenario in molecule/ succeeds when `./dev molecule` runs it, and removes everything it created."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import jail_world, pools, session
from tests.support.gateway import Gateway
from tests.support.roles import make_environment

_MOLECULE_COMMAND = Path(sys.executable).with_name("molecule")
_SCENARIO_DIRECTORY = session.REPOSITORY / "molecule"
_GUIDE_FILE = session.REPOSITORY / "docs" / "molecule.md"
_TIMEOUT_SECONDS = 1200

RunScenario = Callable[..., str]


@pytest.fixture
def run_scenario(requires_root: None) -> Iterator[RunScenario]:
    """Return a function that runs a scenario with environment variables, checks its success, and returns its output."""
    state_directory = session.get_run_dir() / "molecule"
    running_scenarios: list[tuple[str, dict[str, str]]] = []

    def run_scenario(scenario: str, **variables: str) -> str:
        network = session.allocate_network()
        env = {
            **make_environment(state_directory),
            "GROVE_MOLECULE_CACHE": str(session.get_cache_dir()),
            "GROVE_MOLECULE_PREFIX": network["prefix"],
            "GROVE_MOLECULE_STATE": str(state_directory),
            "GROVE_MOLECULE_SUBNET": network["subnet"],
            "MOLECULE_EPHEMERAL_DIRECTORY": str(state_directory / f"{scenario}-molecule"),
            "NO_COLOR": "1",
            **variables,
        }
        running_scenarios.append((scenario, env))
        output = _run_molecule("test", scenario, env)
        running_scenarios.pop()
        for step in ("idempotence", "verify"):
            assert re.search(rf"{scenario} \S+ {step}: Executed: Successful", output), output
        assert not (state_directory / scenario).exists()
        return output

    yield run_scenario
    for scenario, env in running_scenarios:  # molecule cleans up after a failure, but not after a timeout
        if (state_directory / scenario).exists():
            _run_molecule("destroy", scenario, env)


def _run_molecule(command: str, scenario: str, env: dict[str, str]) -> str:
    result = subprocess.run(
        [str(_MOLECULE_COMMAND), command, "--scenario-name", scenario, "--no-command-borders"],
        cwd=session.REPOSITORY,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-20000:]
    return output


def test_every_scenario_has_a_test() -> None:
    scenarios = {path.parent.name for path in _SCENARIO_DIRECTORY.glob("*/molecule.yml")}
    assert scenarios == {name.removeprefix("test_scenario_") for name in globals() if name.startswith("test_scenario_")}


@pytest.mark.slow
def test_scenario_fleet(run_scenario: RunScenario, shared_gateway: Gateway, template: str) -> None:
    run_scenario("fleet", SANDBOX_GATEWAY_URL=shared_gateway.url, SANDBOX_TEST_TEMPLATE=template)
    remaining_names = [each["name"] for each in shared_gateway.call("GET", "/sandboxes?limit=1000")]
    remaining_names += [name for each in shared_gateway.call("GET", "/snapshots?limit=1000") for name in each["names"]]
    assert not [name for name in remaining_names if name.startswith("fleet")]


def test_scenario_kvm_xfs(run_scenario: RunScenario, shared_gateway: Gateway, template: str) -> None:
    """The scenario copies this test run's template instead of building one, because other tests cover builds."""
    run_scenario("kvm_xfs", GROVE_MOLECULE_TEMPLATES=str(shared_gateway.state_root / "templates"))


@pytest.mark.slow
def test_scenario_gateway_systemd(run_scenario: RunScenario) -> None:
    run_scenario("gateway_systemd")


@pytest.mark.slow
def test_scenario_jail_zfs(run_scenario: RunScenario) -> None:
    """Another pool exists throughout, so that the scenario neither starts nor stops ZFS."""
    with pools.pool(f"t{session.get_run_id()}m", session.get_run_dir(), megabytes=128):
        run_scenario("jail_zfs", GROVE_MOLECULE_ROOTFS=str(jail_world.get_debian_tarball()))
        assert f"molecule-t{session.get_run_id()}" not in pools.run("zpool", "list", "-H", "-o", "name").stdout


@pytest.mark.parametrize(
    "path", sorted(path for path in (_SCENARIO_DIRECTORY / "fleet").rglob("*.*")), ids=lambda path: path.name
)
def test_the_guide_shows_the_files_of_the_fleet_scenario(path: Path) -> None:
    """docs/molecule.md shows the name and the unchanged contents of each file in the scenario."""
    name, text = path.relative_to(_SCENARIO_DIRECTORY.parent), path.read_text()
    assert re.search(rf"^`{name}`:\n\n```\w+\n{re.escape(text)}```$", _GUIDE_FILE.read_text(), re.M), name
