"""Fixtures that several test folders share: an XFS file system, real gateways, and a template.

Also checks that a test run leaves nothing behind on the machine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import secrets
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests import leaks
from tests.support import jail_world, session, templates
from tests.support.gateway import PROGRAM, TEMPLATE, Gateway, build_template
from tests.support.jail_world import JailZfsWorld
from tests.support.memory_gateway import MemoryGateway
from tests.support.worlds import KvmXfsWorld
from tests.support.xfs import LoopXfs

# On a busy machine, generating an example can take a second.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Fast tests run first. Folders of one group share expensive fixtures.
_GROUPS = {
    "quick": ("unit", "agent", "api", "cli", "fleet"),
    "zfs": ("freebsd_shim", "jail_zfs", "zfs_core", "zfs_core_cli"),
    "gateway": ("gateway", "collection", "molecule"),
    "engine": ("engine",),
    "sdk": ("sdk",),
    "security": ("security",),
    "kvm_xfs": ("kvm_xfs",),
    "roles": ("roles",),
}
_FOLDERS = [folder for folders in _GROUPS.values() for folder in folders]
_SLOW_FILES = ("test_fleet.py", "test_gateway.py", "test_gateway_systemd.py", "test_kvm_xfs_host.py")
"""The slow test files in the roles folder, which is scheduled last and file by file. Within it, they run first."""

_SEED_VARIABLE = "GROVE_TEST_SEED"
"""The environment variable for the order of tests in a folder: "random", a printed seed, or 0 for source order."""

_inventory_before_tests: leaks.Inventory | None = None


def pytest_configure(config: pytest.Config) -> None:
    session.link_collection()
    if os.environ.setdefault(_SEED_VARIABLE, "0") == "random":
        os.environ[_SEED_VARIABLE] = str(1 + secrets.randbelow(999_999))  # The lanes start later and inherit it.


def pytest_report_header() -> str:
    return f"order of tests: {_SEED_VARIABLE}={os.environ[_SEED_VARIABLE]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _print_durations(terminalreporter)
    if os.environ[_SEED_VARIABLE] != "0":
        terminalreporter.write_line(
            f"To run the tests in this order again: {_SEED_VARIABLE}={os.environ[_SEED_VARIABLE]}"
        )


def _print_durations(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the tests of each folder took. Lanes run in parallel, so the sum is longer than the run."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[_find_folder(report.nodeid)] += report.duration
            tests[_find_folder(report.nodeid)] += report.when == "call"
    terminalreporter.section("time per folder")
    for folder, duration in seconds.most_common():
        terminalreporter.write_line(f"{duration / 60:6.1f} min  tests/{folder}: {tests[folder]} tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Shuffle the tests if a seed is set, let pytest group them by expensive fixtures, and then sort them by folder."""
    if (seed := os.environ[_SEED_VARIABLE]) != "0":
        items.sort(key=functools.partial(_make_random_sort_key, seed))
    yield
    items.sort(key=lambda item: (_FOLDERS.index(_find_folder(item.nodeid)), item.path.name not in _SLOW_FILES))


def _make_random_sort_key(seed: str, item: pytest.Item) -> tuple[bytes, bytes]:
    """Return a key that sorts files, and the tests in each file, randomly. Tests marked in_order keep their order."""
    order_marker = item.get_closest_marker("in_order")
    return _make_seeded_key(seed, item.nodeid.partition("::")[0]), b"" if order_marker else _make_seeded_key(
        seed, item.nodeid
    )


def _make_seeded_key(seed: str, name: str) -> bytes:
    """Return a key that depends only on the arguments, so that any subset of the tests keeps its relative order."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return LaneScheduler(config, log)


class LaneScheduler(LoadScopeScheduling):  # type: ignore[misc]
    """The scheduler for ``pytest -n 2``. A lane that finishes a group of tests takes the next group."""

    def _split_scope(self, nodeid: str) -> str:
        # zfs-fuse has one daemon on the machine: all tests that create jails are one group, whatever their folder. (The
        # collection's tests only mention jails.)
        if "jail" in nodeid and _find_folder(nodeid) != "collection":
            return "zfs"
        # These files share nothing; small groups at the end keep the lanes equally busy.
        if _find_folder(nodeid) == "roles" or "systemd" in nodeid:
            return nodeid.partition("::")[0]
        return next(group for group, folders in _GROUPS.items() if _find_folder(nodeid) in folders)


def _find_folder(nodeid: str) -> str:
    return nodeid.split("/")[1]


def pytest_sessionstart(session: pytest.Session) -> None:
    global _inventory_before_tests
    if leaks.should_check(session.config):
        leaks.sweep_earlier_runs()
        _inventory_before_tests = leaks.take_inventory()


@pytest.fixture(scope="session", autouse=True)
def _record_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    leaks.record_temporary_directory(tmp_path_factory.getbasetemp())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _inventory_before_tests is None:
        return
    leftovers = leaks.wait_for_cleanup(_inventory_before_tests)
    if leftovers:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.section("left behind by the tests", sep="=", red=True)
        for line in leftovers:
            reporter.line(line)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The backend that runs asynchronous tests and fixtures. Each test has its own event loop."""
    return "asyncio"


@pytest.fixture(scope="session")
def requires_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("this test creates mounts and machines. Run it as root, for example with ./dev test.")


