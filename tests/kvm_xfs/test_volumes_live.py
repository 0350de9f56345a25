"""Test volumes in running machines: a snapshot's volumes, disk and memory must be from the same instant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.errors import NoSpace
from sandbox_gateway.records import Sandbox
from tests.kvm_xfs.test_host import fill_disk, small_gateway  # noqa: F401
from tests.support.live import EngineRunner, engines
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, KvmXfsWorld

SIZE_MB = 64
TIMEOUT_SECONDS = 60


@pytest.fixture
def runner(kvm_xfs_world: KvmXfsWorld) -> Iterator[EngineRunner]:
    with engines(kvm_xfs_world) as make_runner:
        runner = make_runner()
        runner.do(runner.engine.volumes.create("data", SIZE_MB))
        yield runner


def create_sandbox(
    runner: EngineRunner, name: str, *mounts: MountSpec, template: str = TEMPLATE, cold_start: bool = False
) -> Sandbox:
    return runner.do(
        runner.engine.forks.create(template, ForkSpec(names=[name], mounts=list(mounts), cold_start=cold_start))
    )


def start_program(runner: EngineRunner, ref: str, program: str) -> None:
    """Start a Python program in the background in a sandbox."""
    runner.do(runner.engine.commands.exec(ref, ["sh", "-c", "cat >/root/program"], stdin=program.encode()))
    runner.shell(ref, "python3 /root/program </dev/null >/root/output 2>&1 &")


def read_file(runner: EngineRunner, ref: str, path: str) -> str:
    return runner.shell(ref, f"cat {path} 2>/dev/null || true").strip("\0\n ")


COUNTER_PROGRAM = """
import os
volume = os.open("/data/count", os.O_RDWR | os.O_CREAT)
disk = os.open("/root/count", os.O_RDWR | os.O_CREAT)
count = 0
while True:
    count += 1
    for file in (volume, disk):
        os.pwrite(file, f"{count:08}".encode(), 0)
        os.fsync(file)
"""


def test_a_volume_is_captured_at_the_same_instant_as_the_disk(runner: EngineRunner) -> None:
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    start_program(runner, "source", COUNTER_PROGRAM)
    for name in ("0", "1", "2"):
        count_before = read_counter(runner, "source")
        wait_until(lambda count_before=count_before: read_counter(runner, "source") > count_before + 3, TIMEOUT_SECONDS)
        runner.do(runner.engine.snapshots.create("source", name=f"mark{name}", volumes=["data"]))
        # In a fork with memory, the program could no longer write to the volume.
        create_sandbox(runner, f"box{name}", MountSpec("data", "/data", clone=True), template=f"mark{name}")
        volume_count, disk_count = (
            int(read_file(runner, f"box{name}", f"{folder}/count")) for folder in ("/data", "/root")
        )
        assert disk_count > count_before and volume_count - disk_count in (0, 1)
        runner.do(runner.engine.sandboxes.delete(f"box{name}"))
    assert [each.name for each in runner.engine.volumes.list()] == ["data"]


def read_counter(runner: EngineRunner, ref: str) -> int:
    return int(read_file(runner, ref, "/root/count") or 0)


def test_a_capture_without_volumes_does_not_freeze_them(runner: EngineRunner) -> None:
    create_sandbox(runner, "source", MountSpec("data", "/data"))
    snapshot = runner.do(runner.engine.snapshots.create("source"))
    assert "volumes" not in snapshot.host["phases_ms"]
    snapshot = runner.do(runner.engine.snapshots.create("source", volumes=["data"]))
    assert snapshot.host["phases_ms"]["volumes"] < 1000


def test_capture_of_volumes_on_a_full_disk_fails_and_cleans_up(
    kvm_xfs_world: KvmXfsWorld,
    small_gateway: EngineRunner,  # noqa: F811
) -> None:
    runner = small_gateway
    runner.do(runner.engine.volumes.create("data", SIZE_MB))
    create_sandbox(runner, "one", MountSpec("data", "/data"))
    runner.shell("one", "head -c 20000000 /dev/urandom >/run/blob; echo data >/data/file; sync")
    root = runner.config.host.state_root
    files_before = list_snapshot_files(root)
    fill_disk(root, 4 << 20)
    with pytest.raises(NoSpace, match="no space left"):
        runner.do(runner.engine.snapshots.create("one", name="big", volumes=["data"]))
    (root / "filler").unlink()
    assert list_snapshot_files(root) == files_before
    assert read_file(runner, "one", "/data/file") == "data"
    runner.shell("one", "echo more >>/data/file && sync")
    runner.do(runner.engine.snapshots.create("one", name="big", volumes=["data"]))


def list_snapshot_files(root: Path) -> set[str]:
    """Return the relative paths of all files and directories that belong to snapshots and volumes."""
    return {
        str(Path(directory, name).relative_to(root))
        for top in ("snapshots", "volumes")
        for directory, subdirectories, names in os.walk(root / top)
        for name in subdirectories + names
    }


def test_removing_the_last_sandbox_of_a_volume_stops_its_server(runner: EngineRunner) -> None:
    volume = runner.engine.volumes.get("data")
    create_sandbox(runner, "one", MountSpec("data", "/data"))
    assert list_server_command_lines(runner, volume.id)
    runner.do(runner.engine.sandboxes.delete("one"))
    wait_until(lambda: not list_server_command_lines(runner, volume.id), TIMEOUT_SECONDS)


def list_server_command_lines(runner: EngineRunner, volume_id: str) -> list[str]:
    """Return the command line of each process that serves a volume."""
    directory = f"{runner.config.host.state_root}/serving"
    command_lines = []
    for cmdline_file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = cmdline_file.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if directory in command_line and volume_id in command_line:
            command_lines.append(command_line)
    return command_lines
