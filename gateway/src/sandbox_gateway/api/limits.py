"""Bodies of the control plane are small; a larger one is refused before it is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.errors import OverQuota

LARGEST_BODY = 4 << 20


class TooLarge(OverQuota):
    kind = "invalid"

    def __init__(self) -> None:
        super().__init__(
            f"the body is larger than {LARGEST_BODY >> 20} MiB: send less; files go through the data plane"
        )


class BodyLimit:
    """Counts what comes in; raises TooLarge beyond LARGEST_BODY bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > LARGEST_BODY:
            raise TooLarge
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise TooLarge
            return message

        await self.app(scope, counted, send)
