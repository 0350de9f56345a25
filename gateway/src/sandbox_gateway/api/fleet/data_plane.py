"""Find the host of the sandbox that a request of the data plane is for, and forward the request there.

The other host authorizes it: tokens and signed URLs are made from the fleet's secret, and hold on every host.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from sandbox_gateway.api.access.forwarded import is_forwarded
from sandbox_gateway.api.access.signed_urls import SignedUrl, get_signed_url
from sandbox_gateway.api.fleet.forwarding import Forwarder
from sandbox_gateway.api.fleet.locator import Locator
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.fleet.fleet import Fleet


class RemoteSandboxes:
    """Implements ``api.data_plane.proxy.Elsewhere``."""

    def __init__(self, fleet: Fleet, engine: Engine, forwarder: Forwarder, locator: Locator) -> None:
        self._fleet = fleet
        self._engine = engine
        self._forwarder = forwarder
        self._locator = locator
        self._tokens: dict[str, bytes] = {}

    async def find_host(self, scope: Scope, ref: str | None) -> str | None:
        """Return the other host that a request is for, or None if it is for this one.

        ``ref``: the sandbox; None if the request names none, but perhaps has a signed URL.
        """
        if is_forwarded(scope):
            return None
        if ref is not None:
            host = await self._locator.find_host("sandbox", ref, [])
            return host if host != self._fleet.name else None
        url = get_signed_url(scope)
        return await asyncio.to_thread(self._find_signer_host, url) if url else None

    def _find_signer_host(self, url: SignedUrl) -> str | None:
        """Return the host of the sandbox whose token signed a URL, or None if it is on this host, or unknown."""
        hosts = dict(self._fleet.view.walk_ids("sandbox"))
        known_tokens = self._tokens
        # Several threads may be here.
        tokens = self._tokens = {id: known_tokens.get(id) or self._engine.secret.derive(id).encode() for id in hosts}
        host = next((hosts[id] for id in url.find_signers(tokens)), None)
        return host if host != self._fleet.name else None

    async def forward(self, host: str, scope: Scope, receive: Receive, send: Send) -> None:
        await self._forwarder.forward(host, scope, receive, send)
