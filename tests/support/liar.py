"""A fake gateway whose sandboxes send the connection plugin hostile responses that a test chooses."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END_STREAM_FLAG = 2


def make_frame(message: dict[str, Any] | bytes, flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


START_FRAME = make_frame({"event": {"start": {"pid": 7, "input": True}}})
END_FRAMES = make_frame({"event": {"end": {"exitCode": 0, "exited": True}}}) + make_frame(b"{}", END_STREAM_FLAG)


def make_output_frame(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return make_frame({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})


def make_response(text: str) -> bytes:
    """Return the complete response for a command that prints ``text`` and succeeds."""
    return START_FRAME + make_output_frame(text) + END_FRAMES


def make_facts_response(**values: Any) -> bytes:
    """Return the complete response of an interpreter that returns facts instead of running the module."""
    return make_response(json.dumps({"changed": False, "ansible_facts": values}))


PieceSource = Callable[[], Iterable[bytes]]
"""A function that yields the pieces of a response, for as long as the client reads."""


class FakeGateway:
    """A fake gateway without an engine.

    ``responses``: for each sandbox, the response to every command, or the status and message of an error.
    ``sandboxes``: the sandboxes that the gateway lists. ``request_headers`` and ``bodies``: the headers and the decoded
    contents of each request. ``sent_bytes``: for each sandbox, the number of bytes sent in responses.
    """

    def __init__(self, responses: dict[str, bytes | PieceSource | tuple[int, str]] | None = None) -> None:
        self.responses = responses or {}
        self.sandboxes: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.sent_bytes: dict[str, int] = {}
        self.url = ""

    def list_received_keys(self) -> set[str]:
        """Return all API keys that the requests contained."""
        authorizations = [headers.get("Authorization", "").partition(" ") for headers in self.request_headers]
        # The other scheme, Basic, contains the name of the user who runs a command.
        return {headers["X-API-Key"] for headers in self.request_headers if "X-API-Key" in headers} | {
            key for scheme, _, key in authorizations if scheme == "Bearer"
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeGateway]:
        """Run the HTTP server on a free loopback port, and set ``url`` to its address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gateway": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _append_decoded(body: bytes) -> bytes:
    """Return a request body, followed by the decoded form of all base64 text in it, at any depth."""
    decoded_texts = [body]
    for text in decoded_texts:
        for encoded in re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", text):
            with contextlib.suppress(ValueError):
                decoded_texts.append(base64.b64decode(encoded))
    return b"\n".join(decoded_texts)


class _Handler(BaseHTTPRequestHandler):
    gateway: FakeGateway

    def do_POST(self) -> None:
        self.gateway.bodies.append(_append_decoded(self.rfile.read(int(self.headers.get("Content-Length") or 0))))
        self.gateway.request_headers.append(dict(self.headers.items()))
        sandbox = self.headers.get("E2b-Sandbox-Id", "")
        response = self.gateway.responses.get(sandbox, make_response("nothing to say"))
        if not self.path.startswith("/process.Process/Start"):
            response = b"{}"
        if self.command == "GET":
            response = json.dumps(self.gateway.sandboxes if self.path.startswith("/sandboxes") else []).encode()
        if isinstance(response, tuple):
            status, message = response
            response = json.dumps({"code": "internal", "message": message}).encode()
        else:
            status = 200
        self.send_response(status)
        self.end_headers()
        self.gateway.sent_bytes.setdefault(sandbox, 0)
        # The client may have disconnected.
        with contextlib.suppress(OSError):
            for piece in [response] if isinstance(response, bytes) else response():
                self.wfile.write(piece)
                self.gateway.sent_bytes[sandbox] += len(piece)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""
