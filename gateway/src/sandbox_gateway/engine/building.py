"""Templates: a base is made, forked, set up from inside, and captured."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sandbox_gateway.config import Config
from sandbox_gateway.engine.builds import LONGEST_LINE, Build
from sandbox_gateway.engine.core import checked
from sandbox_gateway.engine.replacing import Replacing
from sandbox_gateway.errors import BackendFailed, GatewayError, NameTaken, NotFound, Timeout
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.log import Logger
from sandbox_gateway.printable import printable
from sandbox_gateway.recipes import Recipe, agent_digest, source_digest
from sandbox_gateway.records import Memory, Sandbox, Snapshot, SnapshotKind, new_id, now

log = Logger("templates")

_KEPT_BUILDS = 100
_PROBE_EVERY = 0.5
_PROBE_SECONDS = 30
_TAIL = 1000


class Building(Replacing):
    """Verbs that make templates. Builds, also failed ones, are remembered; a finished template is a snapshot."""

    def __init__(self, host: Host, config: Config) -> None:
        super().__init__(host, config)
        self._builds: dict[str, Build] = {}
        self._gate = asyncio.Semaphore(config.limits.builds)

    def template(self, ref: str) -> Snapshot:
        return self.index.snapshot(ref, what="template", kinds=[SnapshotKind.TEMPLATE])

    def templates(self) -> list[Snapshot]:
        found = [each for each in self.index.snapshots.values() if each.kind is SnapshotKind.TEMPLATE]
        return [each for each in found if not each.hidden]

    async def build_template(self, name: str, recipe: Recipe, description: str = "") -> Build:
        """Build a template in the background, or find the one that is the same already."""
        checked(name)
        digest = recipe.digest(await asyncio.to_thread(agent_digest), await asyncio.to_thread(source_digest, recipe))
        if (under_way := self._same_under_way(name, digest)) is not None:
            return under_way
        if (same := self._same(name, digest)) is not None:
            return _ready(same, name, digest)
        self._check_template_name(name)
        build = Build(template_id=new_id(), name=name, digest=digest, recipe=_posted(recipe))
        self._remember(build)
        self.spawn(self._run(build, recipe, description))
        return build

    def build(self, template_ref: str, build_id: str = "") -> Build:
        """The newest build of a template (by its id or name), or the one of that id."""
        for build in reversed(list(self._builds.values())):
            if template_ref in (build.template_id, build.name) and build_id in ("", build.build_id):
                return build
        template = self.template(template_ref)
        build = _ready(template, template_ref, template.recipe_digest)
        if build_id not in ("", build.build_id):
            raise NotFound(f"build of template {template.id},", build_id)
        return build

    def builds(self) -> list[Build]:
        return [build for build in self._builds.values() if build.status != "ready"]

    async def set_alias(self, template_ref: str, alias: str) -> Snapshot:
        """Give a template a name; another template that had it loses it, anything else keeps it."""
        template = self.template(template_ref)
        checked(alias)
        if alias in template.names:
            return template
        self._check_template_name(alias)
        for other in self.templates():
            if alias in other.names:
                await self._hand_over(other, alias)
        return await self._rename(template, [*template.names, alias])

    def _check_template_name(self, name: str) -> None:
        """A template may take over another template's name, nobody else's."""
        owner = self.index.owner(name)
        if owner and not (owner in self.index.snapshots and self.index.snapshots[owner].kind is SnapshotKind.TEMPLATE):
            raise NameTaken(f"the name {name!r} is taken by {owner}: choose another", blockers=[owner])

    async def _hand_over(self, old: Snapshot, name: str) -> None:
        names = [each for each in old.names if each != name]
        await self._rename(old, names)
        if not names:
            await self.delete_snapshot(old.id, when_unused=True)

    async def _rename(self, template: Snapshot, names: list[str]) -> Snapshot:
        changed = template.model_copy(update={"names": names, "updated_at": now()})
        await self.host.save_snapshot(changed)
        self.index.put(changed)
        return changed

    def _same_under_way(self, name: str, digest: str) -> Build | None:
        return next(
            (
                build
                for build in self._builds.values()
                if build.status == "building" and (build.name, build.digest) == (name, digest)
            ),
            None,
        )

    def _same(self, name: str, digest: str) -> Snapshot | None:
        return next(
            (template for template in self.templates() if template.recipe_digest == digest and name in template.names),
            None,
        )

    def _remember(self, build: Build) -> None:
        self._builds[build.build_id] = build
        ended = [each for each in self._builds.values() if each.status != "building"]
        for each in ended[: max(0, len(self._builds) - _KEPT_BUILDS)]:
            del self._builds[each.build_id]

    async def _run(self, build: Build, recipe: Recipe, description: str) -> None:
        publish = self.events.publish
        publish("template.building", templateID=build.template_id, buildID=build.build_id, name=build.name)
        try:
            async with self._gate:
                template = await self._constructed(build, recipe, description)
                await self.set_alias(template.id, build.name)
        except GatewayError as error:
            build.log(f"failed: {error.message}")
            build.end("error", error.message)
        except asyncio.CancelledError:
            build.end("error", "the gateway was stopped while it was built: build it again")
            raise
        except Exception as error:
            log.error("build failed", exc_info=True, template=build.template_id)
            build.end("error", f"a bug in the gateway stopped the build: {error}")
        else:
            build.log("ready")
            build.end("ready")
        publish("template.built", templateID=build.template_id, buildID=build.build_id, status=build.status)

    async def _constructed(self, build: Build, recipe: Recipe, description: str) -> Snapshot:
        host = self.host
        base = Snapshot(kind=SnapshotKind.BASE, resources=recipe.resources)
        base = await host.build_base(base, recipe, build.log)
        try:
            sandbox = self._builder(build, base, recipe)
            build.log("booting it")
            await self.embody(base, sandbox, with_memory=False)
            try:
                await self._set_up(build, sandbox, recipe)
                return await self._captured(build, sandbox, recipe, description)
            finally:
                await asyncio.shield(host.remove(sandbox))
        finally:
            await asyncio.shield(host.remove_snapshot(base))

    def _builder(self, build: Build, base: Snapshot, recipe: Recipe) -> Sandbox:
        """The sandbox a template is set up in; never saved, so that a crash sweeps it."""
        return Sandbox(
            name=f"build-{build.build_id}", forked_from=base.id, head=base.id, base=base.id, resources=recipe.resources
        )

    async def _set_up(self, build: Build, sandbox: Sandbox, recipe: Recipe) -> None:
        agent = self.agent(sandbox)
        for command in recipe.setup:
            build.log(f"$ {command}")
            lines = _Lines(build)
            code = await agent.shell(command, lines.take, seconds=recipe.setup_timeout)
            lines.flush()
            if code != 0:
                raise BackendFailed(f"the set-up command {command[:200]!r} failed with exit code {code}: see the log")
        if recipe.start_command:
            build.log(f"starting {recipe.start_command}")
            await agent.launch(recipe.start_command)
        if recipe.ready_probe:
            await self._wait_ready(build, sandbox, recipe)

    async def _wait_ready(self, build: Build, sandbox: Sandbox, recipe: Recipe) -> None:
        build.log(f"waiting for {recipe.ready_probe}")
        agent = self.agent(sandbox)
        deadline = time.monotonic() + recipe.ready_timeout
        while True:
            result = await agent.exec(["/bin/sh", "-c", recipe.ready_probe], timeout=_PROBE_SECONDS)
            if result.exit_code == 0 and not result.timed_out:
                return
            if time.monotonic() > deadline:
                said = printable((result.stderr or result.stdout)[-_TAIL:].decode(errors="replace")).strip()[-200:]
                raise Timeout(
                    f"the ready probe did not succeed within {recipe.ready_timeout:g} s; it last said: {said}"
                )
            await asyncio.sleep(_PROBE_EVERY)

    async def _captured(self, build: Build, sandbox: Sandbox, recipe: Recipe, description: str) -> Snapshot:
        agent = self.agent(sandbox)
        if self.host.abilities.memory:
            # Part of the template's memory: what is forked from it runs its first code at once.
            build.log("starting its code interpreter")
            await agent.call("/contexts/default/start", {}, seconds=120)
        build.log("capturing it")
        await agent.call("/sync", {}, seconds=120)
        template = Snapshot(
            id=build.template_id,
            kind=SnapshotKind.TEMPLATE,
            description=description,
            template_id=build.template_id,
            origin=build.template_id,
            recipe_digest=build.digest,
            recipe=_posted(recipe),
        )
        template = await self.host.capture(sandbox, template, memory=self.host.abilities.memory)
        self.index.put(template)
        held = "memory and disk" if template.memory is not Memory.NONE else "disk"
        build.log(f"captured {held} in {template.pause_ms:.0f} ms")
        return template


class _Lines:
    """Cuts a command's output into lines for the log; of one that does not end it holds the first bytes."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._rest = ""

    def take(self, data: bytes) -> None:
        *lines, rest = data.decode(errors="replace").split("\n")
        for line in lines:
            self._build.log(self._rest + line)
            self._rest = ""
        self._rest = (self._rest + rest)[:LONGEST_LINE]

    def flush(self) -> None:
        if self._rest:
            self._build.log(self._rest)


def _ready(template: Snapshot, name: str, digest: str) -> Build:
    build = Build(template_id=template.id, name=name, digest=digest, build_id=template.id)
    build.end("ready")
    return build


def _posted(recipe: Recipe) -> dict[str, Any]:
    return {**recipe.model_dump(mode="json"), "packages": sorted(set(recipe.packages))}
