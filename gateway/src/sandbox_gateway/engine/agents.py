"""The agents inside sandboxes: their tokens, addresses, identities and mounts."""

from __future__ import annotations

from functools import partial

from sandbox_gateway.engine.agent_client import AgentClient, Identity
from sandbox_gateway.engine.context import Context
from sandbox_gateway.records import NetworkPolicy, Sandbox

_MOUNT_TIMEOUT_SECONDS = 30.0


class Agents:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._host = context.host

    def derive_access_token(self, sandbox: Sandbox) -> str:
        """Return the token that the sandbox's agent requires."""
        return self._context.secret.derive(sandbox.id)

    def create_client(self, sandbox: Sandbox) -> AgentClient:
        return AgentClient(self._host.get_endpoint(sandbox), self.derive_access_token(sandbox))

    def get_endpoint(self, ref: str) -> tuple[str, str]:
        """Return the address and the access token of a running sandbox's agent."""
        sandbox = self._context.require_running(ref)
        return self._host.get_endpoint(sandbox).address, self.derive_access_token(sandbox)

    async def identify(self, sandbox: Sandbox, *, has_booted: bool) -> None:
        """Send a sandbox's identity to its machine, and wait for the agent's response."""
        identity = Identity(
            sandbox_id=sandbox.id,
            hostname=sandbox.hostname,
            access_token=self.derive_access_token(sandbox),
            env=sandbox.env,
            dns=self._choose_name_servers(sandbox.network),
            grow_disk=has_booted,
        )
        seconds = self._host.boot_seconds if has_booted else self._host.resume_seconds
        await self.create_client(sandbox).identify(
            identity, seconds=seconds, find_end_reason=partial(self._host.find_end_reason, sandbox)
        )

    async def mount_volumes(
        self, sandbox: Sandbox, *, has_stale_mounts: bool = False, seconds: float = _MOUNT_TIMEOUT_SECONDS
    ) -> None:
        """Make the agent mount the volumes in ``sandbox.mounts`` that the host cannot mount from outside.

        ``has_stale_mounts``: the guest may still mount other volumes, which the agent then unmounts.
        """
        guest_mounts = self._host.list_guest_mounts(sandbox)
        if guest_mounts or has_stale_mounts:
            await self.create_client(sandbox).set_mounts(guest_mounts, seconds=seconds)

    def _choose_name_servers(self, policy: NetworkPolicy) -> list[str]:
        return self._host.list_name_servers() if policy.allows_egress else []
