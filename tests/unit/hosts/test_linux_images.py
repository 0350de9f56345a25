"""The message with which a jail host refuses images, with and without linux(4)."""

from __future__ import annotations

import pytest

from sandbox_gateway.hosts.jail_zfs.linux_images import LINUX_FEATURE, create_image_refusal, has_linux
from tests.support.linux_images import make_sysctl


@pytest.mark.parametrize(
    ("output", "is_loaded"),
    [(f"{LINUX_FEATURE}=1\n", True), (f"{LINUX_FEATURE}=0\n", False), ("", False), ("kern.features.linux=1\n", False)],
)
async def test_the_refusal_of_images_names_linux(output: str, is_loaded: bool) -> None:
    run = make_sysctl(output)
    assert await has_linux(run) == is_loaded
    message = (await create_image_refusal(run)).message
    assert message.startswith("a jail host cannot build templates from images")
    assert "use a host with virtual machines (kvm_xfs), or 'from: rootfs' with a FreeBSD file system" in message
    assert ("`sysrc linux_enable=YES; service linux start`" in message) != is_loaded
    assert ("although linux(4) is loaded" in message) == is_loaded
