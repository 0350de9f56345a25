"""Routes of templates and their builds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, StreamingResponse

from sandbox_gateway.api.access.auth import get_plan_id
from sandbox_gateway.api.access.signed_urls import UPLOAD_PREFIX, is_signed_upload, sign_upload
from sandbox_gateway.api.dependencies import EngineDep, Ref
from sandbox_gateway.api.native import requests, shapes
from sandbox_gateway.api.native.snapshots import When, remove
from sandbox_gateway.api.native.view import describe_host, get_template_or_snapshot
from sandbox_gateway.api.paging import Limit, NextToken, paginate_list
from sandbox_gateway.api.waiting import read_file
from sandbox_gateway.engine.build_context_patterns import translate_ignore_file
from sandbox_gateway.engine.builds import Build
from sandbox_gateway.engine.dockerfiles import parse_dockerfile
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.image_steps import name_unchecked_archive
from sandbox_gateway.engine.names import create_build_id, remove_default_tag, require_valid_template_name
from sandbox_gateway.engine.templates import is_outdated
from sandbox_gateway.errors import Invalid, NotFound, Unsupported
from sandbox_gateway.recipes import Recipe, Source
from sandbox_gateway.records import Snapshot, SnapshotKind

router = APIRouter(tags=["templates"])
LogLevel = Annotated[
    Literal["debug", "info", "warn", "error"], Query(description="Omit lines below this level. All lines have info.")
]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The digest that the client has computed.")]


@router.post(
    "/templates",
    status_code=202,
    summary="Build a template in the background, or find an existing one with the same recipe",
    responses={200: {"model": shapes.BuildStarted, "description": "The template already exists"}},
)
async def create(body: requests.CreateTemplate, engine: EngineDep, response: Response) -> shapes.BuildStarted:
    build = await engine.templates.build(
        body.name,
        engine.templates.complete_recipe(body.build_recipe(), body.build_sizes()),
        description=body.description,
        prewarm=body.prewarm,
        login=body.build_login(),
    )
    if build.status == "ready":
        response.status_code = 200
    return shapes.describe_started_build(build)


@router.post("/templates/tags", status_code=201, summary="Assign tags to a template (E2B)")
async def assign_tags(body: requests.AssignTags, engine: EngineDep) -> shapes.AssignedTagsShape:
    template = await engine.templates.assign_tags(body.target, body.tags)
    return shapes.AssignedTagsShape(tags=list(dict.fromkeys(body.tags)), build_id=create_build_id(template.id))


@router.delete("/templates/tags", status_code=204, summary="Remove tags from a template's name (E2B)")
async def remove_tags(body: requests.RemoveTags, engine: EngineDep) -> None:
    await engine.templates.remove_tags(body.name, body.tags)


@router.post(
    "/templates/{ref}",
    status_code=202,
    summary="Build a template again if its image, its files or the gateway's guest files have changed",
    responses={200: {"model": shapes.BuildStarted, "description": "Nothing has changed"}},
)
async def rebuild(
    ref: Ref, engine: EngineDep, response: Response, body: requests.RebuildTemplate | None = None
) -> shapes.BuildStarted:
    build = await engine.templates.rebuild(ref)
    if build.status == "ready":
        response.status_code = 200
    return shapes.describe_started_build(build)


@router.post("/v3/templates", status_code=202, summary="Announce a build, whose steps are sent later (E2B)")
async def announce(body: requests.AnnounceTemplate, engine: EngineDep) -> shapes.BuildAnnounced:
    return shapes.describe_announced_build(engine.templates.announce(body.build_names(), body.build_sizes()))


@router.post("/v2/templates/{ref}/builds/{build}", status_code=202, summary="Start an announced build (E2B)")
async def start(ref: Ref, build: str, body: requests.BuildFromImage, engine: EngineDep) -> shapes.BuildStarted:
    started_build = await engine.templates.start(ref, build, body.build_recipe, body.build_login())
    return shapes.describe_started_build(started_build)


@router.get(
    "/templates/{ref}/files/{digest}",
    status_code=201,
    summary="Return a URL for the upload of a step's files (E2B). Needs the scope admin",
)
async def create_upload_url(request: Request, ref: Ref, digest: Digest, engine: EngineDep) -> shapes.FileUpload:
    """Return whether the files are stored, and a URL to which they can be uploaded within an hour, without a key."""
    _refuse_in_plan(request)
    engine.templates.require_known_template(ref)
    # The header comes from a proxy that provides TLS. A client that sends it changes only its own URL.
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    url = f"{scheme}://{request.base_url.netloc}{sign_upload(engine.secret, digest, time.time())}"
    if fleet := engine.config.fleet:
        url += f"&host={fleet.name}"
    return shapes.FileUpload(present=engine.build_files.mark_used(name_unchecked_archive(digest)), url=url)


@router.post("/dockerfiles", summary="Translate a Dockerfile to a recipe, without building anything")
async def translate_dockerfile(
    request: Request, body: requests.TranslateDockerfile, engine: EngineDep
) -> shapes.DockerfileShape:
    """Return which files of the context the Dockerfile copies. With their `digests`, also return the recipe.

    The client packs the files of each source into a tar archive, and uploads the archives that are missing.
    """
    dockerfile = await asyncio.to_thread(parse_dockerfile, body.dockerfile)
    await engine.host.check_recipe(Recipe(source=Source.IMAGE, image=dockerfile.image))
    ignore_patterns = await asyncio.to_thread(translate_ignore_file, body.ignore_file)
    is_stored = engine.build_files.has if get_plan_id(request.scope) else engine.build_files.mark_used
    missing_digests = [digest for digest in dict.fromkeys((body.digests or {}).values()) if not is_stored(digest)]
    commands = None
    if body.digests is not None or not dockerfile.sources:
        commands = dockerfile.compile(body.digests or {}, requests.MAX_SETUP_BYTES)
    return shapes.describe_dockerfile(
        dockerfile, ignore_patterns, commands, missing_digests, engine.build_files.max_archive_bytes
    )


def _declare_upload_parameters(
    _expires: Annotated[str, Query(alias="expires", description="Only in a signed URL.")] = "",
    _signature: Annotated[str, Query(alias="signature", description="Only in a signed URL.")] = "",
    _host: Annotated[str, Query(alias="host", description="In a fleet: the host that stores the archive.")] = "",
) -> None:
    """Declare the parameters that are read before a request reaches its route."""


@router.put(
    f"{UPLOAD_PREFIX}{{digest}}",
    status_code=204,
    dependencies=[Depends(_declare_upload_parameters)],
    summary="Upload the files of a build step, as a tar archive (E2B). Needs no key with a signed URL",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_file(request: Request, digest: Digest, engine: EngineDep) -> None:
    """Store the archive. Without a signed URL, its files must have this digest.

    A plan session does not read it, and predicts builds as if it were stored.
    """
    if get_plan_id(request.scope):
        engine.build_files.announce(digest)
        return
    length = request.headers.get("content-length", "")
    # Only E2B's client uses signed URLs.
    is_checked = not is_signed_upload(engine.secret, request.scope, time.time())
    announced_size = int(length) if length.isdigit() else None
    await engine.build_files.store(digest, read_file(request), announced_size, is_checked=is_checked)


def _refuse_in_plan(request: Request) -> None:
    if get_plan_id(request.scope):
        raise Unsupported("a plan session stores no files: upload files only outside it")


@router.get("/templates", response_model_exclude_unset=True, summary="List templates")
async def list_templates(
    response: Response,
    engine: EngineDep,
    limit: Limit = 100,
    next_token: Annotated[NextToken, Query(alias="nextToken")] = "",
    name: str = "",
) -> list[shapes.TemplateShape]:
    """List the templates that are ready or being built, and those whose build has failed since the gateway started."""
    guest_digest = await engine.templates.compute_guest_digest()
    ready_templates = engine.snapshots.list([SnapshotKind.TEMPLATE])
    ready_ids = {template.id for template in ready_templates}
    templates = [
        *(_describe_ready_template(engine, template, guest_digest) for template in ready_templates),
        *(
            shapes.describe_unready_template(build)
            for build in engine.templates.list_unready_builds()
            if build.template_id not in ready_ids
        ),
    ]
    name = remove_default_tag(name)
    matching_templates = [template for template in templates if not name or name in template.names]
    return paginate_list(
        matching_templates, lambda shape: (shape.created_at, shape.template_id), response, limit, next_token
    )


@router.get("/templates/{ref}", response_model_exclude_unset=True, summary="Show a template")
async def show(ref: Ref, engine: EngineDep) -> shapes.TemplateShape:
    guest_digest = await engine.templates.compute_guest_digest()
    try:
        template = _describe_ready_template(engine, engine.templates.get(ref), guest_digest)
    except NotFound:
        build = engine.templates.get_build(ref)
        if build.status == "ready":
            # The template was built, and has since been removed.
            raise
        template = shapes.describe_unready_template(build)
    return shapes.add_build(template)


@router.get("/templates/aliases/{ref}", summary="Find a template by name")
async def find_by_alias(ref: Ref, engine: EngineDep) -> shapes.AliasShape:
    return shapes.AliasShape(template_id=engine.templates.get(require_valid_template_name(ref)).id, public=False)


@router.put("/templates/{ref}/alias", response_model_exclude_unset=True, summary="Give a template an additional name")
async def set_alias(ref: Ref, body: requests.SetAlias, engine: EngineDep) -> shapes.TemplateShape:
    guest_digest = await engine.templates.compute_guest_digest()
    return _describe_ready_template(engine, await engine.templates.add_names(ref, [body.alias]), guest_digest)


@router.get("/templates/{ref}/tags", summary="List the tags of a template's name (E2B)")
async def list_tags(ref: Ref, engine: EngineDep) -> list[shapes.TagShape]:
    return [shapes.describe_tag(name, template) for name, template in engine.templates.list_tagged_names(ref)]


@router.get(
    "/templates/{ref}/builds/{build}/status", response_model_exclude_unset=True, summary="Show the status of a build"
)
async def show_build_status(
    ref: Ref,
    build: Ref,
    engine: EngineDep,
    offset: Annotated[int, Query(alias="logsOffset", ge=0, description="Skip this many lines")] = 0,
    limit: Annotated[int | None, Query(ge=0, le=100_000, description="Maximum number of lines")] = None,
    level: LogLevel = "debug",
) -> shapes.BuildShape:
    return shapes.describe_build(engine.templates.get_build(ref, build), level, offset, limit)


@router.get(
    "/templates/{ref}/builds/{build}/logs",
    summary="Show the log of a build",
    response_model=shapes.LogShape,
    responses={200: {"content": {"text/plain": {}}, "description": "With `follow`: lines of text as they are written"}},
)
async def show_build_log(
    ref: Ref,
    build: Ref,
    engine: EngineDep,
    follow: Annotated[bool, Query(description="Stream the log as text until the build finishes")] = False,
    level: LogLevel = "debug",
    direction: Annotated[
        Literal["forward", "backward"], Query(description="Whether the oldest or the newest line is the first")
    ] = "forward",
    cursor: Annotated[
        int | None,
        Query(ge=0, le=1 << 53, description="The time of the first line, in milliseconds since 1970 (UTC)"),
    ] = None,
    limit: Annotated[int | None, Query(ge=0, le=100_000, description="Maximum number of lines")] = None,
) -> Response:
    build_record = engine.templates.get_build(ref, build)
    if follow:
        if limit is not None or cursor is not None or direction == "backward" or level != "debug":
            raise Invalid("'follow' returns the whole log: omit 'limit', 'cursor', 'direction' and 'level'")
        return StreamingResponse(_stream_log_lines(build_record), media_type="text/plain; charset=utf-8")
    shape = shapes.describe_log(build_record, level, cursor, limit, is_backward=direction == "backward")
    return JSONResponse(jsonable_encoder(shape, by_alias=True))


@router.delete(
    "/templates/{ref}",
    status_code=204,
    summary="Remove a template, or hide a snapshot until its last user is removed",
    responses={202: {"model": shapes.HiddenShape, "description": "Hidden until its last user is removed"}},
)
async def delete(ref: Ref, engine: EngineDep, when: When = None) -> Response:
    """Remove a template or a snapshot. A snapshot in use is hidden until its last user is removed.

    E2B's and CubeSandbox's clients delete snapshots with this request, even while sandboxes made from them exist.
    """
    target = get_template_or_snapshot(engine, ref)
    return await remove(engine, target, when if target.kind is SnapshotKind.TEMPLATE else "unused")


def _describe_ready_template(engine: Engine, template: Snapshot, guest_digest: str) -> shapes.TemplateShape:
    return shapes.describe_template(
        template,
        build_id=engine.templates.get_build(template.id).build_id,
        is_outdated=is_outdated(template, guest_digest),
        forks=len(engine.references.find_users(template).blocking_sandboxes),
        prewarm=engine.prewarm.get_level(template),
        memory_problem=engine.host.find_memory_problem(template),
        **describe_host(engine.config),
    )


async def _stream_log_lines(build: Build) -> AsyncIterator[str]:
    async for line in build.follow():
        yield f"{line}\n"
