"""Fixtures that several folders of tests share: an XFS with reflinks, real gateways, a template; and the check that a
test run leaves nothing behind on the machine.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import leaks
from tests.api.memory_gateway import MemoryGateway
from tests.support import jail_world, session, templates
from tests.support.gateway import TEMPLATE, Gateway, build_template
from tests.support.jail_world import JailZfsWorld
from tests.support.worlds import KvmXfsWorld
from tests.support.xfs import LoopXfs

# Fast tests run first. Folders of one group share expensive fixtures.
_GROUPS = {
    "quick": ("unit", "agent", "api", "cli"),
    "zfs": ("freebsd_shim", "jail_zfs"),
    "gateway": ("gateway", "collection", "molecule"),
    "engine": ("engine",),
    "sdk": ("sdk",),
    "security": ("security",),
    "kvm_xfs": ("kvm_xfs",),
    "roles": ("roles",),
}
_FOLDERS = [folder for folders in _GROUPS.values() for folder in folders]
_LONG = ("test_gateway.py", "test_gateway_systemd.py", "test_kvm_xfs_host.py")
"""Files of the folder roles, which is distributed by file and last. They run first, so that no lane ends late."""

_SEED = "GROVE_TEST_SEED"
"""Environment variable: the order of tests in a folder: "random", a seed that was printed, or 0 for source order."""

_before: leaks.Inventory | None = None


def pytest_configure(config: pytest.Config) -> None:
    session.link_collection()
    if os.environ.setdefault(_SEED, "0") == "random":
        os.environ[_SEED] = str(1 + secrets.randbelow(999_999))  # the lanes, which start later, inherit it


def pytest_report_header() -> str:
    return f"order of tests: {_SEED}={os.environ[_SEED]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ[_SEED] != "0":
        terminalreporter.write_line(f"To run them in this order again: {_SEED}={os.environ[_SEED]}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Wraps pytest's own sorting, which groups tests by the parameters of expensive fixtures."""
    if (seed := os.environ[_SEED]) != "0":
        items.sort(key=lambda item: (_random_key(seed, item.nodeid.partition("::")[0]), _random_key(seed, item.nodeid)))
    yield
    items.sort(key=lambda item: (_FOLDERS.index(_folder(item.nodeid)), item.path.name not in _LONG))


def _random_key(seed: str, name: str) -> bytes:
    """The key depends only on the arguments: a subset of the tests runs in the same relative order."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return Lanes(config, log)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """``pytest -n 2``: a lane that has finished a group of tests takes the next."""

    def _split_scope(self, nodeid: str) -> str:
        # zfs-fuse has one daemon on the machine: all tests that create jails are one group, whatever their folder. (The
        # collection's tests only mention jails.)
        if "jail" in nodeid and _folder(nodeid) != "collection":
            return "zfs"
        # These files share nothing; small groups at the end keep the lanes equally busy.
        if _folder(nodeid) == "roles" or "systemd" in nodeid:
            return nodeid.partition("::")[0]
        return next(group for group, folders in _GROUPS.items() if _folder(nodeid) in folders)


def _folder(nodeid: str) -> str:
    return nodeid.split("/")[1]


def pytest_sessionstart(session: pytest.Session) -> None:
    global _before
    if leaks.watching(session.config):
        leaks.sweep_earlier_runs()
        _before = leaks.take_inventory()


@pytest.fixture(scope="session", autouse=True)
def _remembered(tmp_path_factory: pytest.TempPathFactory) -> None:
    leaks.remember(tmp_path_factory.getbasetemp())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _before is None:
        return
    left = leaks.wait_for_leftovers(_before)
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.section("left behind by the tests", sep="=", red=True)
        for line in left:
            reporter.line(line)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """For tests and fixtures that are coroutines: each test runs them in an event loop of its own."""
    return "asyncio"


@pytest.fixture(scope="session")
def need_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("this test makes mounts and machines: run it as root (./dev test does)")


@pytest.fixture(scope="session")
def xfs_root(need_root: None) -> Iterator[Path]:
    """The mount point of an XFS with ``reflink=1`` (12 GiB, sparse) that lasts as long as this run."""
    with LoopXfs(session.run_dir() / "state.xfs", session.run_dir() / "xfs", size_mb=12 * 1024) as xfs:
        yield xfs.mount_point


@pytest.fixture(scope="session")
def kvm_xfs_world(xfs_root: Path) -> KvmXfsWorld:
    """Engines inside the test's process on a KVM/XFS host."""
    return KvmXfsWorld(xfs_root, session.cache_dir())


