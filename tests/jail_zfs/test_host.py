"""Behaviour that only the jail/ZFS host has: its jails' confinement, its snapshots in ZFS, its failures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway import zfs
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Unsupported
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources
from sandbox_gateway.zfs import run as zfs_run
from sandbox_gateway.zfs.causes import Cause
from tests.jail_zfs import pools
from tests.support import session
from tests.support.jail_world import JailZfsWorld, debian_tarball, shim
from tests.support.live import Live, engines
from tests.support.waiting import eventually
from tests.support.worlds import TEMPLATE


@pytest.fixture
def make_live(jail_zfs_world: JailZfsWorld) -> Iterator[Callable[..., Live]]:
    """Engines with their own state: see ``engines``."""
    with engines(jail_zfs_world) as make_live:
        yield make_live


@pytest.fixture
def live(make_live: Callable[..., Live]) -> Live:
    return make_live()


@pytest.fixture
def knob() -> Iterator[Callable[[str, str], None]]:
    """Set a knob of the shim; the test's end restores it."""
    usual = {"dying": "0", "kern.racct.enable": "1"}

    def set_knob(name: str, value: str) -> None:
        assert name in usual
        shim("freebsd-shim", "set", name, value)

    yield set_knob
    for name, value in usual.items():
        shim("freebsd-shim", "set", name, value)


def test_sixty_sandboxes_leave_nothing(live: Live, jail_zfs_world: JailZfsWorld) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["bystander"])))
    before = jail_zfs_world.traces(live.config)
    for count in (30, 30):
        forks = live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(count=count, concurrency=6)), timeout=300)
        assert len(jail_zfs_world.traces(live.config)["jails"]) == count + 1
        for fork in forks:
            live.do(live.engine.sandboxes.delete(fork.id))
    assert jail_zfs_world.traces(live.config) == before


def test_a_jail_is_confined(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    name = live.sandbox("one").host["jail"]
    shown = shim("jls", "-j", name, "-n", "securelevel", "enforce_statfs", "children.max", "vnet", "allow.raw_sockets")
    assert shown.split() == ["securelevel=2", "enforce_statfs=2", "children.max=0", "vnet=new", "allow.noraw_sockets"]
    refused = live.do(live.engine.commands.exec("one", ["mount", "-t", "tmpfs", "tmpfs", "/mnt"]))
    assert refused.exit_code != 0
    assert live.shell("one", "env | grep -c GROVE || true").strip() == "0"
    assert live.do(live.engine.commands.exec("one", ["touch", "/run/sandbox/file"])).exit_code != 0


def test_limits_hold_and_are_removed_with_the_sandbox(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["small"], memory_mb=64, cpus=2)))
    name = live.sandbox("small").host["jail"]
    rules = {line for line in shim("rctl").split() if f":{name}:" in line}
    assert rules == {
        f"jail:{name}:maxproc:deny=1000",
        f"jail:{name}:vmemoryuse:deny={64 << 20}",
        f"jail:{name}:pcpu:deny=200",
    }
    hungry = live.do(live.engine.commands.exec("small", ["python3", "-c", "x = bytearray(200 << 20)"]))
    assert hungry.exit_code != 0
    assert live.do(live.engine.sandboxes.usage("small")).memory_bytes > 1 << 20
    live.do(live.engine.sandboxes.delete("small"))
    assert name not in shim("rctl")


def test_missing_racct_is_reported(
    make_live: Callable[..., Live], knob: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    knob("kern.racct.enable", "0")
    live = make_live()
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["free"])))
    assert live.do(live.engine.sandboxes.usage("free")).memory_bytes == 0
    live.do(live.engine.sandboxes.delete("free"))
    live.close()


def test_the_disk_size_is_a_quota_that_a_fork_may_raise(live: Live) -> None:
    have = live.engine.templates.get(TEMPLATE).resources.disk_mb
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["big"], disk_mb=have + 512)))
    dataset = f"{live.config.jail_zfs.dataset}/sandboxes/{live.sandbox('big').instance}"
    assert zfs.get_props([dataset], ["refquota"])[dataset]["refquota"].number == (have + 512) << 20