@pytest.fixture(scope="session")
def xfs_root(requires_root: None) -> Iterator[Path]:
    """The mount point of an XFS file system with ``reflink=1`` (12 GiB, sparse) that exists during this run."""
    with LoopXfs(session.get_run_dir() / "state.xfs", session.get_run_dir() / "xfs", size_mb=12 * 1024) as xfs:
        yield xfs.mount_point


@pytest.fixture(scope="session")
def kvm_xfs_world(xfs_root: Path) -> KvmXfsWorld:
    """A KVM/XFS host for engines that run in the test process."""
    return KvmXfsWorld(xfs_root, session.get_cache_dir())


@pytest.fixture(scope="session")
def jail_zfs_world(requires_root: None) -> Iterator[JailZfsWorld]:
    """A jail/ZFS host, emulated on Linux, for engines that run in the test process."""
    with jail_world.jail_zfs_world() as world:
        yield world


@pytest.fixture(scope="session")
def make_gateway(xfs_root: Path) -> Iterator[Callable[..., Gateway]]:
    """A function that starts gateways without a template. They run until the end of the test run."""
    yield from _make_gateway_factory(xfs_root, None)


@pytest.fixture(scope="session")
def shared_gateway(xfs_root: Path) -> Iterator[Gateway]:
    """A gateway for the whole test run. Tests that stop a gateway or fill its disk use ``gateway`` instead."""
    for start_gateway in _make_gateway_factory(xfs_root, lambda root: templates.copy_cached_template(root, TEMPLATE)):
        yield start_gateway()


@pytest.fixture(scope="session")
def template(shared_gateway: Gateway) -> str:
    """The name of a template with Debian, python3 and 256 MiB of memory, built once per run in ``shared_gateway``."""
    build_template(shared_gateway, TEMPLATE)
    templates.add_to_cache(shared_gateway.state_root)
    return TEMPLATE


@pytest.fixture
def gateway(xfs_root: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gateway]]:
    """A function that starts new gateways with the template: ``gateway({section: {key: value}})``.

    With ``seed_template=False``, a gateway starts without the template. The template's directory is a reflink copy from
    ``shared_gateway``. A copy suffices, because gateways keep their state only in files.
    """

    yield from _make_gateway_factory(xfs_root, lambda root: _copy_templates(request, root))


@pytest.fixture(scope="session")
def seeded_gateways(xfs_root: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gateway]]:
    """Like ``gateway``, but the gateways run until the end of the test run."""
    yield from _make_gateway_factory(xfs_root, lambda root: _copy_templates(request, root))


def _copy_templates(request: pytest.FixtureRequest, root: Path) -> None:
    request.getfixturevalue("template")
    source_gateway: Gateway = request.getfixturevalue("shared_gateway")
    shutil.rmtree(root / "templates", ignore_errors=True)
    subprocess.run(
        ["cp", "-a", "--reflink=always", str(source_gateway.state_root / "templates"), str(root)],
        check=True,
        timeout=60,
    )


def _make_gateway_factory(xfs_root: Path, seed: Callable[[Path], None] | None) -> Iterator[Callable[..., Gateway]]:
    gateways: list[Gateway] = []

    def start_gateway(
        config: dict[str, dict[str, object]] | None = None,
        *,
        seed_template: bool = True,
        program: Sequence[str] = PROGRAM,
    ) -> Gateway:
        instance = Gateway(xfs_root, config or {}, program=program)
        if seed is not None and seed_template:
            seed(instance.state_root)
        gateways.append(instance)
        instance.start()
        return instance

    yield start_gateway
    problems = [problem for instance in reversed(gateways) for problem in instance.end()]
    assert not problems, "; ".join(problems)


# -- the HTTP API with an in-memory host -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _get_gateway_of_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MemoryGateway]]:
    gateways: dict[str, MemoryGateway] = {}

    def start_gateway(folder: str) -> MemoryGateway:
        if folder not in gateways:
            gateways[folder] = MemoryGateway(tmp_path_factory.mktemp("memory"))
            gateways[folder].build_template("base", packages=["python3"], description="the template of the tests")
        return gateways[folder]

    try:
        yield start_gateway
    finally:
        for gateway in gateways.values():
            gateway.end()


@pytest.fixture(scope="module")
def _memory_gateway(
    _get_gateway_of_folder: Callable[[str], MemoryGateway], request: pytest.FixtureRequest
) -> MemoryGateway:
    """One gateway for each test folder. Tests may change its template `base`."""
    return _get_gateway_of_folder(_find_folder(request.node.nodeid))


@pytest.fixture
def memory_gateway(_memory_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    """A gateway with an in-memory host. Initially, it has only the template `base`."""
    yield _memory_gateway
    _memory_gateway.clear()


@pytest.fixture
def api(memory_gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client for the gateway's HTTP API, with administrator rights."""
    with memory_gateway.client() as client:
        yield client


@pytest.fixture
def keyless_client(memory_gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client that connects over TCP and sends no key."""
    with memory_gateway.client("") as client:
        yield client


@pytest.fixture
def sandbox(api: httpx.Client) -> dict[str, Any]:
    """A new sandbox named `one`, as returned by the API."""
    response = api.post("/sandboxes", json={"templateID": "base", "name": "one"})
    assert response.status_code == 201, response.text
    sandbox: dict[str, Any] = response.json()
    return sandbox
