"""Test that volumes are shared, limited in size, captured with sandboxes, cloned for forks, and protected in use."""

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
from tests.support.live import Live
from tests.support.samples import mark_slow_except
from tests.support.waiting import eventually
from tests.support.worlds import TEMPLATE, World

MB = 1 << 20
MIN_VOLUME_MB = 64
"""The minimum size of a volume in MiB."""
VISIBILITY_TIMEOUT_SECONDS = 60
"""The maximum time in seconds until every sandbox sees the writes of the other sandboxes."""
READ_ONLY_MESSAGES = ("Read-only file system", "Permission denied")
DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")


def create_sandbox(live: Live, name: str, *mounts: MountSpec, template: str = TEMPLATE, **options: Any) -> Sandbox:
    return live.do(live.engine.forks.create(template, ForkSpec(names=[name], mounts=list(mounts), **options)))


def create_volume(live: Live, name: str, **options: Any) -> str:
    return live.do(live.engine.volumes.create(name, **{"size_mb": MIN_VOLUME_MB} | options)).name


def get_volume_names_by_path(live: Live, ref: str) -> dict[str, str]:
    """Return the names of the volumes that a sandbox mounts, by path."""
    return {mount.path: live.engine.volumes.get(mount.volume).name for mount in live.sandbox(ref).mounts}


def read_file(live: Live, ref: str, path: str) -> str:
    """Return the contents of a file in a sandbox, or an empty string if it does not exist."""
    return live.shell(ref, f"cat {path} 2>/dev/null || true").strip()


def list_volume_names(live: Live) -> set[str]:
    return {each.name for each in live.engine.volumes.list()}


def start_program(live: Live, ref: str, program: str) -> None:
    """Start a Python program in the background of a sandbox, and wait until it has created /run/started."""
    live.shell(ref, "rm -f /run/started")
    live.shell(ref, f"python3 -c '{program}' </dev/null >/run/output 2>&1 &")
    eventually(lambda: live.shell(ref, "test -e /run/started && echo yes || true").strip() == "yes")


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


def test_volumes_share_the_namespace_of_sandboxes_and_templates(live: Live) -> None:
    assert live.do(live.engine.volumes.create("data")).size_mb == 1024
    create_sandbox(live, "box")
    for name in ("data", "box", TEMPLATE):
        with pytest.raises(NameTaken, match=name):
            create_volume(live, name)
    with pytest.raises(NameTaken, match="data"):
        create_sandbox(live, "data")
    with pytest.raises(NotFound, match="nowhere"):
        live.engine.volumes.get("nowhere")


@pytest.mark.parametrize("size", [-1, 0, 63, (1 << 26) + 1])
def test_an_invalid_size_is_refused(live: Live, size: int) -> None:
    with pytest.raises(Invalid, match="MiB"):
        create_volume(live, "data", size_mb=size)
    assert not live.engine.volumes.list()


def test_a_volume_never_shrinks(live: Live) -> None:
    create_volume(live, "data", size_mb=96)
    with pytest.raises(Invalid, match="cannot shrink"):
        live.do(live.engine.volumes.grow("data", 80))
    assert live.do(live.engine.volumes.grow("data", 96)).size_mb == 96


def test_later_writes_do_not_change_a_volume_snapshot(live: Live) -> None:
    create_volume(live, "data", size_mb=96)
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "echo first >/data/file && sync")
    snapshot = live.do(live.engine.volumes.create_snapshot("data", "early"))
    with pytest.raises(NameTaken, match="early"):
        live.do(live.engine.volumes.create_snapshot("data", "early"))
    live.shell("box", "echo second >/data/file && sync")
    assert [each.name for each in live.engine.volumes.list_snapshots("data")] == ["early"]
    for name, source in (("by-name", "data@early"), ("by-id", snapshot.id)):
        assert live.do(live.engine.volumes.create(name, from_snapshot=source)).size_mb == 96
        live.do(live.engine.attachments.attach("box", MountSpec(name, f"/{name}")))
        assert read_file(live, "box", f"/{name}/file") == "first"
    assert read_file(live, "box", "/data/file") == "second"
    with pytest.raises(Invalid, match="less than"):
        live.do(live.engine.volumes.create("less", MIN_VOLUME_MB, "data@early"))
    with pytest.raises(NotFound, match="late"):
        live.do(live.engine.volumes.create("late", from_snapshot="data@late"))


def test_a_volume_can_be_larger_than_its_snapshot(live: Live) -> None:
    create_volume(live, "data")
    live.do(live.engine.volumes.create_snapshot("data", "empty"))
    create_volume(live, "large", size_mb=160, from_snapshot="data@empty")
    create_sandbox(live, "box", MountSpec("large", "/data"))
    live.shell("box", "dd if=/dev/zero of=/data/fill bs=1M count=100 conv=fsync")


