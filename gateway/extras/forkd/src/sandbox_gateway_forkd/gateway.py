"""A minimal client for the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

DEFAULT_URL = "http://127.0.0.1:8889"
"""The URL that forkd's own client uses by default."""
CONNECT_TIMEOUT_SECONDS = 10.0
CALL_TIMEOUT_SECONDS = 30.0
SPAWN_TIMEOUT_SECONDS = 600.0
TRANSFER_TIMEOUT_SECONDS = 3600.0
"""How long the gateway may stay silent in a transfer. It can prepare or check a whole snapshot meanwhile."""
_MAX_ERROR_BYTES = 64 << 10
_MAX_CONCURRENT_REQUESTS = 16


class Failure(Exception):
    """An error to show to the user.

    ``status``: the HTTP status of the gateway's response, or 0 if there was none. ``kind``: the kind of its error.
    """

    def __init__(self, message: str, status: int = 0, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Gateway:
    """A client for a gateway.

    Requests return parsed JSON or raise Failure. ``url``: unix:///path, http:// or https://.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if url.startswith("unix://"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"))
            self._http = httpx.AsyncClient(
                transport=transport, base_url="http://gateway", headers=headers, trust_env=False
            )
        elif url.startswith(("http://", "https://")):
            self._http = httpx.AsyncClient(base_url=url, headers=headers)
        else:
            raise Failure(f"{url!r} is not a valid gateway address: use unix:///path, http:// or https:// in FORKD_URL")

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(
        self, method: str, route: str, body: dict[str, Any] | None = None, *, seconds: float = CALL_TIMEOUT_SECONDS
    ) -> Any:
        """Send a request. Returns the JSON of the response; None if it is empty."""
        with self._errors_explained():
            response = await self._http.request(method, route, json=body, timeout=_create_timeout(seconds))
            data = response.json() if response.content else None
        if response.is_success:
            return data
        raise _create_failure(response.status_code, data)

    async def download(self, route: str, write: Callable[[bytes], object]) -> None:
        """Pass the pieces of a response to ``write`` as they arrive."""
        timeout = _create_timeout(TRANSFER_TIMEOUT_SECONDS)
        with self._errors_explained():
            async with self._http.stream("GET", route, timeout=timeout) as response:
                if response.is_success:
                    async for piece in response.aiter_raw():
                        write(piece)
                    return
                body = b""
                async for piece in response.aiter_raw():
                    if len(body := body + piece) > _MAX_ERROR_BYTES:
                        break
        raise _create_failure(response.status_code, _parse(body))

    async def upload(
        self, route: str, pieces: AsyncIterator[bytes], params: Mapping[str, str | Sequence[str]]
    ) -> dict[str, Any]:
        """Send a body that is read while it is sent. Returns the JSON object of the response."""
        timeout = _create_timeout(TRANSFER_TIMEOUT_SECONDS)
        with self._errors_explained():
            response = await self._http.post(route, content=pieces, params=params, timeout=timeout)
        data = _parse(response.content)
        if not response.is_success:
            raise _create_failure(response.status_code, data)
        if not isinstance(data, dict):
            raise self._create_wrong_server_failure()
        return data

    @contextlib.contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise Failure(
                f"the gateway at {self._url} cannot be reached ({error}): start it, or set FORKD_URL to its address"
            ) from None
        except httpx.TimeoutException:
            raise Failure(f"the gateway at {self._url} did not respond in time: try again, or check its log") from None
        except httpx.HTTPError as error:
            raise Failure(f"the connection to the gateway at {self._url} was lost ({error}): try again") from None
        except (ValueError, httpx.InvalidURL) as error:
            raise Failure(
                f"the request to {self._url} failed ({error}): check that FORKD_URL is a gateway's address"
            ) from None

    def _create_wrong_server_failure(self) -> Failure:
        return Failure(f"the server at {self._url} is not a gateway: set FORKD_URL to a gateway's address")

    async def spawn(self, tag: str, count: int, lease: float) -> list[str]:
        """Create sandboxes that expire after ``lease`` seconds unless the lease is renewed. Returns their ids."""
        body = {"snapshot_tag": tag, "n": count, "timeout": lease}
        created_sandboxes = await self.call("POST", "/v1/sandboxes", body, seconds=SPAWN_TIMEOUT_SECONDS)
        try:
            ids = [str(sandbox["id"]) for sandbox in created_sandboxes]
        except (KeyError, TypeError):
            ids = []
        if len(ids) != count:
            raise self._create_wrong_server_failure()
        return ids

    async def compact(self, snapshot: str, tag: str) -> str:
        """Give a snapshot another tag. Returns this tag."""
        data = await self.call("POST", f"/v1/snapshots/{quote(snapshot, safe='')}/compact", {"to": tag})
        if not isinstance(data, dict) or "tag" not in data:
            raise self._create_wrong_server_failure()
        return str(data["tag"])

    async def renew_leases(self, sandboxes: Sequence[str], lease: float) -> list[Failure]:
        """Make the sandboxes expire ``lease`` seconds from now. Returns a Failure for each request that failed."""
        return await self._call_for_each("POST", "/sandboxes/{}/timeout", sandboxes, {"timeout": lease})

    async def kill(self, sandboxes: Sequence[str]) -> list[Failure]:
        return await self._call_for_each("DELETE", "/v1/sandboxes/{}", sandboxes, None)

    async def call_sandbox(self, sandbox: str, verb: str, body: dict[str, Any] | None = None, *, seconds: float) -> Any:
        """Send a request to a sandbox. ``verb``: exec, eval or ping."""
        return await self.call("POST", f"/v1/sandboxes/{quote(sandbox, safe='')}/{verb}", body, seconds=seconds)

    async def _call_for_each(
        self, method: str, route: str, sandboxes: Sequence[str], body: dict[str, Any] | None
    ) -> list[Failure]:
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

        async def send_request(sandbox: str) -> Failure | None:
            async with semaphore:
                try:
                    await self.call(method, route.format(quote(sandbox, safe="")), body)
                except Failure as failure:
                    return failure
            return None

        return [failure for failure in await asyncio.gather(*map(send_request, sandboxes)) if failure]


def _create_timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_SECONDS, pool=None)


def _parse(body: bytes) -> Any:
    """Return the JSON in ``body``, or None if it is none."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def _create_failure(status: int, body: Any) -> Failure:
    kind = body.get("kind", "") if isinstance(body, dict) else ""
    return Failure(_find_error_message(status, body), status, str(kind))


def _find_error_message(status: int, body: Any) -> str:
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        sentence: str = body["error"]
        return f"{sentence} (set FORKD_TOKEN)" if status == 401 else sentence
    return f"the gateway responded with HTTP status {status} and no error message: check its log"