def test_a_snapshot_names_its_zfs_snapshot_and_outlives_its_sandbox(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.shell("source", "echo kept >/root/kept")
    snapshot = live.do(live.engine.snapshots.create("source", name="mark"))
    assert zfs.lzc_exists(snapshot.host["zfsSnapshot"])
    live.do(live.engine.sandboxes.delete("source"))
    assert zfs.lzc_exists(live.engine.snapshots.get("mark").host["zfsSnapshot"])
    live.close()
    again = make_live(config=live.config)
    assert zfs.lzc_exists(again.engine.snapshots.get("mark").host["zfsSnapshot"])
    fork = again.do(again.engine.forks.create("mark", ForkSpec()))
    assert again.shell(fork.id, "cat /root/kept").strip() == "kept"


def test_a_snapshot_destroyed_by_hand_is_gone_after_a_restart(make_live: Callable[..., Live]) -> None:
    live = make_live()
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    for name in ("kept", "lost", "also-lost"):
        live.do(live.engine.snapshots.create("source", name=name))
    for name in ("lost", "also-lost"):
        zfs.lzc_destroy_snaps([live.engine.snapshots.get(name).host["zfsSnapshot"]], False)
    assert live.do(live.engine.snapshots.delete("also-lost"))
    with pytest.raises(GatewayError, match="not found"):
        live.do(live.engine.forks.create("lost", ForkSpec()))
    live.close()
    again = make_live(config=live.config)
    assert [snapshot.names for snapshot in again.engine.snapshots.list()] == [["kept"]]
    assert again.shell("source", "echo alive").strip() == "alive"


def test_a_failed_rollback_leaves_the_old_jail_running(
    make_live: Callable[..., Live], jail_zfs_world: JailZfsWorld
) -> None:
    live = make_live()
    live.do(live.engine.forks.fork(TEMPLATE, ForkSpec(names=["victim", "broken"])))
    live.shell("victim", "echo now >/root/now")
    live.shell("broken", "rm -r /opt/sandbox_agent")
    live.do(live.engine.snapshots.create("broken", name="no-agent"))
    instance, before = live.sandbox("victim").instance, jail_zfs_world.traces(live.config)
    started = time.monotonic()
    with pytest.raises(BackendFailed, match="its jail ended with the agent in it"):
        live.do(live.engine.sandboxes.rollback("victim", "no-agent"))
    assert time.monotonic() - started < 10
    assert live.sandbox("victim").instance == instance
    assert live.shell("victim", "cat /root/now").strip() == "now"
    assert jail_zfs_world.traces(live.config) == before


def test_a_jail_removed_by_hand_is_detected(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["gone"])))
    name = live.sandbox("gone").host["jail"]
    shim("pkill", "-KILL", "-j", name)
    eventually(lambda: live.sandbox("gone").state_reason != "", 20)
    assert "its jail ended" in live.sandbox("gone").state_reason
    live.do(live.engine.sandboxes.resume("gone"))
    assert live.shell("gone", "hostname").strip() == "gone"


def test_a_jail_that_outlives_its_agent_is_removed(live: Live, jail_zfs_world: JailZfsWorld) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["headless"])))
    time.sleep(6)  # the agent has been seen by then
    with pytest.raises(
        BackendFailed, match=r"closed every connection|cannot be reached|connection to the sandbox broke"
    ):
        live.shell("headless", "kill -KILL -1; sleep 100")
    eventually(lambda: live.sandbox("headless").state_reason != "", 20)
    assert jail_zfs_world.traces(live.config)["processes"] == set()


def test_a_dying_jail_does_not_block_a_kill(
    live: Live, jail_zfs_world: JailZfsWorld, knob: Callable[[str, str], None]
) -> None:
    before = jail_zfs_world.traces(live.config)
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["slow"])))
    knob("dying", "forever")
    started = time.monotonic()
    live.do(live.engine.sandboxes.delete("slow"))
    assert time.monotonic() - started < 10
    assert live.engine.sandboxes.list() == []
    knob("dying", "0")
    eventually(lambda: jail_zfs_world.traces(live.config) == before, 20)


def test_a_sandbox_with_a_dying_jail_starts_in_another(
    make_live: Callable[..., Live], knob: Callable[[str, str], None]
) -> None:
    live = make_live(jail_zfs={"dying_seconds": 0.3})
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["slow"])))
    first = live.sandbox("slow").host["jail"]
    live.shell("slow", "echo kept >/root/kept")
    knob("dying", "forever")
    live.do(live.engine.sandboxes.pause("slow"))
    live.do(live.engine.sandboxes.resume("slow"))
    assert live.shell("slow", "cat /root/kept").strip() == "kept"
    assert live.sandbox("slow").host["jail"] == f"{first}-2"
    live.close()
    again = make_live(config=live.config)
    assert again.shell("slow", "cat /root/kept").strip() == "kept"
    knob("dying", "0")