def test_a_volume_rollback_is_refused_while_a_sandbox_can_write_unless_forced(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "writer", MountSpec("data", "/data"))
    live.shell("writer", "echo before >/data/file && sync")
    live.do(live.engine.volumes.create_snapshot("data", "mark"))
    live.shell("writer", "echo after >/data/file && sync")
    live.do(live.engine.volumes.grow("data", 96))
    with pytest.raises(InUse, match=r"1 read-write mount \(writer\)") as refusal:
        live.do(live.engine.volumes.rollback("data", "mark"))
    assert refusal.value.blockers == [live.sandbox("writer").id]
    live.do(live.engine.sandboxes.pause("writer"))
    with pytest.raises(InUse, match=r"1 read-write mount \(writer\)"):
        live.do(live.engine.volumes.rollback("data", "mark"))
    live.do(live.engine.sandboxes.delete("writer"))
    create_sandbox(live, "reader", MountSpec("data", "/data", read_only=True))
    assert read_file(live, "reader", "/data/file") == "after"
    live.do(live.engine.volumes.rollback("data", "mark"))
    eventually(lambda: read_file(live, "reader", "/data/file") == "before", VISIBILITY_TIMEOUT_SECONDS)
    live.do(live.engine.attachments.attach(create_sandbox(live, "other").id, MountSpec("data", "/data")))
    live.shell("other", "echo again >/data/file && sync")
    live.do(live.engine.volumes.rollback("data", "mark", force=True))
    eventually(lambda: read_file(live, "other", "/data/file") == "before", VISIBILITY_TIMEOUT_SECONDS)
    live.shell("other", "echo on >/data/more && sync")
    assert live.engine.volumes.get("data").size_mb == 96


# -- volumes in use ----------------------------------------------------------------------------------------------------


def test_deleting_a_volume_in_use_lists_its_users(live: Live) -> None:
    volume = live.engine.volumes.get(create_volume(live, "data"))
    create_sandbox(live, "runs", MountSpec("data", "/data"))
    create_sandbox(live, "sleeps", MountSpec("data", "/data", read_only=True))
    live.do(live.engine.sandboxes.pause("sleeps"))
    snapshot = live.do(live.engine.snapshots.create("runs", name="mark", volumes=["data"]))
    volume_snapshot = live.do(live.engine.volumes.create_snapshot("data", "own"))
    sandbox_ids = [live.sandbox(name).id for name in ("runs", "sleeps")]
    with pytest.raises(
        InUse, match=r"2 mounts \(runs, sleeps\), 1 sandbox snapshot \(mark\) and 1 snapshot \(own\)"
    ) as refusal:
        live.do(live.engine.volumes.delete("data"))
    assert set(refusal.value.blockers) == {*sandbox_ids, snapshot.id, volume_snapshot.id}
    assert {sandbox.name for sandbox, _ in live.engine.volumes.mounts_of(volume)} == {"runs", "sleeps"}
    live.do(live.engine.attachments.detach("sleeps", "data"))
    live.do(live.engine.sandboxes.delete("runs"))
    with pytest.raises(InUse, match=r"1 sandbox snapshot \(mark\)") as capture_refusal:
        live.do(live.engine.volumes.delete("data", with_snapshots=True))
    assert capture_refusal.value.blockers == [snapshot.id]
    (volume_capture,) = (each for each in live.engine.volumes.list_snapshots("data") if each.sandbox_snapshot)
    with pytest.raises(InUse, match=r"1 sandbox snapshot \(mark\)"):
        live.do(live.engine.volumes.delete_snapshot("data", volume_capture.id))
    live.do(live.engine.snapshots.delete("mark"))
    assert [each.name for each in live.engine.volumes.list_snapshots("data")] == ["own"]
    with pytest.raises(InUse, match=r"1 snapshot \(own\)"):
        live.do(live.engine.volumes.delete("data"))
    live.do(live.engine.volumes.delete("data", with_snapshots=True))
    assert not live.engine.volumes.list()


