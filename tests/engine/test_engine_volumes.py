"""Test that volumes are shared, limited in size, captured with sandboxes, cloned for forks, and protected if in use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed, Conflict, GatewayError, InUse, Invalid, NameTaken, NotFound
from sandbox_gateway.records import Mount, Sandbox, SandboxState, Volume
from tests.support.crash import ScenarioProcess, read_observable_state
from tests.support.live import EngineRunner
from tests.support.samples import mark_slow_except
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World

MB = 1 << 20
MIN_VOLUME_MB = 64
"""The minimum size of a volume in MiB."""
VISIBILITY_TIMEOUT_SECONDS = 60
"""The maximum time in seconds until every sandbox sees the writes of the other sandboxes."""
READ_ONLY_MESSAGES = ("Read-only file system", "Permission denied")
DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")


def create_sandbox(
    runner: EngineRunner, name: str, *mounts: MountSpec, template: str = TEMPLATE, **options: Any
) -> Sandbox:
    return runner.do(runner.engine.forks.create(template, ForkSpec(names=[name], mounts=list(mounts), **options)))


def create_volume(runner: EngineRunner, name: str, **options: Any) -> str:
    return runner.do(runner.engine.volumes.create(name, **{"size_mb": MIN_VOLUME_MB} | options)).name


def get_volume_names_by_path(runner: EngineRunner, ref: str) -> dict[str, str]:
    """Return the names of the volumes that a sandbox mounts, by path."""
    return {mount.path: runner.engine.volumes.get(mount.volume).name for mount in runner.get_sandbox(ref).mounts}


def read_file(runner: EngineRunner, ref: str, path: str) -> str:
    """Return the contents of a file in a sandbox, or an empty string if it does not exist."""
    return runner.shell(ref, f"cat {path} 2>/dev/null || true").strip()


def list_volume_names(runner: EngineRunner) -> set[str]:
    return {each.name for each in runner.engine.volumes.list()}


def start_program(runner: EngineRunner, ref: str, program: str) -> None:
    """Start a Python program in the background of a sandbox, and wait until it has created /run/started."""
    runner.shell(ref, "rm -f /run/started")
    runner.shell(ref, f"python3 -c '{program}' </dev/null >/run/output 2>&1 &")
    wait_until(lambda: runner.shell(ref, "test -e /run/started && echo yes || true").strip() == "yes")


# -- mount paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "",
        "data",
        "/",
        "//data",
        "/data/",
        "/data//x",
        "/data/../etc",
        "/data/.",
        "/with blank",
        "/new\nline",
        "/\x00",
        "/dät",
        "/etc",
        "/usr",
        "/tmp",
        "/var",
        "/root",
        "/home",
        "/proc",
        "/proc/1",
        "/sys/fs",
        "/dev/shm",
        "/run/sandbox",
        f"/{'x' * 255}",
    ],
)
def test_an_invalid_mount_path_is_refused(path: str) -> None:
    with pytest.raises(Invalid, match="a volume cannot be mounted at"):
        check_mount_paths([path])


def test_valid_mount_paths_are_accepted() -> None:
    check_mount_paths(
        ["/data", "/data2", "/mnt/a-b_c.d@e+f:g=h", "/var/lib/x", "/etc/x", "/home/u/..x", "/procx", "/development"]
    )
    check_mount_paths([f"/{'x' * 254}"])


@pytest.mark.parametrize(("path", "other_path"), [("/a", "/a"), ("/a", "/a/b"), ("/a/b/c", "/a"), ("/a/b", "/a/b/c/d")])
def test_overlapping_mounts_are_refused(path: str, other_path: str) -> None:
    with pytest.raises(Invalid, match="overlap"):
        check_mount_paths(["/elsewhere", path, other_path])


def test_a_scan_reports_a_duplicate_name_and_a_mount_of_a_missing_volume() -> None:
    index = Index()
    older_volume = Volume(name="data")
    newer_volume = Volume(name="data", created_at=older_volume.created_at + timedelta(seconds=1))
    mounts = [Mount(volume=older_volume.id, path="/data"), Mount(volume="0" * 12, path="/lost")]
    name_problem, mount_problem = index.load(
        [sandbox := Sandbox(name="box", mounts=mounts)], [], [newer_volume, older_volume]
    )
    assert newer_volume.id in name_problem and "/lost" in mount_problem
    assert index.get_volume("data") is older_volume and index.get_volume(newer_volume.id).name == newer_volume.id
    assert [mount.path for mount in sandbox.mounts] == ["/data", "/lost"], "the volume may be restored"


# -- volumes without sandboxes -----------------------------------------------------------------------------------------


def test_volumes_share_the_namespace_of_sandboxes_and_templates(runner: EngineRunner) -> None:
    assert runner.do(runner.engine.volumes.create("data")).size_mb == 1024
    create_sandbox(runner, "box")
    for name in ("data", "box", TEMPLATE):
        with pytest.raises(NameTaken, match=name):
            create_volume(runner, name)
    with pytest.raises(NameTaken, match="data"):
        create_sandbox(runner, "data")
    with pytest.raises(NotFound, match="nowhere"):
        runner.engine.volumes.get("nowhere")


@pytest.mark.parametrize("size", [-1, 0, 63, (1 << 26) + 1])
def test_an_invalid_size_is_refused(runner: EngineRunner, size: int) -> None:
    with pytest.raises(Invalid, match="MiB"):
        create_volume(runner, "data", size_mb=size)
    assert not runner.engine.volumes.list()


def test_a_volume_never_shrinks(runner: EngineRunner) -> None:
    create_volume(runner, "data", size_mb=96)
    with pytest.raises(Invalid, match="cannot shrink"):
        runner.do(runner.engine.volumes.grow("data", 80))
    assert runner.do(runner.engine.volumes.grow("data", 96)).size_mb == 96


def test_later_writes_do_not_change_a_volume_snapshot(runner: EngineRunner) -> None:
    create_volume(runner, "data", size_mb=96)
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "echo first >/data/file && sync")
    snapshot = runner.do(runner.engine.volumes.create_snapshot("data", "early"))
    with pytest.raises(NameTaken, match="early"):
        runner.do(runner.engine.volumes.create_snapshot("data", "early"))
    runner.shell("box", "echo second >/data/file && sync")
    assert [each.name for each in runner.engine.volumes.list_snapshots("data")] == ["early"]
    for name, source in (("by-name", "data@early"), ("by-id", snapshot.id)):
        assert runner.do(runner.engine.volumes.create(name, from_snapshot=source)).size_mb == 96
        runner.do(runner.engine.attachments.attach("box", MountSpec(name, f"/{name}")))
        assert read_file(runner, "box", f"/{name}/file") == "first"
    assert read_file(runner, "box", "/data/file") == "second"
    with pytest.raises(Invalid, match="less than"):
        runner.do(runner.engine.volumes.create("less", MIN_VOLUME_MB, "data@early"))
    with pytest.raises(NotFound, match="late"):
        runner.do(runner.engine.volumes.create("late", from_snapshot="data@late"))


def test_a_volume_can_be_larger_than_its_snapshot(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    runner.do(runner.engine.volumes.create_snapshot("data", "empty"))
    create_volume(runner, "large", size_mb=160, from_snapshot="data@empty")
    create_sandbox(runner, "box", MountSpec("large", "/data"))
    runner.shell("box", "dd if=/dev/urandom of=/data/fill bs=1M count=100 conv=fsync")


def test_a_volume_rollback_is_refused_while_a_sandbox_can_write_unless_forced(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "writer", MountSpec("data", "/data"))
    runner.shell("writer", "echo before >/data/file && sync")
    runner.do(runner.engine.volumes.create_snapshot("data", "mark"))
    runner.shell("writer", "echo after >/data/file && sync")
    runner.do(runner.engine.volumes.grow("data", 96))
    with pytest.raises(InUse, match=r"1 read-write mount \(writer\)") as refusal:
        runner.do(runner.engine.volumes.rollback("data", "mark"))
    assert refusal.value.blockers == [runner.get_sandbox("writer").id]
    runner.do(runner.engine.sandboxes.pause("writer"))
    with pytest.raises(InUse, match=r"1 read-write mount \(writer\)"):
        runner.do(runner.engine.volumes.rollback("data", "mark"))
    runner.do(runner.engine.sandboxes.delete("writer"))
    create_sandbox(runner, "reader", MountSpec("data", "/data", read_only=True))
    assert read_file(runner, "reader", "/data/file") == "after"
    runner.do(runner.engine.volumes.rollback("data", "mark"))
    wait_until(lambda: read_file(runner, "reader", "/data/file") == "before", VISIBILITY_TIMEOUT_SECONDS)
    runner.do(runner.engine.attachments.attach(create_sandbox(runner, "other").id, MountSpec("data", "/data")))
    runner.shell("other", "echo again >/data/file && sync")
    runner.do(runner.engine.volumes.rollback("data", "mark", force=True))
    wait_until(lambda: read_file(runner, "other", "/data/file") == "before", VISIBILITY_TIMEOUT_SECONDS)
    runner.shell("other", "echo on >/data/more && sync")
    assert runner.engine.volumes.get("data").size_mb == 96


# -- volumes in use ----------------------------------------------------------------------------------------------------


def test_deleting_a_volume_in_use_lists_its_users(runner: EngineRunner) -> None:
    volume = runner.engine.volumes.get(create_volume(runner, "data"))
    create_sandbox(runner, "runs", MountSpec("data", "/data"))
    create_sandbox(runner, "sleeps", MountSpec("data", "/data", read_only=True))
    runner.do(runner.engine.sandboxes.pause("sleeps"))
    snapshot = runner.do(runner.engine.snapshots.create("runs", name="mark", volumes=["data"]))
    volume_snapshot = runner.do(runner.engine.volumes.create_snapshot("data", "own"))
    sandbox_ids = [runner.get_sandbox(name).id for name in ("runs", "sleeps")]
    with pytest.raises(
        InUse, match=r"2 mounts \(runs, sleeps\), 1 sandbox snapshot \(mark\) and 1 snapshot \(own\)"
    ) as refusal:
        runner.do(runner.engine.volumes.delete("data"))
    assert set(refusal.value.blockers) == {*sandbox_ids, snapshot.id, volume_snapshot.id}
    assert {sandbox.name for sandbox, _ in runner.engine.volumes.list_mounts(volume)} == {"runs", "sleeps"}
    runner.do(runner.engine.attachments.detach("sleeps", "data"))
    runner.do(runner.engine.sandboxes.delete("runs"))
    with pytest.raises(InUse, match=r"1 sandbox snapshot \(mark\)") as capture_refusal:
        runner.do(runner.engine.volumes.delete("data", with_snapshots=True))
    assert capture_refusal.value.blockers == [snapshot.id]
    (volume_capture,) = (each for each in runner.engine.volumes.list_snapshots("data") if each.sandbox_snapshot)
    with pytest.raises(InUse, match=r"1 sandbox snapshot \(mark\)"):
        runner.do(runner.engine.volumes.delete_snapshot("data", volume_capture.id))
    runner.do(runner.engine.snapshots.delete("mark"))
    assert [each.name for each in runner.engine.volumes.list_snapshots("data")] == ["own"]
    with pytest.raises(InUse, match=r"1 snapshot \(own\)"):
        runner.do(runner.engine.volumes.delete("data"))
    runner.do(runner.engine.volumes.delete("data", with_snapshots=True))
    assert not runner.engine.volumes.list()


def test_a_volume_is_not_removed_or_rolled_back_during_a_mount(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_volume(runner, "data")
    runner.do(runner.engine.volumes.create_snapshot("data", "mark"))
    engine, identify = runner.engine, runner.engine.agents.identify
    refusals = []

    async def try_changes(*args: Any, **kwargs: Any) -> None:
        for change in (engine.volumes.delete("data", True), engine.volumes.rollback("data", "mark", force=True)):
            with pytest.raises(InUse, match="in use by a running request"):
                await change
            refusals.append(1)
        await identify(*args, **kwargs)

    monkeypatch.setattr(engine.agents, "identify", try_changes)
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    assert len(refusals) == 2


def test_a_mount_waits_for_a_volume_rollback(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "writer", MountSpec("data", "/data"))
    runner.shell("writer", "echo before >/data/file && sync")
    runner.do(runner.engine.volumes.create_snapshot("data", "mark"))
    runner.shell("writer", "echo after >/data/file && sync")
    runner.do(runner.engine.sandboxes.delete("writer"))
    create_sandbox(runner, "late")
    engine, rollback = runner.engine, runner.engine.host.rollback_volume
    attachments: list[asyncio.Future[Any]] = []

    async def roll_back_slowly(*args: Any) -> None:
        attachments.append(asyncio.ensure_future(engine.attachments.attach("late", MountSpec("data", "/data"))))
        await asyncio.sleep(0.3)
        assert not attachments[0].done() and engine.sandboxes.get("late").mounts == []
        await rollback(*args)

    monkeypatch.setattr(engine.host, "rollback_volume", roll_back_slowly)
    runner.do(engine.volumes.rollback("data", "mark"))
    wait_until(lambda: attachments[0].done())
    assert read_file(runner, "late", "/data/file") == "before"


def test_every_volume_change_emits_an_event(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    create_sandbox(runner, "box")

    def record_event(type: str, **data: Any) -> None:
        if type.startswith("volume."):
            events.append((type.removeprefix("volume."), data["volumeID"]))

    monkeypatch.setattr(runner.engine.events, "publish", record_event)
    create_volume(runner, "data")
    runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/data")))
    runner.do(runner.engine.volumes.grow("data", 96))
    runner.do(runner.engine.snapshots.create("box", name="mark", volumes=["data"]))
    create_sandbox(runner, "fork", MountSpec("data", "/data", clone=True), template="mark")
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.do(runner.engine.attachments.detach("box", "data"))
    snapshot = runner.engine.volumes.list_snapshots("data")[0]
    runner.do(runner.engine.volumes.rollback("data", snapshot.id))
    runner.do(runner.engine.snapshots.delete("mark"))
    runner.do(runner.engine.volumes.delete("data"))
    assert events == [
        ("created", "data"),
        ("attached", "data"),
        ("grown", "data"),
        ("captured", "data"),
        ("created", "fork-data"),
        ("deleted", "fork-data"),
        ("detached", "data"),
        ("rolled-back", "data"),
        ("deleted", "data"),
    ]


def test_the_source_of_a_volume_is_deletable_only_if_snapshots_are_independent(
    runner: EngineRunner, world: World
) -> None:
    create_volume(runner, "data")
    runner.do(runner.engine.volumes.create_snapshot("data", "mark"))
    create_volume(runner, "made", from_snapshot="data@mark")
    if world.abilities.independent_snapshots:
        runner.do(runner.engine.volumes.delete_snapshot("data", "mark"))
        runner.do(runner.engine.volumes.delete("data"))
    else:
        for deletion in (
            runner.engine.volumes.delete_snapshot("data", "mark"),
            runner.engine.volumes.delete("data", True),
        ):
            with pytest.raises(InUse, match=r"1 clone \(made\)"):
                runner.do(deletion)
    create_sandbox(runner, "box", MountSpec("made", "/data"))
    runner.shell("box", "echo fine >/data/file")


def test_a_volume_outlives_its_users(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "first", MountSpec("data", "/data"))
    runner.shell("first", "echo kept >/data/file")
    runner.do(runner.engine.sandboxes.delete("first"))
    create_sandbox(runner, "second", MountSpec("data", "/else/where"))
    assert read_file(runner, "second", "/else/where/file") == "kept"


def test_an_open_file_on_a_volume_does_not_block_deleting_the_sandbox(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "cd /data && (exec sleep 1000 >open) </dev/null 2>&1 &")
    started_at = time.monotonic()
    runner.do(runner.engine.sandboxes.delete("box"))
    assert time.monotonic() - started_at < 20
    runner.do(runner.engine.volumes.delete("data"))


# -- attach and detach -------------------------------------------------------------------------------------------------


def test_a_running_sandbox_can_attach_and_detach_a_volume(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_volume(runner, "more")
    create_sandbox(runner, "box")
    runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/data")))
    runner.shell("box", "echo kept >/data/file")
    for spec, error, words in (
        (MountSpec("data", "/other"), Conflict, "already"),
        (MountSpec("more", "/data/below"), Invalid, "overlap"),
        (MountSpec("more", "/etc"), Invalid, "cannot be mounted"),
        (MountSpec("more", "/more", clone=True), Invalid, "clone of a volume cannot be attached to a running sandbox"),
        (MountSpec("nothing", "/more"), NotFound, "nothing"),
    ):
        with pytest.raises(error, match=words):
            runner.do(runner.engine.attachments.attach("box", spec))
    assert get_volume_names_by_path(runner, "box") == {"/data": "data"}
    runner.do(runner.engine.attachments.detach("box", "data"))
    assert read_file(runner, "box", "/data/file") == ""
    with pytest.raises(NotFound, match="data"):
        runner.do(runner.engine.attachments.detach("box", "data"))
    runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/other", read_only=True)))
    assert read_file(runner, "box", "/other/file") == "kept"
    assert get_volume_names_by_path(runner, "box") == {"/other": "data"}


def test_detach_works_without_the_sandboxs_cooperation(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "cd /data && (exec sleep 1000 >open) </dev/null 2>&1 &")
    runner.do(runner.engine.attachments.detach("box", "data"))
    assert read_file(runner, "box", "/data/open") == ""
    runner.do(runner.engine.volumes.delete("data"))
    assert runner.shell("box", "echo alive").strip() == "alive"


def test_a_paused_sandbox_can_detach_but_not_attach(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_volume(runner, "more")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "echo kept >/data/file")
    runner.do(runner.engine.sandboxes.pause("box"))
    with pytest.raises(Conflict, match="resume it first"):
        runner.do(runner.engine.attachments.attach("box", MountSpec("more", "/more")))
    runner.do(runner.engine.attachments.detach("box", "data"))
    runner.do(runner.engine.volumes.delete("data"))
    runner.do(runner.engine.sandboxes.resume("box"))
    assert read_file(runner, "box", "/data/file") == ""
    runner.do(runner.engine.attachments.attach("box", MountSpec("more", "/data")))
    runner.shell("box", "echo new >/data/file")


def test_a_failed_attach_leaves_nothing_behind(
    runner: EngineRunner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "box")
    runner.shell("box", "touch /root/file")
    traces_before = world.read_traces(runner.config)
    with pytest.raises(GatewayError):
        runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/root/file/below")))
    assert runner.get_sandbox("box").mounts == []
    wait_until(lambda: world.read_traces(runner.config) == traces_before)

    async def fail(*args: Any, **kwargs: Any) -> None:
        raise BackendFailed("forced")

    for step, owner in (("mount_volumes", runner.engine.agents), ("attach", runner.engine.host)):
        monkeypatch.setattr(owner, step, fail)
        with pytest.raises(BackendFailed, match="forced"):
            runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/data")))
        monkeypatch.undo()
        assert runner.get_sandbox("box").mounts == []
        wait_until(lambda: world.read_traces(runner.config) == traces_before)
    runner.do(runner.engine.attachments.attach("box", MountSpec("data", "/data")))
    runner.shell("box", "echo works >/data/file")


# -- forks, rollback, promote, pause -----------------------------------------------------------------------------------


def test_a_fork_inherits_mounts_unless_other_mounts_are_requested(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_volume(runner, "other")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    runner.shell("source", "echo shared >/data/file && sync")
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["same"])))
    create_sandbox(runner, "none", template="mark")
    create_sandbox(runner, "else", MountSpec("other", "/data"), template="mark")
    assert [get_volume_names_by_path(runner, name) for name in ("same", "none", "else")] == [
        {"/data": "data"},
        {},
        {"/data": "other"},
    ]
    assert [read_file(runner, name, "/data/file") for name in ("same", "none", "else")] == ["shared", "", ""]
    runner.shell("else", "echo mine >/data/file && sync")
    assert read_file(runner, "source", "/data/file") == "shared"
    for name in ("source", "same"):
        runner.do(runner.engine.sandboxes.delete(name))
    runner.do(runner.engine.volumes.delete("data"))
    with pytest.raises(Conflict, match="volumeMounts"):
        runner.do(runner.engine.forks.create("mark", ForkSpec()))
    create_sandbox(runner, "late", template="mark")


def test_a_failed_mount_fails_the_fork(runner: EngineRunner, world: World) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "source")
    runner.shell("source", "touch /root/file && sync")
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    traces_before = world.read_traces(runner.config)
    spec = ForkSpec(names=["a", "b"], mounts=[MountSpec("data", "/root/file/below")])
    with pytest.raises(GatewayError):
        runner.do(runner.engine.forks.fork("mark", spec))
    wait_until(lambda: world.read_traces(runner.config) == traces_before)
    for invalid_mounts, error in (
        ([MountSpec("data", "/a"), MountSpec("data", "/b")], Invalid),
        ([MountSpec("data", "/proc/x")], Invalid),
        ([MountSpec("nothing", "/a")], NotFound),
        ([MountSpec("data", "/a", clone=True)], Invalid),
    ):
        with pytest.raises(error):
            runner.do(runner.engine.forks.fork("mark", ForkSpec(mounts=invalid_mounts)))
    assert {sandbox.name for sandbox in runner.engine.sandboxes.list()} == {"source"}


def test_each_fork_has_its_own_volume_clone(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    runner.shell("source", "echo common >/data/file && sync")
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["data"]))
    runner.shell("source", "echo later >/data/file && sync")
    spec = ForkSpec(names=["one", "two"], mounts=[MountSpec("data", "/data", clone=True)])
    runner.do(runner.engine.forks.fork("mark", spec))
    assert list_volume_names(runner) == {"data", "one-data", "two-data"}
    assert runner.engine.volumes.get("one-data").owner == runner.get_sandbox("one").id
    assert [read_file(runner, name, "/data/file") for name in ("one", "two", "source")] == ["common", "common", "later"]
    runner.shell("one", "echo own >/data/file && sync")
    assert [read_file(runner, name, "/data/file") for name in ("one", "two", "source")] == ["own", "common", "later"]
    runner.do(runner.engine.sandboxes.delete("two"))
    assert list_volume_names(runner) == {"data", "one-data"}
    runner.do(runner.engine.attachments.attach("source", MountSpec("one-data", "/theirs")))
    runner.do(runner.engine.sandboxes.delete("one"))
    assert read_file(runner, "source", "/theirs/file") == "own"
    runner.do(runner.engine.attachments.detach("source", "one-data"))
    assert list_volume_names(runner) == {"data"}


def test_the_volume_snapshots_of_a_clone_are_removed(runner: EngineRunner) -> None:
    long_name = "n" * 60
    create_volume(runner, "data")
    create_volume(runner, "child-data")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    runner.shell("source", "echo common >/data/file && sync")
    spec = ForkSpec(names=["child", long_name], mounts=[MountSpec("data", "/data", clone=True)])
    children = runner.do(runner.engine.forks.clone("source", spec))
    for child in children:
        assert isinstance(child, Sandbox)
        clone = runner.engine.volumes.get(child.mounts[0].volume)
        assert clone.name.endswith(clone.id)
        assert read_file(runner, child.id, "/data/file") == "common"
        runner.do(runner.engine.sandboxes.delete(child.id))
    assert list_volume_names(runner) == {"data", "child-data"}
    assert runner.engine.volumes.list_snapshots("data") == []


def test_a_failed_fork_leaves_no_volume_clone(
    runner: EngineRunner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["data"]))
    traces_before = world.read_traces(runner.config)
    clone_mounts = [MountSpec("data", "/data", clone=True)]
    owners = {"identify": runner.engine.agents, "create_clones": runner.engine.forks._mount_planner}
    original_methods = {name: getattr(owner, name) for name, owner in owners.items()}

    def make_failing_step(step: str) -> Any:
        calls = []

        async def fail_on_second_call(*args: Any, **kwargs: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise BackendFailed("forced")
            await original_methods[step](*args, **kwargs)

        return fail_on_second_call

    for step in original_methods:
        monkeypatch.setattr(owners[step], step, make_failing_step(step))
        with pytest.raises(BackendFailed, match="forced"):
            runner.do(runner.engine.forks.fork("mark", ForkSpec(count=2, mounts=clone_mounts)))
        assert list_volume_names(runner) == {"data"}, step
        wait_until(lambda: world.read_traces(runner.config) == traces_before)
        monkeypatch.setattr(owners[step], step, make_failing_step(step))
        results = runner.do(runner.engine.forks.fork("mark", ForkSpec(count=2, mounts=clone_mounts, atomic=False)))
        (fork,) = (result for result in results if isinstance(result, Sandbox))
        assert list_volume_names(runner) == {"data", f"{fork.name}-data"}, step
        runner.do(runner.engine.sandboxes.delete(fork.id))
        monkeypatch.undo()
    assert list_volume_names(runner) == {"data"}


def test_rollback_restores_the_mounts_of_the_snapshot(runner: EngineRunner) -> None:
    for name in ("kept", "gone", "late"):
        create_volume(runner, name)
    create_sandbox(runner, "box", MountSpec("kept", "/kept"), MountSpec("gone", "/gone"))
    runner.shell("box", "echo early >/kept/file && sync")
    runner.do(runner.engine.snapshots.create("box", name="mark"))
    runner.do(runner.engine.attachments.detach("box", "gone"))
    runner.do(runner.engine.volumes.delete("gone"))
    runner.do(runner.engine.attachments.attach("box", MountSpec("late", "/late")))
    runner.shell("box", "echo later >/kept/file; echo x >/late/file; sync")
    runner.do(runner.engine.sandboxes.rollback("box", "mark"))
    assert get_volume_names_by_path(runner, "box") == {"/kept": "kept"}
    assert read_file(runner, "box", "/kept/file") == "later"
    assert read_file(runner, "box", "/late/file") == ""
    runner.do(runner.engine.volumes.delete("late"))


def test_promote_hands_over_the_volume_clone(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    runner.shell("source", "echo old >/data/file && sync")
    runner.do(
        runner.engine.forks.clone("source", ForkSpec(names=["try"], mounts=[MountSpec("data", "/data", clone=True)]))
    )
    runner.shell("try", "echo won >/data/file && sync")
    runner.do(runner.engine.sandboxes.promote("try", "source"))
    runner.do(runner.engine.sandboxes.delete("try"))
    assert get_volume_names_by_path(runner, "source") == {"/data": "try-data"}
    assert read_file(runner, "source", "/data/file") == "won"
    runner.do(runner.engine.sandboxes.delete("source"))
    assert list_volume_names(runner) == {"data"}


@pytest.mark.parametrize("memory", mark_slow_except((True,), (True, False)))
def test_a_paused_sandbox_keeps_its_volumes(runner: EngineRunner, memory: bool) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "echo kept >/data/file && sync")
    runner.do(runner.engine.sandboxes.pause("box", memory=memory))
    with pytest.raises(InUse, match=r"1 mount \(box\)"):
        runner.do(runner.engine.volumes.delete("data"))
    runner.do(runner.engine.sandboxes.resume("box"))
    assert read_file(runner, "box", "/data/file") == "kept"
    runner.shell("box", "echo more >/data/file")


# -- guarantees of sharing ---------------------------------------------------------------------------------------------


def test_readers_see_writes_but_cannot_write(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "writer", MountSpec("data", "/data"))
    names = [f"reader{n}" for n in range(8)]
    runner.do(
        runner.engine.forks.fork(TEMPLATE, ForkSpec(names=names, mounts=[MountSpec("data", "/data", read_only=True)]))
    )
    for text in ("one", "two"):
        runner.shell("writer", f"echo {text} >/data/file.new && mv /data/file.new /data/file && sync")
        for name in names:
            wait_until(
                lambda name=name, text=text: read_file(runner, name, "/data/file") == text, VISIBILITY_TIMEOUT_SECONDS
            )  # type: ignore[misc]
    runner.shell("writer", "mkdir /data/open && chmod 777 /data/open /data/file")
    attempts = (
        "touch /data/new",
        "touch /data/open/new",
        "echo x >/data/file",
        "rm /data/file",
        "rmdir /data/open",
        "chmod 700 /data",
    )
    script = "; ".join(f"({attempt}) 2>&1 && echo it went through; echo ---" for attempt in attempts)
    for name in names:
        outputs = runner.shell(name, script).split("---\n")[:-1]
        for attempt, output in zip(attempts, outputs, strict=True):
            assert any(message in output for message in READ_ONLY_MESSAGES), (name, attempt, output)
    assert sorted(runner.shell("writer", "ls /data").split()) == ["file", "open"]
    assert read_file(runner, "writer", "/data/file") == "two"


WRITE_PROGRAM = """
import os, sys
me, blocks, size = int(sys.argv[1]), 200, 4096
own = os.open(f"/data/own{me}", os.O_RDWR | os.O_CREAT)
shared = os.open("/data/shared", os.O_RDWR | os.O_CREAT)
for block in range(blocks):
    text = f"{me} {block:06d} ".encode() * 8
    os.write(own, text)
    os.pwrite(shared, bytes([65 + me]) * size, (block * 3 + me) * size)
    if sys.argv[2] == "append":
        log = os.open("/data/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"{me} {block:06d} {chr(97 + me) * 80}\\n".encode())
        os.close(log)
for each in (own, shared):
    os.fsync(each)
"""

CHECK_PROGRAM = """
import json, os
shared = open("/data/shared", "rb").read()
wrong = [n for n in range(600) if shared[n * 4096 : (n + 1) * 4096] != bytes([65 + n % 3]) * 4096]
own = [open(f"/data/own{me}").read() == "".join(f"{me} {n:06d} " * 8 for n in range(200)) for me in range(3)]
log = open("/data/log").read().splitlines() if os.path.exists("/data/log") else []
print(json.dumps([len(shared), wrong, own, log]))
"""


def test_three_concurrent_writers_lose_no_data(runner: EngineRunner, world: World) -> None:
    create_volume(runner, "data")
    runner.do(
        runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["w0", "w1", "w2"], mounts=[MountSpec("data", "/data")]))
    )
    mode = "append" if world.abilities.atomic_append else "apart"
    for me in range(3):
        runner.shell(
            f"w{me}", f"(python3 -c '{WRITE_PROGRAM}' {me} {mode} && touch /run/done) </dev/null >/run/output 2>&1 &"
        )
    command = "cat /run/output; ls /run/done || true"
    wait_until(lambda: all(runner.shell(f"w{me}", command).strip() == "/run/done" for me in range(3)), 120)
    create_sandbox(runner, "judge", MountSpec("data", "/data", read_only=True))
    size, wrong, own, log = json.loads(runner.shell("judge", f"python3 -c '{CHECK_PROGRAM}'"))
    assert (size, wrong, own) == (600 * 4096, [], [True] * 3)
    expected_lines = {f"{me} {n:06d} {chr(97 + me) * 80}" for me in range(3) for n in range(200)}
    assert len(log) == (600 if world.abilities.atomic_append else 0)
    assert set(log) == (expected_lines if world.abilities.atomic_append else set())


def test_locks_work_across_sandboxes(runner: EngineRunner, world: World) -> None:
    if not world.abilities.atomic_append:
        pytest.skip(f"{world.kind} declares that locks work only within one sandbox")
    create_volume(runner, "data")
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"], mounts=[MountSpec("data", "/data")])))
    holder_pid = runner.shell("a", "flock --close /data/lock sleep 1000 </dev/null >/dev/null 2>&1 & echo $!").strip()
    wait_until(lambda: runner.shell("b", "flock --nonblock /data/lock true || echo held").strip() == "held")
    runner.shell("a", f"kill {holder_pid}")
    wait_until(lambda: runner.shell("b", "flock --nonblock /data/lock true || echo held").strip() == "")


def test_a_full_volume_reports_enospc_and_grows_while_mounted(runner: EngineRunner) -> None:
    """The data is random, because OpenZFS compresses data before it counts it."""
    create_volume(runner, "data", size_mb=MIN_VOLUME_MB)
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    create_sandbox(runner, "other", MountSpec("data", "/data"))
    output = runner.shell("box", "dd if=/dev/urandom of=/data/fill bs=1M count=100 conv=fsync 2>&1 || true")
    assert any(word in output for word in DISK_FULL_MESSAGES), output
    assert 32 * MB < runner.do(runner.engine.volumes.get_state("data")).used_bytes < (MIN_VOLUME_MB + 1) * MB
    assert runner.do(runner.engine.volumes.grow("data", 160)).size_mb == 160
    runner.shell("box", "dd if=/dev/urandom of=/data/fill bs=1M count=100 conv=fsync")
    output = runner.shell("other", "dd if=/dev/urandom of=/data/more bs=1M count=100 conv=fsync 2>&1 || true")
    assert any(word in output for word in DISK_FULL_MESSAGES), output
    runner.shell("other", "rm /data/more && echo room >/data/small && sync")


# -- state with volumes ------------------------------------------------------------------------------------------------

KEEP_OPEN_PROGRAM = """
import os, time
slots = {"source": 0, "copy": 4096}
file = os.open("/data/file", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"%08d" % 0, 4096)
count = 0
while True:
    count += 1
    slot = slots.get(os.uname().nodename, 8192)
    os.pwrite(file, b"%08d" % count, slot)
    os.fsync(file)
    if os.pread(file, 8, slot) == b"%08d" % count:
        open("/run/count.new", "w").write(str(count))
        os.replace("/run/count.new", "/run/started")
    time.sleep(0.05)
"""


@pytest.mark.usefixtures("requires_memory_capture")
def test_a_fork_keeps_an_open_file_on_a_volume(runner: EngineRunner) -> None:
    create_volume(runner, "data")
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    start_program(runner, "source", KEEP_OPEN_PROGRAM)
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["copy"])))
    create_sandbox(runner, "judge", MountSpec("data", "/data", read_only=True))

    def read_counts() -> list[int]:
        observed_counts = [int(read_file(runner, name, "/run/started")) for name in ("source", "copy")]
        stored_counts = [
            int(runner.shell("judge", f"dd if=/data/file bs=4096 skip={n} count=1 2>/dev/null | head -c 8"))
            for n in range(2)
        ]
        return [*observed_counts, *stored_counts]

    first_counts = read_counts()
    wait_until(
        lambda: all(count > first_count for count, first_count in zip(read_counts(), first_counts, strict=True)),
        VISIBILITY_TIMEOUT_SECONDS,
    )


WRITE_IN_TURN_PROGRAM = """
import os, time
places = ["/root/turn", "/a/turn", "/b/turn"]
files = [os.open(place, os.O_RDWR | os.O_CREAT | os.O_SYNC) for place in places]
count = 0
while True:
    count += 1
    for file in files:
        os.pwrite(file, b"%09d" % count, 0)
    if count == 3:
        open("/run/started", "w").close()
"""


def test_disk_and_volumes_are_captured_at_the_same_instant(runner: EngineRunner) -> None:
    for name in ("a", "b"):
        create_volume(runner, name)
    create_sandbox(runner, "source", MountSpec("a", "/a"), MountSpec("b", "/b"))
    start_program(runner, "source", WRITE_IN_TURN_PROGRAM)
    # Without memory, the program does not continue in the fork, so the disk and the volumes are as captured.
    runner.do(runner.engine.snapshots.create("source", name="mark", memory="none", volumes=["a", "b"]))
    fork = create_sandbox(
        runner, "fork", MountSpec("a", "/a", clone=True), MountSpec("b", "/b", clone=True), template="mark"
    )
    disk_count, volume_a_count, volume_b_count = (
        int(read_file(runner, fork.id, f"{place}/turn")) for place in ("/root", "/a", "/b")
    )
    assert disk_count >= volume_a_count >= volume_b_count >= disk_count - 1, (
        disk_count,
        volume_a_count,
        volume_b_count,
    )
    assert int(read_file(runner, "source", "/root/turn")) > disk_count, "the source did not continue"
    runner.do(runner.engine.sandboxes.delete(fork.id))
    runner.do(runner.engine.snapshots.delete("mark"))
    assert not runner.engine.volumes.list_snapshots("a") and not runner.engine.volumes.list_snapshots("b")


def test_a_failed_capture_of_the_second_volume_leaves_nothing_behind(
    runner: EngineRunner, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        create_volume(runner, name)
    create_sandbox(runner, "source", MountSpec("a", "/a"), MountSpec("b", "/b"))
    with pytest.raises(Invalid, match="not mounted"):
        runner.do(runner.engine.snapshots.create("source", volumes=["a", "c"]))
    with pytest.raises(NotFound, match="nothing"):
        runner.do(runner.engine.snapshots.create("source", volumes=["a", "nothing"]))
    traces_before = world.read_traces(runner.config)
    world.break_volume_capture(runner.engine.host, monkeypatch)
    with pytest.raises(BackendFailed, match="forced"):
        runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["a", "b"]))
    monkeypatch.undo()
    assert world.read_traces(runner.config) == traces_before
    assert not runner.engine.volumes.list_snapshots("a") and not runner.engine.snapshots.list()
    runner.shell("source", "echo on >/a/file && echo on >/b/file && sync")
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["a", "b"]))
    (snapshot,) = runner.engine.snapshots.list()
    assert {capture.snapshot for capture in snapshot.volumes} == {
        each.id for name in ("a", "b") for each in runner.engine.volumes.list_snapshots(name)
    }


# -- a malicious sandbox -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", mark_slow_except(("/data",), ("/data", "/srv/data")))
def test_symlinks_at_a_mount_path_cannot_escape_the_sandbox(runner: EngineRunner, world: World, link: str) -> None:
    """Either the request fails or the volume is mounted inside the sandbox; nothing outside it is affected."""
    volume_id = runner.engine.volumes.get(create_volume(runner, "data")).id
    path = "/srv/data/below" if link == "/srv/data" else link
    writable_directory = world.get_writable_directory(runner.config)
    for target in ("/etc", "../../../../../../../../etc", str(writable_directory)):
        create_sandbox(runner, "box")
        runner.shell("box", f"rm -rf {link} && mkdir -p $(dirname {link}) && ln -s {target} {link} && sync")
        runner.do(runner.engine.snapshots.create("box", name="mark"))
        spec = ForkSpec(names=["fork"], mounts=[MountSpec("data", path)])
        refs_with_mount = []
        for ref, request in (
            ("fork", runner.engine.forks.create("mark", spec)),
            ("box", runner.engine.attachments.attach("box", MountSpec("data", path))),
        ):
            with contextlib.suppress(GatewayError):
                runner.do(request)
                refs_with_mount.append(ref)
                runner.shell(ref, f"touch {path}/proof && sync")
            assert not find_traces_outside(volume_id, writable_directory), (ref, target)
        create_sandbox(runner, "judge", MountSpec("data", "/volume"))
        assert runner.shell("judge", "ls /volume").split() == (["proof"] if refs_with_mount else [])
        runner.shell("judge", "rm -f /volume/proof && sync")
        for sandbox in runner.engine.sandboxes.list():
            runner.do(runner.engine.sandboxes.delete(sandbox.id))
        runner.do(runner.engine.snapshots.delete("mark"))
        assert not find_traces_outside(volume_id, writable_directory), target


def find_traces_outside(volume_id: str, writable_directory: Path) -> list[str]:
    """Return the paths outside the gateway's directories where the volume is mounted or its files were written."""
    mount_entries = [
        entry.split() for entry in Path("/proc/self/mountinfo").read_text().splitlines() if volume_id in entry
    ]
    mount_points = [entry[4] for entry in mount_entries if not entry[4].startswith(f"{writable_directory}/")]
    return mount_points + [str(path) for path in (Path("/etc/proof"), writable_directory / "proof") if path.exists()]


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_volumes_stay_mounted_after_a_restart(make_runner: Any, world: World) -> None:
    runner: EngineRunner = make_runner()
    create_volume(runner, "data")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "echo kept >/data/file && sync")
    runner.do(
        runner.engine.sandboxes.pause(create_sandbox(runner, "sleeps", MountSpec("data", "/data", read_only=True)).id)
    )
    runner.close()
    runner_after_restart = make_runner(config=runner.config)
    assert read_file(runner_after_restart, "box", "/data/file") == "kept"
    runner_after_restart.do(runner_after_restart.engine.sandboxes.resume("sleeps"))
    assert read_file(runner_after_restart, "sleeps", "/data/file") == "kept"


