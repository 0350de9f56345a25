"""The settings that all commands share."""

from __future__ import annotations

import os

from sandbox_gateway.cli.failure import ExitCode, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_gateway.cli.client import Client


class Settings:
    def __init__(
        self, url: str = "", token: str = "", token_file: str | os.PathLike[str] | None = None, json: bool = False
    ) -> None:
        self.url = url
        self.token = token
        self.token_file = token_file
        self.json = json
        self.options: dict[str, str] = {}
        """The options of the running command, as returned by ``map_options``. Queries have none."""
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """Return the HTTP client, creating it on first use."""
        if self._client is None:
            from sandbox_gateway.cli.client import DEFAULT_URL, Client

            self._client = Client(self.url or DEFAULT_URL, self._read_token(), self.options)
        return self._client

    def _read_token(self) -> str:
        if self.token:
            return self.token
        path = self.token_file or os.environ.get("SANDBOX_GATEWAY_TOKEN_FILE")
        if not path:
            return ""
        try:
            with open(path) as file:  # noqa: PTH123 - pathlib takes longer to import than a request
                return file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(
                f"the API key cannot be read from {path}: {error}",
                ExitCode.USAGE,
                "check the path and the file's permissions",
            ) from None
