"""Commands for the hosts of a fleet."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandbox_gateway.cli import options, queries, render
from sandbox_gateway.cli.context import Json, get_settings
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.sandboxes import request_move
from sandbox_gateway.cli.settings import Settings
from sandbox_gateway.control_characters import remove_control_characters

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


@app.command("drain")
def drain(ctx: typer.Context, host: HostName, no_memory: options.NoMemory = False, as_json: Json = False) -> None:
    """Cordon a host, and move all its sandboxes to other hosts. Fails if a sandbox remains.

    Snapshots, templates and volumes stay on the host.
    """
    settings = get_settings(ctx, as_json)
    _set_cordoned(settings, host, cordoned=True)
    moved: list[dict[str, Any]] = []
    blockers: dict[str, dict[str, Any]] = {}
    # Clones of a sandbox may appear on the host until it has moved.
    while waiting := [each for each in _list_sandboxes(settings, host) if each["sandboxID"] not in blockers]:
        for sandbox in waiting:
            entry = {"sandboxID": sandbox["sandboxID"], "name": sandbox["name"]}
            try:
                target = request_move(settings, sandbox["sandboxID"], no_memory=no_memory)["sandboxHost"]
            except Failure as failure:
                if failure.code is ExitCode.UNREACHABLE:
                    raise
                blockers[entry["sandboxID"]] = {**entry, "reason": failure.message}
                _report(settings, f"{entry['name']}: not moved: {failure.message}")
            else:
                moved.append({**entry, "sandboxHost": target})
                _report(settings, f"{entry['name']}: moved to {target}")
    remaining_ids = {each["sandboxID"] for each in _list_sandboxes(settings, host)}
    remaining = [each for id, each in blockers.items() if id in remaining_ids]
    if settings.json:
        render.print_json({"host": host, "moved": moved, "remaining": remaining})
    if remaining:
        lines = "".join(f"\n  {each['name']}: {each['reason']}" for each in remaining)
        noun = "1 sandbox remains" if len(remaining) == 1 else f"{len(remaining)} sandboxes remain"
        raise Failure(f"{noun} on {host}, which is cordoned:{lines}", ExitCode.CONFLICT)
    _report(settings, f"{host} is cordoned, and has no sandboxes")


def _list_sandboxes(settings: Settings, host: str) -> list[dict[str, Any]]:
    """Return the sandboxes of a host. Raises Failure if its gateway does not answer."""
    sandboxes = settings.client.get_all("/sandboxes")
    if host in settings.client.missing_hosts:
        raise Failure(f"the gateway of host {host} does not answer: start it, or try again later")
    return [each for each in sandboxes if each["sandboxHost"] == host]


def _report(settings: Settings, line: str) -> None:
    if not settings.json:
        print(remove_control_characters(line), flush=True)
