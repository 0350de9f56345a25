"""`sandboxctl snapshot push` and `pull`, and the same for templates, with a registry that requires a password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import Run, check_success
from tests.support.artifact_registry import Registry, running_gateway
from tests.support.images import PASSWORD, USER, write_auth_file
from tests.support.memory_gateway import MemoryGateway


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    registry = Registry(tmp_path_factory.mktemp("registry"), with_password=True)
    registry.start()
    yield registry
    registry.kill()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> Iterator[MemoryGateway]:
    """A gateway with the snapshot `taken`, and the credentials for the registry."""
    auth_file = write_auth_file(tmp_path_factory.mktemp("login") / "auth", registry.address)
    with running_gateway(tmp_path_factory.mktemp("gateway"), registry, auth_file=str(auth_file)) as gateway:
        with gateway.client() as client:
            client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
            client.post("/sandboxes/source/snapshots", json={"name": "taken"}).raise_for_status()
        yield gateway


def test_a_snapshot_is_pushed_and_pulled(run: Run, gateway: MemoryGateway, registry: Registry) -> None:
    # No other test may push the same chunks to this repository.
    reference, url = f"{registry.address}/team/counted:before", gateway.unix_url
    outcome = check_success(run("snapshot", "push", "taken", reference, url=url))
    assert (
        outcome.out.startswith(f"{reference}@sha256:") and "bytes sent, 2 of 5 chunks were already there" in outcome.out
    )
    again = check_success(run("--json", "snapshot", "push", "taken", reference, url=url)).json
    assert (again["status"], again["transferredBytes"], again["chunksReused"]) == ("ready", 0, 5)
    refusal = run("snapshot", "pull", reference, url=url)
    assert refusal.code == 4 and "choose a different name" in refusal.err
    assert "copy" in check_success(run("snapshot", "pull", reference, "--name", "copy", url=url)).out
    check_success(run("snapshot", "push", "taken", f"{reference}-disk", "--no-memory", url=url))
    pulled = check_success(run("--json", "snapshot", "pull", f"{reference}-disk", "--name", "disk", url=url)).json
    assert (pulled["names"], pulled["memory"]) == (["disk"], "none")
    assert run("snapshot", "pull", f"{reference}-missing", url=url).code == 3
    assert run("snapshot", "pull", "registry.example/team/env:before", url=url).code == 2


def test_a_pull_without_memory_says_why(
    run: Run, gateway: MemoryGateway, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = f"{registry.address}/team/env:memory"
    check_success(run("snapshot", "push", "taken", reference, url=gateway.unix_url))
    monkeypatch.setattr(gateway.host, "import_problem", "it was captured elsewhere")
    outcome = check_success(run("snapshot", "pull", reference, "--name", "no-memory", url=gateway.unix_url))
    assert "pulled without its memory, so forks boot from the disk: it was captured elsewhere" in outcome.err


def test_a_template_is_pushed_and_pulled(run: Run, gateway: MemoryGateway, registry: Registry) -> None:
    reference, url = f"{registry.address}/team/base:1", gateway.unix_url
    check_success(run("template", "push", "base", reference, url=url))
    check_success(run("template", "pull", reference, "--name", "base-copy", url=url))
    assert "base-copy" in check_success(run("template", "list", url=url)).out
    assert run("template", "push", "taken", reference, url=url).code == 3
    refusal = run("snapshot", "pull", reference, url=url)
    assert refusal.code == 2 and "sandboxctl template pull" in refusal.err


def test_the_password_is_read_from_standard_input(
    run: Run, gateway: MemoryGateway, registry: Registry, tmp_path: Path
) -> None:
    with running_gateway(tmp_path / "other", registry) as other_gateway:
        reference, url = f"{registry.address}/team/env:login", other_gateway.unix_url
        login = ("--registry-username", USER, "--registry-password-file", "-")
        check_success(run("template", "push", "base", reference, *login, url=url, stdin=f"{PASSWORD}\n".encode()))
        failure = run("template", "pull", reference, "--name", "copy", *login, url=url, stdin=b"wrong\n")
        assert failure.code == 2 and "refuses access" in failure.err
        check_success(run("template", "pull", reference, "--name", "copy", *login, url=url, stdin=PASSWORD.encode()))
        failure = run("template", "push", "base", reference, url=url)
        assert failure.code == 2 and "refuses access" in failure.err, "the error of the transfer"
        assert run("template", "push", "base", reference, "--registry-username", USER, url=url).code == 2
        signer = check_success(run("snapshot", "signer", url=url)).out.strip()
    url = gateway.unix_url
    assert run("template", "pull", reference, "--name", "foreign", url=url).code == 1
    check_success(run("template", "pull", reference, "--name", "foreign", "--trust", signer, url=url))
