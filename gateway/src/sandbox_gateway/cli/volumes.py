"""Commands for volumes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandbox_gateway.cli import render, words
from sandbox_gateway.cli.context import Json, SandboxRef, VolumeRef, settings
from sandbox_gateway.cli.failure import Failure
from sandbox_gateway.cli.sandboxes import raise_all

app = typer.Typer(
    help="Storage that outlives sandboxes, and is shared by them.", no_args_is_help=True, rich_markup_mode=None
)
Force = Annotated[bool, typer.Option("--force", help="Also while a sandbox may write to it: what it wrote is lost.")]


@app.command("create")
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Default: 1G, or the snapshot's.", show_default=False)
    ] = "",
    source: Annotated[
        str, typer.Option("--from", metavar="VOLUME@SNAPSHOT", help="Begin with what it holds.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Make a volume, empty or as a snapshot of one."""
    call = settings(ctx, as_json)
    body: dict[str, Any] = {"name": name}
    if size:
        body["sizeMB"] = words.mebibytes(size)
    if source:
        body["fromSnapshot"] = source
    _show_one(call.client.call("POST", "/volumes", body), call.json)


@app.command("list")
def list_(ctx: typer.Context, as_json: Json = False) -> None:
    """List volumes."""
    call = settings(ctx, as_json)
    found = call.client.all("/volumes")
    render.print_json(found) if call.json else render.volumes(found)


@app.command("show")
def show(ctx: typer.Context, volume: VolumeRef, as_json: Json = False) -> None:
    """Show all there is to know of a volume: what is in it, who mounts it where."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    found = call.client.get(path("volumes", volume))
    render.print_json(found) if call.json else render.detail(found)


@app.command("grow")
def grow(
    ctx: typer.Context,
    volume: VolumeRef,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="What shall fit in: 20G.")],
    as_json: Json = False,
) -> None:
    """Let a volume hold more, while it is mounted."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    _show_one(call.client.call("PATCH", path("volumes", volume), {"sizeMB": words.mebibytes(size)}), call.json)


@app.command("attach")
def attach(
    ctx: typer.Context,
    sandbox: SandboxRef,
    volume: Annotated[str, typer.Argument(metavar="NAME:PATH[:ro]", help="The volume, and where it is seen.")],
    as_json: Json = False,
) -> None:
    """Mount a volume in a running sandbox."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    made = call.client.call("POST", path("sandboxes", sandbox, "volumes"), words.mount(volume))
    if call.json:
        render.print_json(made)
    else:
        print(f"{sandbox} has {words.mounted(made)}")


@app.command("detach")
def detach(
    ctx: typer.Context,
    sandbox: SandboxRef,
    volumes: Annotated[list[str], typer.Argument(metavar="VOLUME…", help="Ids or names.")],
) -> None:
    """Unmount volumes of a sandbox, whatever it does with them. What is in them stays."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx)
    failures: list[Failure] = []
    for ref in volumes:
        try:
            call.client.call("DELETE", path("sandboxes", sandbox, "volumes", ref))
        except Failure as failure:
            failures.append(failure)
    raise_all(failures)


@app.command("snapshot")
def snapshot(
    ctx: typer.Context,
    volume: VolumeRef,
    name: Annotated[str, typer.Option("--name", help="A name for it, within the volume.", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """Capture a volume. Sandboxes that mount it go on."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    taken = call.client.call("POST", path("volumes", volume, "snapshots"), {"name": name})
    render.print_json(taken) if call.json else render.volume_snapshots([taken], volume)


@app.command("snapshots")
def snapshots(ctx: typer.Context, volume: VolumeRef, as_json: Json = False) -> None:
    """List the snapshots of a volume."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    found = call.client.all(path("volumes", volume, "snapshots"))
    render.print_json(found) if call.json else render.volume_snapshots(found, volume)


@app.command("rollback")
def rollback(
    ctx: typer.Context,
    volume: VolumeRef,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="One of this volume's; id or name.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Let a volume be what a snapshot of it holds. Changes since then are lost."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    done = call.client.call("POST", path("volumes", volume, "rollback"), {"snapshot": snapshot, "force": force})
    if call.json:
        render.print_json(done)
    else:
        print(f"{done['name']} is back at {snapshot}")


@app.command("delete")
def delete(
    ctx: typer.Context,
    volumes: Annotated[list[str], typer.Argument(metavar="VOLUME[@SNAPSHOT]…", help="Volumes, or snapshots of them.")],
    with_snapshots: Annotated[bool, typer.Option("--with-snapshots", help="And the snapshots of it.")] = False,
) -> None:
    """Remove volumes that nothing mounts, and what is in them; or snapshots of volumes."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx)
    failures: list[Failure] = []
    for ref in volumes:
        volume, at, taken = ref.partition("@")
        try:
            if at:
                call.client.call("DELETE", path("volumes", volume, "snapshots", taken))
            else:
                call.client.call("DELETE", path("volumes", volume), params={"withSnapshots": with_snapshots})
        except Failure as failure:
            failures.append(failure)
    raise_all(failures)


def _show_one(volume: dict[str, Any], as_json: bool) -> None:
    render.print_json(volume) if as_json else render.volumes([volume])
