# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gateway's HTTP client, over a unix socket or http(s), with the standard library only."""

from __future__ import annotations

import errno
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure

DEFAULT_URL = "unix:///run/sandbox-gateway/gateway.sock"
MINIMUM_VERSION = (0, 1, 0)
CONNECT_SECONDS = 10
PAGE = 1000
_PIECE = 1 << 20
LARGEST_ANSWER = 64 << 20
"""Maximum bytes of an answer: one page of a list with entries of 64 KiB."""
LOOPBACK = re.compile(r"localhost|.*\.localhost|127(\.\d{1,3}){3}|::1|0\.0\.0\.0|::", re.IGNORECASE)


class Answer:
    """A response: ``status``, the decoded JSON ``data`` (None without a body) and ``headers``."""

    def __init__(self, status: int, data: Any, headers: Any) -> None:
        self.status = status
        self.data = data
        self.headers = headers


class Address:
    """The address of a gateway. Raises Failure for an invalid URL."""

    def __init__(self, url: str) -> None:
        self.url = url or DEFAULT_URL
        parts = urlsplit(self.url)
        self.socket = ""
        self.tls = parts.scheme == "https"
        self.prefix = parts.path.rstrip("/")
        try:
            self.host, port = parts.hostname or "", parts.port
        except ValueError:
            raise _bad_url(self.url) from None
        self.port = port or (443 if self.tls else 80)
        if parts.scheme == "unix" and not self.host and parts.path.startswith("/"):
            self.socket, self.prefix = parts.path, ""
        elif parts.scheme not in ("http", "https") or not self.host or parts.username or parts.query:
            raise _bad_url(self.url)

    @property
    def local(self) -> bool:
        """Return whether the address is a socket or loopback address, which means another gateway on each machine."""
        return bool(self.socket) or LOOPBACK.fullmatch(self.host) is not None


