"""Commands for sandboxes."""

from __future__ import annotations

import base64
import sys
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import formats, options, queries, render
from sandbox_gateway.cli.context import Json, SandboxRef, SnapshotRef, get_settings
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.option_names import name_options
from sandbox_gateway.cli.settings import Settings

SandboxRefs = Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Ids or names.")]
_TIMED_OUT_EXIT_CODE = 124
_MAX_TIMEOUT_SECONDS = 604_800


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
        (move, "move"),
        (promote, "promote"),
    ):
        app.command(name)(function)
    app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)


def create(
    ctx: typer.Context,
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="A template or a snapshot, by id or name.")],
    name: Annotated[str, typer.Option("--name", help="Name of the sandbox. Default: its id.", show_default=False)] = "",
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
    as_json: Json = False,
) -> None:
    """Create a sandbox from a template or a snapshot."""
    settings = get_settings(ctx, as_json)
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
    body = {"templateID": template, **({"name": name} if name else {}), **sandbox_options.build_body()}
    body |= options.build_placement_fields(host, host_label, strategy, anti_affinity=False)
    new_sandbox = settings.client.call("POST", "/sandboxes", body)
    _print_sandbox(new_sandbox, settings.json)


def list_(
    ctx: typer.Context,
    state: Annotated[str, typer.Option("--state", metavar="running|paused", help="Only sandboxes in this state.")] = "",
    template: Annotated[
        str, typer.Option("--template", metavar="TEMPLATE", help="Only sandboxes of this template.")
    ] = "",
    snapshot: Annotated[str, typer.Option("--snapshot", metavar="SNAPSHOT", help="Only forks of this snapshot.")] = "",
    metadata: options.Metadata = None,
    as_json: Json = False,
) -> None:
    """List sandboxes."""
    settings = get_settings(ctx, as_json)
    queries.list_sandboxes(settings, state=state, template=template, snapshot=snapshot, metadata=metadata or [])


def show(ctx: typer.Context, sandbox: SandboxRef, as_json: Json = False) -> None:
    """Show the details of a sandbox."""
    queries.show_sandbox(get_settings(ctx, as_json), sandbox)


def usage(ctx: typer.Context, sandbox: SandboxRef, as_json: Json = False) -> None:
    """Show how much disk and memory a sandbox uses."""
    queries.show_usage(get_settings(ctx, as_json), sandbox)


def exec_(
    ctx: typer.Context,
    sandbox: SandboxRef,
    command: Annotated[
        list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENT…]", help="The program to run, without a shell.")
    ],
    env: options.Env = None,
    cwd: Annotated[str, typer.Option("--cwd", metavar="PATH", help="Working directory of the program.")] = "",
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="User that runs the program. Default: root.")
    ] = "",
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Stop the program after 90s, 10m, …")
    ] = "never",
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Read all of standard input, then pass it to the program.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a program in a sandbox, and exit with the program's exit code."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    seconds = formats.parse_duration(timeout)
    # Options end at SANDBOX, so that PROGRAM can have its own; a leading `--` then arrives as an argument.
    args = command[1:] if command[0] == "--" else command
    if not args:
        raise Failure(
            "the program to run is missing", ExitCode.USAGE, "write `sandboxctl exec SANDBOX -- PROGRAM [ARGUMENT…]`"
        )
    body: dict[str, Any] = {"args": args, "timeout": _MAX_TIMEOUT_SECONDS if seconds < 0 else seconds}
    body |= {key: value for key, value in (("cwd", cwd), ("user", user)) if value}
    if env:
        body["env"] = formats.parse_pairs(env, "an environment variable")
    if stdin:
        body["stdin"] = base64.b64encode(sys.stdin.buffer.read()).decode()
    result = settings.client.call("POST", build_path("sandboxes", sandbox, "exec"), body)
    if settings.json:
        render.print_json(result)
    else:
        sys.stdout.write(result["stdout"])
        sys.stdout.flush()
        sys.stderr.write(result["stderr"])
    if result["timedOut"]:
        render.print_note(f"sandboxctl: the program did not finish within {timeout} and was killed")
        raise typer.Exit(_TIMED_OUT_EXIT_CODE)
    raise typer.Exit(_convert_exit_code(result["exitCode"]))


def pause(
    ctx: typer.Context,
    sandboxes: SandboxRefs,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Store the disk only: the sandbox boots when it is resumed.")
    ] = False,
) -> None:
    """Pause sandboxes and save their memory to disk."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx)
    for ref in sandboxes:
        settings.client.call("POST", build_path("sandboxes", ref, "pause"), {"memory": not no_memory})


def resume(ctx: typer.Context, sandboxes: SandboxRefs, timeout: options.Timeout = "", as_json: Json = False) -> None:
    """Resume paused sandboxes."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    body = {"timeout": formats.parse_duration(timeout)} if timeout else {}
    items = [settings.client.call("POST", build_path("sandboxes", ref, "resume"), body) for ref in sandboxes]
    render.print_json(items if len(items) > 1 else items[0]) if settings.json else render.print_sandboxes(items)


