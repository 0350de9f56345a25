"""Removals that fail while a failed operation is being undone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, NoSpace, Timeout
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support.memory_engine import create, opened_engine
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    """A host that can neither remove the sandbox ``one`` nor save the sandbox ``three``."""

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        if sandbox.name in self.failing_names:
            await asyncio.sleep(0.1)
        await super().fork(snapshot, sandbox, with_memory=with_memory)

    async def save(self, sandbox: Sandbox) -> None:
        if sandbox.name == "three":
            raise NoSpace("no space left")
        await super().save(sandbox)

    async def remove(self, sandbox: Sandbox) -> None:
        if sandbox.name == "one":
            raise Timeout("QEMU did not exit")
        await super().remove(sandbox)


@pytest.mark.parametrize("error", [BackendFailed, NoSpace])
async def test_the_other_forks_are_removed_and_the_first_error_is_raised(
    tmp_path: Path, error: type[Exception]
) -> None:
    host = _Host()
    host.failing_names = {"three"} if error is BackendFailed else set()
    async with opened_engine(tmp_path, host) as engine:
        with pytest.raises(error):
            await engine.forks.fork("t", ForkSpec(names=["one", "two", "three"]))
        assert engine.sandboxes.list() == [] and len(host.machines) == 1
        assert "two" not in {sandbox.name for sandbox in host.saved_sandboxes.values()}


async def test_a_rollback_that_cannot_be_undone_raises_the_original_error(tmp_path: Path) -> None:
    host = MemoryHost()
    async with opened_engine(tmp_path, host) as engine:
        await create(engine, "a")
        await engine.snapshots.create("a", name="s")

        async def raise_no_space(sandbox: Sandbox) -> None:
            raise NoSpace("no space left")

        async def raise_timeout(sandbox: Sandbox) -> None:
            raise Timeout("QEMU did not exit")

        host.save = raise_no_space  # type: ignore[method-assign]
        host.discard = raise_timeout  # type: ignore[method-assign]
        with pytest.raises(NoSpace):
            await engine.sandboxes.rollback("a", "s")
