"""Build the tree of a template from an OCI image."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from sandbox_gateway.config import KvmXfs
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.template.debian import unpack_debian
from sandbox_gateway.hosts.kvm_xfs.template.oci.layers import unpack_layers
from sandbox_gateway.hosts.kvm_xfs.template.oci.registry import copy_image
from sandbox_gateway.hosts.kvm_xfs.template.oci.runtime import START_COMMAND, UNUSED_DEBIAN_FILES, add_runtime
from sandbox_gateway.hosts.kvm_xfs.template.oci.settings import StartSettings, read_start_settings
from sandbox_gateway.hosts.rootfs_common import remove_tree_in_thread
from sandbox_gateway.image_references import ImageReference, RegistryLogin, Transport, parse_image_reference
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources


class ImageBuilder:
    def __init__(
        self,
        work_directory: Path,
        cache_root: Path,
        settings: KvmXfs,
        agent: Path,
        log: Log,
        login: RegistryLogin | None = None,
    ) -> None:
        self._work_directory = work_directory
        self._cache_root = cache_root
        self._settings = settings
        self._agent = agent
        self._log = log
        self._login = login

    async def build(self, recipe: Recipe, digest: str) -> tuple[Path, tuple[Path, Path], str]:
        """Return the path of the tree, the paths of its kernel and initrd, and its start command (or "").

        ``digest``: copy the image with this digest from the registry, even if the tag has moved in the meantime.
        """
        image = parse_image_reference(recipe.image)
        if image.transport is Transport.REGISTRY and digest:
            image = replace(image, tag="", digest=digest)
        # Checking and unpacking the layers occupies only one processor.
        debian_task = asyncio.create_task(self._unpack_debian())
        try:
            tree, start_settings = await self._unpack_image(image, recipe.resources.disk_mb)
            debian = await debian_task
        finally:
            debian_task.cancel()
            await asyncio.gather(debian_task, return_exceptions=True)
        boot_files = await add_runtime(tree, debian, self._agent, start_settings, self._log)
        return tree, boot_files, START_COMMAND if start_settings.args else ""

    async def _unpack_image(self, image: ImageReference, disk_mb: int) -> tuple[Path, StartSettings]:
        copy_directory = self._work_directory / "oci"
        copy_directory.mkdir(mode=0o700)
        copied_image = await copy_image(image, copy_directory, self._settings, disk_mb << 20, self._log, self._login)
        start_settings = read_start_settings(copied_image.config)
        tree = await unpack_layers(copied_image, copy_directory, disk_mb, self._log)
        # A rename on the same file system; the layers are no longer needed.
        tree = tree.rename(self._work_directory / "tree")
        await remove_tree_in_thread(copy_directory)
        return tree, start_settings

    async def _unpack_debian(self) -> Path:
        directory = self._work_directory / "debian"
        await asyncio.to_thread(directory.mkdir, mode=0o755)
        recipe = Recipe(resources=Resources())
        await unpack_debian(recipe, directory, self._work_directory, self._cache_root, self._log, UNUSED_DEBIAN_FILES)
        return directory