def rename(
    ctx: typer.Context,
    sandbox: SandboxRef,
    name: Annotated[str, typer.Argument(metavar="NEW-NAME")],
    as_json: Json = False,
) -> None:
    """Rename a sandbox. Its id does not change."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    _print_sandbox(settings.client.call("PATCH", build_path("sandboxes", sandbox), {"name": name}), settings.json)


def move(
    ctx: typer.Context,
    sandbox: SandboxRef,
    host: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="HOST",
            help="The host that gets it. Default: the suitable one with the most memory.",
            show_default=False,
        ),
    ] = "",
    no_memory: options.NoMemory = False,
    as_json: Json = False,
) -> None:
    """In a fleet: move a sandbox to another host, under the same id. It is paused for the last part of that."""
    settings = get_settings(ctx, as_json)
    _print_sandbox(request_move(settings, sandbox, host, no_memory), settings.json)


def request_move(settings: Settings, sandbox: str, host: str = "", no_memory: bool = False) -> dict[str, Any]:
    """Move a sandbox to ``host``, or to one that the gateway chooses. Return the sandbox. Raises Failure."""
    from sandbox_gateway.cli.client import build_path

    body = {**({"host": host} if host else {}), **({"memory": "none"} if no_memory else {})}
    moved_sandbox: dict[str, Any] = settings.client.call("POST", build_path("sandboxes", sandbox, "move"), body)
    return moved_sandbox


def kill(
    ctx: typer.Context,
    sandboxes: SandboxRefs,
    ignore_missing: Annotated[
        bool, typer.Option("--ignore-missing", help="Ignore sandboxes that do not exist.")
    ] = False,
) -> None:
    """Kill and delete sandboxes. Their snapshots remain."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx)
    failures: list[Failure] = []
    for ref in sandboxes:
        try:
            settings.client.call("DELETE", build_path("sandboxes", ref))
        except Failure as failure:
            if not (ignore_missing and failure.code is ExitCode.NOT_FOUND):
                failures.append(failure)
    raise_first_failure(failures)


def rollback(ctx: typer.Context, sandbox: SandboxRef, snapshot: SnapshotRef, as_json: Json = False) -> None:
    """Roll a sandbox back to a snapshot, under the same id. Later changes are lost."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    result = settings.client.call("POST", build_path("sandboxes", sandbox, "rollback"), {"snapshotID": snapshot})
    if settings.json:
        render.print_json(result)
    else:
        print(f"{sandbox} ({result['sandboxID']}) was rolled back to {snapshot} ({result['snapshotID']})")


def clone(
    ctx: typer.Context,
    sandbox: SandboxRef,
    count: options.Count = None,
    names: options.Names = None,
    concurrency: options.Concurrency = None,
    best_effort: options.BestEffort = False,
    metadata: options.Metadata = None,
    timeout: options.Timeout = "",
    volume: options.Volumes = None,
    no_volumes: options.NoVolumes = False,
    as_json: Json = False,
) -> None:
    """Create siblings of a running sandbox, with its files and memory."""
    from sandbox_gateway.cli.client import build_path
    from sandbox_gateway.cli.progress import create_forks

    settings = get_settings(ctx, as_json)
    fork_fields, total = options.build_count_fields(count, names, concurrency, best_effort)
    sandbox_options = options.SandboxOptions(metadata=metadata, timeout=timeout, volumes=volume, no_volumes=no_volumes)
    body = {**fork_fields, **sandbox_options.build_body()}
    forks = create_forks(settings.client, build_path("sandboxes", sandbox, "clone"), body, total, f"cloning {sandbox}")
    print_forks(forks, settings)


def promote(
    ctx: typer.Context,
    fork: SandboxRef,
    source: Annotated[
        str,
        typer.Option(
            "--source", metavar="SANDBOX", help="Default: the sandbox that it was forked from.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Replace the state of a fork's source with the state of the fork. The fork remains."""
    from sandbox_gateway.cli.client import build_path

    settings = get_settings(ctx, as_json)
    body = {"source": source} if source else {}
    _print_sandbox(settings.client.call("POST", build_path("sandboxes", fork, "promote"), body), settings.json)


def print_forks(forks: dict[str, Any], settings: Settings) -> None:
    """Print the new forks. Exits with code 1 if any could not be created."""
    render.print_json(forks) if settings.json else render.print_sandboxes(forks["sandboxes"])
    if not forks["errors"]:
        return
    for error in forks["errors"]:
        message = name_options(error["message"], settings.options)
        render.print_note(f"sandboxctl: {error['name'] or 'a fork'} was not created: {message}")
    raise typer.Exit(ExitCode.FAILED)


def raise_first_failure(failures: list[Failure]) -> None:
    """Raise the first failure, after printing the messages of the other failures. Do nothing if there are none."""
    for failure in failures[1:]:
        render.print_note(f"sandboxctl: {failure.message}")
    if failures:
        raise failures[0]


def _print_sandbox(sandbox: dict[str, Any], as_json: bool) -> None:
    render.print_json(sandbox) if as_json else render.print_sandboxes([sandbox])


def _convert_exit_code(code: int) -> int:
    """Return the exit code that a shell would report: 128 + n if signal n terminated the program."""
    return code if 0 <= code <= 255 else 128 + abs(code) % 128
