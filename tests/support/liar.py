"""A gateway whose sandboxes lie: each sends the test's answer to the connection plugin. None of them is a machine."""

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

LAST = 2


def make_frame(message: dict[str, Any] | bytes, flags: int = 0) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


STARTED = make_frame({"event": {"start": {"pid": 7, "input": True}}})
ENDED = make_frame({"event": {"end": {"exitCode": 0, "exited": True}}}) + make_frame(b"{}", LAST)


def make_output(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return make_frame({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})


def make_answer(text: str) -> bytes:
    """Make the whole answer for a command that prints ``text`` and succeeds."""
    return STARTED + make_output(text) + ENDED


def facts_answer(**values: Any) -> bytes:
    """Make the whole answer of an interpreter that runs no module, and returns facts instead."""
    return make_answer(json.dumps({"changed": False, "ansible_facts": values}))


Pieces = Callable[[], Iterable[bytes]]
"""An answer in pieces, for as long as the client reads."""


class LyingGateway:
    """``lies``: by sandbox, the answer to every command, or a status and a message of an agent that refuses.
    ``listed``: its list of sandboxes. ``asked``: the headers of each request; ``bodies``: their content, unpacked.
    ``taken``: the number of bytes sent in answers, by sandbox."""

    def __init__(self, lies: dict[str, bytes | Pieces | tuple[int, str]] | None = None) -> None:
        self.lies = lies or {}
        self.listed: list[dict[str, Any]] = []
        self.asked: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.taken: dict[str, int] = {}
        self.url = ""

    def received_keys(self) -> set[str]:
        """The keys that it received."""
        schemes = [headers.get("Authorization", "").partition(" ") for headers in self.asked]
        # The other scheme, Basic, names the user of a command.
        return {headers["X-API-Key"] for headers in self.asked if "X-API-Key" in headers} | {
            key for scheme, _, key in schemes if scheme == "Bearer"
        }

    @contextlib.contextmanager
    def serve(self) -> Iterator[LyingGateway]:
        """Serve on a loopback port, ``url``."""
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


def _decode_all(body: bytes) -> bytes:
    """A request with its decoded base64, and the content of modules in archives within that, appended."""
    found = [body]
    for text in found:
        for coded in re.findall(rb"[A-Za-z0-9+/]{40,}={0,2}", text):
            with contextlib.suppress(ValueError):
                found.append(base64.b64decode(coded))
    return b"\n".join(found)


class _Handler(BaseHTTPRequestHandler):
    liar: LyingGateway

    def do_POST(self) -> None:
        self.liar.bodies.append(_decode_all(self.rfile.read(int(self.headers.get("Content-Length") or 0))))
        self.liar.asked.append(dict(self.headers.items()))
        sandbox = self.headers.get("E2b-Sandbox-Id", "")
        lie = self.liar.lies.get(sandbox, make_answer("nothing to say"))
        if not self.path.startswith("/process.Process/Start"):
            lie = b"{}"
        if self.command == "GET":
            lie = json.dumps(self.liar.listed if self.path.startswith("/sandboxes") else []).encode()
        if isinstance(lie, tuple):
            status, message = lie
            lie = json.dumps({"code": "internal", "message": message}).encode()
        else:
            status = 200
        self.send_response(status)
        self.end_headers()
        self.liar.taken.setdefault(sandbox, 0)
        # The client may have disconnected.
        with contextlib.suppress(OSError):
            for piece in [lie] if isinstance(lie, bytes) else lie():
                self.wfile.write(piece)
                self.liar.taken[sandbox] += len(piece)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