def test_a_restart_does_not_unmount_paused_sandboxes(
    make_live: Callable[..., Live], jail_zfs_world: JailZfsWorld
) -> None:
    """Each start removes leftovers of rollbacks with `zfs rename`, which by itself unmounts the clones of the renamed
    dataset. While a foreign mount namespace holds them, they cannot be mounted again.
    """
    live = make_live()
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    live.do(live.engine.snapshots.create("source", name="mark"))
    live.do(live.engine.sandboxes.rollback("source", "mark"))
    live.do(live.engine.sandboxes.pause("source"))
    live.close()
    root = str(jail_zfs_world.place(live.config) / "sandboxes" / live.sandbox("source").instance)
    before = pools.mount_ids(jail_zfs_world.place(live.config))[root]
    with pools.pinned():
        again = make_live(config=live.config)
        assert pools.mount_ids(jail_zfs_world.place(live.config))[root] == before
        again.do(again.engine.sandboxes.resume("source"))
    assert again.shell("source", "hostname").strip() == "source"


def test_a_mount_error_names_the_holder(
    make_live: Callable[..., Live],
    jail_zfs_world: JailZfsWorld,
    knob: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.5)
    live = make_live(jail_zfs={"dying_seconds": 0.3})
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["held"])))
    sandbox = live.sandbox("held")
    dataset = f"{live.config.jail_zfs.dataset}/sandboxes/{sandbox.instance}"
    knob("dying", "forever")
    live.do(live.engine.sandboxes.pause("held"))
    shim("umount", "-f", str(jail_zfs_world.place(live.config) / "sandboxes" / sandbox.instance))
    with pytest.raises(Busy) as caught:
        live.do(live.engine.sandboxes.resume("held"))
    assert f"({dataset}) cannot be mounted: held by the dying jail {sandbox.host['jail']}." in caught.value.message
    knob("dying", "0")
    monkeypatch.undo()
    live.do(live.engine.sandboxes.resume("held"))
    live.do(live.engine.sandboxes.pause("held"))
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.5)
    with pools.pinned():
        zfs.unmount(dataset)
        with pytest.raises(Busy, match=r"no jail, mount or open file was found that holds it\. End"):
            live.do(live.engine.sandboxes.resume("held"))
    monkeypatch.undo()
    live.do(live.engine.sandboxes.resume("held"))
    assert live.shell("held", "hostname").strip() == "held"


def test_a_removal_error_names_the_holder(
    live: Live, jail_zfs_world: JailZfsWorld, caplog: pytest.LogCaptureFixture
) -> None:
    before = jail_zfs_world.traces(live.config)
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["held"])))
    root = jail_zfs_world.place(live.config) / "sandboxes" / live.sandbox("held").instance
    with subprocess.Popen(["sleep", "infinity"], cwd=root) as holder:
        live.do(live.engine.sandboxes.delete("held"))
        holder.kill()
    fields = [
        record.fields
        for record in caplog.records
        if record.getMessage() == "a sandbox's file system is still in use and will be removed later"
    ]
    assert [each["holders"] for each in fields] == [f"held by the process sleep (pid {holder.pid})"]
    eventually(lambda: jail_zfs_world.traces(live.config) == before, 20)


def test_an_incomplete_jail_is_swept_at_startup(make_live: Callable[..., Live], jail_zfs_world: JailZfsWorld) -> None:
    """A gateway that dies while it creates a jail leaves an epair, limits, rules, a clone and mounts."""
    live = make_live()
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["fine"])))
    before = jail_zfs_world.traces(live.config)
    live.close()
    prefix, root = live.config.network.prefix, live.config.jail_zfs.dataset
    shim("ifconfig", "epair", "create", "group", f"{prefix}-epair")
    shim("rctl", "-a", f"jail:{prefix}-0123456789ab:maxproc:deny=9")
    shim("pfctl", "-q", "-a", f"sbx/{prefix}-0123456789ab", "-f", "-", input="block drop quick from 10.0.0.5 to any\n")
    zfs.lzc_clone(f"{root}/sandboxes/0123456789ab", live.engine.templates.get(TEMPLATE).host["zfsSnapshot"])
    place = jail_zfs_world.place(live.config) / "sandboxes/0123456789ab"
    shim("mount", "-t", "devfs", "-oruleset=4", "devfs", str(place / "dev"))
    shim("jail", "-c", f"name={prefix}-0123456789ab", f"path={place}", "persist", "vnet=new")
    assert jail_zfs_world.traces(live.config) != before
    again = make_live(config=live.config)
    assert jail_zfs_world.traces(again.config) == before
    assert again.shell("fine", "echo alive").strip() == "alive"