@pytest.fixture(scope="session")
def jail_zfs_world(need_root: None) -> Iterator[JailZfsWorld]:
    """Engines inside the test's process on a jail/ZFS host, with FreeBSD's commands on Linux."""
    with jail_world.jail_zfs_world() as made:
        yield made


@pytest.fixture(scope="session")
def make_gateway(xfs_root: Path) -> Iterator[Callable[..., Gateway]]:
    """Start gateways that live as long as the run (most tests use ``gateway`` instead)."""
    yield from _gateway_factory(xfs_root, None)


@pytest.fixture(scope="session")
def shared_gateway(xfs_root: Path) -> Iterator[Gateway]:
    """One gateway for the whole run. Tests that stop it or fill it use ``gateway`` instead."""
    for start in _gateway_factory(xfs_root, lambda root: templates.copy_cached(root, TEMPLATE)):
        yield start()


@pytest.fixture(scope="session")
def template(shared_gateway: Gateway) -> str:
    """The name of a template of ``shared_gateway``: Debian, python3, 256 MiB; built once for the run."""
    build_template(shared_gateway, TEMPLATE)
    templates.add_to_cache(shared_gateway.state_root)
    return TEMPLATE


@pytest.fixture
def gateway(xfs_root: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gateway]]:
    """``gateway({section: {key: value}})`` starts a fresh gateway with the template, unless ``seed_template=False``.

    The template's directory is a reflink copy of the shared one's: gateways keep their state only in the file system.
    """

    yield from _gateway_factory(xfs_root, lambda root: _copy_templates(request, root))


@pytest.fixture(scope="session")
def seeded_gateways(xfs_root: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gateway]]:
    """Like ``gateway``, but the gateways live as long as the run."""
    yield from _gateway_factory(xfs_root, lambda root: _copy_templates(request, root))


def _copy_templates(request: pytest.FixtureRequest, root: Path) -> None:
    request.getfixturevalue("template")
    shared: Gateway = request.getfixturevalue("shared_gateway")
    shutil.rmtree(root / "templates", ignore_errors=True)
    subprocess.run(
        ["cp", "-a", "--reflink=always", str(shared.state_root / "templates"), str(root)], check=True, timeout=60
    )


def _gateway_factory(xfs_root: Path, seed: Callable[[Path], None] | None) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []

    def start(config: dict[str, dict[str, object]] | None = None, *, seed_template: bool = True) -> Gateway:
        instance = Gateway(xfs_root, config or {})
        if seed is not None and seed_template:
            seed(instance.state_root)
        made.append(instance)
        instance.start()
        return instance

    yield start
    problems = [problem for instance in reversed(made) for problem in instance.end()]
    assert not problems, "; ".join(problems)


# -- the HTTP API over a host in memory --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _gateway_by_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MemoryGateway]]:
    made: dict[str, MemoryGateway] = {}

    def start(folder: str) -> MemoryGateway:
        if folder not in made:
            made[folder] = MemoryGateway(tmp_path_factory.mktemp("memory"))
            made[folder].build_template("base", packages=["python3"], description="the template of the tests")
        return made[folder]

    try:
        yield start
    finally:
        for gateway in made.values():
            gateway.end()


@pytest.fixture(scope="module")
def _memory_gateway(
    _gateway_by_folder: Callable[[str], MemoryGateway], request: pytest.FixtureRequest
) -> MemoryGateway:
    """One gateway for each folder of tests, which may change the template `base`."""
    return _gateway_by_folder(_folder(request.node.nodeid))


@pytest.fixture
def memory_gateway(_memory_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    """A gateway over a host in memory, with the template `base` and nothing else."""
    yield _memory_gateway
    _memory_gateway.clear()


@pytest.fixture
def api(memory_gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client of the gateway's HTTP API with administrator rights."""
    with memory_gateway.client() as client:
        yield client


@pytest.fixture
def keyless_client(memory_gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client that connects over TCP and sends no key."""
    with memory_gateway.client("") as client:
        yield client


@pytest.fixture
def sandbox(api: httpx.Client) -> dict[str, Any]:
    """A sandbox named `one`, as the API returned it."""
    answer = api.post("/sandboxes", json={"templateID": "base", "name": "one"})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made
