"""Commands that only show information. `quick` and `app` call them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from sandbox_gateway.cli import formats, render
from sandbox_gateway.cli.client import build_path
from sandbox_gateway.cli.settings import Settings


def list_sandboxes(
    settings: Settings, *, state: str = "", template: str = "", snapshot: str = "", metadata: Sequence[str] = ()
) -> None:
    metadata_query = urlencode(formats.parse_pairs(metadata, "metadata"))
    sandboxes = settings.client.get_all(
        "/sandboxes", state=state, template=template, snapshotID=snapshot, metadata=metadata_query
    )
    render.print_json(sandboxes) if settings.json else render.print_sandboxes(sandboxes)


def list_snapshots(settings: Settings, *, sandbox: str = "", template: str = "") -> None:
    snapshots = settings.client.get_all("/snapshots", sandboxID=sandbox, templateID=template)
    render.print_json(snapshots) if settings.json else render.print_snapshots(snapshots)


def list_templates(settings: Settings) -> None:
    templates = settings.client.get_all("/templates")
    render.print_json(templates) if settings.json else render.print_templates(templates)


def list_volumes(settings: Settings) -> None:
    volumes = settings.client.get_all("/volumes")
    render.print_json(volumes) if settings.json else render.print_volumes(volumes)


def list_hosts(settings: Settings) -> None:
    hosts = settings.client.get("/fleet")["hosts"]
    render.print_json(hosts) if settings.json else render.print_hosts(hosts)


def show_sandbox(settings: Settings, sandbox: str) -> None:
    _show(settings, "sandboxes", sandbox)


def show_snapshot(settings: Settings, snapshot: str) -> None:
    _show(settings, "snapshots", snapshot)


def show_template(settings: Settings, template: str) -> None:
    _show(settings, "templates", template)


def show_volume(settings: Settings, volume: str) -> None:
    _show(settings, "volumes", volume)


def _show(settings: Settings, collection: str, ref: str) -> None:
    details = settings.client.get(build_path(collection, ref))
    render.print_json(details) if settings.json else render.print_details(details)


def show_usage(settings: Settings, sandbox: str) -> None:
    usage = settings.client.get(build_path("sandboxes", sandbox, "usage"))
    if settings.json:
        render.print_json(usage)
    else:
        print(f"disk {formats.format_size(usage['diskBytes'])}, memory {formats.format_size(usage['memoryBytes'])}")


def show_health(settings: Settings) -> None:
    health = settings.client.get("/health")
    if settings.json:
        render.print_json(health)
        return
    print(f"{health['status']}: {health['backend']}, version {health['version']}, {health['sandboxes']} sandboxes")
    if room := health.get("room"):
        for resource in ("disk", "memory"):
            free, total, promised = (
                formats.format_size(room[f"{resource}{kind}Bytes"]) for kind in ("Free", "Total", "Promised")
            )
            print(f"{resource}: {free} of {total} free, {promised} promised to sandboxes")
        if root := room.get("memoryRoot"):
            free, total = formats.format_size(root["freeBytes"]), formats.format_size(root["totalBytes"])
            print(f"memory root {root['path']}: " + (root["problem"] or f"{free} of {total} free"))
        if stalled_ids := room["stalled"]:
            print(f"stopped, because the disk has no space left: {', '.join(stalled_ids)}")
    for each in health.get("slowCommands", []):
        state = "stuck in the kernel" if each["wasKilled"] else "running"
        print(f"has been {state} since {each['since']}: {each['command']} {each['dataset']}")
