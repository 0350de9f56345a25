"""Commands for the gateway itself."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sandbox_gateway.cli import queries
from sandbox_gateway.cli.context import Json, get_settings
from sandbox_gateway.control_characters import remove_control_characters


def register(root: typer.Typer) -> None:
    root.command("events")(events)
    root.command("health")(health)


def events(
    ctx: typer.Context,
    operation: Annotated[
        str, typer.Option("--operation", metavar="ID", help="Show only events of this operation.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Print events as they happen, until interrupted. With --json, print one object per line."""
    settings = get_settings(ctx, as_json)
    for kind, data in settings.client.stream_events(operation):
        if kind == "connected":
            continue
        if settings.json:
            print(json.dumps({"type": kind, **data}), flush=True)
        else:
            at = str(data.pop("at", ""))[11:19]
            fields_text = " ".join(f"{key}={value}" for key, value in data.items())
            print(remove_control_characters(f"{at} {kind} {fields_text}").replace("\n", " "), flush=True)


def health(ctx: typer.Context, as_json: Json = False) -> None:
    """Check that the gateway is running, and show how much disk space and memory its host has left."""
    queries.show_health(get_settings(ctx, as_json))
