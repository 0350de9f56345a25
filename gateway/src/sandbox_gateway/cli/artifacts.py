"""Push snapshots and templates to OCI registries, and pull them. The gateway transfers them; this waits for it."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import render
from sandbox_gateway.cli.client import Client, build_path
from sandbox_gateway.cli.failure import ExitCode, Failure, create_failure_from_response
from sandbox_gateway.cli.progress import items_shown
from sandbox_gateway.cli.settings import Settings

Reference = Annotated[
    str, typer.Argument(metavar="REGISTRY/REPOSITORY:TAG", help="A registry that the gateway allows.")
]
Username = Annotated[
    str, typer.Option("--username", metavar="USER", help="Default: the gateway's credentials.", show_default=False)
]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password for --username from standard input.")
]
_POLL_SECONDS = (0.1, 1.0)
"""The first and the longest delay between two queries of the progress."""


def push(settings: Settings, kind: str, ref: str, body: dict[str, Any]) -> None:
    """Push a snapshot or template. ``kind``: "snapshots" or "templates"."""
    reference = body["reference"]
    transfer = settings.client.call("POST", build_path(kind, ref, "push"), body)
    transfer = _wait(settings.client, transfer, f"pushing {ref}")
    if settings.json:
        render.print_json(transfer)
        return
    print(
        f"{reference}@{transfer['digest']}: {transfer['transferredBytes']} bytes sent, {transfer['chunksReused']} of "
        f"{transfer['chunks']} chunks were already there"
    )


def pull(settings: Settings, kind: str, body: dict[str, Any]) -> None:
    """Pull a snapshot or template, and print it. ``kind``: "snapshots" or "templates"."""
    transfer = settings.client.call("POST", build_path(kind, "pull"), body)
    transfer = _wait(settings.client, transfer, f"pulling {body['reference']}")
    snapshot = settings.client.get(build_path("snapshots", transfer["snapshotID"]))
    render.print_json(snapshot) if settings.json else render.print_snapshots([snapshot])
    if reason := snapshot["imported"]["omittedMemory"]:
        render.print_note(f"pulled without its memory, so forks boot from the disk: {reason}")


def build_login_fields(username: str, password_stdin: bool) -> dict[str, str]:
    """Return the fields of a request with a login, and read the password."""
    if not username and not password_stdin:
        return {}
    if not (username and password_stdin):
        raise Failure(
            "the login to the registry is incomplete", ExitCode.USAGE, "use both --username and --password-stdin"
        )
    return {"registryUsername": username, "registryPassword": sys.stdin.readline().rstrip("\r\n")}


def _wait(client: Client, transfer: dict[str, Any], title: str) -> dict[str, Any]:
    """Wait until a transfer has ended, and return it. Raises Failure if it failed."""
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
