"""Build templates in the background, and give them names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

from sandbox_gateway.engine.build_files import BuildFiles
from sandbox_gateway.engine.builds import Build
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.image_steps import needs_programs
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import remove_default_tag, require_valid_template_name, split_tag
from sandbox_gateway.engine.prewarm import PrewarmPool
from sandbox_gateway.engine.record_changes import save_names
from sandbox_gateway.engine.snapshots import Snapshots
from sandbox_gateway.engine.template_builder import TemplateBuilder
from sandbox_gateway.errors import Conflict, GatewayError, Invalid, NameTaken, NotFound
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import DEFAULT_TAG, TAG_SEPARATOR, Resources, Snapshot, SnapshotKind, new_id
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("templates")

Sizes = Mapping[str, int]
"""Values for fields of ``Resources``."""
_MAX_BUILDS = 100
_UNKNOWN_DIGEST = "unknown"
"""The digest of a source that only a run may read."""


class Templates:
    """Operations on templates. A finished template is a snapshot; the latest builds are kept in memory."""

    def __init__(
        self,
        context: Context,
        snapshots: Snapshots,
        builder: TemplateBuilder,
        prewarm: PrewarmPool,
        build_files: BuildFiles,
    ) -> None:
        self._context = context
        self._index = context.index
        self._snapshots = snapshots
        self._builder = builder
        self._prewarm = prewarm
        self._build_files = build_files
        self._builds: dict[str, Build] = {}
        self._announced_builds: dict[str, tuple[Build, Sizes]] = {}
        """By build id: the builds whose recipes have not arrived yet, with the sizes that the request named."""
        self._build_slots = asyncio.Semaphore(context.config.limits.builds)

    def copy_builds(self, other: Templates) -> None:
        """Copy the builds of another engine. Builds that have not finished are also carried out in this engine."""
        for build in other._builds.values():
            if build.status == "building":
                build = build.copy_initial_state()
                self._context.background.start(self._run(build, Recipe.model_validate(build.recipe)))
            self._builds[build.build_id] = build

    def get(self, ref: str) -> Snapshot:
        return self._index.get_snapshot(ref, noun="template", kinds=[SnapshotKind.TEMPLATE])

    def list(self) -> Sequence[Snapshot]:
        return self._snapshots.list([SnapshotKind.TEMPLATE])

    @measured("template.request")
    async def build(
        self,
        name: str,
        recipe: Recipe,
        description: str = "",
        prewarm: int | None = None,
        login: RegistryLogin | None = None,
    ) -> Build:
        """Build a template in the background. If a template with this name and recipe exists, return its build.

        ``login``: for the registry of the recipe's image; it is forgotten after the build.
        ``prewarm``: the number of forks to keep ready. None: 0 for a new template, unchanged for an existing one.
        Raises NoSpace if the host has no room for the machine of the build.
        """
        name = require_valid_template_name(name)
        self._prewarm.check_count(self._context.host.abilities.memory, prewarm or 0)
        digest_of_source = await self._digest_source(recipe, login)
        digest = recipe.compute_digest(await self.compute_guest_digest(), digest_of_source)
        if self._find_running_build(name, digest) is None and self._find_template(name, digest) is None:
            # A refused build leaves nothing behind, even in a plan session. A build that fails later remains.
            await self._builder.require_room()
            await self._prewarm.require_room(prewarm or 0)
        if (running_build := self._find_running_build(name, digest)) is not None:
            running_build.prewarm = running_build.prewarm if prewarm is None else prewarm
            return running_build
        if (existing_template := self._find_template(name, digest)) is not None:
            if prewarm is not None:
                await self._prewarm.set_target(existing_template.id, prewarm)
            return _create_finished_build(existing_template, digest)
        self.require_available_name(name)
        self._build_files.require_archives(recipe.setup)
        build = Build(
            template_id=new_id(),
            names=[name],
            digest=digest,
            source_digest=digest_of_source,
            recipe=_canonicalize_recipe(recipe),
            description=description,
            prewarm=prewarm or 0,
        )
        self._add_build(build)
        self._context.background.start(self._run(build, recipe, login))
        return build

    def announce(self, names: Sequence[str], sizes: Sizes) -> Build:
        """Return a build that waits for ``start``. Only the newest 100 of them are kept."""
        names = list(dict.fromkeys(map(require_valid_template_name, names)))
        for name in names:
            self.require_available_name(name)
        build = Build(template_id=new_id(), names=names, digest="", status="waiting")
        self._announced_builds[build.build_id] = build, sizes
        while len(self._announced_builds) > _MAX_BUILDS:
            del self._announced_builds[next(iter(self._announced_builds))]
        return build

    @measured("template.request")
    async def start(
        self,
        template_ref: str,
        build_id: str,
        make_recipe: Callable[[Sizes], Recipe],
        login: RegistryLogin | None = None,
    ) -> Build:
        """Carry out an announced build, even if the template exists with the same recipe."""
        if self._find_announced_build(template_ref, build_id) is None:
            raise NotFound("build", build_id, parent=template_ref)
        build, sizes = self._announced_builds[build_id]
        recipe = self.complete_recipe(make_recipe(sizes), sizes)
        if recipe.source is Source.TEMPLATE and any(map(needs_programs, (*recipe.setup, recipe.start_command))):
            self._context.host.read_step_programs()
        self._build_files.require_archives(recipe.setup)
        digest_of_source = await self._digest_source(recipe, login)
        digest = recipe.compute_digest(await self.compute_guest_digest(), digest_of_source)
        await self._builder.require_room()
        if self._announced_builds.pop(build_id, None) is None:
            raise Conflict(f"build {build_id!r} has already been started: request a new build")
        build.digest, build.source_digest, build.recipe = digest, digest_of_source, _canonicalize_recipe(recipe)
        build.status = "building"
        self._add_build(build)
        self._context.background.start(self._run(build, recipe, login))
        return build

    def _find_announced_build(self, template_ref: str, build_id: str) -> Build | None:
        build, _ = self._announced_builds.get(build_id, (None, None))
        return build if build and _is_template_of(build, template_ref) else None

    def require_known_template(self, ref: str) -> None:
        """Raise NotFound unless ``ref`` is a template, or the template of a build, even of one that has not started."""
        announced_builds = (build for build, _ in self._announced_builds.values())
        if not any(_is_template_of(build, ref) for build in announced_builds):
            self.get_build(ref)

    def complete_recipe(self, recipe: Recipe, sizes: Sizes) -> Recipe:
        """Return a recipe, with missing sizes taken from the template that it starts from, if any.

        ``sizes``: the sizes in the request, which override the template's. Raises NotFound, Invalid.
        """
        if recipe.source is not Source.TEMPLATE:
            return recipe
        template_sizes = self.get(recipe.template).resources
        resources = Resources(**{**template_sizes.model_dump(), **sizes})
        if resources.disk_mb < template_sizes.disk_mb:
            raise Invalid(
                f"the disk of {resources.disk_mb} MiB is smaller than the disk of template {recipe.template!r} "
                f"({template_sizes.disk_mb} MiB): request at least {template_sizes.disk_mb} MiB"
            )
        return recipe.model_copy(update={"resources": resources})

    async def rebuild(self, ref: str) -> Build:
        """Build a template again from its recipe, or return its current build if a new one would not differ."""
        template = self.get(ref)
        if not template.recipe or not template.all_names:
            raise Conflict(
                f"template {ref!r} cannot be built again, because it has no name, or was built by a gateway that "
                "did not store its recipe: build it with a recipe"
            )
        name = remove_default_tag(ref)
        name = name if name in template.all_names else template.all_names[0]
        return await self.build(name, Recipe.model_validate(template.recipe), template.description)

    async def compute_guest_digest(self) -> str:
        """Return the digest of the guest files that this gateway uses to build templates."""
        return await asyncio.to_thread(self._context.host.compute_guest_digest)

    def get_build(self, template_ref: str, build_id: str = "") -> Build:
        """Return the build ``build_id`` of a template, by default its newest build. ``template_ref``: an id or name."""
        for build in reversed(self._builds.values()):
            if _is_template_of(build, template_ref) and build_id in ("", build.build_id):
                return build
        if (announced_build := self._find_announced_build(template_ref, build_id)) is not None:
            return announced_build
        template = self.get(template_ref)
        build = _create_finished_build(template, template.recipe_digest)
        if build_id not in ("", build.build_id):
            message = f"build {build_id!r} of template {template.id!r} not found"
            raise NotFound("build", build_id, message=message, parent=template.id)
        return build

    def list_unready_builds(self) -> Sequence[Build]:
        return [build for build in self._builds.values() if build.status != "ready"]

    @measured("template.alias")
    async def add_names(self, template_ref: str, names: Sequence[str]) -> Snapshot:
        """Give a template names, each NAME or NAME:TAG. Names of other templates move to this one.

        Raises NameTaken if an object of a different kind has any of the names.
        """
        names = list(dict.fromkeys(map(require_valid_template_name, names)))
        async with self._snapshots.naming_lock:
            template = self.get(template_ref)
            new_names = [name for name in names if name not in template.all_names]
            for name in new_names:
                self.require_available_name(name)
            if not new_names:
                return template
            return await finish_despite_cancellation(self._move_names(template, new_names))

    async def _move_names(self, template: Snapshot, names: Sequence[str]) -> Snapshot:
        previous_owners = [each for each in self.list() if not {*names}.isdisjoint(each.all_names)]
        with self._index.reserved(names, releasing_ids={each.id for each in previous_owners}):
            async with self._context.name_claims.held([NameClaim(template, names)]):
                try:
                    for each in previous_owners:
                        await save_names(self._context, each, [name for name in each.all_names if name not in names])
                    renamed_template = await save_names(self._context, template, [*template.all_names, *names])
                except BaseException:
                    await clean_up(log, *(save_names(self._context, each, each.all_names) for each in previous_owners))
                    raise
        await clean_up(log, *(self.remove(each.id) for each in previous_owners if {*each.all_names} <= {*names}))
        return renamed_template

    def list_tagged_names(self, ref: str) -> Sequence[tuple[str, Snapshot]]:
        """Return each NAME:TAG (or NAME, for the default tag) of a name, with the template to which it refers.

        ``ref``: a name, whose tag is ignored, or the id of a template that has only one name. Raises NotFound, Invalid.
        """
        return self._list_tagged_names(self._find_base_name(ref))

    async def assign_tags(self, ref: str, tags: Sequence[str]) -> Snapshot:
        """Assign tags to a template. Other templates of its name lose these tags. Raises NotFound, Invalid.

        ``ref``: NAME or NAME:TAG, or the id of a template that has only one name.
        """
        template = self.get(ref)
        base_name = self._find_base_name(ref)
        return await self.add_names(template.id, [f"{base_name}{TAG_SEPARATOR}{tag}" for tag in tags])

    @measured("template.alias")
    async def remove_tags(self, ref: str, tags: Sequence[str]) -> None:
        """Remove tags from a template's name. A template without any other name is removed once it is unused.

        ``ref``: a name, or the id of a template that has only one name. Raises NotFound for the tags that the name does
        not have, and Invalid for the tag "default".
        """
        if TAG_SEPARATOR in ref:
            raise Invalid(f"the name {ref!r} must not contain a tag: list the tags in the field tags")
        if DEFAULT_TAG in tags:
            raise Invalid(
                f"the tag {DEFAULT_TAG!r} cannot be removed, because it is the name without a tag: delete the template "
                "instead, or give the tag to a different build"
            )
        async with self._snapshots.naming_lock:
            base_name = self._find_base_name(ref)
            names = {f"{base_name}{TAG_SEPARATOR}{tag}" for tag in tags}
            for name in names:
                self.get(name)
            await finish_despite_cancellation(self._remove_names(names))

    async def _remove_names(self, names: Set[str]) -> None:
        for template in [each for each in self.list() if not names.isdisjoint(each.all_names)]:
            if remaining_names := [name for name in template.all_names if name not in names]:
                await save_names(self._context, template, remaining_names)
            else:
                await self.remove(template.id)

    def _find_base_name(self, ref: str) -> str:
        """Return the name in NAME:TAG. If ``ref`` is an id, return the template's name. Raises NotFound, Invalid."""
        base_name, _ = split_tag(ref)
        if self._list_tagged_names(base_name):
            return base_name
        template = self.get(ref)
        base_names = sorted({split_tag(name)[0] for name in template.all_names})
        if len(base_names) != 1:
            names_text = ", ".join(base_names) or "none"
            raise Invalid(f"tags belong to a name, but template {ref!r} has these names: {names_text}. Send one name")
        return base_names[0]

    def _list_tagged_names(self, base_name: str) -> Sequence[tuple[str, Snapshot]]:
        return [
            (name, template)
            for template in self.list()
            for name in template.all_names
            if split_tag(name)[0] == base_name
        ]

    async def _digest_source(self, recipe: Recipe, login: RegistryLogin | None) -> str:
        """Return the digest of the recipe's source, or of the last build if the source must not be read."""
        if recipe.source is Source.TEMPLATE:
            return self.get(recipe.template).id
        digest = await self._context.host.compute_source_digest(recipe, login)
        if digest is not None:
            return digest
        builds = ((build.recipe, build.source_digest) for build in reversed(self._builds.values()))
        templates = (
            (template.recipe, template.source_digest)
            for template in self._snapshots.walk([SnapshotKind.TEMPLATE], backwards=True)
        )
        source = (recipe.path, recipe.image)
        for built_recipe, built_digest in chain(builds, templates):
            if built_digest and (built_recipe.get("path", ""), built_recipe.get("image", "")) == source:
                return built_digest
        return _UNKNOWN_DIGEST

    def require_available_name(self, name: str) -> None:
        """Raise NameTaken if the name belongs to an object other than a template. Only templates can lose a name."""
        owner_id = self._index.find_owner(name)
        if owner_id and not (
            owner_id in self._index.snapshots and self._index.snapshots[owner_id].kind is SnapshotKind.TEMPLATE
        ):
            raise NameTaken(
                f"the name {name!r} is already in use by {owner_id}: choose a different name", blockers=[owner_id]
            )

    async def remove(self, id: str) -> None:
        """Remove a template, or hide it until its last user is removed. Does nothing if the template does not exist."""
        with contextlib.suppress(NotFound):
            await self._snapshots.delete(id, when_unused=True)

    def _find_running_build(self, name: str, digest: str) -> Build | None:
        return next(
            (
                build
                for build in self._builds.values()
                if build.status == "building" and build.names == [name] and build.digest == digest
            ),
            None,
        )

    def _find_template(self, name: str, digest: str) -> Snapshot | None:
        return next(
            (template for template in self.list() if template.recipe_digest == digest and name in template.all_names),
            None,
        )

    def _add_build(self, build: Build) -> None:
        self._builds[build.build_id] = build
        ended_builds = [each for each in self._builds.values() if each.status != "building"]
        for each in ended_builds[: max(0, len(self._builds) - _MAX_BUILDS)]:
            del self._builds[each.build_id]

    @measured("template.build")
    async def _build(self, build: Build, recipe: Recipe, login: RegistryLogin | None) -> None:
        """Build a template and name it. On failure, the template is removed."""
        try:
            template = await self._builder.build(build, recipe, login)
            if build.prewarm:
                await self._prewarm.save_target(template, build.prewarm)
            await self.add_names(template.id, build.names)
        except BaseException:
            await clean_up(log, self.remove(build.template_id))
            raise

    async def _run(self, build: Build, recipe: Recipe, login: RegistryLogin | None = None) -> None:
        publish = self._context.events.publish
        publish("template.building", templateID=build.template_id, buildID=build.build_id, name=build.names[0])
        try:
            async with self._build_slots:
                await self._build(build, recipe, login)
        except GatewayError as error:
            for line in f"failed: {error.message}".split("\n"):
                build.log(line)
            build.end("error", error.message)
        except asyncio.CancelledError:
            build.end("error", "the gateway was stopped during the build: build the template again")
            raise
        except Exception as error:
            log.error("build failed", exc_info=True, template=build.template_id)
            build.end("error", f"an internal error in the gateway stopped the build: {error}")
        else:
            build.log("ready")
            build.end("ready")
        publish("template.built", templateID=build.template_id, buildID=build.build_id, status=build.status)


def _is_template_of(build: Build, ref: str) -> bool:
    """Return whether ``ref`` is the id, or one of the names, of the template that a build creates."""
    return ref == build.template_id or remove_default_tag(ref) in build.names


def _create_finished_build(template: Snapshot, digest: str) -> Build:
    build = Build(template_id=template.id, names=template.all_names, digest=digest)
    build.end("ready")
    return build


def is_outdated(template: Snapshot, guest_digest: str) -> bool | None:
    """Return whether a template is outdated, or None if this cannot be determined.

    It is outdated if it was built with different guest files, so that a new build would differ from it.
    ``guest_digest``: the result of ``Templates.compute_guest_digest``.
    """
    if not template.recipe:
        return None
    recipe = Recipe.model_validate(template.recipe)
    if recipe.path and not template.source_digest:
        # The template was built by an older gateway, which did not store the digest of these files.
        return None
    return recipe.compute_digest(guest_digest, template.source_digest) != template.recipe_digest


def _canonicalize_recipe(recipe: Recipe) -> dict[str, Any]:
    return {**recipe.model_dump(mode="json"), "packages": sorted(set(recipe.packages))}