def test_volumes_are_mounted_again_after_a_host_crash(make_runner: Any, world: World) -> None:
    runner: EngineRunner = make_runner()
    create_volume(runner, "data")
    create_sandbox(runner, "box", MountSpec("data", "/data"))
    runner.shell("box", "echo kept >/data/file && sync")
    runner.close()
    world.cut_power(runner.config)
    runner_after_restart = make_runner(config=runner.config)
    wait_until(lambda: runner_after_restart.get_sandbox("box").state is SandboxState.RUNNING, 120)
    assert read_file(runner_after_restart, "box", "/data/file") == "kept"
    runner_after_restart.shell("box", "echo more >/data/file")


def test_volumes_and_mounts_survive_kill_9_of_the_gateway(make_runner: Any, world: World, tmp_path: Path) -> None:
    runner: EngineRunner = make_runner()
    runner.close()
    with ScenarioProcess(runner.config, world.host_class, "ten-with-volumes", tmp_path / "config.json") as process:
        state_before = process.read_state(300)
        process.kill()
    runner_after_restart: EngineRunner = make_runner(config=runner.config)
    assert runner_after_restart.call(read_observable_state, runner_after_restart.engine) == state_before
    for n in range(10):
        assert runner_after_restart.shell(f"box{n}", "cat /mine/who /ours/who").split() == [f"v{n % 4}", "v4"]
    runner_after_restart.shell("box0", "echo on >/mine/on && sync")
    wait_until(lambda: read_file(runner_after_restart, "box4", "/mine/on") == "on", VISIBILITY_TIMEOUT_SECONDS)
    for n in range(5):
        with pytest.raises(InUse, match=r"\d+ mounts? \(box"):
            runner_after_restart.do(runner_after_restart.engine.volumes.delete(f"v{n}"))
    for n in range(10):
        runner_after_restart.do(runner_after_restart.engine.sandboxes.delete(f"box{n}"))
    for n in range(5):
        runner_after_restart.do(runner_after_restart.engine.volumes.delete(f"v{n}"))
    runner_after_restart.wait_for(
        world.check_no_strays, runner_after_restart.engine, runner_after_restart.config, "after kill -9"
    )
