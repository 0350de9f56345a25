"""How a machine boots: the hook that reduces the initrd of Debian templates, and the kernel's arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template import guest_files

MODULES_DIRECTORY = "/lib/modules/6.1.0/kernel/drivers"


@pytest.mark.parametrize("name", ["KERNEL_ARGUMENTS", "TCG_KERNEL_ARGUMENTS"])
def test_different_kernel_arguments_make_templates_outdated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    digest_before = guest_files.compute_guest_digest()
    monkeypatch.setattr(guest_files, name, "other")
    assert guest_files.compute_guest_digest() != digest_before


def run_hook(tmp_path: Path, *modules: str) -> Path:
    """Run the hook on a small initrd tree, for a kernel with these modules. Returns the tree."""
    for name, text in guest_files.read_initramfs_files().items():
        file = tmp_path / "initramfs-tools" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    modprobe = tmp_path / "bin/modprobe"
    modprobe.parent.mkdir()
    modprobe.write_text(
        "#!/bin/sh\ncat <<END\nbuiltin ext4\n" + "".join(f"insmod {each} \n" for each in modules) + "END\n"
    )
    modprobe.chmod(0o755)
    tree = tmp_path / "tree"
    programs = [f"usr/bin/{name}" for name in ("sh", "mount", "insmod", "run-init", "sleep", "kmod", "udevadm")]
    for name in ("init", *programs, "usr/lib/klibc-x.so", "usr/lib/libcrypto.so.3", "scripts/init-bottom/udev"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("general")
        (tree / name).chmod(0o755)
    (tree / "bin").symlink_to("usr/bin")
    (tree / "lib").symlink_to("usr/lib")
    for each in modules:
        (tree / "usr" / each[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tree / "usr" / each[1:]).write_text("module")
    env = {
        "PATH": f"{modprobe.parent}:{os.environ['PATH']}",
        "DESTDIR": str(tree),
        "CONFDIR": str(tmp_path / "initramfs-tools"),
        "version": "6.1.0",
    }
    subprocess.run(["sh", tmp_path / "initramfs-tools/hooks/sandbox"], env=env, check=True, timeout=30)
    return tree


def test_the_initrd_contains_only_the_files_that_mount_the_disk(tmp_path: Path) -> None:
    ring, block = f"{MODULES_DIRECTORY}/virtio_ring.ko", f"{MODULES_DIRECTORY}/virtio_blk.ko"
    tree = run_hook(tmp_path, ring, ring, block)
    init = (tree / "init").read_text()
    assert [line for line in init.splitlines() if line.startswith("insmod")] == [f"insmod {ring}", f"insmod {block}"]
    subprocess.run(["sh", "-n", tree / "init"], check=True, timeout=30)
    assert {path.name for path in (tree / "bin").iterdir()} == {"sh", "mount", "insmod", "run-init", "sleep"}
    assert {path.name for path in (tree / "lib").iterdir()} == {"klibc-x.so", "modules"}
    assert (tree / "usr" / block[1:]).read_text() == "module"


@pytest.mark.parametrize("module", ["virtio_blk.ko.xz", "ext4.ko"])
def test_a_kernel_whose_modules_need_kmod_keeps_the_general_init(tmp_path: Path, module: str) -> None:
    tree = run_hook(tmp_path, f"{MODULES_DIRECTORY}/{module}")
    assert (tree / "init").read_text() == "general"
    assert (tree / "bin/kmod").exists() and (tree / "lib/libcrypto.so.3").exists()
    assert not (tree / "bin/udevadm").exists()
