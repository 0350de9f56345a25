"""Commands for volumes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandbox_gateway.cli import formats, options, queries, render
from sandbox_gateway.cli.context import Json, SandboxRef, VolumeRef, get_settings
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.sandboxes import raise_first_failure

app = typer.Typer(
    help="Manage volumes: storage that outlives sandboxes and that several sandboxes can share.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Force = Annotated[
    bool,
    typer.Option("--force", help="Roll back even if a sandbox can write to the volume. Its later writes are lost."),
]


@app.command("create")
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    size: Annotated[
        str,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Size of the volume. Default: 1G, or the snapshot's size.",
            show_default=False,
        ),
    ] = "",
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="VOLUME@SNAPSHOT", help="Copy the contents of this snapshot.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Create an empty volume, or a copy of a volume snapshot."""
    settings = get_settings(ctx, as_json)
    body: dict[str, Any] = {"name": name}
    if size:
        body["sizeMB"] = formats.parse_size(size)
    if source:
        body["fromSnapshot"] = source
    _print_volume(settings.client.call("POST", "/volumes", body), settings.json)


@app.command("list")
def list_(ctx: typer.Context, as_json: Json = False) -> None:
    """List volumes."""
    queries.list_volumes(get_settings(ctx, as_json))


@app.command("show")
def show(ctx: typer.Context, volume: VolumeRef, as_json: Json = False) -> None:
    """Show the details of a volume, such as its disk usage and its mounts."""
    queries.show_volume(get_settings(ctx, as_json), volume)


@app.command("grow")
def grow(
    ctx: typer.Context,
    volume: VolumeRef,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="The new size, such as 20G.")],
    as_json: Json = False,
) -> None:
    """Grow a volume, even while it is mounted."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    _print_volume(
        settings.client.call("PATCH", build_path("volumes", volume), {"sizeMB": formats.parse_size(size)}),
        settings.json,
    )


@app.command("attach")
def attach(
    ctx: typer.Context,
    sandbox: SandboxRef,
    volume: Annotated[str, typer.Argument(metavar="NAME:PATH[:ro]", help="The volume, and the path to mount it on.")],
    as_json: Json = False,
) -> None:
    """Mount a volume in a running sandbox."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    mount = settings.client.call("POST", build_path("sandboxes", sandbox, "volumes"), formats.parse_mount(volume))
    if settings.json:
        render.print_json(mount)
    else:
        print(f"mounted in {sandbox}: {formats.format_mount(mount)}")


@app.command("detach")
def detach(
    ctx: typer.Context,
    sandbox: SandboxRef,
    volumes: Annotated[list[str], typer.Argument(metavar="VOLUME…", help="Ids or names.")],
) -> None:
    """Unmount volumes from a sandbox, even if they are in use. Their contents are kept."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx)
    failures: list[Failure] = []
    for ref in volumes:
        try:
            settings.client.call("DELETE", build_path("sandboxes", sandbox, "volumes", ref))
        except Failure as failure:
            failures.append(failure)
    raise_first_failure(failures)


@app.command("snapshot")
def snapshot(
    ctx: typer.Context,
    volume: VolumeRef,
    name: Annotated[
        str, typer.Option("--name", help="Name of the snapshot, unique within the volume.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Capture a volume. Sandboxes that mount it keep running."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    snapshot_fields = settings.client.call("POST", build_path("volumes", volume, "snapshots"), {"name": name})
    render.print_json(snapshot_fields) if settings.json else render.print_volume_snapshots([snapshot_fields], volume)


@app.command("snapshots")
def snapshots(ctx: typer.Context, volume: VolumeRef, as_json: Json = False) -> None:
    """List the snapshots of a volume."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    volume_snapshots = settings.client.get_all(build_path("volumes", volume, "snapshots"))
    if settings.json:
        render.print_json(volume_snapshots)
    else:
        render.print_volume_snapshots(volume_snapshots, volume)


@app.command("rollback")
def rollback(
    ctx: typer.Context,
    volume: VolumeRef,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="A snapshot of this volume; id or name.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Roll a volume back to one of its snapshots. Later changes are lost."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    volume_fields = settings.client.call(
        "POST", build_path("volumes", volume, "rollback"), {"snapshot": snapshot, "force": force}
    )
    if settings.json:
        render.print_json(volume_fields)
    else:
        print(f"{volume_fields['name']} was rolled back to {snapshot}")


@app.command("export")
def export(
    ctx: typer.Context,
    snapshot: Annotated[str, typer.Argument(metavar="VOLUME@SNAPSHOT", help="A snapshot of a volume.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to create; - for standard output.")],
    age_recipient: options.AgeRecipients = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot of a volume to a file. The file contains all secrets in the volume."""
    from sandbox_gateway.cli import snapshot_files
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    volume, separator, snapshot_name = snapshot.partition("@")
    if not separator:
        raise Failure(
            f"{snapshot!r} does not name a snapshot of a volume",
            ExitCode.USAGE,
            f"take one with `sandboxctl volume snapshot {volume} --name NAME`, and export {volume}@NAME",
        )
    path = build_path("volumes", volume, "snapshots", snapshot_name, "export")
    size = snapshot_files.export(settings.client, path, snapshot, file, age_recipient or [])
    if file == "-":
        return
    render.print_json({"file": file, "bytes": size}) if settings.json else print(f"{file}: {size} bytes")


@app.command("import")
def import_(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to read; - for standard input.")],
    name: Annotated[
        str, typer.Option("--name", help="A name that replaces the one in the file.", show_default=False)
    ] = "",
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="FINGERPRINT", help="Accept a file that a different gateway has signed."),
    ] = None,
    age_identity: options.AgeIdentity = "",
    as_json: Json = False,
) -> None:
    """Create a volume from a file."""
    from sandbox_gateway.cli import snapshot_files

    settings = get_settings(ctx, as_json)
    volume = snapshot_files.import_(settings.client, "/volumes/import", file, name, trust or [], age_identity)
    _print_volume(volume, settings.json)


@app.command("delete")
def delete(
    ctx: typer.Context,
    volumes: Annotated[
        list[str], typer.Argument(metavar="VOLUME[@SNAPSHOT]…", help="Volumes, or snapshots of volumes.")
    ],
    with_snapshots: Annotated[bool, typer.Option("--with-snapshots", help="Also delete their snapshots.")] = False,
) -> None:
    """Delete unmounted volumes with their contents, or snapshots of volumes."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx)
    failures: list[Failure] = []
    for ref in volumes:
        volume, separator, snapshot_name = ref.partition("@")
        try:
            if separator:
                settings.client.call("DELETE", build_path("volumes", volume, "snapshots", snapshot_name))
            else:
                settings.client.call("DELETE", build_path("volumes", volume), params={"withSnapshots": with_snapshots})
        except Failure as failure:
            failures.append(failure)
    raise_first_failure(failures)


def _print_volume(volume: dict[str, Any], as_json: bool) -> None:
    render.print_json(volume) if as_json else render.print_volumes([volume])
