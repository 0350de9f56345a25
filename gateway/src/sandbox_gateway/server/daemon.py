"""Define the command line of `sandbox-gateway`: the commands serve, check, config-docs and openapi."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sandbox_gateway import __version__
from sandbox_gateway.config import Config, load
from sandbox_gateway.errors import GatewayError

DEFAULT_CONFIG = Path("/etc/sandbox-gateway/config.toml")
START_FAILED_EXIT_CODE = 2

app = typer.Typer(
    name="sandbox-gateway",
    help="Run the daemon of the sandbox gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration file, in TOML.")]


@app.callback(invoke_without_command=True)
def _handle_global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def serve(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Serve until SIGTERM or SIGINT. Sandboxes keep running."""
    import asyncio

    from sandbox_gateway.server.serving import run

    asyncio.run(run(load(config)))


@app.command()
def check(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Check the configuration, the keys, and the host."""
    import asyncio

    from sandbox_gateway.server.serving import check as check_host

    settings = load(config)
    asyncio.run(check_host(settings))
    typer.echo(f"{config} is valid, and this host can run a {settings.host.kind} gateway")


@app.command("config-docs")
def config_docs() -> None:
    """Print the configuration reference, in Markdown."""
    typer.echo(render_configuration_page(), nl=False)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document, in JSON."""
    import json

    from sandbox_gateway.server.serving import build_openapi_document

    typer.echo(json.dumps(build_openapi_document(), indent=2))


def render_configuration_page() -> str:
    """Return the text of `docs/configuration.md`, generated from the descriptions in config.py."""
    from sandbox_gateway.server.config_docs import render_page

    return render_page(Config)


def main() -> None:
    """Run the command line. On an error, print one sentence to standard error and exit with code 2."""
    try:
        app()
    except GatewayError as error:
        print(f"sandbox-gateway: {error.message}", file=sys.stderr)
        sys.exit(START_FAILED_EXIT_CODE)
    except OSError as error:
        print(f"sandbox-gateway: {error}", file=sys.stderr)
        sys.exit(START_FAILED_EXIT_CODE)


if __name__ == "__main__":
    main()
