"""A minimal client for the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx

DEFAULT_URL = "http://127.0.0.1:8889"
"""The URL that forkd's own client uses by default."""
CONNECT_TIMEOUT_SECONDS = 10.0
CALL_TIMEOUT_SECONDS = 30.0
SPAWN_TIMEOUT_SECONDS = 600.0
_MAX_CONCURRENT_REQUESTS = 16


class Failure(Exception):
    """An error to show to the user. ``status``: the HTTP status of the gateway's response, or 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


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
        timeout = httpx.Timeout(seconds, connect=CONNECT_TIMEOUT_SECONDS, pool=None)
        try:
            response = await self._http.request(method, route, json=body, timeout=timeout)
            data = response.json() if response.content else None
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
        if response.is_success:
            return data
        raise Failure(_find_error_message(response.status_code, data), response.status_code)

    async def spawn(self, tag: str, count: int, lease: float) -> list[str]:
        """Create sandboxes that expire after ``lease`` seconds unless the lease is renewed. Returns their ids."""
        body = {"snapshot_tag": tag, "n": count, "timeout": lease}
        created_sandboxes = await self.call("POST", "/v1/sandboxes", body, seconds=SPAWN_TIMEOUT_SECONDS)
        try:
            ids = [str(sandbox["id"]) for sandbox in created_sandboxes]
        except (KeyError, TypeError):
            ids = []
        if len(ids) != count:
            raise Failure(f"the server at {self._url} is not a gateway: set FORKD_URL to a gateway's address")
        return ids

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


def _find_error_message(status: int, body: Any) -> str:
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        sentence: str = body["error"]
        return f"{sentence} (set FORKD_TOKEN)" if status == 401 else sentence
    return f"the gateway responded with HTTP status {status} and no error message: check its log"
