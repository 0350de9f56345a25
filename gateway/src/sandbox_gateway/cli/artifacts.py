"""Push snapshots and templates to OCI registries, and pull them. The gateway transfers them in the background."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import render
from sandbox_gateway.cli.client import Client, build_path
from sandbox_gateway.cli.failure import create_failure_from_response
from sandbox_gateway.cli.progress import items_shown
from sandbox_gateway.cli.settings import Settings

Reference = Annotated[
    str, typer.Argument(metavar="REGISTRY/REPOSITORY:TAG", help="A registry that the gateway allows.")
]
NoMemory = Annotated[bool, typer.Option("--no-memory", help="Push the disk only.")]
NewName = Annotated[
    str, typer.Option("--name", help="A name that replaces the names in the artifact.", show_default=False)
]
Trust = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="FINGERPRINT", help="Accept an artifact that a different gateway has signed."),
]
_POLL_SECONDS = (0.1, 1.0)
"""The first and the longest delay between two queries of the progress."""


def push(
    settings: Settings, kind: str, ref: str, reference: str, login_fields: dict[str, Any], *, no_memory: bool
) -> None:
    """Push a snapshot or template. ``kind``: "snapshots" or "templates"."""
    body = {"reference": reference, **login_fields}
    if no_memory:
        body["memory"] = "none"
    transfer = settings.client.call("POST", build_path(kind, ref, "push"), body)
    transfer = _wait(settings.client, transfer, f"pushing {ref}")
    if settings.json:
        render.print_json(transfer)
        return
    print(
        f"{reference}@{transfer['digest']}: {transfer['transferredBytes']} bytes sent, {transfer['chunksReused']} of "
        f"{transfer['chunks']} chunks were already there"
    )


def pull(
    settings: Settings, kind: str, reference: str, login_fields: dict[str, Any], *, name: str, trust: list[str] | None
) -> None:
    """Pull a snapshot or template, and print it. ``kind``: "snapshots" or "templates"."""
    body = {"reference": reference, "trust": trust or [], **login_fields}
    if name:
        body["name"] = name
    transfer = settings.client.call("POST", build_path(kind, "pull"), body)
    transfer = _wait(settings.client, transfer, f"pulling {reference}")
    snapshot = settings.client.get(build_path("snapshots", transfer["snapshotID"]))
    render.print_json(snapshot) if settings.json else render.print_snapshots([snapshot])
    if reason := snapshot["imported"]["omittedMemory"]:
        render.print_note(f"pulled without its memory, so forks boot from the disk: {reason}")


def _wait(client: Client, transfer: dict[str, Any], title: str) -> dict[str, Any]:
    """Wait until a transfer has finished, and return it. Raises Failure if it failed."""
    route = build_path("transfers", transfer["transferID"])
    delay, max_delay = _POLL_SECONDS
    with items_shown(title) as show:
        while transfer["status"] == "running":
            time.sleep(delay)
            delay = min(delay * 1.5, max_delay)
            transfer = client.get(route)
            show(transfer["chunksDone"], transfer["chunks"])
    if error := transfer["error"]:
        raise create_failure_from_response(error["status"], error)
    return transfer
