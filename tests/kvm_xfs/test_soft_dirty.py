"""Test captures with soft-dirty bits in a virtual machine whose kernel has them, even if the host's kernel lacks them.

The virtual machine runs `tests/support/soft_dirty_guest.py` with the gateway's code: it captures a process that maps an
image like QEMU, and a nested QEMU.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from tests.support import session
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE, KvmXfsWorld

CAPTURE_COUNT = int(os.environ.get("GROVE_TEST_CAPTURES", "20"))
_MEMORY_MB = 1024
_CHUNK_BYTES = 4 << 20
_PACKAGES = (
    "annotated_types",
    "numpy",
    "numpy.libs",
    "pydantic",
    "pydantic_core",
    "pyroute2",
    "qemu",
    "typing_extensions.py",
    "typing_inspection",
)
_PROGRAMS = ("/usr/bin/qemu-system-x86_64", "/usr/sbin/mkfs.xfs")
_QEMU_MODULES = Path("/usr/lib/x86_64-linux-gnu/qemu")
_FIRMWARE = ("/usr/share/seabios/bios-256k.bin", "/usr/share/qemu/kvmvapic.bin")
_RUN_PROGRAM = "/opt/lane/lib/ld-linux-x86-64.so.2 --library-path /opt/lane/lib /opt/lane/bin"
"""The beginning of a command for one of _PROGRAMS. The guest lacks their libraries."""
_SET_UP = f"""
set -e
mkdir -p /opt/lane /mnt/xfs
tar -xzf /root/lane.tar.gz -C /opt/lane
rm /root/lane.tar.gz
truncate -s 320M /root/xfs.img
modprobe --all loop xfs
{_RUN_PROGRAM}/mkfs.xfs -q -m reflink=1 /root/xfs.img
mount -o loop -t xfs /root/xfs.img /mnt/xfs
"""
_RUN = f"""
cd /mnt/xfs
export PYTHONPATH=/opt/lane/python QEMU_MODULE_DIR=/opt/lane/modules
export SOFT_DIRTY_QEMU="{_RUN_PROGRAM}/qemu-system-x86_64 -L /opt/lane/firmware"
exec python3 /opt/lane/python/tests/support/soft_dirty_guest.py "$1" "$2"
"""


def build_archive() -> bytes:
    """Return an archive with the gateway's code and all that it needs in the guest."""
    buffer = io.BytesIO()
    site_packages = Path(sysconfig.get_path("purelib"))
    sources = session.REPOSITORY / "gateway" / "src" / "sandbox_gateway"
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in _PACKAGES:
            archive.add(site_packages / name, f"python/{name}", filter=_skip_tests)
        archive.add(sources, "python/sandbox_gateway", filter=_skip_tests)
        program = "tests/support/soft_dirty_guest.py"
        archive.add(session.REPOSITORY / program, f"python/{program}")
        modules = [_QEMU_MODULES / "accel-tcg-x86_64.so"]
        for path in [*map(Path, _PROGRAMS), *modules]:
            archive.add(path, f"{'modules' if path in modules else 'bin'}/{path.name}")
        for path in sorted({library for each in [*_PROGRAMS, *map(str, modules)] for library in list_libraries(each)}):
            archive.add(path.resolve(), f"lib/{path.name}")
        for firmware in map(Path, _FIRMWARE):
            archive.add(firmware.resolve(), f"firmware/{firmware.name}")
    return buffer.getvalue()


def _skip_tests(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if re.search(r"/(tests|__pycache__|f2py|random/_examples)(/|$)|\.(a|pyi)$", info.name) else info


def list_libraries(program: str) -> list[Path]:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, timeout=30).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", output)]


@pytest.fixture(scope="module")
def runner(kvm_xfs_world: KvmXfsWorld) -> Iterator[EngineRunner]:
    """An engine with the running sandbox "lane", which has everything in /opt/lane."""
    config = kvm_xfs_world.make_config()
    runner = EngineRunner(kvm_xfs_world.make_host(config), config)
    try:
        start_sandbox(runner)
        yield runner
    finally:
        runner.remove_all()
        runner.close()
        kvm_xfs_world.clean_up(config)


def start_sandbox(runner: EngineRunner) -> None:
    spec = ForkSpec(names=["lane"], memory_mb=_MEMORY_MB, cold_start=True)
    runner.do(runner.engine.forks.create(TEMPLATE, spec), timeout=600)
    archive = build_archive()
    for start in range(0, len(archive), _CHUNK_BYTES):
        command = runner.engine.commands.exec(
            "lane", ["sh", "-c", "cat >>/root/lane.tar.gz"], stdin=archive[start : start + _CHUNK_BYTES], timeout=120
        )
        assert runner.do(command).exit_code == 0
    runner.shell("lane", _SET_UP, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["process", "qemu"])
def test_images_of_captures_with_soft_dirty_bits_equal_the_memory(runner: EngineRunner, kind: str) -> None:
    command = runner.engine.commands.exec("lane", ["sh", "-c", _RUN, "sh", kind, str(CAPTURE_COUNT)], timeout=3600)
    execution = runner.do(command, timeout=3700)
    assert execution.exit_code == 0, execution.stderr.decode()[-3000:]
    result = json.loads(execution.stdout)
    print(result)
    assert result["captures"] == CAPTURE_COUNT
    assert result["differing_pages"] == 0
    assert result["reasons"] == []
    assert result["modes"].keys() == {"soft_dirty", "live"}, result
    assert result["max_stops"] >= 2
    assert 0 < result["written_pages"] <= 1.1 * result["changed_pages"]