def _bad_url(url: str) -> Failure:
    shown = re.sub(r"//[^/@]*@", "//", url)
    return Failure(
        f"gateway_url {shown!r} is not the address of a gateway: use unix:///path/to/gateway.sock, "
        "http://host:port or https://host:port"
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """Calls one gateway. Every method raises Failure, whose message never contains the token.

    ``timeout`` is the limit for one response, in seconds. Calls are also retried for this long while the gateway
    reports that it is busy.
    """

    def __init__(
        self, url: str = "", token: str = "", ca_path: str = "", validate_certs: bool = True, timeout: float = 300
    ) -> None:
        if re.search(r"[^\x21-\x7e]", token):
            raise Failure("gateway_token contains characters that no key can contain: remove line ends and blanks")
        if timeout <= 0:
            raise Failure(f"gateway_timeout must be more than 0 seconds, not {timeout}")
        self.address = Address(url)
        self.timeout = timeout
        self._token = token
        self._ca_path = ca_path
        self._validate_certs = validate_certs
        self._connection: http.client.HTTPConnection | None = None
        self._connected_once = False
        self._skew = timedelta(0)
        self._version_checked = False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def now(self) -> datetime:
        """Return the time of the gateway's clock, from its last response."""
        return datetime.now(timezone.utc) + self._skew

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, query=query).data

    def find(self, path: str) -> Any:
        """Send a GET request like ``get``, but return None if the gateway does not find the object."""
        try:
            return self.get(path)
        except Failure as failure:
            if failure.kind == "not_found":
                return None
            raise

    def pages(self, path: str, **query: Any) -> Iterator[Any]:
        """Yield all entries of a list, page by page."""
        token = ""
        while True:
            answer = self.call("GET", path, query={**query, "limit": PAGE, "nextToken": token})
            yield from answer.data
            before, token = token, answer.headers.get("x-next-token", "")
            if not token:
                return
            if token == before:
                raise self._no_gateway(f"GET {path}", "its list has no last page")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.call("POST", path, body=body or {}).data

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("PUT", path, body=body).data

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("PATCH", path, body=body).data

    def delete(self, path: str, **query: Any) -> Any:
        return self.call("DELETE", path, query=query).data

    def require_version(self) -> None:
        """Raise Failure for a gateway that is too old, or another server.

        The version is checked once, before the first change.
        """
        if self._version_checked:
            return
        version = str((self.get("/health") or {}).get("version", ""))
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
        if found is None:
            raise self._no_gateway("GET /health", "its answer contains no version")
        if tuple(int(part or 0) for part in found.groups()) < MINIMUM_VERSION:
            raise self._too_old(version)
        self._version_checked = True

    def call(self, method: str, path: str, *, query: dict[str, Any] | None = None, body: Any = None) -> Answer:
        """Send one request. Retries for up to ``timeout`` while the gateway reports that it is busy."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return self._checked(method, path, query, body)
            except _Busy as busy:
                if time.monotonic() + busy.wait > deadline:
                    raise busy.failure from None
                time.sleep(busy.wait)

    def _checked(self, method: str, path: str, query: dict[str, Any] | None, body: Any) -> Answer:
        status, headers, raw = self._send(method, path, query, body)
        data = self._decoded(f"{method} {path}", status, raw)
        if status < 400:
            return Answer(status, data, headers)
        failure = self._failure(f"{method} {path}", status, data)
        wait = headers.get("Retry-After", "")
        if status in (429, 503) and re.fullmatch("[0-9]{1,9}", wait):
            raise _Busy(failure, max(0.2, float(wait)))
        raise failure

    def _send(self, method: str, path: str, query: dict[str, Any] | None, body: Any) -> tuple[int, Any, bytes]:
        # A gateway must not ignore fields that it does not know. An older gateway ignores this parameter.
        query = query if body is None else {**(query or {}), "strict": True}
        asked = {key: _word(value) for key, value in (query or {}).items() if value not in (None, "")}
        target = self.address.prefix + path + ("?" + urlencode(asked) if asked else "")
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        payload = None
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        reused = self._connection is not None
        try:
            return self._exchange(method, target, payload, headers)
        except (http.client.HTTPException, ConnectionError) as error:
            self.close()
            # The gateway may have closed an idle connection. Only requests that change nothing are sent twice.
            if not reused or method != "GET":
                raise self._unreachable(f"{method} {path}", error) from None
        except (OSError, ValueError) as error:
            self.close()
            raise self._unreachable(f"{method} {path}", error) from None
        try:
            return self._exchange(method, target, payload, headers)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise self._unreachable(f"{method} {path}", error) from None

    def _exchange(
        self, method: str, target: str, payload: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any, bytes]:
        connection = self._connected()
        connection.request(method, target, body=payload, headers=headers)
        response = connection.getresponse()
        raw = read_at_most(LARGEST_ANSWER, response)
        if raw is None:
            self.close()
            raise self._no_gateway(f"{method} {target.partition('?')[0]}", f"its answer exceeds {LARGEST_ANSWER} bytes")
        if response.will_close:
            self.close()
        self._note_clock(response.headers.get("Date", ""))
        return response.status, response.headers, raw

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connected_once = False
            connection = self._new_connection()
            connection.connect()
            self._connected_once = True
            connection.sock.settimeout(self.timeout)
            self._connection = connection
        return self._connection

    def _new_connection(self) -> http.client.HTTPConnection:
        if self.address.socket:
            return _UnixConnection(self.address.socket)
        if not self.address.tls:
            return http.client.HTTPConnection(self.address.host, self.address.port, timeout=CONNECT_SECONDS)
        return http.client.HTTPSConnection(
            self.address.host, self.address.port, timeout=CONNECT_SECONDS, context=self._tls()
        )

    def _tls(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_path or None)
        except OSError as error:
            raise Failure(f"ca_path {self._ca_path!r} cannot be used: {error}") from None
        if not self._validate_certs:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _note_clock(self, date: str) -> None:
        try:
            self._skew = parsedate_to_datetime(date) - datetime.now(timezone.utc)
        except (TypeError, ValueError, OverflowError):
            return
        # The header has a resolution of one second, so smaller differences are noise.
        if abs(self._skew) < timedelta(seconds=2):
            self._skew = timedelta(0)

    def _decoded(self, asked: str, status: int, raw: bytes) -> Any:
        if not raw:
            return None
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise self._no_gateway(asked, f"it answered with status {status} and without JSON") from None

    def _failure(self, asked: str, status: int, data: Any) -> Failure:
        if not isinstance(data, dict) or "message" not in data:
            return self._no_gateway(asked, f"it answered with status {status} and unexpected JSON")
        message, kind = str(data["message"]), str(data.get("kind", "backend_failed"))
        if status == 401:
            return Failure(
                f"the gateway at {self.address.url} does not accept the key: set gateway_token (or "
                "SANDBOX_GATEWAY_TOKEN) to a key in its key file",
                "unauthorized",
                status=status,
            )
        if status in (404, 405) and message.startswith(("route ", asked)):
            return self._too_old(None, asked)
        return Failure(message, kind, blockers=[str(item) for item in data.get("blockers") or ()], status=status)

    def _too_old(self, version: str | None, asked: str = "") -> Failure:
        wanted = ".".join(str(part) for part in MINIMUM_VERSION)
        what = f"is version {version}" if version else f"does not know {asked}"
        return Failure(
            f"the gateway at {self.address.url} {what}, but this collection needs sandbox-gateway {wanted} "
            "or newer: upgrade it with the role grove.sandbox.gateway",
            "too_old",
        )

    def _no_gateway(self, asked: str, why: str) -> Failure:
        return Failure(
            f"the server at {self.address.url} is not a sandbox gateway ({asked}: {why}): check gateway_url",
            "not_a_gateway",
        )

    def _unreachable(self, asked: str, error: Exception) -> Failure:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = getattr(error, "verify_message", "") or "it is not trusted"
            return Failure(
                f"the certificate of {self.address.url} was not accepted ({why}): set ca_path to the "
                "certificate file of its authority",
                "unreachable",
            )
        if isinstance(error, socket.timeout) and self._connected_once:
            return Failure(
                f"the gateway at {self.address.url} did not answer {asked} within {self.timeout:g} s, but "
                "may still finish the request: check the result before you try again, or increase gateway_timeout",
                "timeout",
            )
        return Failure(f"no gateway answers at {self.address.url}: {self._why(error)}", "unreachable")

    def _why(self, error: Exception) -> str:
        number = getattr(error, "errno", None)
        if self.address.socket:
            if number in (errno.ENOENT, errno.ECONNREFUSED):
                return (
                    "the socket does not exist or no process listens on it; check that sandbox-gateway is "
                    "running on this host"
                )
            if number in (errno.EACCES, errno.EPERM):
                return (
                    "this user has no permission to open the socket; use become, or add the user to the socket's group"
                )
        if number == errno.ECONNREFUSED:
            return (
                "nothing listens on that port; check that sandbox-gateway is running there, with this address "
                "in `listen`"
            )
        if isinstance(error, socket.timeout):
            return f"no connection within {CONNECT_SECONDS} s; check for a firewall in between"
        if isinstance(error, http.client.RemoteDisconnected):
            return "it closed the connection without an answer; look at its log"
        return f"{error}" or type(error).__name__


class _Busy(Exception):
    def __init__(self, failure: Failure, wait: float) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.wait = wait


def _word(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def read_at_most(size: int, response: http.client.HTTPResponse) -> bytes | None:
    """Return the rest of a response; None if it is larger than ``size``. Raises IncompleteRead, OSError."""
    data = bytearray()
    piece = response.read(_PIECE)
    while piece:
        data += piece
        if len(data) > size:
            return None
        piece = response.read(_PIECE)
    if response.length:
        raise http.client.IncompleteRead(bytes(data), response.length)
    return bytes(data)


def segment(ref: str) -> str:
    """Return ``ref``, quoted as one segment of a URL path."""
    return quote(ref, safe="")