def test_memory_snapshots_are_refused(live: Live) -> None:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["one"])))
    snapshot = live.do(live.engine.snapshots.create("one", name="files"))
    for work in (
        live.engine.host.fork(snapshot, live.sandbox("one"), with_memory=True),
        live.engine.host.capture(live.sandbox("one"), snapshot, memory=True),
    ):
        with pytest.raises(Unsupported, match="files, not memory"):
            live.do(work)


def build_recipe(live: Live, recipe: Recipe) -> Any:
    build = live.do(live.engine.templates.build("other", recipe))

    async def end() -> None:
        async for _ in build.follow():
            pass

    live.do(end(), timeout=300)
    return build


def test_debootstrap_is_refused(live: Live, jail_zfs_world: JailZfsWorld) -> None:
    before = jail_zfs_world.traces(live.config)
    build = build_recipe(live, Recipe())
    assert build.status == "error"
    assert "cannot debootstrap" in build.reason and "base.txz" in build.reason
    assert jail_zfs_world.traces(live.config) == before


def test_a_template_from_a_directory_with_setup(live: Live, tmp_path: Path) -> None:
    subprocess.run(
        ["tar", "-x", "-C", str(tmp_path), "-f", str(debian_tarball()), "--exclude=./dev/*"], check=True, timeout=120
    )
    recipe = Recipe(
        source="rootfs", path=str(tmp_path), setup=["echo done >/root/set-up"], resources=Resources(disk_mb=1024)
    )
    assert build_recipe(live, recipe).status == "ready"
    live.do(live.engine.forks.create("other", ForkSpec(names=["made"])))
    assert live.shell("made", "cat /root/set-up").strip() == "done"
    assert live.shell("made", "id -u user; ls -d /home/user").split() == ["1000", "/home/user"]
    live.do(live.engine.sandboxes.delete("made"))
    assert live.do(live.engine.snapshots.delete("other"))


@pytest.mark.parametrize(
    ("missing", "words"), [("bin/sh", "/bin/sh"), ("usr/bin/python3", "no /usr/local/bin/python3 or /usr/bin/python3")]
)
def test_an_unusable_tree_is_refused_and_leaves_nothing(
    live: Live, jail_zfs_world: JailZfsWorld, tmp_path: Path, missing: str, words: str
) -> None:
    for name in ("bin/sh", "usr/bin/python3.11", "usr/bin/python3", "etc/passwd"):
        if name != missing:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    before = jail_zfs_world.traces(live.config)
    build = build_recipe(live, Recipe(source="rootfs", path=str(tmp_path)))
    assert build.status == "error" and words in build.reason
    assert jail_zfs_world.traces(live.config) == before


def test_planted_links_cannot_escape_the_jail(live: Live, tmp_path: Path) -> None:
    """A sandbox's root replaces the directory that the host mounts over. The sandbox still starts, and nothing is
    mounted outside."""
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["sly"])))
    live.shell("sly", "mkdir /root/other && cp -a /run/sandbox /root/copy; mv /run /run.old && ln -s /etc /run")
    live.do(live.engine.sandboxes.pause("sly"))
    live.do(live.engine.sandboxes.resume("sly"))
    assert live.shell("sly", "ls /etc/sandbox 2>/dev/null || echo none").strip() == "none"


def test_dead_zfs_is_reported_and_leaves_nothing_incomplete() -> None:
    """In its own namespaces, with a daemon that nothing else uses."""
    tarball, directory = debian_tarball(), session.run_dir() / "host-alone"
    directory.mkdir()
    (directory / "cache").mkdir()
    (directory / "cache" / tarball.name).hardlink_to(tarball)
    unshare = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child"]
    python = [sys.executable, "-m", "tests.jail_zfs.host_alone", str(directory)]
    argv = [*unshare, "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh", *python]
    done = subprocess.run(argv, cwd=session.REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == "well"
    subprocess.run(["rm", "-r", str(directory)], check=True, timeout=60)
