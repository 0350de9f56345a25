"""Commands for snapshots, and the command `tree`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandbox_gateway.cli import artifacts, formats, options, queries, render
from sandbox_gateway.cli.context import Json, SandboxRef, SnapshotRef, get_settings
from sandbox_gateway.cli.failure import Failure
from sandbox_gateway.cli.sandboxes import print_forks, raise_first_failure
from sandbox_gateway.cli.settings import Settings

app = typer.Typer(help="Capture sandboxes, and fork snapshots.", no_args_is_help=True, rich_markup_mode=None)
WhenUnused = Annotated[
    bool,
    typer.Option(
        "--when-unused", help="If the object is in use, hide it now and delete it when its last user is deleted."
    ),
]


def register(root: typer.Typer) -> None:
    root.command("tree")(tree)


@app.command("create")
def create(
    ctx: typer.Context,
    sandbox: SandboxRef,
    name: Annotated[str, typer.Option("--name", help="The snapshot's name.", show_default=False)] = "",
    description: Annotated[str, typer.Option("--description", show_default=False)] = "",
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Capture the disk only.")] = False,
    expires_in: Annotated[
        str,
        typer.Option("--expires-in", metavar="TIME", help="Delete the snapshot after 12h, 7d, …", show_default=False),
    ] = "",
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="Keep the newest N snapshots.", show_default=False)
    ] = 0,
    keep_daily: Annotated[
        int,
        typer.Option(
            "--keep-daily", metavar="N", help="Keep the newest snapshot of each of N days.", show_default=False
        ),
    ] = 0,
    max_age: Annotated[
        str,
        typer.Option("--max-age", metavar="TIME", help="Delete snapshots older than 12h, 7d, …", show_default=False),
    ] = "",
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volumes", metavar="A,B,…", help="Capture these volumes in the same pause."),
    ] = None,
    prewarm: options.Prewarm = None,
    as_json: Json = False,
) -> None:
    """Capture the disk and the memory of a running sandbox at the same instant."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    body: dict[str, Any] = {"memory": "none" if no_memory else "auto"}
    body |= {key: value for key, value in (("name", name), ("description", description)) if value}
    if expires_in:
        body["expiresIn"] = formats.parse_duration(expires_in)
    rule = {"keepLast": keep_last, "keepDaily": keep_daily, "maxAge": formats.parse_duration(max_age) if max_age else 0}
    if any(rule.values()):
        body["retention"] = {key: value for key, value in rule.items() if value}
    if volumes:
        body["volumes"] = formats.split_list(volumes)
    if prewarm:
        body["prewarm"] = prewarm
    snapshot = settings.client.call("POST", build_path("sandboxes", sandbox, "snapshots"), body)
    render.print_json(snapshot) if settings.json else render.print_snapshots([snapshot])


@app.command("list")
def list_(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Option("--sandbox", metavar="SANDBOX", help="Only snapshots of this sandbox.")] = "",
    template: Annotated[
        str, typer.Option("--template", metavar="TEMPLATE", help="Only descendants of this template.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List snapshots."""
    queries.list_snapshots(get_settings(ctx, as_json), sandbox=sandbox, template=template)


@app.command("show")
def show(ctx: typer.Context, snapshot: SnapshotRef, as_json: Json = False) -> None:
    """Show the details of a snapshot."""
    queries.show_snapshot(get_settings(ctx, as_json), snapshot)


@app.command("prewarm")
def prewarm(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    count: Annotated[int, typer.Argument(min=0, metavar="COUNT", help="Number of forks to keep ready; 0: none.")],
    as_json: Json = False,
) -> None:
    """Keep forks of a snapshot or template ready, so that new sandboxes need not wait for a machine to start."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    prewarm_status = settings.client.call("POST", build_path("snapshots", snapshot, "prewarm"), {"count": count})
    render.print_json(prewarm_status) if settings.json else print(formats.format_prewarm(prewarm_status))


@app.command("fork")
def fork(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    count: options.Count = None,
    names: options.Names = None,
    concurrency: options.Concurrency = None,
    best_effort: options.BestEffort = False,
    cpus: options.Cpus = None,
    memory: options.Memory = "",
    disk: options.Disk = "",
    metadata: options.Metadata = None,
    env: options.Env = None,
    timeout: options.Timeout = "",
    on_timeout: options.OnTimeout = "",
    no_internet: options.NoInternet = False,
    allow_out: options.AllowOut = None,
    deny_out: options.DenyOut = None,
    paused: options.Paused = False,
    cold_start: options.ColdStart = False,
    volume: options.Volumes = None,
    no_volumes: options.NoVolumes = False,
    host: options.Host = "",
    host_label: options.HostLabels = None,
    strategy: options.Strategy = "",
    anti_affinity: options.AntiAffinity = False,
    as_json: Json = False,
) -> None:
    """Create sandboxes from a snapshot. Each continues from the captured state."""
    from sandbox_gateway.cli.client import build_path
    from sandbox_gateway.cli.progress import create_forks

    settings = get_settings(ctx, as_json)
    count_fields, total = options.build_count_fields(count, names, concurrency, best_effort)
    sandbox_options = options.SandboxOptions(
        cpus,
        memory,
        disk,
        metadata,
        env,
        timeout,
        on_timeout,
        no_internet,
        allow_out,
        deny_out,
        paused,
        cold_start,
        volume,
        no_volumes,
    )
    route = build_path("snapshots", snapshot, "fork")
    body = {**count_fields, **sandbox_options.build_body()}
    body |= options.build_placement_fields(host, host_label, strategy, anti_affinity)
    print_forks(create_forks(settings.client, route, body, total, f"forking {snapshot}"), settings)


@app.command("export")
def export(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to create; - for standard output.")],
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Export the disk only.")] = False,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="SNAPSHOT",
            help="Export only what differs from this snapshot or template.",
            show_default=False,
        ),
    ] = "",
    resume_token: Annotated[
        str,
        typer.Option(
            "--resume-token",
            metavar="TOKEN",
            help="Export only the rest, to continue an interrupted import.",
            show_default=False,
        ),
    ] = "",
    age_recipient: options.AgeRecipients = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot or template to a file. The file contains all secrets of its guest."""
    from sandbox_gateway.cli import snapshot_files
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    path = build_path("snapshots", snapshot, "export")
    params = {"memory": "none" if no_memory else "", "since": since, "resumeToken": resume_token}
    size = snapshot_files.export(settings.client, path, snapshot, file, age_recipient or [], **params)
    if file == "-":
        return
    render.print_json({"file": file, "bytes": size}) if settings.json else print(f"{file}: {size} bytes")


@app.command("copy")
def copy(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="The host that gets the copy.")],
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Copy the disk only.")] = False,
    as_json: Json = False,
) -> None:
    """In a fleet: copy a snapshot or template to another host. The copy keeps the names and gets its own id."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    params = {"host": host, "memory": "none" if no_memory else "auto"}
    copied = settings.client.call("POST", build_path("snapshots", snapshot, "copy"), params=params)
    _print_imported(copied, settings)


@app.command("import")
def import_(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to read; - for standard input.")],
    name: Annotated[
        str, typer.Option("--name", help="A name that replaces those in the file.", show_default=False)
    ] = "",
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="FINGERPRINT", help="Accept a file that a different gateway has signed."),
    ] = None,
    age_identity: options.AgeIdentity = "",
    as_json: Json = False,
) -> None:
    """Create a snapshot or template from a file. It gets a new id."""
    from sandbox_gateway.cli import snapshot_files

    settings = get_settings(ctx, as_json)
    snapshot = snapshot_files.import_(settings.client, "/snapshots/import", file, name, trust or [], age_identity)
    _print_imported(snapshot, settings)


@app.command("interrupted")
def interrupted(
    ctx: typer.Context,
    discard: Annotated[
        str, typer.Option("--discard", metavar="ID", help="Remove what this import has received.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """List the imports that were interrupted and can be continued."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    if discard:
        settings.client.call("DELETE", build_path("interrupted-imports", discard))
        return
    imports = settings.client.get("/interrupted-imports")
    render.print_json(imports) if settings.json else render.print_interrupted_imports(imports)


