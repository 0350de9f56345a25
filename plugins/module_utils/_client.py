# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An HTTP client for the gateway, over a Unix socket or http(s). Uses only the standard library."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, UnusableBody
from ansible_collections.grove.sandbox.plugins.module_utils._fields import replace_field_names
from ansible_collections.grove.sandbox.plugins.module_utils._refusals import name_options

DEFAULT_URL = "unix:///run/sandbox-gateway/gateway.sock"
MINIMUM_VERSION = (0, 1, 0)
CONNECT_TIMEOUT_SECONDS = 10
PAGE_SIZE = 1000
_CHUNK_BYTES = 1 << 20
MAX_RESPONSE_BYTES = 64 << 20
"""Maximum size of a response in bytes, which is enough for one page of a list whose entries have 64 KiB each."""
PLANNED_ID_PREFIX = "known-after-apply-"
"""The beginning of the placeholder that check mode shows for the id of an object that only the run creates."""
_SESSION_ID_PREFIX = "5e5510ff"
_SESSION_ID_PATTERN = re.compile(rf"\b{_SESSION_ID_PREFIX}([0-9a-f]{{4}})\b")
_UNKNOWN_FIELDS = re.compile("unknown fields?: (.*): correct or remove (?:it|them)", re.DOTALL)
"""The gateway's message for fields that it does not know."""
_PLANNED_ID_PATTERN = re.compile(rf"\b{PLANNED_ID_PREFIX}([0-9a-f]{{4}})\b")
ID_PATTERN = re.compile(rf"[0-9a-f]{{12}}|{PLANNED_ID_PREFIX}[0-9a-f]{{4}}")
_INVALID_RECORD_BYTES = 4 << 20
"""More than any record of a snapshot file has, with what the gateway collects before it looks at it."""
LOOPBACK_HOST = re.compile(r"localhost|.*\.localhost|127(\.\d{1,3}){3}|::1|0\.0\.0\.0|::", re.IGNORECASE)


class Response:
    """A response from the gateway. ``data`` is the decoded JSON body, or None if the body is empty."""

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
        self.uses_tls = parts.scheme == "https"
        self.prefix = parts.path.rstrip("/")
        try:
            self.host, port = parts.hostname or "", parts.port
        except ValueError:
            raise _create_invalid_url_error(self.url) from None
        self.port = port or (443 if self.uses_tls else 80)
        if parts.scheme == "unix" and not self.host and parts.path.startswith("/"):
            self.socket, self.prefix = parts.path, ""
        elif parts.scheme not in ("http", "https") or not self.host or parts.username or parts.query:
            raise _create_invalid_url_error(self.url)

    @property
    def is_local(self) -> bool:
        """Whether the address is a Unix socket or a loopback address, and thus refers to the local machine."""
        return bool(self.socket) or LOOPBACK_HOST.fullmatch(self.host) is not None


