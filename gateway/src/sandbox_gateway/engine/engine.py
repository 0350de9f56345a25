"""The engine, which creates the groups of operations, and opens and closes the host."""

from __future__ import annotations

import time

from sandbox_gateway.config import Config
from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.attachments import Attachments
from sandbox_gateway.engine.build_files import BuildFiles
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.commands import Commands
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.expiry import Expiry
from sandbox_gateway.engine.forks import Forks
from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.loads import Loads
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.mount_plan import MountPlanner
from sandbox_gateway.engine.moves import Moves
from sandbox_gateway.engine.name_claims import NameClaims, PlannedNameClaims
from sandbox_gateway.engine.prewarm import PrewarmPool
from sandbox_gateway.engine.recovery import Recovery
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.replacement import Replacement
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.sandboxes import Sandboxes
from sandbox_gateway.engine.snapshots import Snapshots
from sandbox_gateway.engine.template_builder import TemplateBuilder
from sandbox_gateway.engine.templates import Templates
from sandbox_gateway.engine.transfer.artifacts import Artifacts
from sandbox_gateway.engine.transfer.transfers import Transfers
from sandbox_gateway.engine.volumes import Volumes
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import wait_for_uninterruptible_tasks

_CLOSE_TIMEOUT_SECONDS = 30

log = Logger("engine")


class Engine:
    """All operations, in groups. A group uses the groups that are passed to its constructor, and the ``Context``.

    Some values are set after construction: the name claims, ``index.listener`` and ``transfers.list_fleet_signers`` by
    the fleet and by plan sessions, and ``durations.listener`` and ``durations.capture_listener`` by the API. A context
    variable carries each value that belongs to a request: ``start_slots.requester``, ``own_changes.own_changes``,
    ``commit_gate.commit_gate``, ``plans.host.may_read_sources`` and ``records.id_source``. ``durations`` keeps the
    current measurement in another.

    The API layer uses the groups ``sandboxes``, ``forks``, ``snapshots``, ``templates``, ``build_files``,
    ``transfers``, ``artifacts``, ``moves``, ``volumes``, ``attachments`` and ``commands``. It also uses ``host``,
    ``config``, ``secret``, ``index``, ``events``, ``durations``, ``references``, ``agents``, ``room``, ``prewarm``,
    ``machines``, ``loads`` and ``background``.

    Operations take ids or names, and raise GatewayError. Their steps are ordered so that an interruption at any point
    loses nothing.
    """

    def __init__(
        self, host: Host, config: Config, *, index: Index | None = None, agents_class: type[Agents] = Agents
    ) -> None:
        """Create an engine. ``index`` and ``agents_class`` are for plan sessions: see ``plans.sessions``."""
        # The state of all groups.
        self._context = context = Context(host, config, index)
        self.host, self.config, self.secret = host, config, context.secret
        self.index, self.events, self.background = context.index, context.events, context.background
        self.durations = context.durations

        # The prerequisites of the primitives: locks, users of objects, removal of objects, agents, room on the host,
        # and forks that are ready to be claimed.
        locking = Locking(context)
        self.references = references = References(context)
        removal = Removal(context)
        collector = Collector(context, references, removal)
        self.agents = agents = agents_class(context)
        self.room = room = RoomMonitor(context, locking)
        self.prewarm = prewarm = PrewarmPool(context, agents, room)

        # The two primitives: start a machine from a snapshot, and take a snapshot of a running machine.
        self.machines = machines = MachineLifecycle(context, locking, agents, prewarm)
        captures = Captures(context, locking, agents, removal, room)

        # Operations that do not need the primitives.
        self.volumes = Volumes(context, locking, references, collector, removal)
        self.attachments = attachments = Attachments(context, locking, agents, collector)
        self.commands = Commands(context, locking, agents)
        self.transfers = transfers = Transfers(context, collector, room)
        self.build_files = build_files = BuildFiles(context, room, transfers)

        # Operations that are built on the primitives.
        mount_planner = MountPlanner(context, locking, collector)
        replacement = Replacement(context, locking, collector, removal, machines)
        builder = TemplateBuilder(context, agents, machines, captures, room, build_files, collector)
        self.snapshots = snapshots = Snapshots(context, locking, references, collector, removal, captures, prewarm)
        self.forks = Forks(context, locking, references, collector, mount_planner, machines, captures, room)
        self.sandboxes = sandboxes = Sandboxes(
            context, locking, agents, collector, mount_planner, machines, captures, replacement
        )
        self.templates = templates = Templates(context, snapshots, builder, prewarm, build_files)
        self.moves = Moves(context, locking, collector, removal, machines, captures, room, sandboxes, self.transfers)
        self.artifacts = Artifacts(context, collector, room, transfers, templates)

        # Work that no request triggers.
        self.loads = Loads(context)
        self._recovery = Recovery(context, collector, removal, attachments, machines, sandboxes)
        self._expiry = Expiry(context, collector, sandboxes)

    def use_name_claims(self, claims: NameClaims) -> None:
        """Claim names with ``claims`` from now on, instead of only in the index."""
        self._context.name_claims = claims

    def follow_fleet(self, engine: Engine) -> None:
        """This engine belongs to a plan session of ``engine``: check names and trust signers as ``engine`` does."""
        self._context.name_claims = PlannedNameClaims(engine._context.name_claims)
        self.transfers.list_fleet_signers = engine.transfers.list_fleet_signers

    async def open(self) -> None:
        """Lock the host, scan it, and complete or undo operations that a crash interrupted."""
        start_time = time.monotonic()
        await self.host.open()
        self.secret.load(self.config.secret_path)
        self.transfers.open()
        self.build_files.open()
        self.artifacts.open()
        scan = await self.host.scan()
        self._recovery.load(scan)
        self.machines.watch()
        await self._recovery.reconcile(scan.running_instances)
        self.background.start(self._expiry.watch())
        self.background.start(self.prewarm.keep_forks_ready())
        self.background.start(self.loads.watch())
        self.background.start(self.build_files.watch())
        self.background.start(self.artifacts.watch())
        if self.host.abilities.can_stall:
            self.background.start(self.room.watch())
        log.info(
            "open",
            sandboxes=len(self.index.sandboxes),
            running=len(scan.running_instances),
            snapshots=len(self.index.snapshots),
            repaired=len(scan.repaired),
            ms=round((time.monotonic() - start_time) * 1000),
        )

    async def close(self) -> None:
        """Wait for operations that are being committed, then close the host. Sandboxes keep running."""
        await self.background.cancel()
        if not await wait_for_uninterruptible_tasks(_CLOSE_TIMEOUT_SECONDS):
            log.error("closed before all operations were complete", seconds=_CLOSE_TIMEOUT_SECONDS)
        await self.prewarm.discard_all()
        await self.host.close()
