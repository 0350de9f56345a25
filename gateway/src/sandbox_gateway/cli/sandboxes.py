"""Commands for sandboxes."""

from __future__ import annotations

import base64
import sys
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import making, render, words
from sandbox_gateway.cli.context import Json, SandboxRef, SnapshotRef, settings
from sandbox_gateway.cli.failure import Exit, Failure

Refs = Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Ids or names.")]
_TIMED_OUT = 124
_A_WEEK = 604_800


def register(app: typer.Typer) -> None:
    for function, name in (
        (create, "create"),
        (list_, "list"),
        (show, "show"),
        (usage, "usage"),
        (pause, "pause"),
        (resume, "resume"),
        (rename, "rename"),
        (kill, "kill"),
        (rollback, "rollback"),
        (clone, "clone"),
        (promote, "promote"),
    ):
        app.command(name)(function)
    app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)


def create(
    ctx: typer.Context,
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="A template or a snapshot, by id or name.")],
    name: Annotated[str, typer.Option("--name", help="Default: its id.", show_default=False)] = "",
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
    """Make a sandbox from a template or a snapshot."""
    call = settings(ctx, as_json)
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
    body = {"templateID": template, **({"name": name} if name else {}), **options.body()}
    made = call.client.call("POST", "/sandboxes", body)
    _show_one(made, call.json)


def list_(
    ctx: typer.Context,
    state: Annotated[str, typer.Option("--state", metavar="running|paused", help="Only those.")] = "",
    template: Annotated[str, typer.Option("--template", metavar="TEMPLATE", help="Only those of it.")] = "",
    snapshot: Annotated[str, typer.Option("--snapshot", metavar="SNAPSHOT", help="Only those made from it.")] = "",
    metadata: making.Metadata = None,
    as_json: Json = False,
) -> None:
    """List sandboxes."""
    from urllib.parse import urlencode

    call = settings(ctx, as_json)
    query = urlencode(words.pairs(metadata or [], "metadata"))
    found = call.client.all("/sandboxes", state=state, template=template, snapshotID=snapshot, metadata=query)
    render.print_json(found) if call.json else render.sandboxes(found)


def show(ctx: typer.Context, sandbox: SandboxRef, as_json: Json = False) -> None:
    """Show all there is to know of a sandbox."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    found = call.client.get(path("sandboxes", sandbox))
    render.print_json(found) if call.json else render.detail(found)


def usage(ctx: typer.Context, sandbox: SandboxRef, as_json: Json = False) -> None:
    """Show what a sandbox costs its host: disk and memory that are its own."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    found = call.client.get(path("sandboxes", sandbox, "usage"))
    if call.json:
        render.print_json(found)
    else:
        print(f"disk {words.size(found['diskBytes'])}, memory {words.size(found['memoryBytes'])}")


def exec_(
    ctx: typer.Context,
    sandbox: SandboxRef,
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENT…]", help="Run without a shell.")],
    env: making.Env = None,
    cwd: Annotated[str, typer.Option("--cwd", metavar="PATH", help="Directory to run it in.")] = "",
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="User to run it as. Default: root.")] = "",
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long it may take.")] = "never",
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it our standard input (read to its end).")] = False,
    as_json: Json = False,
) -> None:
    """Run a program in a sandbox; its exit code becomes ours."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    seconds = words.seconds(timeout)
    # Options end at SANDBOX, so that PROGRAM may have its own; the customary `--` is then one of the words.
    args = command[1:] if command[0] == "--" else command
    if not args:
        raise Failure("there is no program to run", Exit.USAGE, "sandboxctl exec SANDBOX -- PROGRAM [ARGUMENT…]")
    body: dict[str, Any] = {"args": args, "timeout": _A_WEEK if seconds < 0 else seconds}
    body |= {key: value for key, value in (("cwd", cwd), ("user", user)) if value}
    if env:
        body["env"] = words.pairs(env, "an environment variable")
    if stdin:
        body["stdin"] = base64.b64encode(sys.stdin.buffer.read()).decode()
    result = call.client.call("POST", path("sandboxes", sandbox, "exec"), body)
    if call.json:
        render.print_json(result)
    else:
        sys.stdout.write(result["stdout"])
        sys.stdout.flush()
        sys.stderr.write(result["stderr"])
    if result["timedOut"]:
        render.note(f"sandboxctl: it did not end within {timeout} and was stopped")
        raise typer.Exit(_TIMED_OUT)
    raise typer.Exit(_exit_code(result["exitCode"]))


def pause(
    ctx: typer.Context,
    sandboxes: Refs,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Keep its disk only: it boots when resumed.")] = False,
) -> None:
    """Pause sandboxes: they stay on the disk, with their memory."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx)
    for ref in sandboxes:
        call.client.call("POST", path("sandboxes", ref, "pause"), {"memory": not no_memory})


