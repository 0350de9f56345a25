"""The state that all groups of operations share."""

from __future__ import annotations

from sandbox_gateway.config import Config
from sandbox_gateway.engine.background import Background
from sandbox_gateway.engine.events import Events
from sandbox_gateway.engine.index import Index
from sandbox_gateway.engine.locks import Locks
from sandbox_gateway.engine.secret import Secret
from sandbox_gateway.hosts.base import Host


class Context:
    """State and services, without operations."""

    def __init__(self, host: Host, config: Config) -> None:
        self.host = host
        self.config = config
        self.index = Index()
        self.locks = Locks(config.limits.lock_seconds)
        self.events = Events()
        self.secret = Secret()
        self.background = Background()
        self.unreadable_sandboxes: list[str] = []
        """Sandboxes whose records cannot be read. While there are any, nothing that may belong to them is removed."""
