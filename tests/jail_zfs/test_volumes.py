"""Test volumes in jails: mounts, snapshots, restarts, stuck mounts, and malicious jails."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zfs_core
from zfs_core import snapshots

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import BackendFailed, Busy, InUse, Invalid
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.jail_zfs.jail import mount_point
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY
from sandbox_gateway.records import Mount, Sandbox, SandboxState, Volume
from tests.support import pools
from tests.support.jail_world import JailZfsWorld, run_shim
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE


@pytest.fixture
def make_runner(make_runner: Callable[..., EngineRunner]) -> Iterator[Callable[..., EngineRunner]]:
    """Like the fixture of all jail tests. Before the engines end, no file system is busy any more."""
    yield make_runner
    run_shim("freebsd-shim", "set", "busy", "")


def get_jail_host(runner: EngineRunner) -> JailZfsHost:
    assert isinstance(runner.engine.host, JailZfsHost)
    return runner.engine.host


def create_volume(runner: EngineRunner, name: str = "data", size_mb: int = 64, **options: Any) -> Volume:
    return runner.do(runner.engine.volumes.create(name, size_mb, **options))


def create_sandbox(runner: EngineRunner, name: str, *mounts: tuple[str, str], read_only: bool = False) -> Sandbox:
    mount_specs = [MountSpec(volume, path, read_only) for volume, path in mounts]
    return runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=[name], mounts=mount_specs)))


def get_root_path(world: JailZfsWorld, runner: EngineRunner, name: str) -> Path:
    return world.get_mount_point(runner.config) / "sandboxes" / runner.get_sandbox(name).instance


def list_startup_repairs(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the repairs that the gateway logged at startup."""
    return [vars(record)["fields"]["what"] for record in caplog.records if record.message == "repaired"]


# -- mounts -----------------------------------------------------------------------------------------------------------


def test_setuid_has_no_effect_on_a_volume(runner: EngineRunner) -> None:
    create_volume(runner)
    create_sandbox(runner, "box", ("data", "/data"))
    runner.shell("box", "cp /usr/bin/id /data/id; chown root /data/id; chmod 4755 /data/id")
    assert runner.do(runner.engine.commands.exec("box", ["/data/id", "-u"], user="user")).stdout.strip() == b"1000"


def test_volumes_can_be_mounted_inside_volumes(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    """The engine refuses such mounts, but the host supports them: it mounts outer volumes before inner ones."""
    outer, inner = create_volume(runner, "outer"), create_volume(runner, "inner")
    sandbox = create_sandbox(runner, "box")
    for mount in (Mount(volume=outer.id, path="/data"), Mount(volume=inner.id, path="/data/below")):
        runner.do(get_jail_host(runner).attach(sandbox, mount))
    runner.shell("box", "touch /data/a /data/below/b")
    assert runner.shell("box", "cd /data; find . -type f | sort").split() == ["./a", "./below/b"]
    runner.do(runner.engine.sandboxes.delete("box"))
    assert jail_zfs_world.list_volume_mounts(runner.config) == set()


def test_long_names_and_paths_are_supported(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    name = "v" + "-" * 63
    volume = create_volume(runner, name)
    sandbox = create_sandbox(runner, "box")
    deep_path = "/srv/" + "/".join(["d" * 120] * 3)
    runner.do(get_jail_host(runner).attach(sandbox, Mount(volume=volume.id, path=deep_path)))
    runner.shell("box", f"touch {deep_path}/file")
    assert (
        f"{get_root_path(jail_zfs_world, runner, 'box')}{deep_path}",
        volume.id,
        False,
    ) in jail_zfs_world.list_volume_mounts(runner.config)
    runner.do(get_jail_host(runner).detach(sandbox, Mount(volume=volume.id, path=deep_path)))
    assert runner.shell("box", f"ls {deep_path}") == ""
    with pytest.raises(Invalid, match="File name too long"):
        runner.do(get_jail_host(runner).attach(sandbox, Mount(volume=volume.id, path=f"/srv/{'x' * 300}")))
    assert runner.shell("box", "ls /srv").split() == ["d" * 120]


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_volume_is_captured_and_cloned_with_its_sandbox(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    create_volume(runner, "a")
    create_volume(runner, "b")
    create_sandbox(runner, "source", ("a", "/a"), ("b", "/b"))
    runner.shell("source", "echo one | tee /a/file >/b/file")
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["a", "b"]))
    runner.shell("source", "echo two | tee /a/file >/b/file")
    clone_specs = [MountSpec(name, f"/{name}", clone=True) for name in ("a", "b")]
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["fork"], mounts=clone_specs)))
    assert runner.shell("fork", "cat /a/file /b/file").split() == ["one", "one"]
    runner.shell("fork", "echo three >/a/file")
    assert runner.shell("source", "cat /a/file").strip() == "two"
    assert list((runner.config.host.state_root / "stopped").glob("*")) == []
    with pytest.raises(InUse):
        runner.do(runner.engine.snapshots.delete("mark"))
    runner.do(runner.engine.sandboxes.delete("fork"))
    runner.wait_for(jail_zfs_world.check_no_strays, runner.engine, runner.config, "after the fork")
    assert runner.do(runner.engine.snapshots.delete("mark"))
    assert [each for name in ("a", "b") for each in runner.engine.volumes.list_snapshots(name)] == []
    runner.wait_for(jail_zfs_world.check_no_strays, runner.engine, runner.config, "after the snapshot")