def test_a_volume_is_not_removed_or_rolled_back_during_a_mount(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    create_volume(live, "data")
    live.do(live.engine.volumes.create_snapshot("data", "mark"))
    engine, identify = live.engine, live.engine.agents.identify
    refusals = []

    async def try_changes(*args: Any, **kwargs: Any) -> None:
        for change in (engine.volumes.delete("data", True), engine.volumes.rollback("data", "mark", force=True)):
            with pytest.raises(InUse, match="in use by another request"):
                await change
            refusals.append(1)
        await identify(*args, **kwargs)

    monkeypatch.setattr(engine.agents, "identify", try_changes)
    create_sandbox(live, "box", MountSpec("data", "/data"))
    assert len(refusals) == 2


def test_a_mount_waits_for_a_volume_rollback(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    create_volume(live, "data")
    create_sandbox(live, "writer", MountSpec("data", "/data"))
    live.shell("writer", "echo before >/data/file && sync")
    live.do(live.engine.volumes.create_snapshot("data", "mark"))
    live.shell("writer", "echo after >/data/file && sync")
    live.do(live.engine.sandboxes.delete("writer"))
    create_sandbox(live, "late")
    engine, rollback = live.engine, live.engine.host.rollback_volume
    attachments: list[asyncio.Future[Any]] = []

    async def roll_back_slowly(*args: Any) -> None:
        attachments.append(asyncio.ensure_future(engine.attachments.attach("late", MountSpec("data", "/data"))))
        await asyncio.sleep(0.3)
        assert not attachments[0].done() and engine.sandboxes.get("late").mounts == []
        await rollback(*args)

    monkeypatch.setattr(engine.host, "rollback_volume", roll_back_slowly)
    live.do(engine.volumes.rollback("data", "mark"))
    eventually(lambda: attachments[0].done())
    assert read_file(live, "late", "/data/file") == "before"


def test_every_volume_change_emits_an_event(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    create_sandbox(live, "box")

    def record_event(type: str, **data: Any) -> None:
        if type.startswith("volume."):
            events.append((type.removeprefix("volume."), data["volumeID"]))

    monkeypatch.setattr(live.engine.events, "publish", record_event)
    create_volume(live, "data")
    live.do(live.engine.attachments.attach("box", MountSpec("data", "/data")))
    live.do(live.engine.volumes.grow("data", 96))
    live.do(live.engine.snapshots.create("box", name="mark", volumes=["data"]))
    create_sandbox(live, "fork", MountSpec("data", "/data", clone=True), template="mark")
    live.do(live.engine.sandboxes.delete("fork"))
    live.do(live.engine.attachments.detach("box", "data"))
    snapshot = live.engine.volumes.list_snapshots("data")[0]
    live.do(live.engine.volumes.rollback("data", snapshot.id))
    live.do(live.engine.snapshots.delete("mark"))
    live.do(live.engine.volumes.delete("data"))
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


def test_the_source_of_a_volume_is_deletable_only_if_snapshots_are_independent(live: Live, world: World) -> None:
    create_volume(live, "data")
    live.do(live.engine.volumes.create_snapshot("data", "mark"))
    create_volume(live, "made", from_snapshot="data@mark")
    if world.abilities.independent_snapshots:
        live.do(live.engine.volumes.delete_snapshot("data", "mark"))
        live.do(live.engine.volumes.delete("data"))
    else:
        for deletion in (live.engine.volumes.delete_snapshot("data", "mark"), live.engine.volumes.delete("data", True)):
            with pytest.raises(InUse, match=r"1 clone \(made\)"):
                live.do(deletion)
    create_sandbox(live, "box", MountSpec("made", "/data"))
    live.shell("box", "echo fine >/data/file")


def test_a_volume_outlives_its_users(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "first", MountSpec("data", "/data"))
    live.shell("first", "echo kept >/data/file")
    live.do(live.engine.sandboxes.delete("first"))
    create_sandbox(live, "second", MountSpec("data", "/else/where"))
    assert read_file(live, "second", "/else/where/file") == "kept"


def test_an_open_file_on_a_volume_does_not_block_deleting_the_sandbox(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "cd /data && (exec sleep 1000 >open) </dev/null 2>&1 &")
    started_at = time.monotonic()
    live.do(live.engine.sandboxes.delete("box"))
    assert time.monotonic() - started_at < 20
    live.do(live.engine.volumes.delete("data"))


# -- attach and detach -------------------------------------------------------------------------------------------------


def test_a_running_sandbox_can_attach_and_detach_a_volume(live: Live) -> None:
    create_volume(live, "data")
    create_volume(live, "more")
    create_sandbox(live, "box")
    live.do(live.engine.attachments.attach("box", MountSpec("data", "/data")))
    live.shell("box", "echo kept >/data/file")
    for spec, error, words in (
        (MountSpec("data", "/other"), Conflict, "already"),
        (MountSpec("more", "/data/below"), Invalid, "overlap"),
        (MountSpec("more", "/etc"), Invalid, "cannot be mounted"),
        (MountSpec("more", "/more", clone=True), Invalid, "clone of a volume cannot be attached to a running sandbox"),
        (MountSpec("nothing", "/more"), NotFound, "nothing"),
    ):
        with pytest.raises(error, match=words):
            live.do(live.engine.attachments.attach("box", spec))
    assert get_volume_names_by_path(live, "box") == {"/data": "data"}
    live.do(live.engine.attachments.detach("box", "data"))
    assert read_file(live, "box", "/data/file") == ""
    with pytest.raises(NotFound, match="data"):
        live.do(live.engine.attachments.detach("box", "data"))
    live.do(live.engine.attachments.attach("box", MountSpec("data", "/other", read_only=True)))
    assert read_file(live, "box", "/other/file") == "kept"
    assert get_volume_names_by_path(live, "box") == {"/other": "data"}


def test_detach_works_without_the_sandboxs_cooperation(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "cd /data && (exec sleep 1000 >open) </dev/null 2>&1 &")
    live.do(live.engine.attachments.detach("box", "data"))
    assert read_file(live, "box", "/data/open") == ""
    live.do(live.engine.volumes.delete("data"))
    assert live.shell("box", "echo alive").strip() == "alive"


def test_a_paused_sandbox_can_detach_but_not_attach(live: Live) -> None:
    create_volume(live, "data")
    create_volume(live, "more")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "echo kept >/data/file")
    live.do(live.engine.sandboxes.pause("box"))
    with pytest.raises(Conflict, match="resume it first"):
        live.do(live.engine.attachments.attach("box", MountSpec("more", "/more")))
    live.do(live.engine.attachments.detach("box", "data"))
    live.do(live.engine.volumes.delete("data"))
    live.do(live.engine.sandboxes.resume("box"))
    assert read_file(live, "box", "/data/file") == ""
    live.do(live.engine.attachments.attach("box", MountSpec("more", "/data")))
    live.shell("box", "echo new >/data/file")


def test_a_failed_attach_leaves_nothing_behind(live: Live, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create_volume(live, "data")
    create_sandbox(live, "box")
    live.shell("box", "touch /root/file")
    traces_before = world.traces(live.config)
    with pytest.raises(GatewayError):
        live.do(live.engine.attachments.attach("box", MountSpec("data", "/root/file/below")))
    assert live.sandbox("box").mounts == []
    eventually(lambda: world.traces(live.config) == traces_before)

    async def fail(*args: Any, **kwargs: Any) -> None:
        raise BackendFailed("forced")

    for step, owner in (("mount_volumes", live.engine.agents), ("attach", live.engine.host)):
        monkeypatch.setattr(owner, step, fail)
        with pytest.raises(BackendFailed, match="forced"):
            live.do(live.engine.attachments.attach("box", MountSpec("data", "/data")))
        monkeypatch.undo()
        assert live.sandbox("box").mounts == []
        eventually(lambda: world.traces(live.config) == traces_before)
    live.do(live.engine.attachments.attach("box", MountSpec("data", "/data")))
    live.shell("box", "echo works >/data/file")


# -- forks, rollback, promote, pause -----------------------------------------------------------------------------------


def test_a_fork_inherits_mounts_unless_others_are_requested(live: Live) -> None:
    create_volume(live, "data")
    create_volume(live, "other")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    live.shell("source", "echo shared >/data/file && sync")
    live.do(live.engine.snapshots.create("source", name="mark"))
    live.do(live.engine.forks.create("mark", ForkSpec(names=["same"])))
    create_sandbox(live, "none", template="mark")
    create_sandbox(live, "else", MountSpec("other", "/data"), template="mark")
    assert [get_volume_names_by_path(live, name) for name in ("same", "none", "else")] == [
        {"/data": "data"},
        {},
        {"/data": "other"},
    ]
    assert [read_file(live, name, "/data/file") for name in ("same", "none", "else")] == ["shared", "", ""]
    live.shell("else", "echo mine >/data/file && sync")
    assert read_file(live, "source", "/data/file") == "shared"
    for name in ("source", "same"):
        live.do(live.engine.sandboxes.delete(name))
    live.do(live.engine.volumes.delete("data"))
    with pytest.raises(Conflict, match="volumeMounts"):
        live.do(live.engine.forks.create("mark", ForkSpec()))
    create_sandbox(live, "late", template="mark")


def test_a_failed_mount_fails_the_fork(live: Live, world: World) -> None:
    create_volume(live, "data")
    create_sandbox(live, "source")
    live.shell("source", "touch /root/file && sync")
    live.do(live.engine.snapshots.create("source", name="mark"))
    traces_before = world.traces(live.config)
    spec = ForkSpec(names=["a", "b"], mounts=[MountSpec("data", "/root/file/below")])
    with pytest.raises(GatewayError):
        live.do(live.engine.forks.fork("mark", spec))
    eventually(lambda: world.traces(live.config) == traces_before)
    for invalid_mounts, error in (
        ([MountSpec("data", "/a"), MountSpec("data", "/b")], Invalid),
        ([MountSpec("data", "/proc/x")], Invalid),
        ([MountSpec("nothing", "/a")], NotFound),
        ([MountSpec("data", "/a", clone=True)], Invalid),
    ):
        with pytest.raises(error):
            live.do(live.engine.forks.fork("mark", ForkSpec(mounts=invalid_mounts)))
    assert {sandbox.name for sandbox in live.engine.sandboxes.list()} == {"source"}


def test_each_fork_has_its_own_volume_clone(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    live.shell("source", "echo common >/data/file && sync")
    live.do(live.engine.snapshots.create("source", name="mark", volumes=["data"]))
    live.shell("source", "echo later >/data/file && sync")
    spec = ForkSpec(names=["one", "two"], mounts=[MountSpec("data", "/data", clone=True)])
    live.do(live.engine.forks.fork("mark", spec))
    assert list_volume_names(live) == {"data", "one-data", "two-data"}
    assert live.engine.volumes.get("one-data").owner == live.sandbox("one").id
    assert [read_file(live, name, "/data/file") for name in ("one", "two", "source")] == ["common", "common", "later"]
    live.shell("one", "echo own >/data/file && sync")
    assert [read_file(live, name, "/data/file") for name in ("one", "two", "source")] == ["own", "common", "later"]
    live.do(live.engine.sandboxes.delete("two"))
    assert list_volume_names(live) == {"data", "one-data"}
    live.do(live.engine.attachments.attach("source", MountSpec("one-data", "/theirs")))
    live.do(live.engine.sandboxes.delete("one"))
    assert read_file(live, "source", "/theirs/file") == "own"
    live.do(live.engine.attachments.detach("source", "one-data"))
    assert list_volume_names(live) == {"data"}


def test_the_volume_snapshots_of_a_clone_are_removed(live: Live) -> None:
    long_name = "n" * 60
    create_volume(live, "data")
    create_volume(live, "child-data")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    live.shell("source", "echo common >/data/file && sync")
    spec = ForkSpec(names=["child", long_name], mounts=[MountSpec("data", "/data", clone=True)])
    children = live.do(live.engine.forks.clone("source", spec))
    for child in children:
        assert isinstance(child, Sandbox)
        clone = live.engine.volumes.get(child.mounts[0].volume)
        assert clone.name.endswith(clone.id)
        assert read_file(live, child.id, "/data/file") == "common"
        live.do(live.engine.sandboxes.delete(child.id))
    assert list_volume_names(live) == {"data", "child-data"}
    assert live.engine.volumes.list_snapshots("data") == []


def test_a_failed_fork_leaves_no_volume_clone(live: Live, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create_volume(live, "data")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    live.do(live.engine.snapshots.create("source", name="mark", volumes=["data"]))
    traces_before = world.traces(live.config)
    clone_mounts = [MountSpec("data", "/data", clone=True)]
    owners = {"identify": live.engine.agents, "create_clones": live.engine.forks._mount_planner}
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
            live.do(live.engine.forks.fork("mark", ForkSpec(count=2, mounts=clone_mounts)))
        assert list_volume_names(live) == {"data"}, step
        eventually(lambda: world.traces(live.config) == traces_before)
        monkeypatch.setattr(owners[step], step, make_failing_step(step))
        results = live.do(live.engine.forks.fork("mark", ForkSpec(count=2, mounts=clone_mounts, atomic=False)))
        (fork,) = (result for result in results if isinstance(result, Sandbox))
        assert list_volume_names(live) == {"data", f"{fork.name}-data"}, step
        live.do(live.engine.sandboxes.delete(fork.id))
        monkeypatch.undo()
    assert list_volume_names(live) == {"data"}


def test_rollback_restores_the_mounts_of_the_snapshot(live: Live) -> None:
    for name in ("kept", "gone", "late"):
        create_volume(live, name)
    create_sandbox(live, "box", MountSpec("kept", "/kept"), MountSpec("gone", "/gone"))
    live.shell("box", "echo early >/kept/file && sync")
    live.do(live.engine.snapshots.create("box", name="mark"))
    live.do(live.engine.attachments.detach("box", "gone"))
    live.do(live.engine.volumes.delete("gone"))
    live.do(live.engine.attachments.attach("box", MountSpec("late", "/late")))
    live.shell("box", "echo later >/kept/file; echo x >/late/file; sync")
    live.do(live.engine.sandboxes.rollback("box", "mark"))
    assert get_volume_names_by_path(live, "box") == {"/kept": "kept"}
    assert read_file(live, "box", "/kept/file") == "later"
    assert read_file(live, "box", "/late/file") == ""
    live.do(live.engine.volumes.delete("late"))


def test_promote_hands_over_the_volume_clone(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    live.shell("source", "echo old >/data/file && sync")
    live.do(live.engine.forks.clone("source", ForkSpec(names=["try"], mounts=[MountSpec("data", "/data", clone=True)])))
    live.shell("try", "echo won >/data/file && sync")
    live.do(live.engine.sandboxes.promote("try", "source"))
    live.do(live.engine.sandboxes.delete("try"))
    assert get_volume_names_by_path(live, "source") == {"/data": "try-data"}
    assert read_file(live, "source", "/data/file") == "won"
    live.do(live.engine.sandboxes.delete("source"))
    assert list_volume_names(live) == {"data"}


@pytest.mark.parametrize("memory", [True, False])
def test_a_paused_sandbox_keeps_its_volumes(live: Live, memory: bool) -> None:
    create_volume(live, "data")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "echo kept >/data/file && sync")
    live.do(live.engine.sandboxes.pause("box", memory=memory))
    with pytest.raises(InUse, match=r"1 mount \(box\)"):
        live.do(live.engine.volumes.delete("data"))
    live.do(live.engine.sandboxes.resume("box"))
    assert read_file(live, "box", "/data/file") == "kept"
    live.shell("box", "echo more >/data/file")


# -- guarantees of sharing ---------------------------------------------------------------------------------------------


def test_readers_see_writes_but_cannot_write(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "writer", MountSpec("data", "/data"))
    names = [f"reader{n}" for n in range(8)]
    live.do(
        live.engine.forks.fork(TEMPLATE, ForkSpec(names=names, mounts=[MountSpec("data", "/data", read_only=True)]))
    )
    for text in ("one", "two"):
        live.shell("writer", f"echo {text} >/data/file.new && mv /data/file.new /data/file && sync")
        for name in names:
            eventually(
                lambda name=name, text=text: read_file(live, name, "/data/file") == text, VISIBILITY_TIMEOUT_SECONDS
            )  # type: ignore[misc]
    live.shell("writer", "mkdir /data/open && chmod 777 /data/open /data/file")
    for name in names:
        for attempt in (
            "touch /data/new",
            "touch /data/open/new",
            "echo x >/data/file",
            "rm /data/file",
            "rmdir /data/open",
            "chmod 700 /data",
        ):
            output = live.shell(name, f"({attempt}) 2>&1 && echo it went through || true")
            assert any(message in output for message in READ_ONLY_MESSAGES), (name, attempt, output)
    assert sorted(live.shell("writer", "ls /data").split()) == ["file", "open"]
    assert read_file(live, "writer", "/data/file") == "two"


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


def test_three_concurrent_writers_lose_no_data(live: Live, world: World) -> None:
    create_volume(live, "data")
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["w0", "w1", "w2"], mounts=[MountSpec("data", "/data")])))
    mode = "append" if world.abilities.atomic_append else "apart"
    for me in range(3):
        live.shell(
            f"w{me}", f"(python3 -c '{WRITE_PROGRAM}' {me} {mode} && touch /run/done) </dev/null >/run/output 2>&1 &"
        )
    command = "cat /run/output; ls /run/done || true"
    eventually(lambda: all(live.shell(f"w{me}", command).strip() == "/run/done" for me in range(3)), 120)
    create_sandbox(live, "judge", MountSpec("data", "/data", read_only=True))
    size, wrong, own, log = json.loads(live.shell("judge", f"python3 -c '{CHECK_PROGRAM}'"))
    assert (size, wrong, own) == (600 * 4096, [], [True] * 3)
    expected_lines = {f"{me} {n:06d} {chr(97 + me) * 80}" for me in range(3) for n in range(200)}
    assert len(log) == (600 if world.abilities.atomic_append else 0)
    assert set(log) == (expected_lines if world.abilities.atomic_append else set())


def test_locks_work_across_sandboxes(live: Live, world: World) -> None:
    if not world.abilities.atomic_append:
        pytest.skip(f"{world.kind} declares that locks work only within one sandbox")
    create_volume(live, "data")
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["a", "b"], mounts=[MountSpec("data", "/data")])))
    holder_pid = live.shell("a", "flock --close /data/lock sleep 1000 </dev/null >/dev/null 2>&1 & echo $!").strip()
    eventually(lambda: live.shell("b", "flock --nonblock /data/lock true || echo held").strip() == "held")
    live.shell("a", f"kill {holder_pid}")
    eventually(lambda: live.shell("b", "flock --nonblock /data/lock true || echo held").strip() == "")


