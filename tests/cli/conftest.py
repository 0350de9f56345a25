from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import httpx
import pytest

from sandbox_gateway.cli import main as sandboxctl
from tests.api.served import Served
from tests.cli.running import Outcome, Run


@pytest.fixture(scope="session")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("memory"))
    try:
        served.build_template("base", packages=["python3"], description="what tests start from")
        yield served
    finally:
        served.end()


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    """A gateway over a host in memory, with the template `base` and nothing else."""
    yield _served
    _served.clear()


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    """Its HTTP surface, as an administrator."""
    with served.client() as client:
        yield client


@pytest.fixture
def run(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run sandboxctl with these arguments; over the socket unless ``url`` says otherwise."""
    for name in ("SANDBOX_GATEWAY_TOKEN", "SANDBOX_GATEWAY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)

    def running(*args: str, url: str = served.unix_url, token: str = "", stdin: bytes = b"") -> Outcome:
        monkeypatch.setenv("SANDBOX_GATEWAY_URL", url)
        monkeypatch.setenv("SANDBOX_GATEWAY_TOKEN", token)
        monkeypatch.setattr(sys, "argv", ["sandboxctl", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            sandboxctl.main()
            sys.exit(0)
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return running
