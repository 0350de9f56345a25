"""The state that all groups of operations share."""

from __future__ import annotations

from sandbox_gateway.config import Config
from sandbox_gateway.engine.durations import Durations
from sandbox_gateway.engine.events import Events
from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.keyed_locks import KeyedLocks
from sandbox_gateway.engine.name_claims import LocalNameClaims, NameClaims
from sandbox_gateway.engine.secret import Secret
from sandbox_gateway.errors import Busy, Conflict
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState
from sandbox_gateway.tasks import BackgroundTasks


class Context:
    """The shared state and services of all groups of operations."""

    def __init__(self, host: Host, config: Config, index: Index | None = None) -> None:
        self.host = host
        self.config = config
        self.index = index or Index()
        self.name_claims: NameClaims = LocalNameClaims()
        self.locks = KeyedLocks(config.limits.lock_seconds)
        self.events = Events()
        self.durations = Durations()
        self.secret = Secret()
        self.background = BackgroundTasks(Logger("engine"))
        self.unreadable_sandboxes: list[str] = []
        """Ids of the sandboxes whose records cannot be read. Objects that may belong to them are not removed."""

    def require_running(self, ref: str) -> Sandbox:
        """Return the sandbox. Raises Conflict if it is paused or its machine has stopped."""
        sandbox = self.index.get_sandbox(ref)
        require_not_departing(sandbox)
        if sandbox.state is SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox.id} is paused: resume it first")
        if reason := self.host.find_end_reason(sandbox):
            raise Conflict(f"sandbox {sandbox.id} is not running ({reason}): resume it, or roll it back")
        return sandbox


def require_not_departing(sandbox: Sandbox) -> None:
    """Raise Busy if the sandbox is being moved to another host of the fleet."""
    if sandbox.departure is not None:
        raise Busy(f"sandbox {sandbox.id} is being moved to host {sandbox.departure.target!r}: try again later")
