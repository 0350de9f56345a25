"""Build a template: create a base file system, boot it, set it up from inside, and capture it."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.build_files import BuildFiles
from sandbox_gateway.engine.builds import Build, LogWriter
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.image_steps import LAUNCHER, build_archive_path, find_archive, needs_programs
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.errors import BackendFailed, NotFound, Timeout
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.log import Logger
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import MemoryMode, NetworkPolicy, Sandbox, Snapshot, SnapshotKind, StartCommand
from sandbox_gateway.tasks import clean_up

_PROBE_INTERVAL_SECONDS = 0.5
_PROBE_TIMEOUT_SECONDS = 30
_CAPTURE_STEP_TIMEOUT_SECONDS = 120
_INSTALL_TIMEOUT_SECONDS = 60
_OUTPUT_TAIL_BYTES = 1000

log = Logger("templates")


class TemplateBuilder:
    def __init__(
        self,
        context: Context,
        agents: Agents,
        machines: MachineLifecycle,
        captures: Captures,
        room: RoomMonitor,
        build_files: BuildFiles,
        collector: Collector,
    ) -> None:
        self._host = context.host
        self._index = context.index
        self._collector = collector
        self._agents = agents
        self._machines = machines
        self._captures = captures
        self._room = room
        self._build_files = build_files

    async def require_room(self) -> None:
        """Raise NoSpace if the host has no room for the machine of a build."""
        await self._room.require_room_for_machines(1)

    async def build(self, build: Build, recipe: Recipe, login: RegistryLogin | None = None) -> Snapshot:
        """Build a template without a name, and write its log to ``build``. ``login``: for the image's registry."""
        host = self._host
        await self.require_room()
        if recipe.source is Source.TEMPLATE:
            return await self._build_from_template(build, recipe)
        base = Snapshot(kind=SnapshotKind.BASE, resources=recipe.resources)
        image_command = await host.build_base(base, recipe, build.source_digest, build.log, login)
        try:
            return await self._build_from_base(build, base, recipe, _get_start_command(recipe, image_command))
        finally:
            await clean_up(log, host.remove_snapshot(base))

    async def _build_from_template(self, build: Build, recipe: Recipe) -> Snapshot:
        """Build a template from the disk of a parent. If the recipe has no start command, start the parent's."""
        template = self._index.snapshots.get(build.source_digest)
        if template is None:
            raise NotFound("template", recipe.template)
        start = _get_start_command(recipe)
        if not start.command:
            inherited_start = template.start or _get_start_command(Recipe.model_validate(template.recipe))
            if start.ready_probe:
                start = start.model_copy(update={"command": inherited_start.command})
            else:
                start = inherited_start
        async with self._collector.pinned_then_collected(template):
            return await self._build_from_base(build, template, recipe, start)

    async def _build_from_base(self, build: Build, base: Snapshot, recipe: Recipe, start: StartCommand) -> Snapshot:
        sandbox = self._create_sandbox_record(build, base, recipe)
        build.log("booting the base file system")
        await self._machines.fork(base, sandbox, with_memory=False)
        try:
            await self._set_up(build, sandbox, recipe, start)
            return await self._capture(build, sandbox, start)
        finally:
            await clean_up(log, self._host.remove(sandbox))

    def _create_sandbox_record(self, build: Build, base: Snapshot, recipe: Recipe) -> Sandbox:
        """Create the record of the sandbox in which the template is set up.

        The record is never saved, so that a restart after a crash removes the sandbox.
        """
        return Sandbox(
            name=f"build-{build.build_id}",
            forked_from=base.id,
            head=base.id,
            base=base.id,
            resources=recipe.resources,
            network=NetworkPolicy(allow_internet=recipe.setup_network),
        )

    async def _set_up(self, build: Build, sandbox: Sandbox, recipe: Recipe, start: StartCommand) -> None:
        agent = self._agents.create_client(sandbox)
        if any(map(needs_programs, (*recipe.setup, start.command, start.ready_probe))):
            await self._install_step_programs(sandbox)
        for command in recipe.setup:
            if archive_name := find_archive(command):
                await self._upload_archive(build, sandbox, archive_name, recipe.setup_timeout)
            build.log(f"$ {command}")
            log_writer = LogWriter(build)
            exit_code = await agent.run_shell(command, log_writer.feed, seconds=recipe.setup_timeout)
            log_writer.flush()
            if exit_code != 0:
                raise BackendFailed(
                    f"the set-up command {command[:200]!r} failed with exit code {exit_code}: see the build's log"
                )
        if start.command:
            build.log(f"starting {start.command}")
            await agent.start_background_command(start.command)
        if start.ready_probe:
            await self._wait_until_ready(build, sandbox, start)

    async def _install_step_programs(self, sandbox: Sandbox) -> None:
        """Install the programs that run the steps of E2B's client, unless the template already contains them."""
        agent = self._agents.create_client(sandbox)
        result = await agent.exec(["/bin/sh", "-c", f"test -x {LAUNCHER}"])
        if result.exit_code == 0:
            return
        programs = self._host.read_step_programs()
        for path, text in programs.items():
            data = text.encode()
            await agent.upload(path, len(data), _yield_once(data), seconds=_INSTALL_TIMEOUT_SECONDS)
        result = await agent.exec(["/bin/sh", "-c", f"chmod 755 {' '.join(map(shlex.quote, programs))}"])
        if result.exit_code != 0:
            raise BackendFailed("the programs that run the steps could not be installed: use a recipe without steps")

    async def _upload_archive(self, build: Build, sandbox: Sandbox, name: str, seconds: float) -> None:
        """Write an archive to the sandbox, where the next command copies its files and removes it."""
        with self._build_files.opened(name) as archive:
            build.log(f"uploading {archive.size} bytes of files")
            client = self._agents.create_client(sandbox)
            await client.upload(build_archive_path(name), archive.size, archive.read_pieces(), seconds=seconds)

    async def _wait_until_ready(self, build: Build, sandbox: Sandbox, start: StartCommand) -> None:
        build.log(f"waiting for {start.ready_probe}")
        agent = self._agents.create_client(sandbox)
        deadline = time.monotonic() + start.ready_timeout
        while True:
            result = await agent.exec(["/bin/sh", "-c", start.ready_probe], timeout=_PROBE_TIMEOUT_SECONDS)
            if result.exit_code == 0 and not result.timed_out:
                return
            if time.monotonic() > deadline:
                output = remove_control_characters(
                    (result.stderr or result.stdout)[-_OUTPUT_TAIL_BYTES:].decode(errors="replace")
                ).strip()[-200:]
                raise Timeout(
                    f"the readiness probe did not succeed within {start.ready_timeout:g} s: check the start command "
                    f"and the probe, or raise 'readyTimeout'. The last output of the probe: {output or 'none'}"
                )
            await asyncio.sleep(_PROBE_INTERVAL_SECONDS)

    async def _capture(self, build: Build, sandbox: Sandbox, start: StartCommand) -> Snapshot:
        agent = self._agents.create_client(sandbox)
        if self._host.abilities.memory:
            # The interpreter becomes part of the template's memory, so that forks run their first code immediately.
            build.log("starting the code interpreter")
            await agent.start_interpreter(seconds=_CAPTURE_STEP_TIMEOUT_SECONDS)
        build.log("capturing the template")
        await agent.sync(seconds=_CAPTURE_STEP_TIMEOUT_SECONDS)
        template = Snapshot(
            id=build.template_id,
            kind=SnapshotKind.TEMPLATE,
            description=build.description,
            template_id=build.template_id,
            origin=build.template_id,
            recipe_digest=build.digest,
            source_digest=build.source_digest,
            recipe=build.recipe,
            start=start,
        )
        template = await self._captures.capture_state(sandbox, template, memory=True)
        contents = "memory and disk" if template.memory is not MemoryMode.NONE else "disk"
        build.log(f"captured {contents} in {template.pause_ms:.0f} ms")
        return template


def _get_start_command(recipe: Recipe, image_command: str = "") -> StartCommand:
    return StartCommand(
        command=recipe.start_command or image_command,
        ready_probe=recipe.ready_probe,
        ready_timeout=recipe.ready_timeout,
    )


async def _yield_once(data: bytes) -> AsyncIterator[bytes]:
    yield data
