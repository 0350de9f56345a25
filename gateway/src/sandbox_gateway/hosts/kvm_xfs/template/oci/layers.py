"""Check and unpack the layers of an image, with umoci."""

from __future__ import annotations

import json
from pathlib import Path

from sandbox_gateway.command import run_async
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.template.oci import check_layers
from sandbox_gateway.hosts.kvm_xfs.template.oci.confinement import FILE_CAPABILITIES, WORK, confine
from sandbox_gateway.hosts.kvm_xfs.template.oci.measuring import (
    count_inodes,
    measure_disk_usage,
    run_measured,
)
from sandbox_gateway.hosts.kvm_xfs.template.oci.registry import LAYOUT, CopiedImage
from sandbox_gateway.hosts.rootfs_common import STEP_TIMEOUT_SECONDS

TREE = "tree"
"""The name of the unpacked tree in the work directory."""
_PYTHON = "/usr/bin/python3"
_CHECKER = "/check_layers.py"
_CHECKER_MEMORY_BYTES = 512 << 20
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_ENTRIES_PER_MIB = 256
"""The number of inodes that mke2fs creates for each MiB of a small disk."""


async def unpack_layers(image: CopiedImage, work_directory: Path, disk_mb: int, log: Log) -> Path:
    """Unpack the image's layers into the directory `tree` in ``work_directory``, with their owners. Returns its path.

    Raises Invalid if a layer could write outside the tree, or if the files would not fit on the disk.
    """
    log(f"checking {len(image.layers)} layers")
    paths = [f"{'gzip' if layer.is_gzip else 'tar'}:{WORK / layer.path}" for layer in image.layers]
    limits = [str(disk_mb << 20), str(disk_mb * _MAX_ENTRIES_PER_MIB)]
    check_command = confine(
        [_PYTHON, "-I", "-S", _CHECKER, *limits, *paths],
        work_directory,
        inputs={_CHECKER: Path(check_layers.__file__)},
        max_memory_bytes=_CHECKER_MEMORY_BYTES,
    )
    result = await run_async(check_command, timeout=STEP_TIMEOUT_SECONDS, max_output_bytes=_MAX_OUTPUT_BYTES)
    if problem := json.loads(result.stdout)["problem"]:
        raise Invalid(problem if problem.startswith("the image") else f"the image cannot be unpacked: {problem}")
    log("unpacking the layers")
    unpack_command = confine(
        # At a more verbose level, umoci prints a warning for each file with attributes that it cannot set.
        ["umoci", "--log=fatal", "raw", "unpack", "--image", f"{WORK / LAYOUT}:image", str(WORK / TREE)],
        work_directory,
        capabilities=FILE_CAPABILITIES,
        max_file_bytes=disk_mb << 20,
    )
    tree = work_directory / TREE
    program = run_async(unpack_command, timeout=STEP_TIMEOUT_SECONDS, check=False, max_output_bytes=_MAX_OUTPUT_BYTES)
    result = await run_measured(program, lambda: check_tree_size(tree, disk_mb))
    if result.returncode != 0:
        output = result.stderr.strip()[-1000:]
        if "no space left on device" in output.lower():
            raise NoSpace(
                "unpacking the image failed because the host's disk is full: free some space and build the template "
                "again"
            )
        raise BackendFailed(f"umoci cannot unpack the image: {output or 'no message'}")
    if tree.is_symlink():
        raise Invalid("the image cannot be unpacked: its root is not a directory")
    tree.chmod(0o755)
    return tree


async def check_tree_size(tree: Path, disk_mb: int) -> None:
    """Raise Invalid if the tree has outgrown the disk, for example because umoci and the checker disagree on a layer.

    A file that is being written may occupy twice its size, because XFS allocates space in advance.
    """
    if (
        await measure_disk_usage(tree) > 2 * disk_mb << 20
        or await count_inodes(tree) > disk_mb * _MAX_ENTRIES_PER_MIB + 1
    ):
        raise Invalid(
            f"the unpacked image does not fit on the template's disk of {disk_mb} MiB: set 'diskSizeMB' to a larger "
            "number"
        )
