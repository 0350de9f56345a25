"""Test that an operation that fails because a file system is in use names the processes and mounts that use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zfs_core
from zfs_core import run as zfs_run
from zfs_core.causes import Cause

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Busy
from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.jail_zfs.jail import rootfs
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Mount, Snapshot, Volume
from tests.support.jail_world import JailZfsWorld, get_debian_tarball
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE

_WRAPPER = """#!/bin/sh
if [ "$1" = mount ] && [ "$2" = "$(cat {directory}/dataset)" ]; then
    echo "cannot mount '$2': mountpoint or dataset is busy" >&2
    exit 1
fi
exec {zfs} "$@"
"""


@pytest.fixture
def refuse_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes `zfs mount` refuse a dataset.

    FreeBSD refuses a dataset whose former mount has not ended because processes use it. Linux cannot imitate this: a
    forced unmount ends at once, and `fstat` does not find the processes any more.
    """
    commands_directory = tmp_path / "bin"
    commands_directory.mkdir()
    zfs = shutil.which("zfs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    wrapper = commands_directory / "zfs"
    wrapper.write_text(_WRAPPER.format(directory=tmp_path, zfs=zfs))
    wrapper.chmod(0o755)
    (tmp_path / "dataset").touch()
    monkeypatch.setenv("PATH", str(commands_directory), prepend=os.pathsep)
    monkeypatch.setitem(zfs_run._RETRY_SECONDS, Cause.MOUNT_BUSY, 0.1)

    def refuse(dataset: str) -> None:
        (tmp_path / "dataset").write_text(dataset)

    return refuse


@contextlib.contextmanager
def former_mount_in_use(dataset: str, path: Path) -> Iterator[str]:
    """Show a mount of ``dataset`` at ``path`` in the mount table, and run a process in it. Yields its description."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", dataset, str(path)], check=True, timeout=30)
    try:
        with process_in(path) as description:
            yield description
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=30)


@contextlib.contextmanager
def process_in(path: Path) -> Iterator[str]:
    """Run a process in a directory. Yields its description in errors."""
    with subprocess.Popen(["sleep", "infinity"], cwd=path) as holder:
        try:
            yield f"the process sleep (pid {holder.pid})"
        finally:
            holder.kill()


def find_message(error: Busy, dataset: str) -> str:
    beginning, _, rest = error.message.partition(f"the dataset {dataset} is busy: it is in use by ")
    assert not beginning and rest.endswith(". Stop what uses it, then try again"), error.message
    return rest


def get_host(runner: EngineRunner) -> JailZfsHost:
    assert isinstance(runner.engine.host, JailZfsHost)
    return runner.engine.host


def test_a_volume_that_cannot_be_mounted(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, refuse_mount: Callable[[str], None]
) -> None:
    volume = runner.do(runner.engine.volumes.create("data", 64))
    sandbox = runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["box"])))
    dataset = f"{runner.config.jail_zfs.dataset}/volumes/{volume.id}"
    zfs_core.unmount(dataset)
    refuse_mount(dataset)
    path = jail_zfs_world.get_mount_point(runner.config) / "volumes" / volume.id
    attach = get_host(runner).attach
    with former_mount_in_use(dataset, path) as process:
        with pytest.raises(Busy) as error_info:
            runner.do(attach(sandbox, Mount(volume=volume.id, path="/data")))
        assert process in find_message(error_info.value, dataset)
    refuse_mount("")
    runner.do(attach(sandbox, Mount(volume=volume.id, path="/data")))


def test_a_received_volume_that_cannot_be_mounted(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, refuse_mount: Callable[[str], None]
) -> None:
    host, copy = get_host(runner), Volume(name="copy", size_mb=64)
    runner.do(runner.engine.volumes.create("data", 64))
    snapshot = runner.do(runner.engine.volumes.create_snapshot("data"))
    source = runner.do(host.open_volume_snapshot(snapshot))
    size = source.sizes[SnapshotPart.STREAM]
    stream = source.read(SnapshotPart.STREAM, 0, size)
    source.close()
    dataset = f"{runner.config.jail_zfs.dataset}/volumes/{copy.id}"
    refuse_mount(dataset)
    target = runner.do(host.begin_volume_import(copy, SnapshotPart.STREAM, size))
    target.write(SnapshotPart.STREAM, 0, stream)
    path = jail_zfs_world.get_mount_point(runner.config) / "volumes" / copy.id
    with former_mount_in_use(dataset, path) as process:
        with pytest.raises(Busy) as error_info:
            runner.do(target.commit())
        assert process in find_message(error_info.value, dataset)
    runner.do(target.discard())
    assert not zfs_core.lzc_exists(dataset)


@pytest.mark.parametrize("is_built", [False, True], ids=["before", "after"])
def test_a_template_that_is_in_use_before_or_after_its_build(
    is_built: bool,
    runner: EngineRunner,
    jail_zfs_world: JailZfsWorld,
    refuse_mount: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = Snapshot()
    dataset = f"{runner.config.jail_zfs.dataset}/_template-{base.id}"
    path = jail_zfs_world.get_mount_point(runner.config) / f"_template-{base.id}"
    with contextlib.ExitStack() as stack:
        processes: list[str] = []

        async def build_rootfs(_recipe: Recipe, root: Path, _log: object) -> None:
            """A program of the build keeps running in the tree."""
            assert is_built and root == path
            processes.append(stack.enter_context(process_in(root)))

        monkeypatch.setattr(rootfs, "build_rootfs", build_rootfs)
        if not is_built:
            refuse_mount(dataset)
            processes.append(stack.enter_context(former_mount_in_use(dataset, path)))
        recipe = Recipe(source=Source.ROOTFS, path=str(get_debian_tarball()))
        with pytest.raises(Busy) as error_info:
            runner.do(get_host(runner).build_base(base, recipe, "", print))
        assert processes[0] in find_message(error_info.value, dataset)


@pytest.mark.parametrize("container", ["", "/sandboxes"], ids=["root", "container"])
def test_a_root_dataset_that_cannot_be_mounted(
    container: str, jail_zfs_world: JailZfsWorld, refuse_mount: Callable[[str], None]
) -> None:
    config = jail_zfs_world.make_config()
    dataset = f"{config.jail_zfs.dataset}{container}"
    path = Path(f"{jail_zfs_world.get_mount_point(config)}{container}")
    host = jail_zfs_world.make_host(config)
    try:
        if container:
            asyncio.run(open_and_close(host))
        zfs_core.unmount(dataset)
        refuse_mount(dataset)
        with former_mount_in_use(dataset, path) as process:
            with pytest.raises(Busy) as error_info:
                asyncio.run(open_and_close(jail_zfs_world.make_host(config)))
            assert process in find_message(error_info.value, dataset)
        refuse_mount("")
        asyncio.run(open_and_close(jail_zfs_world.make_host(config)))
    finally:
        jail_zfs_world.clean_up(config)


async def open_and_close(host: object) -> None:
    assert isinstance(host, JailZfsHost)
    await host.open()
    await host.close()


def test_the_log_names_what_prevents_the_removal_of_a_volume(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, caplog: pytest.LogCaptureFixture
) -> None:
    volume = runner.do(runner.engine.volumes.create("data", 64))
    dataset = f"{runner.config.jail_zfs.dataset}/volumes/{volume.id}"
    with process_in(jail_zfs_world.get_mount_point(runner.config) / "volumes" / volume.id) as process:
        runner.do(runner.engine.volumes.delete("data"))
    (reason,) = [
        vars(record)["fields"]["reason"]
        for record in caplog.records
        if record.getMessage() == "a volume cannot be removed yet and will be removed later"
    ]
    assert process in find_message(Busy(reason), dataset)
    wait_until(lambda: not zfs_core.lzc_exists(dataset), 20)


def test_the_log_names_what_uses_the_former_dataset_of_a_volume(
    runner: EngineRunner, jail_zfs_world: JailZfsWorld, caplog: pytest.LogCaptureFixture
) -> None:
    volume = runner.do(runner.engine.volumes.create("data", 64))
    snapshot = runner.do(runner.engine.volumes.create_snapshot("data", name="before"))
    dataset = f"{runner.config.jail_zfs.dataset}/volumes/{volume.id}"
    with process_in(jail_zfs_world.get_mount_point(runner.config) / "volumes" / volume.id) as process:
        runner.do(runner.engine.volumes.rollback("data", snapshot.id))
    (reason,) = [
        vars(record)["fields"]["reason"]
        for record in caplog.records
        if record.getMessage() == "a former dataset of a volume is still in use and will be retired later"
    ]
    assert process in find_message(Busy(reason), dataset)
    wait_until(lambda: not zfs_core.is_mounted(dataset), 20)