def test_a_full_volume_reports_enospc_and_grows_while_mounted(live: Live) -> None:
    create_volume(live, "data", size_mb=MIN_VOLUME_MB)
    create_sandbox(live, "box", MountSpec("data", "/data"))
    create_sandbox(live, "other", MountSpec("data", "/data"))
    output = live.shell("box", "dd if=/dev/zero of=/data/fill bs=1M count=100 conv=fsync 2>&1 || true")
    assert any(word in output for word in DISK_FULL_MESSAGES), output
    assert 32 * MB < live.do(live.engine.volumes.get_state("data")).used_bytes < (MIN_VOLUME_MB + 1) * MB
    assert live.do(live.engine.volumes.grow("data", 160)).size_mb == 160
    live.shell("box", "dd if=/dev/zero of=/data/fill bs=1M count=100 conv=fsync")
    output = live.shell("other", "dd if=/dev/zero of=/data/more bs=1M count=100 conv=fsync 2>&1 || true")
    assert any(word in output for word in DISK_FULL_MESSAGES), output
    live.shell("other", "rm /data/more && echo room >/data/small && sync")


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


@pytest.mark.usefixtures("with_memory")
def test_a_fork_keeps_an_open_file_on_a_volume(live: Live) -> None:
    create_volume(live, "data")
    create_sandbox(live, "source", MountSpec("data", "/data"))
    start_program(live, "source", KEEP_OPEN_PROGRAM)
    live.do(live.engine.snapshots.create("source", name="mark"))
    live.do(live.engine.forks.create("mark", ForkSpec(names=["copy"])))
    create_sandbox(live, "judge", MountSpec("data", "/data", read_only=True))

    def read_counts() -> list[int]:
        observed_counts = [int(read_file(live, name, "/run/started")) for name in ("source", "copy")]
        stored_counts = [
            int(live.shell("judge", f"dd if=/data/file bs=4096 skip={n} count=1 2>/dev/null | head -c 8"))
            for n in range(2)
        ]
        return [*observed_counts, *stored_counts]

    first_counts = read_counts()
    eventually(
        lambda: all(now > then for now, then in zip(read_counts(), first_counts, strict=True)),
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


def test_disk_and_volumes_are_captured_at_the_same_instant(live: Live) -> None:
    for name in ("a", "b"):
        create_volume(live, name)
    create_sandbox(live, "source", MountSpec("a", "/a"), MountSpec("b", "/b"))
    start_program(live, "source", WRITE_IN_TURN_PROGRAM)
    # Without memory, the program does not continue in the fork, so the disk and the volumes are as captured.
    live.do(live.engine.snapshots.create("source", name="mark", memory="none", volumes=["a", "b"]))
    fork = create_sandbox(
        live, "fork", MountSpec("a", "/a", clone=True), MountSpec("b", "/b", clone=True), template="mark"
    )
    disk_count, volume_a_count, volume_b_count = (
        int(read_file(live, fork.id, f"{place}/turn")) for place in ("/root", "/a", "/b")
    )
    assert disk_count >= volume_a_count >= volume_b_count >= disk_count - 1, (
        disk_count,
        volume_a_count,
        volume_b_count,
    )
    assert int(read_file(live, "source", "/root/turn")) > disk_count, "the source did not continue"
    live.do(live.engine.sandboxes.delete(fork.id))
    live.do(live.engine.snapshots.delete("mark"))
    assert not live.engine.volumes.list_snapshots("a") and not live.engine.volumes.list_snapshots("b")


def test_a_failed_capture_of_the_second_volume_leaves_nothing_behind(
    live: Live, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        create_volume(live, name)
    create_sandbox(live, "source", MountSpec("a", "/a"), MountSpec("b", "/b"))
    with pytest.raises(Invalid, match="not mounted"):
        live.do(live.engine.snapshots.create("source", volumes=["a", "c"]))
    with pytest.raises(NotFound, match="nothing"):
        live.do(live.engine.snapshots.create("source", volumes=["a", "nothing"]))
    traces_before = world.traces(live.config)
    world.break_volume_capture(live.engine.host, monkeypatch)
    with pytest.raises(BackendFailed, match="forced"):
        live.do(live.engine.snapshots.create("source", name="mark", volumes=["a", "b"]))
    monkeypatch.undo()
    assert world.traces(live.config) == traces_before
    assert not live.engine.volumes.list_snapshots("a") and not live.engine.snapshots.list()
    live.shell("source", "echo on >/a/file && echo on >/b/file && sync")
    live.do(live.engine.snapshots.create("source", name="mark", volumes=["a", "b"]))
    (snapshot,) = live.engine.snapshots.list()
    assert {capture.snapshot for capture in snapshot.volumes} == {
        each.id for name in ("a", "b") for each in live.engine.volumes.list_snapshots(name)
    }


# -- a malicious sandbox -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", mark_slow_except(("/data",), ("/data", "/srv/data")))
def test_symlinks_at_a_mount_path_cannot_escape_the_sandbox(live: Live, world: World, link: str) -> None:
    """Either the request fails or the volume is mounted inside the sandbox; nothing outside it is affected."""
    volume_id = live.engine.volumes.get(create_volume(live, "data")).id
    path = "/srv/data/below" if link == "/srv/data" else link
    writable_directory = world.writable_directory(live.config)
    for target in ("/etc", "../../../../../../../../etc", str(writable_directory)):
        create_sandbox(live, "box")
        live.shell("box", f"rm -rf {link} && mkdir -p $(dirname {link}) && ln -s {target} {link} && sync")
        live.do(live.engine.snapshots.create("box", name="mark"))
        spec = ForkSpec(names=["fork"], mounts=[MountSpec("data", path)])
        refs_with_mount = []
        for ref, request in (
            ("fork", live.engine.forks.create("mark", spec)),
            ("box", live.engine.attachments.attach("box", MountSpec("data", path))),
        ):
            with contextlib.suppress(GatewayError):
                live.do(request)
                refs_with_mount.append(ref)
                live.shell(ref, f"touch {path}/proof && sync")
            assert not find_traces_outside(volume_id, writable_directory), (ref, target)
        create_sandbox(live, "judge", MountSpec("data", "/volume"))
        assert live.shell("judge", "ls /volume").split() == (["proof"] if refs_with_mount else [])
        live.shell("judge", "rm -f /volume/proof && sync")
        for sandbox in live.engine.sandboxes.list():
            live.do(live.engine.sandboxes.delete(sandbox.id))
        live.do(live.engine.snapshots.delete("mark"))
        assert not find_traces_outside(volume_id, writable_directory), target


def find_traces_outside(volume_id: str, writable_directory: Path) -> list[str]:
    """Return the paths outside the gateway's directories where the volume is mounted or its files were written."""
    mount_entries = [
        entry.split() for entry in Path("/proc/self/mountinfo").read_text().splitlines() if volume_id in entry
    ]
    mount_points = [entry[4] for entry in mount_entries if not entry[4].startswith(f"{writable_directory}/")]
    return mount_points + [str(path) for path in (Path("/etc/proof"), writable_directory / "proof") if path.exists()]


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_volumes_stay_mounted_after_a_restart(make_live: Any, world: World) -> None:
    live: Live = make_live()
    create_volume(live, "data")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "echo kept >/data/file && sync")
    live.do(live.engine.sandboxes.pause(create_sandbox(live, "sleeps", MountSpec("data", "/data", read_only=True)).id))
    live.close()
    live_after_restart = make_live(config=live.config)
    assert read_file(live_after_restart, "box", "/data/file") == "kept"
    live_after_restart.do(live_after_restart.engine.sandboxes.resume("sleeps"))
    assert read_file(live_after_restart, "sleeps", "/data/file") == "kept"


def test_volumes_are_mounted_again_after_a_host_crash(make_live: Any, world: World) -> None:
    live: Live = make_live()
    create_volume(live, "data")
    create_sandbox(live, "box", MountSpec("data", "/data"))
    live.shell("box", "echo kept >/data/file && sync")
    live.close()
    world.cut_power(live.config)
    live_after_restart = make_live(config=live.config)
    eventually(lambda: live_after_restart.sandbox("box").state is SandboxState.RUNNING, 120)
    assert read_file(live_after_restart, "box", "/data/file") == "kept"
    live_after_restart.shell("box", "echo more >/data/file")


def test_volumes_and_mounts_survive_kill_9_of_the_gateway(make_live: Any, world: World, tmp_path: Path) -> None:
    live: Live = make_live()
    live.close()
    with ScenarioProcess(live.config, world.host_class, "ten-with-volumes", tmp_path / "config.json") as process:
        state_before = process.read_state(300)
        process.kill()
    live_after_restart: Live = make_live(config=live.config)
    assert live_after_restart.call(read_observable_state, live_after_restart.engine) == state_before
    for n in range(10):
        assert live_after_restart.shell(f"box{n}", "cat /mine/who /ours/who").split() == [f"v{n % 4}", "v4"]
    live_after_restart.shell("box0", "echo on >/mine/on && sync")
    eventually(lambda: read_file(live_after_restart, "box4", "/mine/on") == "on", VISIBILITY_TIMEOUT_SECONDS)
    for n in range(5):
        with pytest.raises(InUse, match=r"\d+ mounts? \(box"):
            live_after_restart.do(live_after_restart.engine.volumes.delete(f"v{n}"))
    for n in range(10):
        live_after_restart.do(live_after_restart.engine.sandboxes.delete(f"box{n}"))
    for n in range(5):
        live_after_restart.do(live_after_restart.engine.volumes.delete(f"v{n}"))
    live_after_restart.wait_for(
        world.check_no_strays, live_after_restart.engine, live_after_restart.config, "after kill -9"
    )
