"""Test behaviour that only the jail/ZFS host has: confinement by jails, snapshots in ZFS, and failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zfs_core
from zfs_core import run as zfs_run
from zfs_core.causes import Cause

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, NoSpace, Unsupported
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import QUARANTINE_PROPERTY, RECORD_PROPERTY
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Resources, SandboxState
from tests.support import pools, session
from tests.support.jail_world import JailZfsWorld, get_debian_tarball, run_shim
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE


@pytest.fixture
def set_knob() -> Iterator[Callable[[str, str], None]]:
    """Return a function that sets a knob of the shim. All knobs are restored at the end of the test."""
    defaults = {"dying": "0", "kern.racct.enable": "1", "linux": "0"}

    def set_value(name: str, value: str) -> None:
        assert name in defaults
        run_shim("freebsd-shim", "set", name, value)

    yield set_value
    for name, value in defaults.items():
        run_shim("freebsd-shim", "set", name, value)


def test_deleting_many_sandboxes_leaves_no_resources(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["bystander"])))
    traces_before = jail_zfs_world.read_traces(runner.config)
    for count in (8, 8):
        forks = runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(count=count, concurrency=6)), timeout=300)
        assert len(jail_zfs_world.read_traces(runner.config)["jails"]) == count + 1
        for fork in forks:
            runner.do(runner.engine.sandboxes.delete(fork.id))
    assert jail_zfs_world.read_traces(runner.config) == traces_before


def test_jails_have_restrictive_parameters(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    jail_name = runner.get_sandbox("one").host["jail"]
    output = run_shim(
        "jls", "-j", jail_name, "-n", "securelevel", "enforce_statfs", "children.max", "vnet", "allow.raw_sockets"
    )
    assert output.split() == ["securelevel=2", "enforce_statfs=2", "children.max=0", "vnet=new", "allow.noraw_sockets"]
    mount_result = runner.do(runner.engine.commands.exec("one", ["mount", "-t", "tmpfs", "tmpfs", "/mnt"]))
    assert mount_result.exit_code != 0
    assert runner.shell("one", "env | grep -c GROVE || true").strip() == "0"
    assert runner.do(runner.engine.commands.exec("one", ["touch", "/run/sandbox/file"])).exit_code != 0


def test_limits_are_enforced_and_removed_with_the_sandbox(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["small"], memory_mb=64, cpus=2)))
    jail_name = runner.get_sandbox("small").host["jail"]
    rules = {line for line in run_shim("rctl").split() if f":{jail_name}:" in line}
    assert rules == {
        f"jail:{jail_name}:maxproc:deny=1000",
        f"jail:{jail_name}:nthr:deny=4000",
        f"jail:{jail_name}:openfiles:deny=31695",
        f"jail:{jail_name}:vmemoryuse:deny={64 << 20}",
        f"jail:{jail_name}:pcpu:deny=200",
    }
    allocation_result = runner.do(runner.engine.commands.exec("small", ["python3", "-c", "x = bytearray(200 << 20)"]))
    assert allocation_result.exit_code != 0
    assert runner.do(runner.engine.sandboxes.get_usage("small")).memory_bytes > 1 << 20
    runner.do(runner.engine.sandboxes.delete("small"))
    assert jail_name not in run_shim("rctl")


def test_a_host_without_racct_runs_sandboxes_without_limits(
    make_runner: Callable[..., EngineRunner], set_knob: Callable[[str, str], None]
) -> None:
    set_knob("kern.racct.enable", "0")
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["free"])))
    assert runner.do(runner.engine.sandboxes.get_usage("free")).memory_bytes == 0
    (sample,) = runner.do(runner.engine.loads.get_history("free"))
    assert sample.memory_bytes is None and sample.cpu_percent is None, (
        "a value that the host cannot measure is not None"
    )
    assert sample.disk_bytes is not None and sample.disk_bytes > 1 << 20
    runner.do(runner.engine.sandboxes.delete("free"))
    runner.close()


@pytest.mark.parametrize(
    ("linux", "words"),
    [
        ("0", r"linux\(4\) is not loaded on this host \(kern.features.linux64 is not 1\).*service linux start"),
        ("1", r"in this release, although linux\(4\) is loaded on this host: use a host with virtual machines"),
    ],
)
def test_images_are_refused_with_and_without_linux(
    runner: EngineRunner, set_knob: Callable[[str, str], None], linux: str, words: str
) -> None:
    set_knob("linux", linux)
    for recipe in (Recipe(source=Source.IMAGE, image="app:1"), Recipe(source=Source.IMAGE, image="oci:/nowhere:app")):
        with pytest.raises(Unsupported, match=words):
            runner.do(runner.engine.templates.build("web", recipe))
    assert [each.names for each in runner.engine.templates.list()] == [[TEMPLATE]]
    assert runner.engine.templates.list_unready_builds() == []


def test_the_free_space_of_the_dataset_limits_forks(make_runner: Callable[..., EngineRunner]) -> None:
    runner = make_runner()
    dataset = runner.config.jail_zfs.dataset
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    room = runner.do(runner.engine.host.measure_room())
    assert 0 < room.disk_free < room.disk_total
    assert 0 < room.memory_free < room.memory_total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    used_bytes = room.disk_total - room.disk_free
    zfs_core.lzc_set_prop(dataset, "quota", used_bytes + (500 << 20))
    try:
        datasets_before = zfs_core.list_datasets(dataset, types="filesystem,snapshot")
        for operation in (
            runner.engine.forks.create(TEMPLATE, ForkSpec()),
            runner.engine.forks.clone("one", ForkSpec()),
            runner.engine.snapshots.create("one", name="more"),
        ):
            with pytest.raises(NoSpace, match="less than 512 MiB of disk space free"):
                runner.do(operation)
        assert zfs_core.list_datasets(dataset, types="filesystem,snapshot") == datasets_before
    finally:
        pools.run("zfs", "set", "quota=none", dataset)
    runner.do(runner.engine.snapshots.create("one", name="more"))


def test_a_fork_can_raise_the_disk_quota(runner: EngineRunner) -> None:
    template_disk_mb = runner.engine.templates.get(TEMPLATE).resources.disk_mb
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["big"], disk_mb=template_disk_mb + 512)))
    dataset = f"{runner.config.jail_zfs.dataset}/sandboxes/{runner.get_sandbox('big').instance}"
    assert zfs_core.get_props([dataset], ["refquota"])[dataset]["refquota"].number == (template_disk_mb + 512) << 20


def test_a_snapshot_survives_the_deletion_of_its_sandbox(make_runner: Callable[..., EngineRunner]) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.shell("source", "echo kept >/root/kept")
    snapshot = runner.do(runner.engine.snapshots.create("source", name="mark"))
    assert zfs_core.lzc_exists(snapshot.host["zfsSnapshot"])
    runner.do(runner.engine.sandboxes.delete("source"))
    assert zfs_core.lzc_exists(runner.engine.snapshots.get("mark").host["zfsSnapshot"])
    runner.close()
    runner_after_restart = make_runner(config=runner.config)
    assert zfs_core.lzc_exists(runner_after_restart.engine.snapshots.get("mark").host["zfsSnapshot"])
    fork = runner_after_restart.do(runner_after_restart.engine.forks.create("mark", ForkSpec()))
    assert runner_after_restart.shell(fork.id, "cat /root/kept").strip() == "kept"


def test_a_gateway_that_refuses_newer_records_leaves_its_jails_alone(make_runner: Callable[..., EngineRunner]) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["box"])))
    sandbox = runner.get_sandbox("box")
    dataset = f"{runner.config.jail_zfs.dataset}/sandboxes/{sandbox.instance}"
    runner.close()
    record = zfs_core.local_props(dataset)[RECORD_PROPERTY]
    zfs_core.lzc_set_prop(dataset, RECORD_PROPERTY, record.replace('"format":1', '"format":2'))
    with pytest.raises(BackendFailed, match=r"newer release of the gateway \(its format is 2"):
        make_runner(config=runner.config)
    assert QUARANTINE_PROPERTY not in zfs_core.local_props(dataset)
    zfs_core.lzc_set_prop(dataset, RECORD_PROPERTY, record)
    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.get_sandbox("box").state is SandboxState.RUNNING
    assert runner_after_restart.get_sandbox("box").instance == sandbox.instance
    assert runner_after_restart.shell("box", "echo alive").strip() == "alive"


def test_a_snapshot_destroyed_with_zfs_is_not_listed_after_a_restart(make_runner: Callable[..., EngineRunner]) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    for name in ("kept", "lost", "also-lost"):
        runner.do(runner.engine.snapshots.create("source", name=name))
    for name in ("lost", "also-lost"):
        zfs_core.lzc_destroy_snaps([runner.engine.snapshots.get(name).host["zfsSnapshot"]], False)
    assert runner.do(runner.engine.snapshots.delete("also-lost"))
    with pytest.raises(GatewayError, match="not found"):
        runner.do(runner.engine.forks.create("lost", ForkSpec()))
    runner.close()
    runner_after_restart = make_runner(config=runner.config)
    assert [snapshot.names for snapshot in runner_after_restart.engine.snapshots.list()] == [["kept"]]
    assert runner_after_restart.shell("source", "echo alive").strip() == "alive"


def test_a_failed_rollback_keeps_the_old_jail_running(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    runner = make_runner()
    runner.do(runner.engine.forks.fork(TEMPLATE, ForkSpec(names=["victim", "broken"])))
    runner.shell("victim", "echo now >/root/now")
    runner.shell("broken", "rm -r /opt/sandbox_agent")
    runner.do(runner.engine.snapshots.create("broken", name="no-agent"))
    instance, traces_before = runner.get_sandbox("victim").instance, jail_zfs_world.read_traces(runner.config)
    start_time = time.monotonic()
    with pytest.raises(BackendFailed, match="its jail stopped together with the agent"):
        runner.do(runner.engine.sandboxes.rollback("victim", "no-agent"))
    assert time.monotonic() - start_time < 10
    assert runner.get_sandbox("victim").instance == instance
    assert runner.shell("victim", "cat /root/now").strip() == "now"
    assert jail_zfs_world.read_traces(runner.config) == traces_before


def test_a_killed_jail_is_detected(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["gone"])))
    jail_name = runner.get_sandbox("gone").host["jail"]
    run_shim("pkill", "-KILL", "-j", jail_name)
    wait_until(lambda: runner.get_sandbox("gone").state_reason != "", 20)
    assert "its jail stopped" in runner.get_sandbox("gone").state_reason
    runner.do(runner.engine.sandboxes.resume("gone"))
    assert runner.shell("gone", "hostname").strip() == "gone"


def test_a_jail_that_outlives_its_agent_is_removed(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["headless"])))
    time.sleep(6)  # long enough for a probe to reach the agent
    with pytest.raises(
        BackendFailed, match=r"closed every connection|cannot be reached|connection to the sandbox was lost"
    ):
        runner.shell("headless", "kill -KILL -1; sleep 100")
    wait_until(lambda: runner.get_sandbox("headless").state_reason != "", 20)
    assert jail_zfs_world.read_traces(runner.config)["processes"] == set()


def test_deleting_a_sandbox_does_not_wait_for_its_dying_jail(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, set_knob: Callable[[str, str], None]
) -> None:
    traces_before = jail_zfs_world.read_traces(runner.config)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["slow"])))
    set_knob("dying", "forever")
    start_time = time.monotonic()
    runner.do(runner.engine.sandboxes.delete("slow"))
    assert time.monotonic() - start_time < 10
    assert runner.engine.sandboxes.list() == []
    set_knob("dying", "0")
    wait_until(lambda: jail_zfs_world.read_traces(runner.config) == traces_before, 20)


def test_resuming_chooses_a_different_name_while_the_old_jail_is_dying(
    make_runner: Callable[..., EngineRunner], set_knob: Callable[[str, str], None]
) -> None:
    runner = make_runner(jail_zfs={"dying_seconds": 0.3})
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["slow"])))
    first_jail_name = runner.get_sandbox("slow").host["jail"]
    runner.shell("slow", "echo kept >/root/kept")
    set_knob("dying", "forever")
    runner.do(runner.engine.sandboxes.pause("slow"))
    runner.do(runner.engine.sandboxes.resume("slow"))
    assert runner.shell("slow", "cat /root/kept").strip() == "kept"
    assert runner.get_sandbox("slow").host["jail"] == f"{first_jail_name}-2"
    runner.close()
    runner_after_restart = make_runner(config=runner.config)
    assert runner_after_restart.shell("slow", "cat /root/kept").strip() == "kept"
    set_knob("dying", "0")


def test_a_restart_does_not_unmount_paused_sandboxes(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    """Each start retires leftovers of rollbacks with `zfs rename`, which by default unmounts the dataset's clones.

    While another mount namespace uses the clones, they cannot be mounted again.
    """
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    runner.do(runner.engine.snapshots.create("source", name="mark"))
    runner.do(runner.engine.sandboxes.rollback("source", "mark"))
    runner.do(runner.engine.sandboxes.pause("source"))
    runner.close()
    sandbox_mount_point = str(
        jail_zfs_world.get_mount_point(runner.config) / "sandboxes" / runner.get_sandbox("source").instance
    )
    mount_id_before = pools.read_mount_ids(jail_zfs_world.get_mount_point(runner.config))[sandbox_mount_point]
    with pools.mounts_kept_in_use():
        runner_after_restart = make_runner(config=runner.config)
        assert (
            pools.read_mount_ids(jail_zfs_world.get_mount_point(runner.config))[sandbox_mount_point] == mount_id_before
        )
        runner_after_restart.do(runner_after_restart.engine.sandboxes.resume("source"))
    assert runner_after_restart.shell("source", "hostname").strip() == "source"


def test_a_mount_error_lists_the_holder(
    make_runner: Callable[..., EngineRunner],
    jail_zfs_world: JailZfsWorld,
    set_knob: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.5)
    runner = make_runner(jail_zfs={"dying_seconds": 0.3})
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["held"])))
    sandbox = runner.get_sandbox("held")
    dataset = f"{runner.config.jail_zfs.dataset}/sandboxes/{sandbox.instance}"
    set_knob("dying", "forever")
    runner.do(runner.engine.sandboxes.pause("held"))
    run_shim("umount", "-f", str(jail_zfs_world.get_mount_point(runner.config) / "sandboxes" / sandbox.instance))
    if pools.IS_OPENZFS:  # It also mounts a dataset that is in use.
        runner.do(runner.engine.sandboxes.resume("held"))
        runner.do(runner.engine.sandboxes.pause("held"))
    else:
        with pytest.raises(Busy) as error_info:
            runner.do(runner.engine.sandboxes.resume("held"))
        holder = f"the dying jail {sandbox.host['jail']}"
        assert error_info.value.message == (
            f"the dataset {dataset} is busy: it is in use by {holder}. Stop what uses it, then try again"
        )
    set_knob("dying", "0")
    monkeypatch.undo()
    runner.do(runner.engine.sandboxes.resume("held"))
    runner.do(runner.engine.sandboxes.pause("held"))
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.5)
    message = r"no jail, mount or process that uses it was found\. Stop"
    with pools.kept_unmountable(dataset), pytest.raises(Busy, match=message):
        runner.do(runner.engine.sandboxes.resume("held"))
    monkeypatch.undo()
    runner.do(runner.engine.sandboxes.resume("held"))
    assert runner.shell("held", "hostname").strip() == "held"


def test_a_removal_warning_lists_the_holder(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, caplog: pytest.LogCaptureFixture
) -> None:
    traces_before = jail_zfs_world.read_traces(runner.config)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["held"])))
    root_path = jail_zfs_world.get_mount_point(runner.config) / "sandboxes" / runner.get_sandbox("held").instance
    with subprocess.Popen(["sleep", "infinity"], cwd=root_path) as holder:
        runner.do(runner.engine.sandboxes.delete("held"))
        holder.kill()
    warning_fields = [
        record.fields
        for record in caplog.records
        if record.getMessage() == "a sandbox's file system cannot be removed yet and will be removed later"
    ]
    (reason,) = [each["reason"] for each in warning_fields]
    assert f"is busy: it is in use by the process sleep (pid {holder.pid})." in reason
    wait_until(lambda: jail_zfs_world.read_traces(runner.config) == traces_before, 20)


def test_leftovers_of_an_incomplete_jail_are_removed_at_startup(
    make_runner: Callable[..., EngineRunner], jail_zfs_world: JailZfsWorld
) -> None:
    """A gateway that is killed while it creates a jail leaves an epair, limits, rules, a clone and mounts behind."""
    runner = make_runner()
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["fine"])))
    traces_before = jail_zfs_world.read_traces(runner.config)
    runner.close()
    prefix, root_dataset = runner.config.network.prefix, runner.config.jail_zfs.dataset
    run_shim("ifconfig", "epair", "create", "group", f"{prefix}-epair")
    run_shim("rctl", "-a", f"jail:{prefix}-0123456789ab:maxproc:deny=9")
    run_shim(
        "pfctl", "-q", "-a", f"sbx/{prefix}-0123456789ab", "-f", "-", input="block drop quick from 10.0.0.5 to any\n"
    )
    zfs_core.lzc_clone(
        f"{root_dataset}/sandboxes/0123456789ab",
        runner.engine.templates.get(TEMPLATE).host["zfsSnapshot"],
        mounted=True,
    )
    root_path = jail_zfs_world.get_mount_point(runner.config) / "sandboxes/0123456789ab"
    run_shim("mount", "-t", "devfs", "-oruleset=4", "devfs", str(root_path / "dev"))
    run_shim("jail", "-c", f"name={prefix}-0123456789ab", f"path={root_path}", "persist", "vnet=new")
    assert jail_zfs_world.read_traces(runner.config) != traces_before
    runner_after_restart = make_runner(config=runner.config)
    assert jail_zfs_world.read_traces(runner_after_restart.config) == traces_before
    assert runner_after_restart.shell("fine", "echo alive").strip() == "alive"


def test_memory_snapshots_are_refused(runner: EngineRunner) -> None:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    snapshot = runner.do(runner.engine.snapshots.create("one", name="files"))
    for operation in (
        runner.engine.host.fork(snapshot, runner.get_sandbox("one"), with_memory=True),
        runner.engine.host.capture(runner.get_sandbox("one"), snapshot, memory=True),
    ):
        with pytest.raises(Unsupported, match="files, not memory"):
            runner.do(operation)


def build_recipe(runner: EngineRunner, recipe: Recipe) -> Any:
    build = runner.do(runner.engine.templates.build("other", recipe))

    async def wait_until_built() -> None:
        async for _ in build.follow():
            pass

    runner.do(wait_until_built(), timeout=300)
    return build


def test_a_debootstrap_recipe_is_refused(runner: EngineRunner, jail_zfs_world: JailZfsWorld) -> None:
    traces_before = jail_zfs_world.read_traces(runner.config)
    build = build_recipe(runner, Recipe())
    assert build.status == "error"
    assert "cannot build templates with debootstrap" in build.reason and "base.txz" in build.reason
    assert jail_zfs_world.read_traces(runner.config) == traces_before


def test_building_a_template_from_a_directory_runs_its_setup(runner: EngineRunner, tmp_path: Path) -> None:
    subprocess.run(
        ["tar", "-x", "-C", str(tmp_path), "-f", str(get_debian_tarball()), "--exclude=./dev/*"],
        check=True,
        timeout=120,
    )
    recipe = Recipe(
        source="rootfs", path=str(tmp_path), setup=["echo done >/root/set-up"], resources=Resources(disk_mb=1024)
    )
    assert build_recipe(runner, recipe).status == "ready"
    runner.do(runner.engine.forks.create("other", ForkSpec(names=["made"])))
    assert runner.shell("made", "cat /root/set-up").strip() == "done"
    assert runner.shell("made", "id -u user; ls -d /home/user").split() == ["1000", "/home/user"]
    runner.do(runner.engine.sandboxes.delete("made"))
    assert runner.do(runner.engine.snapshots.delete("other"))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("bin/sh", "/bin/sh"), ("usr/bin/python3", "no /usr/local/bin/python3 or /usr/bin/python3")],
)
def test_an_unusable_root_file_system_is_refused_and_removed(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, tmp_path: Path, missing: str, message: str
) -> None:
    for name in ("bin/sh", "usr/bin/python3.11", "usr/bin/python3", "etc/passwd"):
        if name != missing:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    traces_before = jail_zfs_world.read_traces(runner.config)
    build = build_recipe(runner, Recipe(source="rootfs", path=str(tmp_path)))
    assert build.status == "error" and message in build.reason
    assert jail_zfs_world.read_traces(runner.config) == traces_before


def test_a_planted_symlink_cannot_redirect_the_identity_mount(runner: EngineRunner, tmp_path: Path) -> None:
    """Root in a sandbox replaces /run, which contains the identity's mount point, with a symbolic link to /etc."""
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["sly"])))
    runner.shell("sly", "mkdir /root/other && cp -a /run/sandbox /root/copy; mv /run /run.old && ln -s /etc /run")
    runner.do(runner.engine.sandboxes.pause("sly"))
    runner.do(runner.engine.sandboxes.resume("sly"))
    assert runner.shell("sly", "ls /etc/sandbox 2>/dev/null || echo none").strip() == "none"


@pools.needs_zfs_fuse
def test_a_killed_zfs_daemon_is_reported_and_leaves_nothing_incomplete() -> None:
    """The scenario runs in new namespaces with a private zfs-fuse daemon."""
    tarball, directory = get_debian_tarball(), session.get_run_dir() / "host-alone"
    directory.mkdir()
    (directory / "cache").mkdir()
    (directory / "cache" / tarball.name).hardlink_to(tarball)
    unshare_command = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child"]
    scenario_command = [sys.executable, "-m", "tests.jail_zfs.host_alone", str(directory)]
    argv = [*unshare_command, "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh", *scenario_command]
    result = subprocess.run(argv, cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    assert json.loads(result.stdout.splitlines()[-1]) == "passed"
    subprocess.run(["rm", "-r", str(directory)], check=True, timeout=60)
