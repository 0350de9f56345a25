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

END_STREAM = 2


def make_frame(message: dict[str, Any] | bytes, flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


START_FRAME = make_frame({"event": {"start": {"pid": 7, "input": True}}})
END_FRAMES = make_frame({"event": {"end": {"exitCode": 0, "exited": True}}}) + make_frame(b"{}", END_STREAM)


def make_output(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return make_frame({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})


def make_response(text: str) -> bytes:
    """Return the complete response for a command that prints ``text`` and succeeds."""
    return START_FRAME + make_output(text) + END_FRAMES


def make_facts_response(**values: Any) -> bytes:
    """Return the complete response of an interpreter that returns facts instead of running the module."""
    return make_response(json.dumps({"changed": False, "ansible_facts": values}))


Pieces = Callable[[], Iterable[bytes]]
"""A function that yields the pieces of a response, for as long as the client reads."""


class LyingGateway:
    """A gateway without an engine.

    ``lies``: for each sandbox, the response to every command, or the status and message of an error. ``sandboxes``: the
    sandboxes that the gateway lists. ``request_headers`` and ``bodies``: the headers and the decoded contents of each
    request. ``sent_bytes``: for each sandbox, the number of bytes sent in responses.
    """

    def __init__(self, lies: dict[str, bytes | Pieces | tuple[int, str]] | None = None) -> None:
        self.lies = lies or {}
        self.sandboxes: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.sent_bytes: dict[str, int] = {}
        self.url = ""

    def received_keys(self) -> set[str]:
        """Return all keys that requests contained."""
        schemes = [headers.get("Authorization", "").partition(" ") for headers in self.request_headers]
        # The other scheme, Basic, contains the name of the user who runs a command.
        return {headers["X-API-Key"] for headers in self.request_headers if "X-API-Key" in headers} | {
            key for scheme, _, key in schemes if scheme == "Bearer"
        }

    @contextlib.contextmanager
    def serve(self) -> Iterator[LyingGateway]:
        """Run the HTTP server on a loopback port, at ``url``."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"liar": self}))
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
    """Return a request body, followed by everything base64-encoded in it in decoded form, at any depth."""
    texts = [body]
    for text in texts:
        for encoded in re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", text):
            with contextlib.suppress(ValueError):
                texts.append(base64.b64decode(encoded))
    return b"\n".join(texts)


class _Handler(BaseHTTPRequestHandler):
    liar: LyingGateway

    def do_POST(self) -> None:
        self.liar.bodies.append(_append_decoded(self.rfile.read(int(self.headers.get("Content-Length") or 0))))
        self.liar.request_headers.append(dict(self.headers.items()))
        sandbox = self.headers.get("E2b-Sandbox-Id", "")
        response = self.liar.lies.get(sandbox, make_response("nothing to say"))
        if not self.path.startswith("/process.Process/Start"):
            response = b"{}"
        if self.command == "GET":
            response = json.dumps(self.liar.sandboxes if self.path.startswith("/sandboxes") else []).encode()
        if isinstance(response, tuple):
            status, message = response
            response = json.dumps({"code": "internal", "message": message}).encode()
        else:
            status = 200
        self.send_response(status)
        self.end_headers()
        self.liar.sent_bytes.setdefault(sandbox, 0)
        # The client may have disconnected.
        with contextlib.suppress(OSError):
            for piece in [response] if isinstance(response, bytes) else response():
                self.wfile.write(piece)
                self.liar.sent_bytes[sandbox] += len(piece)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""
