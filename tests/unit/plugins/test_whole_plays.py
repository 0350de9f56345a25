"""Test, with generated plays, that a plan session predicts whole plays: each task sees what earlier ones would do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_table
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.engine.plans.host import PlannedHost
from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.errors import Unsupported
from sandbox_gateway.hosts.base import Log, Room, Usage
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Sandbox, Snapshot
from tests.collection.plays import (
    BY_ID,
    Node,
    PlayChecks,
    PlayTask,
    is_condition,
    make_entries,
    make_plays,
    make_tasks,
    read_play_count,
    run_task,
)
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemoryHost

tasks = make_tasks(with_templates=True, with_files=True)
with_and_without_plan = pytest.mark.parametrize(
    "has_approved_plan", [False, True], ids=["without the plan", "with the plan"]
)


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


@with_and_without_plan
def test_a_plan_applies_retention_rules(gateway: MemoryGateway, has_approved_plan: bool) -> None:
    gateway.clear()

    def make_capture(*names: str, sandbox: str = "b") -> PlayTask:
        return "snapshot", {"name": list(names), "sandbox": [sandbox], "retention": {"keep_last": 1}}

    fork: PlayTask = ("fork", {"snapshot": "first", "names": ["user"]})
    history = [make_capture("first")]
    play: list[PlayTask] = [
        fork,
        make_capture("second"),
        fork,  # This changes nothing, because a snapshot in use is kept.
        ("sandbox", {"name": ["user"], "state": "absent"}),
        fork,  # This fails, because the snapshot was removed once it was unused.
        make_capture("third", "fourth"),
        ("snapshot_info", {}),
    ]
    checks = PlayChecks()
    entries = checks.check(gateway.unix_url, history, play, has_approved_plan=has_approved_plan)
    assert checks.tasks == {"changed": 4, "ok": 2, "failed": 1}
    signs = [
        [_plan_table.get_sign(action["verb"], change) + change["name"] for change in action["changes"]]
        for entry in (entries[1], entries[5])
        for action in entry["actions"]
    ]
    assert signs == [["+second"], ["+third", "-second"], ["+fourth", "-third"]], "another task uses the first snapshot"


@with_and_without_plan
def test_a_plan_marks_what_depends_on_whether_a_sandbox_has_diverged(tmp_path: Path, has_approved_plan: bool) -> None:
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
        entries = checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)
    finally:
        gateway.end()
    assert checks.partial_count == 1, "the guests are idle, so the run does not roll back"
    checks.partial_count = 3
    with pytest.raises(AssertionError, match="3 in part"):
        checks.check_shares()
    condition = "only if sandbox b has diverged by then"
    snapshot_dependency, fork_dependency = (
        f"depends on {name}, which the run might not create" for name in ("n2", "z")
    )
    first_costs = "the pause and the size of the gateway's first snapshots"
    assert [[phrase for phrase in entry["unknown"] if phrase != first_costs] for entry in entries] == [
        [],
        [condition],
        [condition],
        [snapshot_dependency],
        [fork_dependency],
        [snapshot_dependency],
        [],
        [],
    ]


@with_and_without_plan
def test_a_plan_knows_that_a_rollback_removes_the_clone_of_a_volume(
    gateway: MemoryGateway, has_approved_plan: bool
) -> None:
    gateway.clear()
    clone = {"name": "data", "path": "/srv/data", "clone": True}
    play: list[PlayTask] = [
        ("fork", {"snapshot": "s", "names": ["user"], "volumes": [clone]}),
        ("rollback", {"sandbox": ["user"], "snapshot": "s", "backup_name": ["backup"]}),
    ]
    PlayChecks().check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)


@with_and_without_plan
def test_a_plan_predicts_that_an_invalid_environment_is_refused(
    gateway: MemoryGateway, has_approved_plan: bool
) -> None:
    gateway.clear()
    options = {"name": ["c"], "template": "base", "env": {"A=B": "x"}}
    play: list[PlayTask] = [("sandbox", options), ("sandbox", {**options, "state": "paused"})]
    checks = PlayChecks()
    checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)
    assert checks.tasks == {"failed": 2}


class SlowBuildHost(BusyHost):
    """A host on which the builds of templates wait until ``build_event`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.build_event = threading.Event()

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        await asyncio.to_thread(self.build_event.wait, 60)
        return await super().build_base(base, recipe, source_digest, log, login)


@with_and_without_plan
@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_plan_contains_templates_that_another_client_is_building(
    tmp_path: Path, is_replacement: bool, has_approved_plan: bool
) -> None:
    host, checks = SlowBuildHost(), PlayChecks()
    gateway = MemoryGateway(tmp_path, host, log={"level": "error"})
    recipe = {"packages": ["nginx", "curl"]}
    play: list[PlayTask] = [
        ("sandbox", {"name": ["w"], "template": "web"}),
        ("template", {"name": ["web"], **recipe}),
        ("template_info", {}),
    ]

    def finish_build() -> None:
        host.build_event.set()
        gateway.build_template("web", **recipe)  # This waits for the build.

    try:
        host.build_event.set()
        gateway.build_template("base")
        if is_replacement:
            gateway.build_template("web")
        host.build_event.clear()
        with gateway.client() as client:
            client.post("/templates", json={"name": "web", "description": "a server", **recipe}).raise_for_status()
        checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan, before_run=finish_build)
    finally:
        host.build_event.set()
        gateway.end()
    assert checks.tasks == {"changed": 1, "ok": 2}


def test_a_plan_marks_what_depends_on_a_build_that_no_task_waits_for(gateway: MemoryGateway) -> None:
    start: PlayTask = ("template", {"name": ["web"], "packages": ["curl"], "wait_timeout": 0})
    wait: PlayTask = ("template", {"name": ["web"], "packages": ["curl"]})
    box: PlayTask = ("sandbox", {"name": ["w"], "template": "web"})
    capture: PlayTask = ("snapshot", {"name": ["of-w"], "sandbox": ["w"]})
    client = Client(gateway.unix_url)
    for play, notes in (
        (
            [start, box, capture, wait],
            [
                [],
                ["depends on template web, whose build might not have finished by then"],
                ["depends on w, which the run might not create"],
                [],
            ],
        ),
        ([start, wait, box, capture], [[], [], [], []]),
    ):
        gateway.clear()
        planner = Client(gateway.unix_url)
        try:
            assert planner.enter_plan(f"unfinished-builds-{len(notes[1])}-000000")
            results = {str(number): run_task(planner, *task, check=True) for number, task in enumerate(play)}
        finally:
            client.delete(planner.session_path)
            planner.close()
        template = results["0"]["templates"][0]
        assert template["id"].startswith("known-after-apply-") and template["status"] is template["cpus"] is None
        entries = make_entries(results)
        assert [[note for note in each["unknown"] if is_condition(note)] for each in entries] == notes
    client.close()


TWO_FORKS_TASK: PlayTask = ("fork", {"snapshot": "s", "count": 2, "name_prefix": "y"})
FORK_TASK: PlayTask = ("fork", {"snapshot": "s", "names": ["z"]})
BUILD_TASK: PlayTask = ("template", {"name": ["web"], "packages": ["curl"]})
REMOVE_X_TASK: PlayTask = ("sandbox", {"name": ["x"], "state": "absent"})


class FullHost(BusyHost):
    """A host with room for ``capacity`` machines, each of which uses as much memory as the gateway assumes."""

    capacity = 100

    async def measure_room(self) -> Room:
        free_count = self.capacity - len(self.machines)
        return dataclasses.replace(self.available_room, memory_free=free_count * MACHINE_START_BYTES)

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        return Usage(disk_bytes=1 << 20, memory_bytes=MACHINE_START_BYTES)


@pytest.mark.parametrize(
    ("capacity", "play", "outcomes"),
    [
        (4, [REMOVE_X_TASK, TWO_FORKS_TASK], {"changed": 1, "failed": 1}),
        (5, [REMOVE_X_TASK, TWO_FORKS_TASK], {"changed": 2}),
        (5, [("sandbox", {"name": ["x"], "state": "paused"}), TWO_FORKS_TASK], {"changed": 2}),
        (5, [REMOVE_X_TASK, TWO_FORKS_TASK, FORK_TASK], {"changed": 2, "failed": 1}),
        (6, [TWO_FORKS_TASK, FORK_TASK, REMOVE_X_TASK, FORK_TASK], {"changed": 3, "failed": 1}),
        (6, [TWO_FORKS_TASK, ("fork", {**TWO_FORKS_TASK[1], "count": 1, "exact": True}), FORK_TASK], {"changed": 3}),
        (4, [BUILD_TASK, FORK_TASK], {"failed": 2}),
        (5, [BUILD_TASK, FORK_TASK], {"changed": 2}),
        (4, [BUILD_TASK, ("template_info", {}), REMOVE_X_TASK, BUILD_TASK], {"failed": 1, "ok": 1, "changed": 2}),
        (4, [("rollback", {"sandbox": ["x"], "snapshot": "s"}), FORK_TASK], {"changed": 1, "failed": 1}),
    ],
)
@with_and_without_plan
def test_a_plan_counts_the_room_for_machines(
    tmp_path: Path, capacity: int, play: list[PlayTask], outcomes: dict[str, int], has_approved_plan: bool
) -> None:
    host, checks = FullHost(), PlayChecks()
    host.capacity = capacity  # One of these remains free as the reserve.
    gateway = MemoryGateway(tmp_path, host, log={"level": "error"}, limits={"free_memory_mb": 64})
    try:
        gateway.build_template("base")
        history: list[PlayTask] = [("sandbox", {"name": ["x"], "template": "base"})]
        checks.check(gateway.unix_url, history, play, has_approved_plan=has_approved_plan)
    finally:
        gateway.end()
    assert checks.tasks == outcomes


CREATE_Y = {"name": ["y-1", "y-2", "x"], "template": "base", "metadata": {"k": "1"}}
UPDATE_Y: PlayTask = ("sandbox", {"name": ["y-1"], "metadata": {"k": "2"}})


@pytest.mark.parametrize(
    ("capacity", "play", "outcomes", "change_counts"),
    [
        (4, [TWO_FORKS_TASK, REMOVE_X_TASK], {"failed": 1, "changed": 1}, [0, 1]),
        (5, [("sandbox", CREATE_Y), UPDATE_Y], {"failed": 1, "changed": 1}, [1, 1]),
        (5, [("sandbox", {**CREATE_Y, "continue_on_error": True}), UPDATE_Y], {"failed": 1, "changed": 1}, [2, 1]),
    ],
)
def test_a_run_does_not_try_what_the_plan_predicts_to_fail(
    tmp_path: Path, capacity: int, play: list[PlayTask], outcomes: dict[str, int], change_counts: list[int]
) -> None:
    """Other programs free memory between the check-mode run and the run."""
    host, checks = FullHost(), PlayChecks()
    host.capacity = capacity
    gateway = MemoryGateway(tmp_path, host, log={"level": "error"}, limits={"free_memory_mb": 64})

    def free_memory() -> None:
        host.capacity = 100

    try:
        gateway.build_template("base")
        history: list[PlayTask] = [("sandbox", {"name": ["x"], "template": "base"})]
        entries = checks.check(gateway.unix_url, history, play, has_approved_plan=True, before_run=free_memory)
    finally:
        gateway.end()
    assert checks.tasks == outcomes and not checks.partial_count
    counts = [sum(len(action["changes"]) for action in entry["actions"]) for entry in entries]
    assert counts == change_counts, entries


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


@pytest.fixture(scope="module")
def volume_file(gateway: MemoryGateway, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported snapshot of a volume that no longer exists in the gateway."""
    path = tmp_path_factory.mktemp("files") / "volume"
    client = Client(gateway.unix_url)
    try:
        options = {"name": ["source"], "size_mb": 64, "snapshots": ["taken"], "export_to": str(path)}
        assert run_task(client, "volume", options)["changed"]
    finally:
        client.close()
    gateway.clear()
    return path


@with_and_without_plan
def test_a_plan_predicts_a_build_from_a_dockerfile(
    gateway: MemoryGateway, tmp_path: Path, has_approved_plan: bool
) -> None:
    gateway.clear()
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM registry.example/web:1\nCOPY . /srv\nRUN true\n")
    options = {"name": ["web"], "dockerfile": str(dockerfile)}
    play: list[PlayTask] = [
        ("template", options),
        ("sandbox", {"name": ["one"], "template": "web"}),
        ("template", options),
        ("template", {**options, "memory_mb": 512}),
    ]
    entries = PlayChecks().check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)
    verbs = [[action["verb"] for action in entry["actions"]] for entry in entries]
    assert verbs == [["build"], ["create"], [], ["build"]]


@with_and_without_plan
def test_a_plan_predicts_exports_and_imports(
    gateway: MemoryGateway, snapshot_file: Path, volume_file: Path, has_approved_plan: bool
) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["t"], "sandbox": ["b"], "export_to": "new"}),
        ("snapshot", {"name": ["s"], "export_to": "new"}),  # fails, because the snapshot includes a volume
        ("snapshot", {"name": ["u"], "import_from": "existing"}),
        ("snapshot", {"name": ["u"], "import_from": "existing"}),
        ("fork", {"snapshot": "u", "names": ["c"]}),
        ("snapshot", {"name": ["u"], "export_to": "new"}),
        ("snapshot", {"name": ["v"], "import_from": "existing volume"}),  # fails, because the file contains a volume
        ("volume", {"name": ["data"], "snapshots": ["two"], "export_to": "new"}),
        ("volume", {"name": ["copy"], "import_from": "existing volume", "size_mb": 128}),
        ("volume", {"name": ["copy"], "import_from": "existing volume"}),
        ("volume", {"name": ["data"], "import_from": "existing volume"}),  # fails, because it was not imported
        ("sandbox", {"name": ["b"], "volumes": [{"name": "copy", "path": "/srv/copy"}]}),
        ("volume", {"name": ["copy"], "snapshots": ["one"], "export_to": "new"}),
    ]
    checks = PlayChecks()
    checks.check(
        gateway.unix_url,
        [],
        play,
        has_approved_plan=has_approved_plan,
        existing_file=snapshot_file,
        existing_volume_file=volume_file,
    )
    assert checks.tasks == {"changed": 8, "ok": 2, "failed": 3} and checks.partial_count == 0


@pytest.mark.parametrize(
    ("has_approved_plan", "outcomes", "partial_count"),
    [(False, {"changed": 2}, 1), (True, {"changed": 1, "failed": 1}, 0)],
    ids=["without the plan", "with the plan"],
)
def test_a_plan_does_not_know_the_files_that_it_exports(
    gateway: MemoryGateway,
    snapshot_file: Path,
    has_approved_plan: bool,
    outcomes: dict[str, int],
    partial_count: int,
) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["t"], "sandbox": ["b"], "export_to": "new"}),
        ("snapshot", {"name": ["u"], "import_from": "exported"}),
    ]
    checks = PlayChecks()
    entries = checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan, existing_file=snapshot_file)
    assert [phrase.partition(" writes ")[0] for phrase in entries[1]["unknown"]] == [
        "only if no earlier task of the run"
    ]
    assert (checks.tasks, checks.partial_count) == (outcomes, partial_count)


@pytest.mark.parametrize(
    ("has_approved_plan", "outcomes", "partial_count"),
    [(False, {"changed": 2, "failed": 1}, 1), (True, {"changed": 2, "failed": 1}, 1)],
    ids=["without the plan", "with the plan"],
)
def test_a_plan_says_that_an_exported_file_may_not_be_the_imported_one(
    gateway: MemoryGateway,
    snapshot_file: Path,
    has_approved_plan: bool,
    outcomes: dict[str, int],
    partial_count: int,
) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["u"], "import_from": "existing"}),
        ("snapshot", {"name": ["t"], "sandbox": ["b"], "export_to": "new"}),
        ("snapshot", {"name": ["u"], "import_from": "exported"}),
    ]
    checks = PlayChecks()
    entries = checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan, existing_file=snapshot_file)
    assert [phrase.partition(" writes ")[0] for phrase in entries[2]["unknown"]] == [
        "only if an earlier task of the run"
    ]
    assert (checks.tasks, checks.partial_count) == (outcomes, partial_count)


async def refuse(*args: Any, **options: Any) -> None:
    raise Unsupported("only the plan session refuses this")


@pytest.mark.parametrize(
    ("method", "task"),
    [
        ("fork", FORK_TASK),
        ("fork", ("sandbox", {"name": ["c"], "template": "base"})),
        ("capture", ("snapshot", {"name": ["t"], "sandbox": ["b"]})),
        ("grow_volume", ("volume", {"name": ["data"], "size_mb": 128})),
        ("rollback_volume", ("volume", {"name": ["cache"], "rollback_to": "one"})),
    ],
)
def test_a_refusal_that_is_wrongly_predicted_is_found(
    gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch, method: str, task: PlayTask
) -> None:
    gateway.clear()
    monkeypatch.setattr(PlannedHost, method, refuse)
    with pytest.raises(AssertionError, match="only the plan session refuses this"):
        PlayChecks().check(gateway.unix_url, [], [task])


@with_and_without_plan
def test_an_uncertain_failure_can_have_a_different_reason(gateway: MemoryGateway, has_approved_plan: bool) -> None:
    """The exported file does not exist in check mode, and contains a sandbox instead of a volume in the run."""
    gateway.clear()
    play: list[PlayTask] = [
        ("snapshot", {"name": ["t"], "sandbox": ["a"], "export_to": "new"}),
        ("volume", {"name": ["copy"], "import_from": "exported"}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)
    assert checks.tasks == {"changed": 1, "failed": 1}


@with_and_without_plan
@pytest.mark.parametrize("name", ["a", "s"], ids=["taken by a sandbox", "of a captured snapshot"])
def test_an_import_fails_for_its_name_before_its_file(
    gateway: MemoryGateway, name: str, has_approved_plan: bool
) -> None:
    """The exported file does not exist in check mode, and contains a volume instead of a sandbox in the run."""
    gateway.clear()
    history: list[PlayTask] = [("snapshot", {"name": ["s"], "sandbox": ["a"]})]
    play: list[PlayTask] = [
        ("volume", {"name": ["data"], "size_mb": 64, "snapshots": ["one"], "export_to": "new"}),
        ("snapshot", {"name": [name], "import_from": "exported"}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, history, play, has_approved_plan=has_approved_plan)
    assert checks.tasks == {"changed": 1, "failed": 1} and checks.partial_count == 0


@with_and_without_plan
def test_a_sandbox_can_be_named_by_the_id_of_a_removed_one(gateway: MemoryGateway, has_approved_plan: bool) -> None:
    gateway.clear()
    play: list[PlayTask] = [
        ("fork", {"snapshot": "base", "name_prefix": "ci", "count": 2}),
        ("fork", {"snapshot": "base", "names": ["ci-1"], "state": "absent", "exact": True}),
        ("sandbox", {"name": ["ci-2"], "template": "base", BY_ID: True}),
        ("sandbox", {"name": ["ci-3"], "template": "base"}),
    ]
    checks = PlayChecks()
    checks.check(gateway.unix_url, [], play, has_approved_plan=has_approved_plan)
    assert checks.partial_count == 0


@with_and_without_plan
def test_a_plan_predicts_a_whole_play(
    gateway: MemoryGateway, snapshot_file: Path, volume_file: Path, has_approved_plan: bool
) -> None:
    checks = PlayChecks()

    @settings(max_examples=read_play_count(10, long_run_count=1000), deadline=None)
    @given(st.lists(tasks, max_size=4), make_plays(tasks), st.booleans())
    def check_play(history: list[PlayTask], play: list[Node], guests_write: bool) -> None:
        gateway.clear()
        gateway.host.guests_write = guests_write  # type: ignore[attr-defined]
        with gateway.client() as client:
            if client.get("/templates/base").status_code == 404:  # An earlier play removed it.
                gateway.build_template("base")
        checks.check(
            gateway.unix_url,
            history,
            play,
            has_approved_plan=has_approved_plan,
            existing_file=snapshot_file,
            existing_volume_file=volume_file,
        )

    check_play()
    print(checks)
    checks.check_shares()
