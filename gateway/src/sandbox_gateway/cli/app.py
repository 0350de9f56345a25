"""The commands and the global options of `sandboxctl`. `main` is the entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandbox_gateway import __version__
from sandbox_gateway.cli import gateway, hosts, plans, sandboxes, snapshots, templates, volumes
from sandbox_gateway.cli.settings import Settings

_HELP = """Create, capture, fork and roll back sandboxes while they run.

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 not found, 4 in use or in the wrong state, 5 no access to the
gateway, 6 no space. `exec` exits with the exit code of the program it ran. `plan compare` exits with 1 if the plans
differ.
"""

app = typer.Typer(
    name="sandboxctl",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(templates.app, name="template")
app.add_typer(snapshots.app, name="snapshot")
app.add_typer(volumes.app, name="volume")
app.add_typer(plans.app, name="plan")
app.add_typer(hosts.app, name="host")
sandboxes.register(app)
snapshots.register(app)
gateway.register(app)


@app.callback(invoke_without_command=True)
def _handle_global_options(
    ctx: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            "--url",
            envvar="SANDBOX_GATEWAY_URL",
            show_default=False,
            help="The gateway: unix:///path, http:// or https://. Default: its socket on this machine.",
        ),
    ] = "",
    token: Annotated[str, typer.Option("--token", envvar="SANDBOX_GATEWAY_TOKEN", hidden=True)] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File that contains the API key. Alternatives: SANDBOX_GATEWAY_TOKEN, SANDBOX_GATEWAY_TOKEN_FILE.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    ctx.obj = Settings(url=url, token=token, token_file=token_file, json=as_json)
