"""Commands for snapshots, and the tree."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sandbox_gateway.cli import making, render, words
from sandbox_gateway.cli.context import Json, SandboxRef, SnapshotRef, settings
from sandbox_gateway.cli.failure import Failure
from sandbox_gateway.cli.sandboxes import raise_all, show_forks

app = typer.Typer(help="Capture sandboxes, and fork what was captured.", no_args_is_help=True, rich_markup_mode=None)
WhenUnused = Annotated[
    bool, typer.Option("--when-unused", help="If it is in use: hide it now, remove it with its last user.")
]


def register(root: typer.Typer) -> None:
    root.command("tree")(tree)


@app.command("create")
def create(
    ctx: typer.Context,
    sandbox: SandboxRef,
    name: Annotated[str, typer.Option("--name", help="A name for it.", show_default=False)] = "",
    description: Annotated[str, typer.Option("--description", show_default=False)] = "",
    no_memory: Annotated[bool, typer.Option("--no-memory", help="The disk only.")] = False,
    expires_in: Annotated[
        str, typer.Option("--expires-in", metavar="TIME", help="Remove it after 12h, 7d, …", show_default=False)
    ] = "",
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="Keep the newest N taken under a rule.", show_default=False)
    ] = 0,
    keep_daily: Annotated[
        int, typer.Option("--keep-daily", metavar="N", help="Keep the newest of each of N days.", show_default=False)
    ] = 0,
    max_age: Annotated[
        str, typer.Option("--max-age", metavar="TIME", help="Keep none older than 12h, 7d, …", show_default=False)
    ] = "",
    volumes: Annotated[
        list[str] | None,
        typer.Option("--volumes", metavar="A,B,…", help="Capture these volumes in the same pause."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Capture a sandbox while it runs: its disk and its memory, of one instant."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    body: dict[str, Any] = {"memory": "none" if no_memory else "auto"}
    body |= {key: value for key, value in (("name", name), ("description", description)) if value}
    if expires_in:
        body["expiresIn"] = words.seconds(expires_in)
    rule = {"keepLast": keep_last, "keepDaily": keep_daily, "maxAge": words.seconds(max_age) if max_age else 0}
    if any(rule.values()):
        body["retention"] = {key: value for key, value in rule.items() if value}
    if volumes:
        body["volumes"] = words.split(volumes)
    taken = call.client.call("POST", path("sandboxes", sandbox, "snapshots"), body)
    render.print_json(taken) if call.json else render.snapshots([taken])


@app.command("list")
def list_(
    ctx: typer.Context,
    sandbox: Annotated[str, typer.Option("--sandbox", metavar="SANDBOX", help="Only those taken of it.")] = "",
    template: Annotated[str, typer.Option("--template", metavar="TEMPLATE", help="Only its descendants.")] = "",
    as_json: Json = False,
) -> None:
    """List snapshots."""
    call = settings(ctx, as_json)
    found = call.client.all("/snapshots", sandboxID=sandbox, templateID=template)
    render.print_json(found) if call.json else render.snapshots(found)


@app.command("show")
def show(ctx: typer.Context, snapshot: SnapshotRef, as_json: Json = False) -> None:
    """Show all there is to know of a snapshot."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    found = call.client.get(path("snapshots", snapshot))
    render.print_json(found) if call.json else render.detail(found)


@app.command("fork")
def fork(
    ctx: typer.Context,
    snapshot: SnapshotRef,
    count: making.Count = None,
    names: making.Names = None,
    concurrency: making.Concurrency = None,
    best_effort: making.BestEffort = False,
    cpus: making.Cpus = None,
    memory: making.Memory = "",
    disk: making.Disk = "",
    metadata: making.Metadata = None,
    env: making.Env = None,
    timeout: making.Life = "",
    on_timeout: making.OnTimeout = "",
    no_internet: making.NoInternet = False,
    allow_out: making.AllowOut = None,
    deny_out: making.DenyOut = None,
    paused: making.Paused = False,
    cold_start: making.ColdStart = False,
    volume: making.Volumes = None,
    no_volumes: making.NoVolumes = False,
    as_json: Json = False,
) -> None:
    """Make sandboxes from a snapshot: siblings, each going on from where it was captured."""
    from sandbox_gateway.cli.client import path
    from sandbox_gateway.cli.progress import fork_many

    call = settings(ctx, as_json)
    many, total = making.siblings(count, names, concurrency, best_effort)
    options = making.Options(
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
    route = path("snapshots", snapshot, "fork")
    show_forks(fork_many(call.client, route, {**many, **options.body()}, total, f"forking {snapshot}"), call.json)


@app.command("delete")
def delete(
    ctx: typer.Context,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT…", help="Ids or names.")],
    when_unused: WhenUnused = False,
) -> None:
    """Remove snapshots."""
    delete_each(ctx, "snapshots", snapshots, when_unused)


def delete_each(ctx: typer.Context, kind: str, refs: list[str], when_unused: bool) -> None:
    """Remove snapshots or templates (``kind``); says of each that is only hidden."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx)
    failures: list[Failure] = []
    for ref in refs:
        params = {"when": "unused"} if when_unused else None
        try:
            hidden = call.client.call("DELETE", path(kind, ref), params=params)
        except Failure as failure:
            failures.append(failure)
            continue
        if hidden:
            render.note(f"{ref} is hidden; it is removed with its last user ({', '.join(hidden['blockers'])})")
    raise_all(failures)


def tree(
    ctx: typer.Context,
    root: Annotated[str, typer.Argument(metavar="[ROOT]", help="Only what descends from it.", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """Show what came from what: templates, sandboxes, snapshots, forks."""
    call = settings(ctx, as_json)
    found = call.client.get("/lineage", root=root)
    render.print_json(found) if call.json else render.tree(found)
