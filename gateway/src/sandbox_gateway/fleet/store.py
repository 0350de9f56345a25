"""Requests to etcd.

The client is etcd3gw, which uses etcd's JSON gateway: it needs no compiled package, and grpcio (which aetcd needs) has
no wheels for FreeBSD. In a test against Debian's etcd-server, both took 2.2 ms for a transaction, gave up a request to
a stopped server in time, and worked again after a restart. etcd3gw does not report the end of a watch, and fails if an
event arrives in several pieces, so ``watch`` reads the stream itself.

Requests run in threads. Each is bounded in time, and goes to the next endpoint if the first does not answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import etcd3gw
import requests
from etcd3gw.exceptions import Etcd3Exception

from sandbox_gateway.errors import BackendFailed, Unavailable
from sandbox_gateway.log import Logger

_REQUEST_SECONDS = 2.0
"""Maximum time that one endpoint may take to answer."""
_TOTAL_SECONDS = 4.0
"""No further endpoint is asked after this time."""
_WATCH_SILENCE_SECONDS = 30.0
"""A watch without any event for this time is broken: the records of members are renewed more often."""
_MAX_CONCURRENT_REQUESTS = 8
_PAGE_KEYS = 2000
"""Reading a page must not keep the event loop busy for long."""
MAX_TRANSACTION_OPERATIONS = 128
"""The default of etcd's option `--max-txn-ops`. It applies to comparisons and to operations separately."""

_REASONS = {
    "timed out": "no answer in time",
    "Connection refused": "connection refused",
    "CERTIFICATE_VERIFY_FAILED": "its certificate cannot be verified",
    "alert certificate required": "it requires a client certificate",
    "alert bad certificate": "it does not accept the client certificate",
    "alert unknown ca": "it does not trust the client certificate",
    "EOF occurred": "it has closed the connection, perhaps because it does not trust the client certificate",
    "Connection reset": "it has closed the connection, perhaps because it does not trust the client certificate",
    "Failed to resolve": "unknown host name",
}
"""Parts of the texts of failures, and their meanings."""

log = Logger("etcd")
# It would log each retry of a connection.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)


class StoreRefused(BackendFailed):
    """etcd has answered a request with an error. For example, its lease has ended."""


class StoreUnavailable(Unavailable):
    """etcd does not answer, so nothing can be decided that concerns other hosts."""


@dataclass(frozen=True)
class TlsFiles:
    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Entry:
    """A key with its value."""

    key: str
    value: bytes
    revision: int
    """The revision of its last change."""
    lease: int = 0


@dataclass(frozen=True)
class Change:
    """A change of a key. The value is None if the key was deleted."""

    key: str
    value: bytes | None


@dataclass(frozen=True)
class Outcome:
    """The result of a transaction. ``entries``: the results of ``read`` operations, one after the other."""

    succeeded: bool
    revision: int
    entries: list[Entry] = field(default_factory=list)


Operation = Mapping[str, Any]


