"""Concurrent changes to template names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import Invalid, NameTaken, NoSpace, NotFound
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot, SnapshotKind
from tests.support.memory_engine import build, create, opened_engine, wait_until
from tests.support.memory_host import MemoryHost


class _Host(MemoryHost):
    failure_count = 0
    """How many of the next attempts to save a template that has a name fail."""

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        await asyncio.sleep(0.02)
        if self.failure_count and snapshot.all_names:
            self.failure_count -= 1
            raise NoSpace("no space left")


async def test_concurrent_aliases_of_one_template_are_all_kept(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        aliases = [engine.templates.add_names("t", [name]) for name in ("x", "y")]
        await asyncio.gather(*aliases, engine.snapshots.add_name("t", "z"))
        (template,) = engine.templates.list()
        assert sorted(template.names) == ["t", "x", "y", "z"]
        assert {engine.templates.get(name).id for name in template.names} == {template.id}


async def test_concurrent_requests_give_an_alias_to_only_one_template(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await build(engine, "u", "curl")
        await build(engine, "v", "wget")
        await asyncio.gather(*(engine.templates.add_names(name, ["x"]) for name in ("t", "u", "v")))
        assert sum("x" in template.names for template in engine.templates.list()) == 1


@pytest.mark.parametrize("former_owner", ["", "u"])
async def test_a_sandbox_cannot_take_an_alias_that_is_being_assigned(tmp_path: Path, former_owner: str) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await build(engine, "u", "curl")
        if former_owner:
            await engine.templates.add_names("u", ["x"])
        alias_task = asyncio.create_task(engine.templates.add_names("t", ["x"]))
        for _ in range(4):
            await asyncio.sleep(0.01)
            with pytest.raises(NameTaken):
                await create(engine, "x")
        assert (await alias_task).names == ["t", "x"]


async def test_a_name_stays_with_its_template_if_the_move_fails(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await build(engine, "u", "curl")
        template_before = engine.templates.get("u")
        host.failure_count = 1
        with pytest.raises(NoSpace):
            await engine.templates.add_names("t", ["u"])
        assert engine.templates.get("u").id == template_before.id and len(engine.templates.list()) == 2


async def test_concurrent_builds_with_one_name_leave_one_template(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host, limits={"builds": 4}) as engine:
        await asyncio.gather(*(build(engine, "u", package) for package in ("curl", "wget", "git")))
        assert sorted(name for template in engine.templates.list() for name in template.names) == ["t", "u"]
        assert len(engine.templates.list()) == 2


async def test_a_build_that_cannot_be_named_leaves_no_template(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        host.build_seconds = 0.05
        template_build = await engine.templates.build("u", Recipe(packages=["curl"]))
        await engine.forks.fork("t", ForkSpec(names=["u"]))
        await wait_until(lambda: template_build.status != "building")
        assert template_build.status == "error" and "is already in use" in template_build.reason
        kinds = [each.kind for each in engine.index.snapshots.values()]
        assert kinds == [SnapshotKind.TEMPLATE], "only the template t remains"


async def test_a_tag_keeps_its_build_when_the_name_moves(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await build(engine, "u", "curl")
        first_template = await engine.templates.add_names("u", ["u:v1"])
        await build(engine, "u", "wget")
        second_template = engine.templates.get("u")
        assert second_template.id != first_template.id and second_template.all_names == ["u"]
        assert engine.templates.get("u:v1").id == first_template.id
        assert engine.templates.get("u:default").id == second_template.id
        await engine.templates.add_names("u:default", ["u:v1"])
        assert first_template.id not in engine.index, "a template without names and users is removed"
        assert engine.templates.get("u").all_names == ["u", "u:v1"]


async def test_all_names_of_a_build_move_or_none(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        await build(engine, "u", "curl")
        await build(engine, "v:1", "wget")
        names_before = {template.id: template.all_names for template in engine.templates.list()}
        host.failure_count = 1
        with pytest.raises(NoSpace):
            await engine.templates.add_names("t", ["v:1", "u", "w"])
        assert {template.id: template.all_names for template in engine.templates.list()} == names_before
        await create(engine, "w")
        with pytest.raises(NameTaken):
            await engine.templates.add_names("t", ["v:1", "u", "w"])
        assert {template.id: template.all_names for template in engine.templates.list()} == names_before
        await engine.templates.add_names("t", ["v:1", "u", "w:1"])
        assert [template.all_names for template in engine.templates.list()] == [["t", "u", "v:1", "w:1"]]


async def test_tags_survive_a_restart_with_their_times(tmp_path: Path) -> None:
    host = _Host()
    async with opened_engine(tmp_path, host) as engine:
        template = await engine.templates.add_names("t", ["t:v1"])
        index = Index()
        index.load([], [Snapshot.model_validate_json(template.model_dump_json())])
        assert index.get_snapshot("t:v1").named_at == template.named_at
        assert template.named_at["t"] < template.named_at["t:v1"] == template.updated_at
        renamed_template = await engine.templates.add_names("t", ["t:v2"])
        assert renamed_template.named_at["t:v1"] == template.named_at["t:v1"] < renamed_template.updated_at


async def test_removed_tags_leave_other_names_and_users(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await build(engine, "u:v1", "curl")
        old_template = await engine.templates.add_names("u:v1", ["u:v2"])
        sandbox = await create(engine, "one", "u:v2")
        for ref, tags, error in (
            ("u", ["default"], Invalid),
            ("u:v1", ["v2"], Invalid),
            ("u", ["v1", "v3"], NotFound),
        ):
            with pytest.raises(error):
                await engine.templates.remove_tags(ref, tags)
        assert engine.templates.get("u:v1").id == old_template.id
        await engine.templates.remove_tags("u", ["v1"])
        assert [name for name, _ in engine.templates.list_tagged_names("u")] == ["u:v2"]
        await engine.templates.remove_tags(old_template.id, ["v2"])
        with pytest.raises(NotFound):
            engine.templates.list_tagged_names("u")
        assert old_template.id in engine.index, "its sandbox still exists"
        await engine.sandboxes.delete(sandbox.id)
        await wait_until(lambda: old_template.id not in engine.index)


async def test_a_build_id_stands_for_a_build_of_the_name(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        await build(engine, "u", "curl")
        build_id = engine.templates.get_build("u").build_id
        assert build_id == engine.templates.get_build(engine.templates.get("u").id, build_id).build_id
        assert engine.templates.get(f"u:{build_id}").id == engine.templates.get("u").id
        for ref in (f"t:{build_id}", f"u:{build_id[:-1]}", f"u:{build_id[:-12]}{'0' * 12}", "u:v1", "u:", ":u"):
            with pytest.raises(NotFound):
                engine.templates.get(ref)
        with pytest.raises(Invalid, match="build ids look like this"):
            await engine.templates.add_names("u", [f"u:{build_id}"])


async def test_tags_of_an_id_with_several_names_are_refused(tmp_path: Path) -> None:
    async with opened_engine(tmp_path, _Host()) as engine:
        template = await engine.templates.assign_tags(engine.templates.get("t").id, ["v1"])
        assert template.all_names == ["t", "t:v1"]
        await engine.templates.add_names("t", ["other"])
        with pytest.raises(Invalid, match="other, t"):
            await engine.templates.assign_tags(template.id, ["v2"])