@app.command("push")
def push(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    reference: artifacts.Reference,
    no_memory: artifacts.NoMemory = False,
    registry_username: options.RegistryUsername = "",
    registry_password_file: options.RegistryPasswordFile = "",
    as_json: Json = False,
) -> None:
    """Push a snapshot or template to an OCI registry. The artifact contains all secrets of its guest."""
    login_fields = options.build_login_fields(registry_username, registry_password_file)
    artifacts.push(get_settings(ctx, as_json), "snapshots", snapshot, reference, login_fields, no_memory=no_memory)


@app.command("pull")
def pull(
    ctx: typer.Context,
    reference: artifacts.Reference,
    name: artifacts.NewName = "",
    trust: artifacts.Trust = None,
    registry_username: options.RegistryUsername = "",
    registry_password_file: options.RegistryPasswordFile = "",
    as_json: Json = False,
) -> None:
    """Create a snapshot from an artifact in an OCI registry. It gets a new id."""
    login_fields = options.build_login_fields(registry_username, registry_password_file)
    artifacts.pull(get_settings(ctx, as_json), "snapshots", reference, login_fields, name=name, trust=trust)


@app.command("signer")
def signer(ctx: typer.Context, as_json: Json = False) -> None:
    """Show the fingerprint of the key with which the gateway signs exported files."""
    settings = get_settings(ctx, as_json)
    key = settings.client.get("/signer")
    render.print_json(key) if settings.json else print(key["fingerprint"])


@app.command("delete")
def delete(
    ctx: typer.Context,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT…", help="Ids or names.")],
    when_unused: WhenUnused = False,
) -> None:
    """Delete snapshots."""
    delete_objects(ctx, "snapshots", snapshots, when_unused)


def delete_objects(ctx: typer.Context, kind: str, refs: list[str], when_unused: bool) -> None:
    """Delete objects of ``kind`` ("snapshots" or "templates"). Print the ones that are hidden until they are unused."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx)
    failures: list[Failure] = []
    for ref in refs:
        params = {"when": "unused"} if when_unused else None
        try:
            response = settings.client.call("DELETE", build_path(kind, ref), params=params)
        except Failure as failure:
            failures.append(failure)
            continue
        if response:  # the object is still in use, so it was only hidden
            render.print_note(f"{ref} is hidden until its last user is deleted ({', '.join(response['blockers'])})")
    raise_first_failure(failures)


def tree(
    ctx: typer.Context,
    root: Annotated[
        str, typer.Argument(metavar="[ROOT]", help="Show only descendants of this object.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Show the lineage of templates, snapshots and sandboxes."""
    settings = get_settings(ctx, as_json)
    if settings.json:
        render.print_json(settings.client.get("/lineage", root=root))
    else:
        render.print_tree(settings.client.get("/lineage", root=root, flat=True))


def _print_imported(snapshot: dict[str, Any], settings: Settings) -> None:
    render.print_json(snapshot) if settings.json else render.print_snapshots([snapshot])
    if reason := (snapshot.get("imported") or {}).get("omittedMemory"):
        render.print_note(f"imported without its memory, so forks boot from the disk: {reason}")
