"""Test, with generated plays, that a plan session predicts whole plays: each task sees what earlier ones would do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.hosts.base import Log, Room, Usage
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Sandbox, Snapshot
from tests.api.memory_gateway import MemoryGateway
from tests.api.memory_host import MemoryHost
from tests.collection.plays import Node, PlayChecks, PlayTask, make_plays, make_tasks, read_play_count, run_task

tasks = make_tasks(with_templates=True, with_files=True)


@pytest.fixture(autouse=True)
def _no_poll_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template, "POLL_SECONDS", (0, 0))


class BusyHost(MemoryHost):
    """A host whose guests write all the time, or are idle if ``guests_write`` is False."""

    guests_write = True

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        return self.guests_write or await super().has_diverged(sandbox, head)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("plays"), BusyHost(), log={"level": "error"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


def test_a_plan_applies_retention_rules(gateway: MemoryGateway) -> None:
    gateway.clear()

    def capture(*names: str, sandbox: str = "b") -> PlayTask:
        return "snapshot", {"name": list(names), "sandbox": [sandbox], "retention": {"keep_last": 1}}

    fork: PlayTask = ("fork", {"snapshot": "first", "names": ["user"]})
    history = [capture("first")]
    play: list[PlayTask] = [
        fork,
        capture("second"),
        fork,  # is unchanged, because a snapshot in use is kept
        ("sandbox", {"name": ["user"], "state": "absent"}),
        fork,  # fails, because the snapshot was removed with its last user
        capture("third", "fourth"),
        ("snapshot_info", {}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, history, play)
    assert checks.tasks == {"changed": 4, "ok": 2, "failed": 1}


def test_a_plan_marks_what_depends_on_whether_a_sandbox_has_diverged(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, log={"level": "error"})
    play: list[PlayTask] = [
        ("snapshot", {"name": ["n"], "sandbox": ["b"]}),
        ("rollback", {"sandbox": ["b"], "snapshot": "n", "backup_name": ["backup"]}),
        ("snapshot", {"name": ["n2"], "sandbox": ["b"], "when_changed": True}),
        ("fork", {"snapshot": "n2", "names": ["z"]}),
        ("sandbox", {"name": ["z"], "metadata": {"k": "1"}}),
        ("sandbox", {"name": ["n2"], "template": "base"}),
        ("rollback", {"sandbox": ["b"], "snapshot": "n", "unless_clean": False}),
        ("sandbox", {"name": ["a"], "metadata": {"k": "1"}}),
    ]
    try:
        gateway.build_template("base")
        checks = PlayChecks()
        entries = checks.check(gateway.unix_url, [], play)
    finally:
        gateway.end()
    assert checks.partial_count == 1, "the guests are idle, so the run does not roll back"
    checks.partial_count = 3
    with pytest.raises(AssertionError, match="3 in part"):
        checks.check_shares()
    condition = "only if sandbox b has diverged by then"
    on_snapshot, on_fork = (f"depends on {name}, which the run might not create" for name in ("n2", "z"))
    first_costs = "the pause and the size of the gateway's first snapshots"
    assert [[phrase for phrase in entry["unknown"] if phrase != first_costs] for entry in entries] == [
        [],
        [condition],
        [condition],
        [on_snapshot],
        [on_fork],
        [on_snapshot],
        [],
        [],
    ]


def test_a_plan_knows_that_a_rollback_removes_the_clone_of_a_volume(gateway: MemoryGateway) -> None:
    gateway.clear()
    clone = {"name": "data", "path": "/srv/data", "clone": True}
    play: list[PlayTask] = [
        ("fork", {"snapshot": "s", "names": ["user"], "volumes": [clone]}),
        ("rollback", {"sandbox": ["user"], "snapshot": "s", "backup_name": ["backup"]}),
    ]
    PlayChecks().check(gateway.unix_url, [], play)


class SlowBuildHost(BusyHost):
    """A host on which the builds of templates wait until ``may_build`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_build = threading.Event()

    async def build_base(self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log) -> str:
        await asyncio.to_thread(self.may_build.wait, 60)
        return await super().build_base(base, recipe, source_digest, log)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_plan_contains_the_templates_that_others_are_building(tmp_path: Path, replaces: bool) -> None:
    host, checks = SlowBuildHost(), PlayChecks()
    gateway = MemoryGateway(tmp_path, host, log={"level": "error"})
    recipe = {"packages": ["nginx", "curl"]}
    play: list[PlayTask] = [
        ("sandbox", {"name": ["w"], "template": "web"}),
        ("template", {"name": ["web"], **recipe}),
        ("template_info", {}),
    ]

    def finish_build() -> None:
        host.may_build.set()
        gateway.build_template("web", **recipe)  # waits for the build

    try:
        host.may_build.set()
        gateway.build_template("base")
        if replaces:
            gateway.build_template("web")
        host.may_build.clear()
        with gateway.client() as client:
            client.post("/templates", json={"name": "web", "description": "a server", **recipe}).raise_for_status()
        checks.check(gateway.unix_url, [], play, before_run=finish_build)
    finally:
        host.may_build.set()
        gateway.end()
    assert checks.tasks == {"changed": 1, "ok": 2}


FORKS: PlayTask = ("fork", {"snapshot": "s", "count": 2, "name_prefix": "y"})
FORK: PlayTask = ("fork", {"snapshot": "s", "names": ["z"]})
WITHOUT_X: PlayTask = ("sandbox", {"name": ["x"], "state": "absent"})


class FullHost(BusyHost):
    """A host with room for ``capacity`` machines, each of which uses as much memory as the gateway assumes."""

    capacity = 100

    async def room(self) -> Room:
        free_count = self.capacity - len(self.machines)
        return dataclasses.replace(self.available_room, memory_free=free_count * MACHINE_START_BYTES)

    async def usage(self, sandbox: Sandbox) -> Usage:
        return Usage(disk_bytes=1 << 20, memory_bytes=MACHINE_START_BYTES)


@pytest.mark.parametrize(
    ("capacity", "play", "outcomes"),
    [
        (4, [WITHOUT_X, FORKS], {"changed": 1, "failed": 1}),
        (5, [WITHOUT_X, FORKS], {"changed": 2}),
        (5, [("sandbox", {"name": ["x"], "state": "paused"}), FORKS], {"changed": 2}),
        (5, [WITHOUT_X, FORKS, FORK], {"changed": 2, "failed": 1}),
        (6, [FORKS, FORK, WITHOUT_X, FORK], {"changed": 3, "failed": 1}),
        (6, [FORKS, ("fork", {**FORKS[1], "count": 1, "exact": True}), FORK], {"changed": 3}),
        (4, [("rollback", {"sandbox": ["x"], "snapshot": "s"}), FORK], {"changed": 1, "failed": 1}),
    ],
)
def test_a_plan_counts_the_room_for_machines(
    tmp_path: Path, capacity: int, play: list[PlayTask], outcomes: dict[str, int]
) -> None:
    host, checks = FullHost(), PlayChecks()
    host.capacity = capacity  # of which one remains free, as the reserve
    gateway = MemoryGateway(tmp_path, host, log={"level": "error"}, limits={"free_memory_mb": 64})
    try:
        gateway.build_template("base")
        checks.check(gateway.unix_url, [("sandbox", {"name": ["x"], "template": "base"})], play)
    finally:
        gateway.end()
    assert checks.tasks == outcomes


@pytest.fixture(scope="module")
def snapshot_file(gateway: MemoryGateway, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported snapshot that no longer exists in the gateway."""
    path = tmp_path_factory.mktemp("files") / "snapshot"
    client = Client(gateway.unix_url)
    try:
        run_task(client, "sandbox", {"name": ["source"], "template": "base"})
        options = {"name": ["taken"], "sandbox": ["source"], "export_to": str(path)}
        assert run_task(client, "snapshot", options)["changed"]
    finally:
        client.close()
    gateway.clear()
    return path


def test_a_plan_predicts_exports_and_imports(gateway: MemoryGateway, snapshot_file: Path) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["t"], "sandbox": ["b"], "export_to": "new"}),
        ("snapshot", {"name": ["s"], "export_to": "new"}),  # fails, because the snapshot includes a volume
        ("snapshot", {"name": ["u"], "import_from": "existing"}),
        ("snapshot", {"name": ["u"], "import_from": "existing"}),
        ("fork", {"snapshot": "u", "names": ["c"]}),
        ("snapshot", {"name": ["u"], "export_to": "new"}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, [], play, existing_file=snapshot_file)
    assert checks.tasks == {"changed": 4, "ok": 1, "failed": 1} and checks.partial_count == 0


def test_a_plan_does_not_know_the_files_that_it_exports(gateway: MemoryGateway, snapshot_file: Path) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["t"], "sandbox": ["b"], "export_to": "new"}),
        ("snapshot", {"name": ["u"], "import_from": "exported"}),
    ]
    checks = PlayChecks()
    entries = checks.check(gateway.unix_url, [], play, existing_file=snapshot_file)
    assert [phrase.partition(" writes ")[0] for phrase in entries[1]["unknown"]] == [
        "only if no earlier task of the run"
    ]
    assert checks.partial_count == 1, "the run finds the file, but its import is not in the plan"


def test_a_plan_predicts_a_whole_play(
    gateway: MemoryGateway, snapshot_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = PlayChecks()

    @settings(max_examples=read_play_count(20, long_run_count=2000), deadline=None)
    @given(st.lists(tasks, max_size=4), make_plays(tasks), st.booleans())
    def check(history: list[PlayTask], play: list[Node], writes: bool) -> None:
        gateway.clear()
        gateway.host.guests_write = writes  # type: ignore[attr-defined]
        with gateway.client() as client:
            if client.get("/templates/base").status_code == 404:  # an earlier play removed it
                gateway.build_template("base")
        checks.check(gateway.unix_url, history, play, existing_file=snapshot_file)

    check()
    with capsys.disabled():
        print(f"\n{checks}")
    checks.check_shares()
