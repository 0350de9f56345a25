"""Test the files of a machine."""

from __future__ import annotations

from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.files import instances
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles


def test_a_new_boot_removes_the_memory_images_of_the_previous_run(tmp_path: Path) -> None:
    """A capture based on such an image would contain pages that this machine never had."""
    files = InstanceFiles(tmp_path)
    for path in (files.memory, files.last_memory, files.last_memory_check, files.taken_marker):
        path.write_text("former")
    instances.create_memory_file(files, 1)
    assert [path.name for path in tmp_path.iterdir()] == [files.memory.name]
    assert files.memory.read_bytes() == bytes(1 << 20)