def absent(prefix: str) -> Operation:
    """Compare: no key with this prefix exists."""
    return {**_range(prefix), "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def unchanged_since(prefix: str, revision: int) -> Operation:
    """Compare: no key with this prefix was changed after ``revision``. Deleted keys do not count."""
    return {**_range(prefix), "target": "MOD", "result": "LESS", "mod_revision": revision + 1}


def is_absent(key: str) -> Operation:
    """Compare: the key does not exist."""
    return {"key": _encode(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}


def exists(key: str) -> Operation:
    """Compare: the key exists."""
    return {"key": _encode(key), "target": "CREATE", "result": "GREATER", "create_revision": 0}


def has_value(key: str, value: bytes) -> Operation:
    """Compare: the key exists and has this value."""
    return {
        "key": _encode(key),
        "target": "VALUE",
        "result": "EQUAL",
        "value": base64.b64encode(value).decode(),
    }


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    return {"request_put": {"key": _encode(key), "value": base64.b64encode(value).decode(), "lease": lease}}


def delete(key: str) -> Operation:
    return {"request_delete_range": {"key": _encode(key)}}


def read(prefix: str) -> Operation:
    return {"request_range": _range(prefix)}


class Store:
    def __init__(self, endpoints: Sequence[str], tls: TlsFiles | None = None) -> None:
        self._endpoints = [*endpoints]
        self._tls = tls
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS, thread_name_prefix="etcd")
        self._lease_threads = ThreadPoolExecutor(1, thread_name_prefix="etcd-lease")
        """A membership must not end because many other requests wait."""
        self._local = threading.local()
        self._preferred = secrets.randbelow(len(endpoints))
        """The endpoint that answered last. The gateways begin with different ones, to distribute their watches."""
        self._away_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Whether the last request got no answer from any endpoint."""
        return self._away_since is not None

    def close(self) -> None:
        for threads in (self._threads, self._lease_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def transact(
        self, compare: Sequence[Operation], success: Sequence[Operation], failure: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out a transaction: ``success`` if all of ``compare`` hold, otherwise ``failure``.

        Raises StoreUnavailable. The transaction may then have been carried out.
        """
        data = await self._request("/kv/txn", {"compare": [*compare], "success": [*success], "failure": [*failure]})
        entries = [
            entry
            for response in data.get("responses", ())
            for entry in _read_entries(response.get("response_range", {}))
        ]
        return Outcome(data.get("succeeded", False), int(data["header"]["revision"]), entries)

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        await self.transact([], [put(key, value, lease)])

    async def load(self, prefix: str) -> tuple[list[Entry], int]:
        """Return all keys with this prefix, as they were at one revision, and that revision."""
        entries: list[Entry] = []
        revision = 0
        async for page, page_revision in self.load_pages(prefix):
            entries += page
            revision = page_revision
        return entries, revision

    async def load_pages(self, prefix: str) -> AsyncGenerator[tuple[list[Entry], int]]:
        """Yield all keys with this prefix, as they were at one revision, in pages, and that revision with each page."""
        revision, start, end = 0, _encode(prefix), _encode(_find_end(prefix))
        while True:
            request = {"key": start, "range_end": end, "limit": _PAGE_KEYS, "revision": revision}
            data = await self._request("/kv/range", request)
            revision = revision or int(data["header"]["revision"])
            entries = _read_entries(data)
            yield entries, revision
            if not data.get("more"):
                return
            start = _encode(entries[-1].key + "\0")

    async def grant_lease(self, seconds: int) -> int:
        data = await self._request("/lease/grant", {"TTL": seconds, "ID": 0})
        return int(data["ID"])

    async def renew_lease(self, lease: int) -> bool:
        """Renew a lease. Returns False if it has ended."""
        data = await self._request("/lease/keepalive", {"ID": lease}, self._lease_threads)
        return int(data.get("result", {}).get("TTL", 0)) > 0

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and delete its keys."""
        await self._request("/lease/revoke", {"ID": lease})

    async def _request(self, path: str, body: Mapping[str, Any], threads: ThreadPoolExecutor | None = None) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads or self._threads, self._send, path, body)

    def _send(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to the endpoints, one after the other, until one answers."""
        deadline = time.monotonic() + _TOTAL_SECONDS
        reason = ""
        for attempt in range(len(self._endpoints)):
            number = (self._preferred + attempt) % len(self._endpoints)
            if attempt and time.monotonic() >= deadline:
                break
            try:
                client = self._get_client(number)
                data = client.post(client.get_url(path), json=body)
            except (Etcd3Exception, requests.RequestException, ValueError) as error:
                reason = _describe_failure(error)
                if _is_refusal(error):
                    raise StoreRefused(f"etcd at {self._endpoints[number]} refused a request: {reason}") from None
                continue
            self._preferred = number
            self._set_away(None)
            return data
        self._set_away(reason)
        raise StoreUnavailable(
            f"etcd does not answer at {', '.join(self._endpoints)} ({reason}): sandboxes keep running, but new "
            "sandboxes and new names must wait until it is back"
        )

    def _set_away(self, reason: str | None) -> None:
        if reason is None:
            if self._away_since is not None:
                log.info("etcd answers again", seconds=round(time.monotonic() - self._away_since, 1))
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("etcd does not answer", endpoints=", ".join(self._endpoints), reason=reason)

    def _get_client(self, number: int) -> etcd3gw.Etcd3Client:
        """Return this thread's client for an endpoint, because a session of requests is not safe for threads."""
        clients: dict[int, etcd3gw.Etcd3Client] = self._local.__dict__.setdefault("clients", {})
        if number not in clients:
            clients[number] = self._create_client(self._endpoints[number])
        return clients[number]

    def _create_client(self, endpoint: str) -> etcd3gw.Etcd3Client:
        url = urlsplit(endpoint)
        session = requests.Session()
        session.trust_env = False  # no proxies, no .netrc
        if self._tls and url.scheme == "https":
            session.verify = str(self._tls.ca)
            session.cert = (str(self._tls.cert), str(self._tls.key))
        return etcd3gw.Etcd3Client(
            host=url.hostname or "",
            port=url.port or 2379,
            protocol=url.scheme,
            timeout=_REQUEST_SECONDS,
            session=session,
        )

    # -- watch ------------------------------------------------------------------------------------------------------

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[list[Change], None]:
        """Yield the changes of keys with this prefix, from the first one after the revision ``after``.

        Raises StoreUnavailable if the stream ends, or if nothing has changed for 30 seconds. The records of members are
        renewed more often than that.
        """
        queue: asyncio.Queue[list[Change] | StoreUnavailable] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stream = _WatchStream(self._create_client(self._endpoints[self._preferred]), prefix, after)

        def deliver(item: list[Change] | StoreUnavailable) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        # Not in the pool: a watch lasts, and a pool of threads delays the exit of the process.
        thread = threading.Thread(target=stream.run, args=[deliver], name="etcd-watch", daemon=True)
        thread.start()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, StoreUnavailable):
                    raise item
                yield item
        finally:
            stream.close()


