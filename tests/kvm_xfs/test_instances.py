"""Test the files of a machine."""

from __future__ import annotations

from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.image import instances
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance


def test_a_machine_that_boots_again_has_no_image_of_a_former_machine(tmp_path: Path) -> None:
    """A capture based on such an image would contain pages that this machine never had."""
    files = Instance(tmp_path)
    for path in (files.memory, files.last_memory, files.last_memory_check, files.taken_marker):
        path.write_text("former")
    instances.create_memory_file(files, 1)
    assert [path.name for path in tmp_path.iterdir()] == [files.memory.name]
    assert files.memory.read_bytes() == bytes(1 << 20)
