"""Arguments that many commands share, and access to the settings."""

from __future__ import annotations

from typing import Annotated

import typer

from sandbox_gateway.cli.option_names import map_options
from sandbox_gateway.cli.settings import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SandboxRef = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id or name.")]
SnapshotRef = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id or name.")]
VolumeRef = Annotated[str, typer.Argument(metavar="VOLUME", help="Id or name.")]
TemplateRef = Annotated[str, typer.Argument(metavar="TEMPLATE", help="Id or name.")]


def get_settings(ctx: typer.Context, as_json: bool = False) -> Settings:
    settings: Settings = ctx.find_root().obj
    settings.json = settings.json or as_json
    settings.options.update(map_options(ctx.command.params))
    return settings