class _WatchStream:
    def __init__(self, client: etcd3gw.Etcd3Client, prefix: str, after: int) -> None:
        self._client = client
        self._request = {"create_request": {**_range(prefix), "start_revision": after + 1}}
        self._response: requests.Response | None = None
        self._is_closed = False

    def run(self, deliver: Callable[[list[Change] | StoreUnavailable], None]) -> None:
        try:
            self._response = self._client.session.post(
                self._client.get_url("/watch"),
                json=self._request,
                stream=True,
                timeout=(_REQUEST_SECONDS, _WATCH_SILENCE_SECONDS),
            )
            for line in self._read_lines(self._response):
                result = line.get("result", {})
                if "error" in line or result.get("canceled"):
                    raise ValueError("etcd has ended the watch")
                if changes := [_read_change(event) for event in result.get("events", ())]:
                    deliver(changes)
            raise ValueError("the connection has ended")
        except Exception as error:
            if not self._is_closed:
                deliver(StoreUnavailable(f"the watch of etcd has ended ({_describe_failure(error)})"))
        finally:
            if self._response is not None:
                self._response.close()

    def _read_lines(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        unfinished_line = b""
        for piece in response.iter_content(chunk_size=None):
            *lines, unfinished_line = (unfinished_line + piece).split(b"\n")
            for line in lines:
                if self._is_closed:
                    return
                if line.strip():
                    yield json.loads(line)

    def close(self) -> None:
        """End the thread: it is woken by the end of its connection."""
        self._is_closed = True
        connection = getattr(getattr(self._response, "raw", None), "_connection", None)
        if (sock := getattr(connection, "sock", None)) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)


def _is_refusal(error: Exception) -> bool:
    """Return whether etcd answered, but with an error that other endpoints would also give."""
    return type(error) is Etcd3Exception


def _describe_failure(error: Exception) -> str:
    """Return the reason in a few words. The texts of requests' errors repeat whole objects."""
    text = " ".join(str(getattr(error, "detail_text", "") or error).split())
    for words, reason in _REASONS.items():
        if words in text:
            return reason
    is_opaque = isinstance(error, requests.RequestException) or (
        isinstance(error, Etcd3Exception) and not _is_refusal(error)
    )
    return type(error).__name__ if is_opaque else text[:200]


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _find_end(prefix: str) -> str:
    """Return the first key after all keys with this prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _range(prefix: str) -> dict[str, Any]:
    return {"key": _encode(prefix), "range_end": _encode(_find_end(prefix))}


def _read_entries(data: Mapping[str, Any]) -> list[Entry]:
    return [
        Entry(
            base64.b64decode(each["key"]).decode(),
            base64.b64decode(each.get("value", "")),
            int(each.get("mod_revision", 0)),
            int(each.get("lease", 0)),
        )
        for each in data.get("kvs", ())
    ]


def _read_change(event: Mapping[str, Any]) -> Change:
    pair = event["kv"]
    key = base64.b64decode(pair["key"]).decode()
    return Change(key, None if event.get("type") == "DELETE" else base64.b64decode(pair.get("value", "")))