def resume(ctx: typer.Context, sandboxes: Refs, timeout: making.Life = "", as_json: Json = False) -> None:
    """Resume paused sandboxes."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    body = {"timeout": words.seconds(timeout)} if timeout else {}
    made = [call.client.call("POST", path("sandboxes", ref, "resume"), body) for ref in sandboxes]
    render.print_json(made if len(made) > 1 else made[0]) if call.json else render.sandboxes(made)


def rename(
    ctx: typer.Context,
    sandbox: SandboxRef,
    name: Annotated[str, typer.Argument(metavar="NEW-NAME")],
    as_json: Json = False,
) -> None:
    """Give a sandbox another name; its id stays."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    _show_one(call.client.call("PATCH", path("sandboxes", sandbox), {"name": name}), call.json)


def kill(
    ctx: typer.Context,
    sandboxes: Refs,
    ignore_missing: Annotated[bool, typer.Option("--ignore-missing", help="What is not there is no error.")] = False,
) -> None:
    """End sandboxes and remove them. Their snapshots stay."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx)
    failures: list[Failure] = []
    for ref in sandboxes:
        try:
            call.client.call("DELETE", path("sandboxes", ref))
        except Failure as failure:
            if not (ignore_missing and failure.code is Exit.NOT_FOUND):
                failures.append(failure)
    raise_all(failures)


def rollback(ctx: typer.Context, sandbox: SandboxRef, snapshot: SnapshotRef, as_json: Json = False) -> None:
    """Bring a sandbox back to a snapshot, under the same id. Changes since then are lost."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    done = call.client.call("POST", path("sandboxes", sandbox, "rollback"), {"snapshotID": snapshot})
    if call.json:
        render.print_json(done)
    else:
        print(f"{sandbox} ({done['sandboxID']}) is back at {snapshot} ({done['snapshotID']})")


def clone(
    ctx: typer.Context,
    sandbox: SandboxRef,
    count: making.Count = None,
    names: making.Names = None,
    concurrency: making.Concurrency = None,
    best_effort: making.BestEffort = False,
    metadata: making.Metadata = None,
    timeout: making.Life = "",
    volume: making.Volumes = None,
    no_volumes: making.NoVolumes = False,
    as_json: Json = False,
) -> None:
    """Make siblings of a running sandbox, with its files and its memory."""
    from sandbox_gateway.cli.client import path
    from sandbox_gateway.cli.progress import fork_many

    call = settings(ctx, as_json)
    many, total = making.siblings(count, names, concurrency, best_effort)
    options = making.Options(metadata=metadata, timeout=timeout, volumes=volume, no_volumes=no_volumes)
    body = {**many, **options.body()}
    made = fork_many(call.client, path("sandboxes", sandbox, "clone"), body, total, f"cloning {sandbox}")
    show_forks(made, call.json)


def promote(
    ctx: typer.Context,
    fork: SandboxRef,
    source: Annotated[
        str, typer.Option("--source", metavar="SANDBOX", help="Default: what it was forked from.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Let the source of a fork go on from the fork's state. The fork stays."""
    from sandbox_gateway.cli.client import path

    call = settings(ctx, as_json)
    body = {"source": source} if source else {}
    _show_one(call.client.call("POST", path("sandboxes", fork, "promote"), body), call.json)


def show_forks(made: dict[str, Any], as_json: bool) -> None:
    """Print what forks were made; ends with the first error's exit code where some were not."""
    render.print_json(made) if as_json else render.sandboxes(made["sandboxes"])
    if not made["errors"]:
        return
    for error in made["errors"]:
        render.note(f"sandboxctl: {error['name'] or 'a fork'} was not made: {error['message']}")
    raise typer.Exit(Exit.FAILED)


def raise_all(failures: list[Failure]) -> None:
    """Report all but the first failure, and end with the first."""
    for failure in failures[1:]:
        render.note(f"sandboxctl: {failure.message}")
    if failures:
        raise failures[0]


def _show_one(sandbox: dict[str, Any], as_json: bool) -> None:
    render.print_json(sandbox) if as_json else render.sandboxes([sandbox])


def _exit_code(code: int) -> int:
    """What a shell would report: 128 + n where signal n ended it."""
    return code if 0 <= code <= 255 else 128 + abs(code) % 128
