"""Build the tree of a template from an image and, at the same time, unpack the Debian tree that it needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import Invalid
from sandbox_gateway.hosts.kvm_xfs.template.oci import builder
from sandbox_gateway.recipes import Recipe, Source


async def test_an_image_that_is_refused_ends_the_unpacking_of_debian(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []
    has_started = asyncio.Event()

    async def unpack_debian(*args: Any) -> None:
        events.append("started")
        has_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    async def copy_image(*args: Any) -> None:
        await has_started.wait()
        raise Invalid("the image is refused")

    monkeypatch.setattr(builder, "unpack_debian", unpack_debian)
    monkeypatch.setattr(builder, "copy_image", copy_image)
    image_builder = builder.ImageBuilder(tmp_path, tmp_path, KvmXfs(), tmp_path, lambda line: None)
    with pytest.raises(Invalid, match="the image is refused"):
        await image_builder.build(Recipe(source=Source.IMAGE, image="oci:/layout:test"), "")
    assert events == ["started", "ended"]
