"""Refuse images as a jail host does, without FreeBSD's commands."""

from __future__ import annotations

from typing import cast

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.linux_images import LINUX_FEATURE, create_image_refusal
from sandbox_gateway.recipes import Recipe


def make_sysctl(output: str) -> CommandRunner:
    """Return a runner whose only command is the one that reads the feature, and prints ``output``."""

    async def run(*argv: str) -> str:
        assert argv == ("sysctl", "-ie", LINUX_FEATURE)
        return output

    return cast(CommandRunner, run)


async def refuse_images(recipe: Recipe) -> None:
    """Refuse a recipe with an image, like ``Host.check_recipe`` of a jail host without linux(4)."""
    assert recipe.image
    raise await create_image_refusal(make_sysctl(""))
