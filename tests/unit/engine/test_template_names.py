"""Concurrent changes of template names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import NameTaken, NoSpace
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot, SnapshotKind
from tests.api.memory_host import MemoryHost
from tests.support.memory_engine import build, create, opened_engine, wait_until


class _Host(MemoryHost):
    failure_count = 0
    """How many of the next attempts to save a template that has a name fail."""

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(0.02)
        if self.failure_count and snapshot.names:
            self.failure_count -= 1
            raise NoSpace("no space left")


def test_concurrent_aliases_of_one_template_are_all_kept(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        async with opened_engine(tmp_path, _Host()) as engine:
            await asyncio.gather(*(engine.templates.set_alias("t", name) for name in ("x", "y", "z")))
            (template,) = engine.templates.list()
            assert sorted(template.names) == ["t", "x", "y", "z"]
            assert {engine.templates.get(name).id for name in template.names} == {template.id}

    asyncio.run(run_scenario())


def test_concurrent_requests_give_an_alias_to_only_one_template(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        async with opened_engine(tmp_path, _Host()) as engine:
            await build(engine, "u", "curl")
            await build(engine, "v", "wget")
            await asyncio.gather(*(engine.templates.set_alias(name, "x") for name in ("t", "u", "v")))
            assert sum("x" in template.names for template in engine.templates.list()) == 1

    asyncio.run(run_scenario())


@pytest.mark.parametrize("former_owner", ["", "u"])
def test_a_sandbox_cannot_take_an_alias_that_is_being_assigned(tmp_path: Path, former_owner: str) -> None:
    async def run_scenario() -> None:
        async with opened_engine(tmp_path, _Host()) as engine:
            await build(engine, "u", "curl")
            if former_owner:
                await engine.templates.set_alias("u", "x")
            alias_task = asyncio.create_task(engine.templates.set_alias("t", "x"))
            for _ in range(4):
                await asyncio.sleep(0.01)
                with pytest.raises(NameTaken):
                    await create(engine, "x")
            assert (await alias_task).names == ["t", "x"]

    asyncio.run(run_scenario())


def test_a_name_stays_with_its_template_if_the_move_fails(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        host = _Host()
        async with opened_engine(tmp_path, host) as engine:
            await build(engine, "u", "curl")
            template_before = engine.templates.get("u")
            host.failure_count = 1
            with pytest.raises(NoSpace):
                await engine.templates.set_alias("t", "u")
            assert engine.templates.get("u").id == template_before.id and len(engine.templates.list()) == 2

    asyncio.run(run_scenario())


def test_concurrent_builds_with_one_name_leave_one_template(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        host = _Host()
        async with opened_engine(tmp_path, host, limits={"builds": 4}) as engine:
            await asyncio.gather(*(build(engine, "u", package) for package in ("curl", "wget", "git")))
            assert sorted(name for template in engine.templates.list() for name in template.names) == ["t", "u"]
            assert len(engine.templates.list()) == 2

    asyncio.run(run_scenario())


def test_a_build_that_cannot_be_named_leaves_no_template(tmp_path: Path) -> None:
    async def run_scenario() -> None:
        host = _Host()
        async with opened_engine(tmp_path, host) as engine:
            host.build_seconds = 0.05
            template_build = await engine.templates.build("u", Recipe(packages=["curl"]))
            await engine.forks.fork("t", ForkSpec(names=["u"]))
            await wait_until(lambda: template_build.status != "building")
            assert template_build.status == "error" and "is already in use" in template_build.reason
            kinds = [each.kind for each in engine.index.snapshots.values()]
            assert kinds == [SnapshotKind.TEMPLATE], "only the template t remains"

    asyncio.run(run_scenario())
