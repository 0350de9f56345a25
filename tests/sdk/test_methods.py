"""Test that every public method of each client is tested or documented as missing.

``GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py`` writes the tables of methods to docs/.
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

_UPDATE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py"
_UNTESTED_REASON = "not tested; they choose an image of Docker Hub, or send nothing to the gateway"


@dataclass(frozen=True)
class Client:
    """A client's classes, the tests that use them, and the methods that are missing, each with a reason."""

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
        ("test_e2b", "test_e2b_inside", "test_e2b_git"),
        {
            "Sandbox.get_mcp_token": "needs a template with `mcp-gateway`, which we do not provide",
            "Sandbox.get_mcp_url": "needs a template with `mcp-gateway`, which we do not provide",
            "Volume.*": "all others: no file calls on volumes; mount the volume in a sandbox instead",
            "Template.from_aws_registry": "use `from_image` with the user name `AWS` and a password from AWS",
            "Template.from_gcp_registry": "logs in with the key; not tested with Google's registries",
            "Template.*": f"all others: {_UNTESTED_REASON}",
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
            "Sandbox.get_mcp_token": "needs a template with `mcp-gateway`, which we do not provide",
            "Sandbox.get_mcp_url": "needs a template with `mcp-gateway`, which we do not provide",
            "Template.update": "a template keeps its recipe: build a new one with the same name",
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


def list_public_methods(client: Client) -> list[str]:
    """Return all public methods of the client as ``Class.method``."""
    return [
        f"{title}.{name}"
        for title, kind in client.classes.items()
        for name, _ in inspect.getmembers(kind, callable)
        if not name.startswith("_") and (client.inherited is None or name in vars(kind))
        if not inspect.isclass(getattr(kind, name))
    ]


def list_tests(client: Client) -> Iterator[Callable[..., Any]]:
    for name in client.tests:
        module = importlib.import_module(f"tests.sdk.{name}")
        yield from (member for key, member in vars(module).items() if key.startswith("test_") and callable(member))


def find_coverage(client: Client) -> dict[str, list[tuple[str, bool]]]:
    """Return {method: [(note, whether the test needs snapshots with memory) for each of its tests]}."""
    coverage: dict[str, list[tuple[str, bool]]] = {}
    for test in list_tests(client):
        marks = getattr(test, "pytestmark", [])
        needs_memory = any("requires_memory" in mark.args for mark in marks)
        for method, note in getattr(test, "covers", {}).items():
            coverage.setdefault(method, []).append((note, needs_memory))
    return coverage


def list_table_rows(client: Client) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: method, support on kvm_xfs, support on jail_zfs, remarks."""
    rows = []
    for method in sorted({*find_coverage(client), *client.missing}, key=_sort_key(client)):
        if method in client.missing:
            rows.append((method, "no", "no", client.missing[method]))
            continue
        coverage = find_coverage(client)[method]
        remarks = "; ".join(dict.fromkeys(note for note, _ in coverage if note))
        rows.append((method, "yes", "no" if all(needs_memory for _, needs_memory in coverage) else "yes", remarks))
    return rows


def _sort_key(client: Client) -> Callable[[str], tuple[int, str]]:
    titles = list(client.classes)
    return lambda method: (
        next((position for position, title in enumerate(titles) if method.rpartition(".")[0] == title), len(titles)),
        method,
    )


def render_table(client: Client) -> str:
    lines = [f"### {client.title}", "", "| method | `kvm_xfs` | `jail_zfs` | |", "|---|---|---|---|"]
    lines += [f"| `{method}` | {kvm} | {jail} | {note} |" for method, kvm, jail, note in list_table_rows(client)]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.title)
def test_every_method_is_tested_or_documented_as_missing(client):
    tested_methods, missing_methods = find_coverage(client), client.missing
    assert not set(tested_methods) & set(missing_methods)
    listed_methods = {*tested_methods, *missing_methods}
    for method in list_public_methods(client):
        assert method in listed_methods or f"{method.partition('.')[0]}.*" in listed_methods, (
            f"{method}: neither tested nor documented as missing"
        )
    existing_names = {*list_public_methods(client), *client.classes, "AsyncSandbox", "AsyncTemplate", "VolumeMount"}
    assert {method for method in listed_methods if not method.endswith(".*")} <= existing_names


@pytest.mark.parametrize("page", sorted({client.page for client in CLIENTS}))
def test_the_page_contains_the_generated_tables(page):
    path = REPOSITORY / "docs" / f"{page}.md"
    text = path.read_text()
    start_marker, end_marker = "<!-- methods: made by tests/sdk/test_methods.py -->", "<!-- end of methods -->"
    tables_text = "\n\n".join(render_table(client) for client in CLIENTS if client.page == page)
    expected_text = re.sub(
        f"{start_marker}.*{end_marker}",
        lambda _: f"{start_marker}\n\n{tables_text}\n\n{end_marker}",
        text,
        flags=re.DOTALL,
    )
    assert start_marker in text
    if os.environ.get("GROVE_WRITE_DOCS"):
        path.write_text(expected_text)
    assert path.read_text() == expected_text, f"generate the page again: {_UPDATE_COMMAND}"
