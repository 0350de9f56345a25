"""Run the core tests of the clients at another gateway of a fleet than the one that has the sandboxes.

`./dev test fleet` runs all tests of the clients in this way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.sdk import client_sets
from tests.sdk.servers import KEY, count_forwarded_requests, running_fleet
from tests.sdk.test_clients import count_results, run_process
from tests.support.session import REPOSITORY


@pytest.mark.parametrize("kind", [pytest.param("kvm_xfs", marks=pytest.mark.slow), "jail_zfs"])
def test_core_tests_pass_at_another_gateway(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    with running_fleet(request, kind) as front:
        files = [f"tests/sdk/{file}.py" for file in client_sets.CLIENT_BY_FILE]
        options = ["-m", "core", "-k", kind, "-q", "--tb=short", f"--junitxml={tmp_path}/report.xml"]
        environment = client_sets.make_environment(client_sets.NEWEST, kind, front.port, front.template)
        result = run_process([sys.executable, "-m", "pytest", *files, *options], REPOSITORY, environment)
        assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-3000:]
        passed, _ = count_results(tmp_path / "report.xml")
        assert all(passed[client] for client in client_sets.CLIENTS)
        metrics = httpx.get(f"{front.url}/metrics", headers={"X-API-Key": KEY}).text
        assert count_forwarded_requests(metrics) > 5 * passed.total()