def test_writers_are_stopped_during_a_capture_that_is_not_atomic(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_volume(runner)
    create_sandbox(runner, "source", ("data", "/data"))
    create_sandbox(runner, "writer", ("data", "/data"))
    create_sandbox(runner, "reader", ("data", "/data"), read_only=True)
    states: dict[str, set[str]] = {}
    commands: list[int] = []
    original_snapshot_atomically = snapshots._snapshot_atomically

    def record_states(names: Any, options: Any) -> None:
        time.sleep(0.1)
        for name in ("source", "writer", "reader"):
            states.setdefault(name, set()).update(read_process_states(jail_zfs_world, runner, name))
        commands.append(len(names))
        original_snapshot_atomically(names, options)

    monkeypatch.setattr(snapshots, "_snapshot_atomically", record_states)
    runner.do(runner.engine.snapshots.create("source", volumes=["data"]))
    if zfs_core.detect_capabilities().atomic_snapshots:
        assert commands == [2]
        assert "T" not in states["source"] | states["writer"] | states["reader"]
    else:
        assert commands == [1, 1]
        assert (states["source"], states["writer"]) == ({"T"}, {"T"})
        assert "T" not in states["reader"]
    assert "T" not in read_process_states(jail_zfs_world, runner, "source") | read_process_states(
        jail_zfs_world, runner, "writer"
    )


COUNT_PROGRAM = """
import os, sys, time
files = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in sys.argv[1:]]
number = 0
while True:
    number += 1
    for file in files:
        os.pwrite(file, b"%09d" % number, 0)
    time.sleep(0.001)
"""


def test_a_capture_contains_a_single_instant(runner: EngineRunner) -> None:
    """Each program writes a number to its files in turn, so a later file contains the same or the previous one."""
    paths_by_name = {
        "source": ["/root/number", "/a/number", "/b/number"],
        "writer": ["/b/other", "/a/other"],
    }
    create_volume(runner, "a")
    create_volume(runner, "b")
    for name, paths in paths_by_name.items():
        create_sandbox(runner, name, ("a", "/a"), ("b", "/b"))
        program = f"setsid python3 -c '{COUNT_PROGRAM}' {' '.join(paths)} </dev/null >/dev/null 2>&1 &"
        runner.shell(name, f"{program} while ! test -s {paths[-1]}; do sleep 0.1; done")
    clone_specs = [MountSpec(name, f"/{name}", clone=True) for name in ("a", "b")]
    last_number = 0
    for mark in ("mark-1", "mark-2"):
        runner.do(runner.engine.snapshots.create("source", name=mark, volumes=["a", "b"]))
        runner.do(runner.engine.forks.create(mark, ForkSpec(names=[f"{mark}-fork"], mounts=clone_specs)))
        for paths in paths_by_name.values():
            numbers = [int(runner.shell(f"{mark}-fork", f"cat {path}")) for path in paths]
            assert numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1
        runner.do(runner.engine.sandboxes.delete(f"{mark}-fork"))
        assert last_number < numbers[0], "the program was not running during the capture"
        last_number = numbers[0]


MAP_PROGRAM = """
import mmap, os, sys, time
maps = []
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    maps.append(mmap.mmap(file, 4096))
    maps[-1][:5] = b"dirty"
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_capture_contains_memory_mapped_data(runner: EngineRunner) -> None:
    create_volume(runner, "a")
    create_sandbox(runner, "source", ("a", "/a"))
    program = f"setsid python3 -c '{MAP_PROGRAM}' /root/map /a/map </dev/null >/root/log 2>&1 &"
    runner.shell("source", f"{program} while ! grep -q ready /root/log; do sleep 0.1; done")
    runner.do(runner.engine.snapshots.create("source", name="mark", volumes=["a"]))
    runner.do(runner.engine.forks.create("mark", ForkSpec(names=["fork"], mounts=[MountSpec("a", "/a", clone=True)])))
    assert runner.shell("fork", "head -c 5 /root/map; head -c 5 /a/map") == "dirtydirty"


def read_process_states(world: JailZfsWorld, runner: EngineRunner, name: str) -> set[str]:
    """Return the states of a jail's processes, as `ps` prints them."""
    states = set()
    for pid in run_shim("pgrep", "-j", runner.get_sandbox(name).host["jail"], check=False).split():
        try:
            states.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return states


def test_rolling_back_a_mounted_volume_updates_all_jails(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    volume = create_volume(runner)
    create_sandbox(runner, "writer", ("data", "/data"))
    create_sandbox(runner, "reader", ("data", "/srv/data"), read_only=True)
    taken_snapshots = []
    for text in ("one", "two"):
        runner.shell("writer", f"echo {text} >/data/file")
        taken_snapshots.append(runner.do(runner.engine.volumes.create_snapshot("data", text)))
    runner.shell("writer", "(cd /data; exec sleep 1000 >open) </dev/null 2>&1 &")
    for snapshot in (taken_snapshots[0], taken_snapshots[1], taken_snapshots[0]):
        runner.do(runner.engine.volumes.rollback("data", snapshot.name, force=True))
        assert runner.shell("writer", "cat /data/file").strip() == snapshot.name
        assert runner.shell("reader", "cat /srv/data/file").strip() == snapshot.name
        assert runner.do(runner.engine.commands.exec("reader", ["touch", "/srv/data/x"])).exit_code != 0
    runner.shell("writer", "echo on >/data/file")
    assert runner.shell("reader", "cat /srv/data/file").strip() == "on"
    assert [each.name for each in runner.engine.volumes.list_snapshots("data")] == ["one", "two"]
    runner.wait_for(jail_zfs_world.check_no_strays, runner.engine, runner.config, "after rollbacks")
    assert volume.id == runner.engine.volumes.get("data").id


def test_a_failed_rollback_restores_the_mounts(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_volume(runner)
    for name in ("first", "second"):
        create_sandbox(runner, name, ("data", f"/data/{name}"))
    runner.shell("first", "echo old >/data/first/file")
    runner.do(runner.engine.volumes.create_snapshot("data", "mark"))
    runner.shell("first", "echo new >/data/first/file")
    mounts_and_traces_before = (
        jail_zfs_world.list_volume_mounts(runner.config),
        jail_zfs_world.read_traces(runner.config),
    )
    commit_method_name = "sandbox_gateway.hosts.jail_zfs.storage.property_store.PropertyStore.write"

    def fail(*args: Any) -> None:
        raise BackendFailed("forced")

    with monkeypatch.context() as patch, pytest.raises(BackendFailed, match="forced"):
        patch.setattr(commit_method_name, fail)
        runner.do(runner.engine.volumes.rollback("data", "mark", force=True))
    assert (
        jail_zfs_world.list_volume_mounts(runner.config),
        jail_zfs_world.read_traces(runner.config),
    ) == mounts_and_traces_before
    # Root in a jail may remove the mount point, which does not affect other jails.
    runner.shell("second", "mv /data /gone; ln -s /etc /data")
    with pytest.raises(Invalid, match="symbolic link"):
        runner.do(runner.engine.volumes.rollback("data", "mark", force=True))
    assert runner.shell("first", "cat /data/first/file").strip() == "new"
    assert {node for node, *_ in jail_zfs_world.list_volume_mounts(runner.config)} == {
        f"{get_root_path(jail_zfs_world, runner, 'first')}/data/first"
    }


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_corrects_mounts_to_match_the_records(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner()
    for name in ("kept", "missing", "stray", "wrong"):
        create_volume(runner, name)
    sandbox = create_sandbox(runner, "box", ("kept", "/kept"), ("missing", "/missing"), ("wrong", "/wrong"))
    runner.shell("box", "echo kept >/kept/file; echo missing >/missing/file; (exec sleep 1000 >/kept/open) 2>&1 &")
    expected_mounts = jail_zfs_world.list_volume_mounts(runner.config)
    runner.close()
    root, volumes_directory = (
        get_root_path(jail_zfs_world, runner, "box"),
        jail_zfs_world.get_mount_point(runner.config) / "volumes",
    )
    for name in ("missing", "wrong"):
        run_shim("umount", f"{root}/{name}")
    (root / "stray").mkdir()
    stray_volume_id = runner.engine.volumes.get("stray").id
    run_shim(
        "mount",
        "-t",
        "nullfs",
        "-o",
        "ro",
        str(volumes_directory / runner.engine.volumes.get("wrong").id),
        f"{root}/wrong",
    )
    run_shim("mount", "-t", "nullfs", str(volumes_directory / stray_volume_id), f"{root}/stray")
    (runner.config.host.state_root / "stopped").mkdir(exist_ok=True)
    (runner.config.host.state_root / "stopped" / sandbox.host["jail"]).touch()
    run_shim("pkill", "-STOP", "-j", sandbox.host["jail"])
    caplog.clear()
    runner_after_restart = make_runner(runner.config)
    repairs = list_startup_repairs(caplog)
    for expected_text in (
        f"mounted /missing in sandbox {sandbox.id} again",
        f"mounted /wrong in sandbox {sandbox.id} again",
        f"unmounted {root}/stray",
        f"resumed the jail {sandbox.host['jail']}",
    ):
        assert any(expected_text in sentence for sentence in repairs), repairs
    assert jail_zfs_world.list_volume_mounts(runner_after_restart.config) == expected_mounts
    assert runner_after_restart.shell("box", "cat /kept/file /missing/file").split() == ["kept", "missing"]
    runner_after_restart.shell("box", "echo works >/wrong/file")
    runner_after_restart.close()
    caplog.clear()
    runner_after_second_restart = make_runner(runner.config)
    assert list_startup_repairs(caplog) == [], "the second start repaired something"
    runner_after_second_restart.do(runner_after_second_restart.engine.sandboxes.delete("box"))
    assert jail_zfs_world.list_volume_mounts(runner_after_second_restart.config) == set()


def test_volumes_of_dead_jails_are_unmounted(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    runner = make_runner()
    create_volume(runner)
    create_sandbox(runner, "box", ("data", "/data"))
    runner.shell("box", "echo kept >/data/file")
    runner.close()
    run_shim("pkill", "-KILL", "-j", runner.get_sandbox("box").host["jail"])
    runner_after_restart = make_runner(runner.config)
    wait_until(lambda: runner_after_restart.get_sandbox("box").state is SandboxState.RUNNING, 60)
    assert runner_after_restart.shell("box", "cat /data/file").strip() == "kept"
    runner_after_restart.wait_for(
        jail_zfs_world.check_no_strays, runner_after_restart.engine, runner_after_restart.config, "after the resume"
    )


def test_a_sandbox_starts_without_a_volume_destroyed_with_zfs(
    make_runner: Callable[..., EngineRunner], caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner()
    lost_volume, kept_volume = create_volume(runner, "lost"), create_volume(runner, "kept")
    sandbox = create_sandbox(runner, "box", ("lost", "/lost"), ("kept", "/kept"))
    runner.do(runner.engine.sandboxes.pause("box"))
    runner.close()
    pools.destroy_all(lost_volume.host["dataset"])
    caplog.clear()
    runner_after_restart = make_runner(runner.config)
    repairs = list_startup_repairs(caplog)
    assert (
        f"sandbox {sandbox.id} mounts volume {lost_volume.id} at /lost, but the volume is missing: restore or detach it"
        in repairs
    ), repairs
    assert [each.id for each in runner_after_restart.engine.volumes.list()] == [kept_volume.id]
    assert [each.path for each in runner_after_restart.get_sandbox("box").mounts] == ["/lost", "/kept"]
    runner_after_restart.do(runner_after_restart.engine.sandboxes.resume("box"))
    runner_after_restart.shell("box", "touch /kept/file")
    runner_after_restart.do(runner_after_restart.engine.attachments.detach("box", lost_volume.id))
    assert [each.path for each in runner_after_restart.get_sandbox("box").mounts] == ["/kept"]


def test_damaged_volume_records_do_not_prevent_startup(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    runner = make_runner()
    damaged_volume = create_volume(runner, "torn")
    create_sandbox(runner, "box", ("torn", "/torn"))
    runner.shell("box", "echo kept >/torn/file")
    record = zfs_core.local_props(damaged_volume.host["dataset"])[RECORD_PROPERTY]
    runner.close()
    zfs_core.lzc_set_prop(damaged_volume.host["dataset"], RECORD_PROPERTY, record[:60])
    runner_after_restart = make_runner(runner.config)
    assert runner_after_restart.engine.volumes.list() == []
    assert runner_after_restart.shell("box", "cat /torn/file").strip() == "kept", (
        "the volume with the damaged record was unmounted"
    )
    runner_after_restart.do(runner_after_restart.engine.sandboxes.update("box", metadata={"saved": "again"}))
    runner_after_restart.close()
    zfs_core.lzc_set_prop(damaged_volume.host["dataset"], RECORD_PROPERTY, record)
    runner_after_second_restart = make_runner(runner.config)
    assert [each.name for each in runner_after_second_restart.engine.volumes.list()] == ["torn"]
    assert [each.path for each in runner_after_second_restart.get_sandbox("box").mounts] == ["/torn"]
    assert runner_after_second_restart.shell("box", "cat /torn/file").strip() == "kept"


# -- stuck mounts -----------------------------------------------------------------------------------------------------


def test_deleting_a_sandbox_does_not_wait_for_a_stuck_mount(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    volume = create_volume(runner)
    create_sandbox(runner, "bystander")
    traces_before = jail_zfs_world.read_traces(runner.config)
    sandbox = create_sandbox(runner, "box", ("data", "/data"))
    node = f"{get_root_path(jail_zfs_world, runner, 'box')}/data"
    run_shim("freebsd-shim", "set", "busy", node)
    with pytest.raises(Busy, match="cannot be unmounted"):
        runner.do(get_jail_host(runner).detach(sandbox, Mount(volume=volume.id, path="/data")))
    assert runner.do(runner.engine.volumes.get_state("data")).stuck == [], "the failed detach changed something"
    runner.shell("box", "touch /data/file")
    start_time = time.monotonic()
    runner.do(runner.engine.sandboxes.delete("box"))
    assert time.monotonic() - start_time < 10
    assert [each.name for each in runner.engine.sandboxes.list()] == ["bystander"]
    (sentence,) = runner.do(runner.engine.volumes.get_state("data")).stuck
    assert node in sentence and "Device busy" in sentence and "the gateway retries" in sentence
    assert jail_zfs_world.read_traces(runner.config) != traces_before, (
        "the files were removed although a mount is stuck"
    )
    run_shim("freebsd-shim", "set", "busy", "")
    wait_until(lambda: jail_zfs_world.read_traces(runner.config) == traces_before, 40)
    assert runner.do(runner.engine.volumes.get_state("data")).stuck == []


def test_a_stuck_volume_is_removed_later(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    runner = make_runner()
    traces_before = jail_zfs_world.read_traces(runner.config)
    create_volume(runner)
    create_sandbox(runner, "box", ("data", "/data"))
    run_shim("freebsd-shim", "set", "busy", f"{get_root_path(jail_zfs_world, runner, 'box')}/data")
    runner.do(runner.engine.sandboxes.delete("box"))
    start_time = time.monotonic()
    runner.do(runner.engine.volumes.delete("data"))
    assert time.monotonic() - start_time < 5
    runner.close()
    runner_after_restart = make_runner(runner.config)
    assert runner_after_restart.engine.volumes.list() == [], "a volume that is being removed is still listed"
    run_shim("freebsd-shim", "set", "busy", "")
    wait_until(lambda: jail_zfs_world.list_volume_mounts(runner.config) == set(), 40)
    runner_after_restart.close()
    runner_after_second_restart = make_runner(runner.config)
    assert jail_zfs_world.read_traces(runner_after_second_restart.config) == traces_before


# -- malicious jails --------------------------------------------------------------------------------------------------


@pytest.fixture
def host_directory(tmp_path: Path) -> Iterator[Path]:
    """Create a directory on the host, and check at the end that nothing was mounted in it."""
    directory = tmp_path / "host_directory"
    directory.mkdir()
    yield directory
    mount_points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    assert [node for node in mount_points if node.startswith(str(tmp_path))] == []


@pytest.mark.parametrize(
    ("script", "path"),
    [
        ("ln -s {host_directory} /data", "/data"),
        ("ln -s {host_directory} /srv/link", "/srv/link/below"),
        ("mkdir /data; ln -s ../../../../../../../../..{host_directory} /data/below", "/data/below"),
        ("touch /data", "/data"),
    ],
)
def test_a_planted_symlink_cannot_redirect_a_volume_mount(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, host_directory: Path, script: str, path: str
) -> None:
    volume = create_volume(runner)
    sandbox = create_sandbox(runner, "sly")
    runner.shell("sly", script.format(host_directory=host_directory))
    traces_before = jail_zfs_world.read_traces(runner.config)
    with pytest.raises(Invalid, match="a volume cannot be mounted"):
        runner.do(get_jail_host(runner).attach(sandbox, Mount(volume=volume.id, path=path)))
    assert jail_zfs_world.read_traces(runner.config) == traces_before
    assert list(host_directory.iterdir()) == []
    # The same must hold when a fork of the sandbox starts.
    runner.do(runner.engine.snapshots.create("sly", name="mark"))
    with pytest.raises(Invalid, match="a volume cannot be mounted"):
        runner.do(runner.engine.forks.create("mark", ForkSpec(mounts=[MountSpec("data", path)])))
    runner.do(runner.engine.snapshots.delete("mark"))
    assert jail_zfs_world.read_traces(runner.config) == traces_before
    assert runner.shell("sly", "echo alive").strip() == "alive"


def test_a_symlink_created_after_the_check_is_detected(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, host_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test acts like a process in the jail that runs between the check and the mount."""
    volume = create_volume(runner)
    bystander = create_sandbox(runner, "bystander", ("data", "/data"))
    sandbox = create_sandbox(runner, "sly")
    traces_before = jail_zfs_world.read_traces(runner.config)
    original_prepare = mount_point.prepare

    def prepare_then_swap(root: Path, path: str) -> None:
        original_prepare(root, path)
        (root / "data").rename(root / "aside")
        (root / "data").symlink_to(host_directory)

    monkeypatch.setattr(mount_point, "prepare", prepare_then_swap)
    with pytest.raises(Invalid, match="contains a symbolic link"):
        runner.do(get_jail_host(runner).attach(sandbox, Mount(volume=volume.id, path="/data")))
    assert jail_zfs_world.read_traces(runner.config) == traces_before
    assert not os.path.ismount(host_directory)
    runner.shell("bystander", "echo mine >/data/file")
    assert bystander.mounts[0].volume == volume.id


def test_a_constantly_swapped_mount_point_cannot_redirect_a_mount(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, host_directory: Path
) -> None:
    """The jail's processes are stopped during an attach, but a thread of the test keeps swapping another path."""
    volume = create_volume(runner)
    sandbox = create_sandbox(runner, "sly")
    swap_script = (
        "mkdir -p /a/data; while :; do mv /a /b; ln -s OUT /a; rm /a; mv /b /a; done </dev/null >/dev/null 2>&1 &"
    ).replace("OUT", str(host_directory))
    runner.shell("sly", swap_script)
    root, stop_event = get_root_path(jail_zfs_world, runner, "sly"), threading.Event()
    (root / "c/data").mkdir(parents=True)
    (host_directory / "data").mkdir()

    def swap_paths() -> None:
        while not stop_event.is_set():
            for change in (
                lambda: (root / "c").rename(root / "d"),
                lambda: (root / "c").symlink_to(host_directory),
                lambda: (root / "c").unlink(),
                lambda: (root / "d").rename(root / "c"),
            ):
                with contextlib.suppress(OSError):
                    change()

    thread = threading.Thread(target=swap_paths)
    thread.start()
    outcomes = set()
    try:
        for attempt in range(12):
            mount = Mount(volume=volume.id, path=("/a/data", "/c/data")[attempt % 2])
            try:
                runner.do(get_jail_host(runner).attach(sandbox, mount))
            except Invalid:
                outcomes.add("refused")
                assert jail_zfs_world.list_volume_mounts(runner.config) == set()
                continue
            outcomes.add("mounted")
            assert jail_zfs_world.list_volume_mounts(runner.config) == {(f"{root}{mount.path}", volume.id, False)}
            runner.do(get_jail_host(runner).detach(sandbox, mount))
            assert jail_zfs_world.list_volume_mounts(runner.config) == set()
    finally:
        stop_event.set()
        thread.join()
    assert outcomes
    assert not any((host_directory / "data").iterdir())
    assert runner.shell("sly", "echo alive").strip() == "alive"
