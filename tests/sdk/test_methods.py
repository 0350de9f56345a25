"""Every public method of each client is tested or documented as missing; generates the tables of docs/.

``GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py`` writes the tables.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cubesandbox
import cubesandbox._commands
import cubesandbox._filesystem
import e2b
import e2b_code_interpreter
import forkd
import forkd.sandbox
import pytest
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem
from e2b.sandbox_sync.filesystem.watch_handle import WatchHandle
from e2b.sandbox_sync.git import Git
from e2b.sandbox_sync.paginator import SandboxPaginator, SnapshotPaginator

from tests.support.session import REPOSITORY

_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py"
_IMAGES = "templates are made from Debian's packages, a directory or a tarball: templates.md"


@dataclass(frozen=True)
class Client:
    """A client's classes, the tests that use them, and its missing methods with reasons."""

    page: str
    title: str
    classes: dict[str, type]
    tests: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    inherited: type | None = None


CLIENTS = (
    Client(
        "e2b",
        "e2b 2.63.0",
        {
            "Sandbox": e2b.Sandbox,
            "SandboxPaginator": SandboxPaginator,
            "SnapshotPaginator": SnapshotPaginator,
            "Commands": Commands,
            "CommandHandle": e2b.CommandHandle,
            "Filesystem": Filesystem,
            "WatchHandle": WatchHandle,
            "Pty": Pty,
            "Git": Git,
            "Volume": e2b.Volume,
            "Template": e2b.Template,
        },
        ("test_e2b", "test_e2b_inside"),
        {
            "Sandbox.get_metrics": "none are kept for each sandbox; `GET /sandboxes/{ref}/usage` is what it costs now",
            "Sandbox.get_mcp_token": "needs a template with `mcp-gateway`, which none here has",
            "Sandbox.get_mcp_url": "needs a template with `mcp-gateway`, which none here has",
            "Git.*": "not tested: these are commands, and need git in the template",
            "Volume.*": "others: no file calls on volumes; mount it, and use the files of a sandbox",
            "Template.*": f"others: {_IMAGES}",
        },
    ),
    Client(
        "e2b",
        "e2b-code-interpreter 2.11.5",
        {"Sandbox": e2b_code_interpreter.Sandbox},
        ("test_e2b_code_interpreter",),
        inherited=e2b.Sandbox,
    ),
    Client(
        "cubesandbox",
        "cubesandbox 0.7.3",
        {
            "Sandbox": cubesandbox.Sandbox,
            "Commands": cubesandbox._commands.Commands,
            "Filesystem": cubesandbox._filesystem.Filesystem,
            "Watcher": cubesandbox._filesystem.Watcher,
            "Pty": cubesandbox.Pty,
            "PtyHandle": cubesandbox.PtyHandle,
            "Volume": cubesandbox.Volume,
            "Template": cubesandbox.Template,
        },
        ("test_cubesandbox",),
        {
            "Sandbox.get_mcp_token": "needs a template with `mcp-gateway`, which none here has",
            "Sandbox.get_mcp_url": "needs a template with `mcp-gateway`, which none here has",
            **{f"Template.{name}": _IMAGES for name in ("build", "rebuild", "update")},
        },
    ),
    Client(
        "forkd",
        "forkd 0.5.3",
        {
            "Controller": forkd.Controller,
            "Sandbox": forkd.Sandbox,
            "Sandbox.commands": forkd.sandbox._CommandsProxy,
        },
        ("test_forkd",),
    ),
)


def public_methods(client: Client) -> list[str]:
    """``Class.method`` for all callables whose names do not start with an underscore."""
    return [
        f"{title}.{name}"
        for title, kind in client.classes.items()
        for name, _ in inspect.getmembers(kind, callable)
        if not name.startswith("_") and (client.inherited is None or name in vars(kind))
        if not inspect.isclass(getattr(kind, name))
    ]


def client_of(client: Client) -> Iterator[Callable[..., Any]]:
    for name in client.tests:
        module = importlib.import_module(f"tests.sdk.{name}")
        yield from (member for key, member in vars(module).items() if key.startswith("test_") and callable(member))


def coverage_of(client: Client) -> dict[str, list[tuple[str, bool]]]:
    """For each method, for each test of it: the differences, and whether it needs hosts that keep memory."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for test in client_of(client):
        marks = getattr(test, "pytestmark", [])
        memory = any("needs_memory" in mark.args for mark in marks)
        for method, note in getattr(test, "covers", {}).items():
            found.setdefault(method, []).append((note, memory))
    return found


def rows(client: Client) -> list[tuple[str, str, str, str]]:
    """Method, KVM/XFS, jail/ZFS, remarks."""
    found = []
    for method in sorted({*coverage_of(client), *client.missing}, key=_order(client)):
        if method in client.missing:
            found.append((method, "no", "no", client.missing[method]))
            continue
        about = coverage_of(client)[method]
        notes = "; ".join(dict.fromkeys(note for note, _ in about if note))
        found.append((method, "yes", "no" if all(memory for _, memory in about) else "yes", notes))
    return found


def _order(client: Client) -> Callable[[str], tuple[int, str]]:
    classes = list(client.classes)
    return lambda method: (
        next((place for place, title in enumerate(classes) if method.rpartition(".")[0] == title), len(classes)),
        method,
    )


def table(client: Client) -> str:
    lines = [f"### {client.title}", "", "| method | `kvm_xfs` | `jail_zfs` | |", "|---|---|---|---|"]
    lines += [f"| `{method}` | {kvm} | {jail} | {note} |" for method, kvm, jail, note in rows(client)]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_every_method_is_tested_or_documented_as_missing(client):
    there, said = coverage_of(client), client.missing
    assert not set(there) & set(said)
    known = {*there, *said}
    for method in public_methods(client):
        assert method in known or f"{method.partition('.')[0]}.*" in known, f"{method}: neither tested nor missing"
    real = {*public_methods(client), *client.classes, "AsyncSandbox", "VolumeMount"}
    assert {method for method in known if not method.endswith(".*")} <= real


@pytest.mark.parametrize("page", sorted({client.page for client in CLIENTS}))
def test_the_page_contains_the_tables(page):
    path = REPOSITORY / "docs" / f"{page}.md"
    text = path.read_text()
    begin, end = "<!-- methods: made by tests/sdk/test_methods.py -->", "<!-- end of methods -->"
    made = "\n\n".join(table(client) for client in CLIENTS if client.page == page)
    wanted = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{made}\n\n{end}", text, flags=re.DOTALL)
    assert begin in text
    if os.environ.get("GROVE_WRITE_DOCS"):
        path.write_text(wanted)
    assert path.read_text() == wanted, f"write it anew: {_COMMAND}"