def _create_invalid_url_error(url: str) -> Failure:
    url_without_login = re.sub(r"//[^/@]*@", "//", url)
    return Failure(
        f"gateway_url {url_without_login!r} is not the address of a gateway: use unix:///path/to/gateway.sock, "
        "http://host:port or https://host:port"
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """Sends requests to one gateway. Every method can raise Failure, whose message never contains the token.

    ``timeout`` is the time limit for one response in seconds. The client also retries a request for this long while
    the gateway reports that it is busy.
    """

    def __init__(
        self, url: str = "", token: str = "", ca_path: str = "", validate_certs: bool = True, timeout: float = 300
    ) -> None:
        if re.search(r"[^\x21-\x7e]", token):
            raise Failure(
                "gateway_token contains characters that are not allowed in an API key: remove line breaks and spaces"
            )
        if timeout <= 0:
            raise Failure(f"gateway_timeout must be more than 0 seconds, not {timeout}")
        self.address = Address(url)
        self.timeout = timeout
        self._token = token
        self._ca_path = ca_path
        self._validate_certs = validate_certs
        self._connection: http.client.HTTPConnection | None = None
        self._has_connected = False
        self._clock_skew = timedelta(0)
        self._has_checked_version = False
        self.plan_id = ""
        """The id of the plan session in which requests are carried out; "" if there is none."""
        self.plan_key = ""
        """The ids of the gateway and of the plan session, separated by a slash; "" if there is no session."""
        self.plan_opened_at = ""
        """When the plan session began, in the gateway's notation."""
        self.run_id = ""
        """The id of the applied run to which the requests belong; "" if there is none."""
        self.run_opened_at = ""
        """When the gateway first saw the applied run."""
        self.gateway_id = ""
        """The gateway's id, known after ``enter_plan``, ``enter_run`` or ``require_version``."""
        self.typical_costs: dict[str, Any] | None = None
        """The costs of recent captures, known after ``enter_plan``; None if there were none."""
        self.is_predicting = False
        """Whether the requests belong to a task in check mode."""
        self.started_builds: dict[str, str] = {}
        """The ids of the templates whose builds the current task has started, or has waited for in vain, by name."""
        self.uploaded_digests: set[str] = set()
        """The digests of the archives that the current task has uploaded for builds."""
        self.may_change = True
        """False in a plan session if the same key may not make the session's changes."""
        self.known_objects: dict[str, Any] = {}
        """The last state of each object that this client has read, by path; None if the object does not exist."""
        self.accepts_incomplete_lists = False
        """Whether ``list_all`` only notes the hosts of a fleet that did not answer, in ``missing_hosts``."""
        self.missing_hosts: set[str] = set()
        self.requested_paths: set[str] = set()
        """The keys of ``known_objects`` that were requested alone and not in a list."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def enter_plan(self, run: str, opened_at: Mapping[str, str] | None = None, *, wait: bool = True) -> bool:
        """Carry out all further requests in the plan session of ``run``, which changes nothing on the host.

        Returns False if the gateway is too old to have plan sessions. ``opened_at``: when the sessions that earlier
        tasks of the run have used were opened, by ``plan_key``. Raises Failure if the session was opened at a different
        time, because it does not contain what those tasks have planned. ``wait``: whether to wait while there are too
        many sessions.
        """
        try:
            plan = self.call("POST", "/plans", body={"run": run}, wait=wait).data
        except Failure as failure:
            # An old gateway checks the scope of the key before it looks for the route.
            if failure.kind in ("too_old", "forbidden"):
                return False
            raise
        self.gateway_id, self.typical_costs = plan.get("gatewayID") or "", plan.get("typical")
        self.may_change = plan.get("mayChange") is not False
        key = f"{self.gateway_id}/{plan['planID']}"
        if (opened_at or {}).get(key, plan["openedAt"]) != plan["openedAt"]:
            raise Failure(
                f"the gateway at {self.address.url} was restarted during this check-mode run, so it has forgotten what "
                "the tasks before this one would have changed: start the check-mode run again",
                "gone",
            )
        self.plan_key, self.plan_id, self.plan_opened_at = key, plan["planID"], plan["openedAt"]
        return True

    def enter_run(self, run: str) -> None:
        """Send all further requests as part of ``run``, which applies a plan.

        The generations in the responses then exclude the changes of that run.
        """
        self.run_id = ""
        try:
            applied_run = self.call("POST", "/applied-runs", body={"run": run}).data
        except Failure as failure:
            if failure.kind != "too_old":
                raise
            raise Failure(
                f"the gateway at {self.address.url} is too old to apply plans: upgrade it with the "
                "grove.sandbox.gateway role, or run the playbook without the plan",
                "too_old",
            ) from None
        self.run_id, self.run_opened_at = applied_run["runID"], applied_run["openedAt"]
        self.gateway_id = applied_run["gatewayID"]

    @property
    def session_path(self) -> str:
        """The path of the plan session or applied run to which the requests belong; "" if there is none."""
        if self.run_id:
            return f"/applied-runs/{self.run_id}"
        return f"/plans/{self.plan_id}" if self.plan_id else ""

    def make_session_reference(self) -> dict[str, Any]:
        """Return the data that another process needs to end this client's session, including the API key."""
        return {
            "url": self.address.url,
            "token": self._token,
            "ca_path": self._ca_path,
            "validate_certs": self._validate_certs,
            "session": self.session_path,
        }

    @property
    def is_planning(self) -> bool:
        """Whether requests are carried out in a plan session."""
        return bool(self.plan_id)

    def now(self) -> datetime:
        """Return the gateway's current time, estimated from the date of its last response."""
        return datetime.now(timezone.utc) + self._clock_skew

    def get(self, path: str, **query: Any) -> Any:
        try:
            data = self.call("GET", path, query=query).data
        except Failure as failure:
            if failure.kind == "not_found":
                self._remember(path, None)
            raise
        self._remember(path, data)
        return data

    def find(self, path: str, **query: Any) -> Any:
        """Send a GET request like ``get``, but return None if the resource does not exist."""
        try:
            return self.get(path, **query)
        except Failure as failure:
            if failure.kind == "not_found":
                return None
            raise

    def _remember(self, path: str, data: Any) -> None:
        self.known_objects[path] = data
        self.requested_paths.add(path)

    def _remember_list_entry(self, path: str, entry: Any) -> None:
        for ref in _list_refs(path, entry):
            key = f"{path}/{ref}"
            # A request for one object has returned fields that lists do not contain.
            detail = self.known_objects.get(key) if key in self.requested_paths else None
            self.known_objects[key] = {**detail, **entry} if detail else entry

    def forget_objects(self) -> None:
        """Forget which objects this client has read."""
        self.known_objects.clear()
        self.requested_paths.clear()

    def list_all(self, path: str, **query: Any) -> Iterator[Any]:
        """Yield all entries of a list, requesting one page at a time.

        Raises Failure if hosts of a fleet did not answer, unless ``accepts_incomplete_lists``. Otherwise, a task would
        create their sandboxes again, or report them as removed.
        """
        page_token = ""
        while True:
            response = self.call("GET", path, query={**query, "limit": PAGE_SIZE, "nextToken": page_token})
            if missing_hosts := response.headers.get("x-sandbox-hosts-missing", ""):
                self._note_missing_hosts(path, missing_hosts)
            is_part_of_object = path.count("/") > 1  # such as the snapshots of a volume
            if is_part_of_object and not page_token:
                self._remember(path, response.data)
            for entry in response.data:
                if not is_part_of_object:
                    self._remember_list_entry(path, entry)
                yield entry
            previous_token, page_token = page_token, response.headers.get("x-next-token", "")
            if not page_token:
                return
            if page_token == previous_token:
                raise self._create_not_a_gateway_error(f"GET {path}", "it returned the same page twice")

    def _note_missing_hosts(self, path: str, hosts: str) -> None:
        if not self.accepts_incomplete_lists:
            raise Failure(
                f"the list {path} is not complete, because these hosts of the fleet do not answer: {hosts}. Start "
                "their gateways, or remove hosts that will not come back with DELETE /fleet/hosts/NAME",
                "unavailable",
            )
        self.missing_hosts.update(hosts.split(","))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.call("POST", path, body=body or {}).data

    def put(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("PUT", path, body=body).data

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("PATCH", path, body=body).data

    def delete(self, path: str, **query: Any) -> Any:
        return self.call("DELETE", path, query=query).data

    def download(
        self,
        path: str,
        write: Callable[[bytes], object],
        on_start: Callable[[int], object] = lambda status: None,
        timeout: float = 0.0,
        **query: Any,
    ) -> None:
        """Pass the pieces of a large response to ``write``, over a connection of its own. Retries like ``call``.

        ``on_start`` gets the status of a successful response before. ``timeout``: wait at least this many seconds.
        ``write`` must not raise OSError, which counts as an error of the connection. The response may be incomplete if
        its length is unknown, as behind a proxy that speaks HTTP/1.0.
        """
        self._retry_while_busy(lambda: self._download_once(path, write, on_start, timeout, query))

    def _download_once(
        self,
        path: str,
        write: Callable[[bytes], object],
        on_start: Callable[[int], object],
        timeout: float,
        query: dict[str, Any],
    ) -> None:
        with self._transfer_opened("GET", path, query) as connection:
            connection.sock.settimeout(max(timeout, self.timeout))
            connection.endheaders()
            response = connection.getresponse()
            if response.status >= 400:
                self._raise_failure(f"GET {path}", response)  # Nothing is written yet: the request can be repeated.
            on_start(response.status)
            while piece := self._read_piece(path, response):
                write(piece)

    def _read_piece(self, path: str, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_CHUNK_BYTES)
        except (http.client.HTTPException, ConnectionError) as error:
            raise Failure(
                f"the connection to the gateway at {self.address.url} was lost during GET {path} "
                f"({str(error) or type(error).__name__}): try again",
                "unreachable",
            ) from None

    def upload(self, path: str, read_pieces: Callable[[], Iterable[bytes]], **query: Any) -> Any:
        """POST a large body, over a connection of its own. Retries like ``call``. Return the data of the response.

        If reading it raises UnusableBody, the gateway keeps nothing of the body.
        """
        return self._retry_while_busy(lambda: self._upload_once(path, read_pieces(), query))

    def put_file(self, path: str, read_pieces: Callable[[], Iterable[bytes]], size: int) -> None:
        """PUT a body of ``size`` bytes, like ``upload``."""
        self._retry_while_busy(lambda: self._upload_once(path, read_pieces(), {}, size))

    def _upload_once(self, path: str, pieces: Iterable[bytes], query: dict[str, Any], size: int | None = None) -> Any:
        """Send a body. ``size``: the size of the body of a PUT request. None: a POST request of any size."""
        method = "POST" if size is None else "PUT"
        with self._transfer_opened(method, path, query) as connection:
            if size is None:
                connection.putheader("Transfer-Encoding", "chunked")
            else:
                connection.putheader("Content-Length", str(size))
            connection.endheaders()
            try:
                for piece in pieces:
                    connection.send(piece if size is not None else b"%x\r\n%s\r\n" % (len(piece), piece))
                if size is None:
                    connection.send(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                pass  # The gateway has refused the request without reading all of it: its response says why.
            except UnusableBody:
                _make_refused(connection)
                raise
            response = connection.getresponse()
            if response.status >= 400:
                self._raise_failure(f"{method} {path}", response)
            return self._decode(
                f"{method} {path}", response.status, read_limited_response(MAX_RESPONSE_BYTES, response) or b""
            )

    @contextlib.contextmanager
    def _transfer_opened(
        self, method: str, path: str, query: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        """Connect, and send the beginning of a request. The caller sends the rest inside this context."""
        target = path + (f"?{urlencode(query, doseq=True)}" if query else "")
        target = self.address.prefix + self.session_path + (to_session_ids(target) if self.session_path else target)
        connection = self._make_connection()
        has_connected, self._has_connected = self._has_connected, False
        try:
            connection.connect()
            self._has_connected = True
            connection.sock.settimeout(self.timeout)
            connection.putrequest(method, target)
            if self._token:
                connection.putheader("Authorization", f"Bearer {self._token}")
            yield connection
        except (http.client.HTTPException, OSError) as error:
            raise self._create_unreachable_error(f"{method} {path}", error) from None
        finally:
            self._has_connected = has_connected
            connection.close()

    def _raise_failure(self, request: str, response: http.client.HTTPResponse) -> NoReturn:
        data = self._decode(request, response.status, read_limited_response(MAX_RESPONSE_BYTES, response) or b"")
        raise self._make_failure_or_busy_error(request, response.status, response.headers, data)

    def require_version(self) -> None:
        """Raise Failure if the gateway is too old, or if the server is not a gateway.

        Requests the version only once, before the first change.
        """
        if self._has_checked_version:
            return
        health = self.get("/health") or {}
        version = str(health.get("version", ""))
        match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
        if match is None:
            raise self._create_not_a_gateway_error("GET /health", "its response contains no version")
        if tuple(int(part or 0) for part in match.groups()) < MINIMUM_VERSION:
            raise self._create_gateway_too_old_error(version)
        self._has_checked_version = True
        self.gateway_id = self.gateway_id or str(health.get("gatewayID", ""))

    def call(
        self, method: str, path: str, *, query: dict[str, Any] | None = None, body: Any = None, wait: bool = True
    ) -> Response:
        """Send a request. Retries it for up to ``timeout`` seconds while the gateway reports that it is busy.

        If ``wait`` is False, sends it only once.
        """
        return self._retry_while_busy(lambda: self._send_once(method, path, query, body), wait=wait)

    def _retry_while_busy(self, send: Callable[[], Any], *, wait: bool = True) -> Any:
        deadline = time.monotonic() + (self.timeout if wait else 0)
        while True:
            try:
                return send()
            except _GatewayBusy as busy:
                if time.monotonic() + busy.retry_after > deadline:
                    raise busy.failure from None
                time.sleep(busy.retry_after)

    def _send_once(self, method: str, path: str, query: dict[str, Any] | None, body: Any) -> Response:
        status, headers, raw_body = self._send(method, path, query, body)
        data = self._decode(f"{method} {path}", status, raw_body)
        if status < 400:
            return Response(status, data, headers)
        raise self._make_failure_or_busy_error(f"{method} {path}", status, headers, data)

    def _make_failure_or_busy_error(self, request: str, status: int, headers: Any, data: Any) -> Exception:
        failure = self._make_response_failure(request, status, data)
        retry_after = headers.get("Retry-After", "")
        if status in (429, 503) and re.fullmatch("[0-9]{1,9}", retry_after):
            return _GatewayBusy(failure, max(0.2, float(retry_after)))
        return failure

    def _send(self, method: str, path: str, query: dict[str, Any] | None, body: Any) -> tuple[int, Any, bytes]:
        # Makes the gateway refuse unknown fields instead of ignoring them. An older gateway ignores this parameter.
        query = query if body is None else {**(query or {}), "strict": True}
        # Planned ids cannot be found in encoded text.
        format_text = to_session_ids if self.session_path else str
        parameters = {
            key: _format_query_value(value, format_text)
            for key, value in (query or {}).items()
            if value not in (None, "", {})
        }
        target = self.address.prefix + path + ("?" + urlencode(parameters) if parameters else "")
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        payload = None
        if self.session_path:
            # The session is part of the path. A proxy could remove a header, and the request would change the host.
            target = self.address.prefix + self.session_path + to_session_ids(target[len(self.address.prefix) :])
        if body is not None:
            payload = to_session_ids(json.dumps(body)).encode()
            headers["Content-Type"] = "application/json"
        is_reused = self._connection is not None
        try:
            return self._exchange(method, target, payload, headers)
        except (http.client.HTTPException, ConnectionError) as error:
            self.close()
            # The gateway may have closed an idle connection. Repeat only requests that change nothing.
            if not is_reused or method != "GET":
                raise self._create_unreachable_error(f"{method} {path}", error) from None
        except (OSError, ValueError) as error:
            self.close()
            raise self._create_unreachable_error(f"{method} {path}", error) from None
        try:
            return self._exchange(method, target, payload, headers)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise self._create_unreachable_error(f"{method} {path}", error) from None

    def _exchange(
        self, method: str, target: str, payload: bytes | None, headers: dict[str, str]
    ) -> tuple[int, Any, bytes]:
        connection = self._open_connection()
        connection.request(method, target, body=payload, headers=headers)
        response = connection.getresponse()
        raw_body = read_limited_response(MAX_RESPONSE_BYTES, response)
        if raw_body is None:
            self.close()
            raise self._create_not_a_gateway_error(
                f"{method} {target.partition('?')[0]}", f"its response exceeds {MAX_RESPONSE_BYTES} bytes"
            )
        if response.will_close:
            self.close()
        self._update_clock_skew(response.headers.get("Date", ""))
        return response.status, response.headers, raw_body

    def _open_connection(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self._has_connected = False
            connection = self._make_connection()
            connection.connect()
            self._has_connected = True
            connection.sock.settimeout(self.timeout)
            self._connection = connection
        return self._connection

    def _make_connection(self) -> http.client.HTTPConnection:
        if self.address.socket:
            return _UnixConnection(self.address.socket)
        if not self.address.uses_tls:
            return http.client.HTTPConnection(self.address.host, self.address.port, timeout=CONNECT_TIMEOUT_SECONDS)
        return http.client.HTTPSConnection(
            self.address.host, self.address.port, timeout=CONNECT_TIMEOUT_SECONDS, context=self._create_tls_context()
        )

    def _create_tls_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_path or None)
        except OSError as error:
            raise Failure(
                f"ca_path {self._ca_path!r} cannot be used ({error}): set it to a PEM file with CA certificates"
            ) from None
        if not self._validate_certs:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _update_clock_skew(self, date: str) -> None:
        try:
            self._clock_skew = parsedate_to_datetime(date) - datetime.now(timezone.utc)
        except (TypeError, ValueError, OverflowError):
            return
        # The header has a resolution of one second, so smaller differences are noise.
        if abs(self._clock_skew) < timedelta(seconds=2):
            self._clock_skew = timedelta(0)

    def _decode(self, request: str, status: int, raw_body: bytes) -> Any:
        if not raw_body:
            return None
        try:
            return json.loads(to_planned_ids(raw_body.decode()) if self.plan_id else raw_body)
        except (ValueError, RecursionError):
            raise self._create_not_a_gateway_error(request, f"it returned status {status} without JSON") from None

    def _make_response_failure(self, request: str, status: int, data: Any) -> Failure:
        if not isinstance(data, dict) or "message" not in data:
            return self._create_not_a_gateway_error(request, f"it returned status {status} with unexpected JSON")
        message, kind = str(data["message"]), str(data.get("kind", "backend_failed"))
        if status == 401:
            return Failure(
                f"the gateway at {self.address.url} does not accept the key: set gateway_token (or "
                "SANDBOX_GATEWAY_TOKEN) to a key in its key file",
                "unauthorized",
                status=status,
            )
        if status in (404, 405) and message.startswith(("route ", request)):
            return self._create_gateway_too_old_error(None, request)
        if kind == "invalid" and (match := _UNKNOWN_FIELDS.fullmatch(message)):
            return self._create_unknown_fields_error(match[1])
        details = data.get("details")
        message = name_options(message, details if isinstance(details, dict) else {})
        return Failure(message, kind, blockers=[str(item) for item in data.get("blockers") or ()], status=status)

    def _create_gateway_too_old_error(self, version: str | None, request: str = "") -> Failure:
        required_version = ".".join(str(part) for part in MINIMUM_VERSION)
        problem = (
            f"is version {version}, but this collection needs sandbox-gateway {required_version} or newer"
            if version
            else f"does not support {request}, which this task needs"
        )
        return Failure(
            f"the gateway at {self.address.url} {problem}: upgrade it with the grove.sandbox.gateway role", "too_old"
        )

    def _create_unknown_fields_error(self, fields: str) -> Failure:
        """Return the error for fields that the gateway does not know. Modules send none that a newer gateway lacks."""
        options = replace_field_names(re.sub(r" \(did you mean [^)]*\)", "", fields))
        return Failure(
            f"the gateway at {self.address.url} is older than this collection, and does not know {options}: remove it "
            "from the task, or upgrade the gateway with the grove.sandbox.gateway role",
            "too_old",
        )

    def _create_not_a_gateway_error(self, request: str, reason: str) -> Failure:
        return Failure(
            f"the server at {self.address.url} is not a sandbox gateway ({request}: {reason}): check gateway_url",
            "not_a_gateway",
        )

    def _create_unreachable_error(self, request: str, error: Exception) -> Failure:
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = getattr(error, "verify_message", "") or "it is not trusted"
            return Failure(
                f"the certificate of {self.address.url} was not accepted ({reason}): set ca_path to the "
                "certificate file of its CA",
                "unreachable",
            )
        if isinstance(error, socket.timeout) and self._has_connected:
            return Failure(
                f"the gateway at {self.address.url} did not respond to {request} within {self.timeout:g} s, but "
                "may still finish the request: check the result before you try again, or increase gateway_timeout",
                "timeout",
            )
        return Failure(f"no gateway answers at {self.address.url}: {self._describe_error(error)}", "unreachable")

    def _describe_error(self, error: Exception) -> str:
        error_number = getattr(error, "errno", None)
        if self.address.socket:
            if error_number in (errno.ENOENT, errno.ECONNREFUSED):
                return (
                    "the socket does not exist, or no process listens on it; check that sandbox-gateway is "
                    "running on this host"
                )
            if error_number in (errno.EACCES, errno.EPERM):
                return (
                    "this user has no permission to open the socket; use become, or add the user to the socket's group"
                )
        if error_number == errno.ECONNREFUSED:
            return (
                "nothing listens on that port; check that sandbox-gateway is running there, with this address "
                "in `listen`"
            )
        if isinstance(error, socket.timeout):
            return f"no connection within {CONNECT_TIMEOUT_SECONDS} s; check for a firewall in between"
        if isinstance(error, http.client.RemoteDisconnected):
            return "it closed the connection without a response; check its log"
        return f"{error}" or type(error).__name__


class _GatewayBusy(Exception):
    def __init__(self, failure: Failure, retry_after: float) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after = retry_after


def _list_refs(path: str, entry: Any) -> list[str]:
    """Return the names and the id of an entry of the list at ``path``."""
    if not isinstance(entry, dict):
        return []
    id_key = {"/sandboxes": "sandboxID", "/snapshots": "snapshotID", "/templates": "templateID"}.get(path, "")
    refs = (entry.get("name"), *(entry.get("names") or ()), entry.get(id_key))
    return [ref for ref in refs if isinstance(ref, str) and ref]


def _make_refused(connection: http.client.HTTPConnection) -> None:
    """Make the gateway refuse a body of which a part was sent, and wait until it has.

    The body does not end, so the gateway cannot take it for complete. If only the connection were closed, the gateway
    would keep what has arrived for an import that continues.
    """
    # No record begins with this byte.
    piece = b"\xff" * _INVALID_RECORD_BYTES
    with contextlib.suppress(OSError):
        connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.getresponse().read()


def _format_query_value(value: Any, format_text: Callable[[str], str]) -> str:
    if isinstance(value, dict):
        return urlencode({format_text(key): format_text(item) for key, item in value.items()})
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else format_text(str(value))


def read_limited_response(size: int, response: http.client.HTTPResponse) -> bytes | None:
    """Return the rest of a response, or None if it is longer than ``size`` bytes. Raises IncompleteRead or OSError."""
    data = bytearray()
    chunk = response.read(_CHUNK_BYTES)
    while chunk:
        data += chunk
        if len(data) > size:
            return None
        chunk = response.read(_CHUNK_BYTES)
    if response.length:
        raise http.client.IncompleteRead(bytes(data), response.length)
    return bytes(data)


def to_planned_ids(text: str) -> str:
    """Replace the ids of objects that exist only in a plan session with ids that begin with PLANNED_ID_PREFIX."""
    return _SESSION_ID_PATTERN.sub(lambda match: PLANNED_ID_PREFIX + match[1], text)


def to_session_ids(text: str) -> str:
    """Undo ``to_planned_ids``."""
    return _PLANNED_ID_PATTERN.sub(lambda match: _SESSION_ID_PREFIX + match[1], text)


def quote_segment(ref: str) -> str:
    """Return ``ref`` quoted for use as one segment of a URL path. Raises Failure if no name or id contains it."""
    if "/" in ref or ref in (".", ".."):
        raise Failure(f"{ref!r} is not a valid name or id: use the name or id of an existing object", "invalid")
    return quote(ref, safe="")
