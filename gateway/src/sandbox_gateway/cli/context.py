"""Settings and arguments that all commands share."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sandbox_gateway.cli.failure import Exit, Failure

if TYPE_CHECKING:
    from sandbox_gateway.cli.client import Client

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SandboxRef = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id or name.")]
SnapshotRef = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id or name.")]
VolumeRef = Annotated[str, typer.Argument(metavar="VOLUME", help="Id or name.")]
TemplateRef = Annotated[str, typer.Argument(metavar="TEMPLATE", help="Id or name.")]


@dataclass
class Settings:
    url: str = ""
    token: str = ""
    token_file: Path | None = None
    json: bool = False
    _client: Client | None = field(default=None, repr=False)

    @property
    def client(self) -> Client:
        """Return the client, created on first use."""
        if self._client is None:
            from sandbox_gateway.cli.client import DEFAULT_URL, Client

            self._client = Client(self.url or DEFAULT_URL, self._read_token())
        return self._client

    def _read_token(self) -> str:
        if self.token:
            return self.token
        file = self.token_file or os.environ.get("SANDBOX_GATEWAY_TOKEN_FILE")
        if not file:
            return ""
        try:
            return Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(
                f"the API key cannot be read from {file}: {error}",
                Exit.USAGE,
                "check the path and the file's permissions",
            ) from None


def get_settings(ctx: typer.Context, as_json: bool = False) -> Settings:
    settings: Settings = ctx.find_root().obj
    settings.json = settings.json or as_json
    return settings
