"""Commands for templates."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import artifacts, formats, options, queries, render
from sandbox_gateway.cli.build_context import ContextError, translate_dockerfile
from sandbox_gateway.cli.client import Client
from sandbox_gateway.cli.context import Json, TemplateRef, get_settings
from sandbox_gateway.cli.failure import ExitCode, Failure
from sandbox_gateway.cli.option_names import name_options
from sandbox_gateway.cli.progress import progress_shown
from sandbox_gateway.cli.settings import Settings
from sandbox_gateway.cli.snapshots import WhenUnused, delete_objects

app = typer.Typer(
    help="Build templates, from which sandboxes are created.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("build")
def build(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the template.", show_default=False)] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="A recipe in TOML or JSON; options override it.")
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="debootstrap|rootfs|image",
            help="Default: image with --image, else debootstrap.",
            show_default=False,
        ),
    ] = "",
    suite: Annotated[str, typer.Option("--suite", help="Default: bookworm.", show_default=False)] = "",
    mirror: Annotated[
        str, typer.Option("--mirror", metavar="URL", help="Package mirror. Default: the host's.", show_default=False)
    ] = "",
    packages: Annotated[list[str] | None, typer.Option("--packages", "-p", metavar="A,B,…")] = None,
    rootfs: Annotated[
        str,
        typer.Option(
            "--path", metavar="PATH", help="With --from rootfs: a directory or tarball on the host.", show_default=False
        ),
    ] = "",
    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="IMAGE",
            help="REGISTRY/NAME:TAG, or oci:/DIRECTORY, oci-archive:/FILE or docker-archive:/FILE on the host.",
            show_default=False,
        ),
    ] = "",
    dockerfile: Annotated[
        str,
        typer.Option(
            "--dockerfile",
            metavar="FILE",
            help="A Dockerfile on this host. RUN has no network unless --setup-network is given.",
            show_default=False,
        ),
    ] = "",
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="DIRECTORY",
            help="Where COPY finds its sources. Default: the directory of the Dockerfile.",
            show_default=False,
        ),
    ] = "",
    registry_username: options.RegistryUsername = "",
    registry_password_file: options.RegistryPasswordFile = "",
    setup: Annotated[
        list[str] | None,
        typer.Option("--setup", metavar="COMMAND", help="Command to run during the build; repeatable."),
    ] = None,
    start_command: Annotated[
        str,
        typer.Option(
            "--start-command", metavar="COMMAND", help="Command to start and keep running.", show_default=False
        ),
    ] = "",
    ready_probe: Annotated[
        str,
        typer.Option(
            "--ready-probe",
            metavar="COMMAND",
            help="Command that exits with 0 when the template is ready.",
            show_default=False,
        ),
    ] = "",
    ready_timeout: Annotated[str, typer.Option("--ready-timeout", metavar="TIME", show_default=False)] = "",
    setup_timeout: Annotated[str, typer.Option("--setup-timeout", metavar="TIME", show_default=False)] = "",
    setup_network: Annotated[
        bool | None,
        typer.Option(
            "--setup-network/--no-setup-network",
            help="Network access during the build. Default: yes, but no with --dockerfile.",
            show_default=False,
        ),
    ] = None,
    cpus: options.Cpus = None,
    memory: options.Memory = "",
    disk: options.Disk = "",
    description: Annotated[str, typer.Option("--description", show_default=False)] = "",
    prewarm: options.Prewarm = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the build.")] = False,
    as_json: Json = False,
) -> None:
    """Build a template. Does nothing if the template already exists with the same recipe."""
    settings = get_settings(ctx, as_json)
    option_fields: dict[str, Any] = {
        "name": name,
        "from": source,
        "suite": suite,
        "mirror": mirror,
        "packages": formats.split_list(packages or []),
        "path": rootfs,
        "image": image,
        **options.build_login_fields(registry_username, registry_password_file),
        "setup": setup,
        "startCommand": start_command,
        "readyProbe": ready_probe,
        "readyTimeout": formats.parse_duration(ready_timeout) if ready_timeout else None,
        "setupTimeout": formats.parse_duration(setup_timeout) if setup_timeout else None,
        "description": description,
        **options.build_size_fields(cpus, memory, disk),
    }
    body = {**(_read_recipe(file) if file else {}), **{key: value for key, value in option_fields.items() if value}}
    if prewarm is not None:
        body["prewarm"] = prewarm
    if setup_network is not None:
        body["setupNetwork"] = setup_network
    if not body.get("name"):
        raise Failure("the template needs a name", ExitCode.USAGE, "pass it as an argument, or set it in the recipe")
    if dockerfile:
        _add_dockerfile(settings.client, body, dockerfile, context)
    elif context:
        raise Failure("--context is valid only with --dockerfile", ExitCode.USAGE, "remove it, or pass --dockerfile")
    if body.get("setupNetwork"):  # Older gateways do not know the field, and always allow the network.
        del body["setupNetwork"]
    started_build = settings.client.call("POST", "/templates", body)
    if started_build["buildStatus"] != "ready" and not detach:
        _wait_for_build(settings, started_build)
    _print_template(settings.client.get(f"/templates/{started_build['templateID']}"), settings.json)


@app.command("list")
def list_(ctx: typer.Context, as_json: Json = False) -> None:
    """List templates."""
    queries.list_templates(get_settings(ctx, as_json))


@app.command("show")
def show(ctx: typer.Context, template: TemplateRef, as_json: Json = False) -> None:
    """Show the details of a template."""
    queries.show_template(get_settings(ctx, as_json), template)


@app.command("push")
def push(
    ctx: typer.Context,
    template: TemplateRef,
    reference: artifacts.Reference,
    no_memory: artifacts.NoMemory = False,
    registry_username: options.RegistryUsername = "",
    registry_password_file: options.RegistryPasswordFile = "",
    as_json: Json = False,
) -> None:
    """Push a template to an OCI registry. The artifact contains all secrets of its guest."""
    login_fields = options.build_login_fields(registry_username, registry_password_file)
    artifacts.push(get_settings(ctx, as_json), "templates", template, reference, login_fields, no_memory=no_memory)


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
    """Create a template from an artifact in an OCI registry. A different template with the same name loses it."""
    login_fields = options.build_login_fields(registry_username, registry_password_file)
    artifacts.pull(get_settings(ctx, as_json), "templates", reference, login_fields, name=name, trust=trust)


@app.command("delete")
def delete(
    ctx: typer.Context,
    templates: Annotated[list[str], typer.Argument(metavar="TEMPLATE…", help="Ids or names.")],
    when_unused: WhenUnused = False,
) -> None:
    """Delete templates."""
    delete_objects(ctx, "templates", templates, when_unused)


def _add_dockerfile(client: Client, body: dict[str, Any], dockerfile: str, context: str) -> None:
    """Complete a recipe with the steps of a Dockerfile, and upload the files that it copies."""
    for field in ("image", "packages", "path", "template"):
        if body.get(field):
            hint = f"remove {field}: FROM names the image, RUN installs packages, and COPY copies files"
            raise Failure(f"a Dockerfile cannot be combined with {field}", ExitCode.USAGE, hint)
    if body.get("from", "image") != "image":
        raise Failure(f"a Dockerfile cannot be combined with --from {body['from']}", ExitCode.USAGE, "remove --from")
    try:
        translated = translate_dockerfile(lambda path, data: client.call("POST", path, data), dockerfile, context)
        for archive in translated.missing_archives:
            with progress_shown(f"uploading {archive.source}", archive.size) as advance:
                client.put_file(f"/build-files/{archive.digest}", _count(archive.read_pieces(), advance), archive.size)
    except ContextError as error:
        message, _, hint = str(error).rpartition(": ")
        raise Failure(message, ExitCode.USAGE, hint) from None
    body["image"] = translated.image
    body["setup"] = [*translated.setup, *(body.get("setup") or ())]
    body["startCommand"] = body.get("startCommand") or translated.start_command
    body.setdefault("setupNetwork", False)


def _count(pieces: Iterable[bytes], advance: Callable[[int], object]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        advance(len(piece))


def _wait_for_build(settings: Settings, build: dict[str, Any]) -> None:
    """Print the build's log until the build finishes. Raises Failure if the build failed."""
    from sandbox_gateway.cli.progress import follow_log

    route = f"/templates/{build['templateID']}/builds/{build['buildID']}"
    try:
        follow_log(settings.client.stream_lines(f"{route}/logs", follow="true"), f"building {build['names'][0]}")
    except KeyboardInterrupt:
        render.print_note("sandboxctl: the build continues; `sandboxctl template list` shows its status")
        raise
    status = settings.client.get(f"{route}/status", logsOffset=1 << 30)
    if status["status"] == "error":
        raise Failure(
            f"the template could not be built: {name_options(status['errorMessage'], settings.options)}",
            hint="fix the recipe, and build the template again",
        )
    if status["status"] != "ready":
        raise Failure("the log ended before the build finished", hint="`sandboxctl template list` shows its status")


def _print_template(template: dict[str, Any], as_json: bool) -> None:
    render.print_json(template) if as_json else render.print_templates([template])


def _read_recipe(file: Path) -> dict[str, Any]:
    """Return the recipe in ``file``, whose fields have the same names as in the HTTP API."""
    try:
        text = file.read_text()
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(
            f"the recipe {file} cannot be read: {error}", ExitCode.USAGE, "check the path and the file's permissions"
        ) from None
    except ValueError as error:
        hint = "write TOML, or JSON in a file that ends in .json"
        raise Failure(f"the recipe {file} is invalid: {error}", ExitCode.USAGE, hint) from None
    if not isinstance(data, dict):
        raise Failure(
            f"the recipe {file} is not a JSON object",
            ExitCode.USAGE,
            "write one JSON object with the fields of the recipe",
        )
    return data
