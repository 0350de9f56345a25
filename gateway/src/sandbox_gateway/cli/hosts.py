"""Commands for the hosts of a fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from sandbox_gateway.cli import queries
from sandbox_gateway.cli.context import Json, get_settings
from sandbox_gateway.cli.settings import Settings

app = typer.Typer(help="In a fleet: manage its hosts.", no_args_is_help=True, rich_markup_mode=None)
HostName = Annotated[str, typer.Argument(metavar="NAME", help="The name of a host.")]


@app.command("list")
def list_(ctx: typer.Context, as_json: Json = False) -> None:
    """List the hosts of the fleet, with their free memory and disk space."""
    queries.list_hosts(get_settings(ctx, as_json))


@app.command("cordon")
def cordon(ctx: typer.Context, host: HostName) -> None:
    """Give a host no new sandboxes. Those that it has keep running."""
    _set_cordoned(get_settings(ctx), host, cordoned=True)
    print(f"{host} is cordoned")


@app.command("uncordon")
def uncordon(ctx: typer.Context, host: HostName) -> None:
    """Give a cordoned host new sandboxes again."""
    _set_cordoned(get_settings(ctx), host, cordoned=False)
    print(f"{host} is not cordoned")


def _set_cordoned(settings: Settings, host: str, *, cordoned: bool) -> None:
    from sandbox_gateway.cli.client import build_path

    settings.client.call("PATCH", build_path("fleet", "hosts", host), {"cordoned": cordoned})
