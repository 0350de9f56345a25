"""Limit the size, total size and upload time of control-plane request bodies, which are held in memory."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.access.pace import MIN_BYTES_PER_SECOND, Pace
from sandbox_gateway.api.access.signed_urls import UPLOAD_PREFIX
from sandbox_gateway.errors import Busy, GatewayError, OverQuota

MAX_BODY_BYTES = 4 << 20
MAX_HELD_BYTES = 32 << 20
"""Maximum number of bytes in the bodies of all current requests."""


IMPORT_PATH = "/snapshots/import"
VOLUME_IMPORT_PATH = "/volumes/import"


class TooLarge(OverQuota):
    kind = "invalid"

    def __init__(self) -> None:
        super().__init__(
            f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send a smaller one, or upload files through the data "
            "plane"
        )


class TooSlow(GatewayError):
    """The client sends its request body too slowly. Data may still arrive after this error."""

    kind = "timeout"
    status = 408

    @classmethod
    def create_for_whole_body(cls, seconds: float) -> TooSlow:
        return cls(
            f"the request body did not arrive within {seconds:g} s (server.request_seconds): send it faster, or "
            "send less"
        )

    @classmethod
    def create_for_stalled_body(cls, seconds: float) -> TooSlow:
        return cls(
            f"no data of the request body arrived for {seconds:g} s (server.stalled_seconds): send the request again"
        )

    @classmethod
    def create_for_slow_file(cls, seconds: float) -> TooSlow:
        return cls(
            f"for {seconds:g} s (server.stalled_seconds), the file arrived at less than "
            f"{MIN_BYTES_PER_SECOND >> 10} KiB per second: send it from a host with a faster connection"
        )


class BodyLimitMiddleware:
    """Middleware that limits the size and upload time of request bodies.

    Raises TooLarge beyond MAX_BODY_BYTES, TooSlow after ``seconds``, and Busy if all bodies together exceed
    MAX_HELD_BYTES. If the body is a file, only its pace is limited (``stalled_seconds``).
    """

    def __init__(self, app: ASGIApp, seconds: float, stalled_seconds: float) -> None:
        self.app = app
        self.seconds = seconds
        self.stalled_seconds = stalled_seconds
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if _has_file(scope):
            await self.app(scope, self._refuse_slow_file(receive), send)
            return
        declared_length = Headers(scope=scope).get("content-length", "0")
        if declared_length.isdigit() and int(declared_length) > MAX_BODY_BYTES:
            raise TooLarge
        deadline: float | None = asyncio.get_running_loop().time() + self.seconds
        received_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal received_bytes, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise TooSlow.create_for_whole_body(self.seconds) from None
            if not message.get("more_body"):
                # After the body, only the client's disconnect can follow, at any time.
                deadline = None
            size = len(message.get("body", b""))
            received_bytes += size
            self._held_bytes += size
            if received_bytes > MAX_BODY_BYTES:
                raise TooLarge
            if self._held_bytes > MAX_HELD_BYTES:
                raise Busy(
                    f"the bodies of all current requests together exceed {MAX_HELD_BYTES >> 20} MiB: try again later"
                )
            return message

        try:
            await self.app(scope, receive_and_count, send)
        finally:
            self._held_bytes -= received_bytes

    def _refuse_slow_file(self, receive: Receive) -> Receive:
        pace = Pace(self.stalled_seconds)
        is_complete = False

        async def receive_in_time() -> Message:
            nonlocal is_complete
            if is_complete:  # Only the client's disconnect can follow, at any time.
                return await receive()
            try:
                message = await pace.wait_for_client(receive())
            except TimeoutError:
                raise TooSlow.create_for_slow_file(self.stalled_seconds) from None
            pace.count(len(message.get("body", b"")))
            is_complete = not message.get("more_body")
            return message

        return receive_in_time


def _has_file(scope: Scope) -> bool:
    """Return whether the body is a file that is streamed to disk, and may therefore exceed the usual limit.

    The files of a plan session do not count, because the gateway keeps them in memory.
    """
    method, path = scope["method"], scope["path"]
    is_import = method == "POST" and path in (IMPORT_PATH, VOLUME_IMPORT_PATH)
    is_file = is_import or (method == "PUT" and path.startswith(UPLOAD_PREFIX))
    return is_file and not get_plan_id(scope)
