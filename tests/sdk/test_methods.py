"""Test that every public function and method of each client is tested, or listed with the reason why it is not.

``GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py`` writes the tables of methods to docs/.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cubesandbox
import e2b
import e2b_code_interpreter
import forkd
import pytest

from tests.sdk.public_names import find_public_names
from tests.support.session import REPOSITORY

_UPDATE_COMMAND = "GROVE_WRITE_DOCS=1 ./dev test tests/sdk/test_methods.py"
_MCP_REASON = "needs a template with `mcp-gateway`, which we do not provide"
_VOLUME_FILES_REASON = "refused: mount the volume in a sandbox instead"
_SECRETS_REASON = "there are no secrets: use `envVars`"
_RUN_COMMAND_REASON = "sent as a command, as `run_cmd` sends it"
_IMAGE_REASON = "sent as `from_image` with an image of Docker Hub"
_LOCAL_DATA_REASON = "reads or writes the data of the object"


@dataclass(frozen=True)
class Client:
    """A client's package, the tests that use it, and the methods that they do not use, each with a reason.

    ``missing``: methods that the gateway does not support. ``untested``: methods that build templates, which only
    `kvm_xfs` hosts do for this client. ``local``: methods that send no request. ``only_synchronous``: methods that the
    asynchronous classes do not have.
    """

    page: str
    package: ModuleType
    tests: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    local: dict[str, str] = field(default_factory=dict)
    only_synchronous: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name and the version of the installed distribution."""
        name = self.package.__name__.replace("_", "-")
        return f"{name} {importlib.metadata.version(name)}"


def _list_methods(title: str, names: str) -> list[str]:
    return [f"{title}.{name}" for name in names.split()]


CLIENTS = (
    Client(
        "e2b",
        e2b,
        ("test_e2b", "test_e2b_inside", "test_e2b_git"),
        {
            **dict.fromkeys(_list_methods("Sandbox", "get_mcp_token get_mcp_url"), _MCP_REASON),
            **dict.fromkeys(
                _list_methods("Volume", "exists make_dir read_file remove update_metadata write_file"),
                _VOLUME_FILES_REASON,
            ),
            **dict.fromkeys(_list_methods("Secret", "create destroy exists get_info list update"), _SECRETS_REASON),
            "Secret.fill": 'for the option `network["rules"]`, which is refused',
            "Secret.iam_token": "for the option `iam`, which is refused",
            "SecretPaginator.next_items": _SECRETS_REASON,
            "Template.from_aws_registry": "use `from_image` with the user name `AWS` and a password from AWS",
            "TemplateBuilder.add_mcp_server": "needs the template `mcp-gateway`, which we do not provide",
            **dict.fromkeys(
                _list_methods("TemplateBuilder", "beta_dev_container_prebuild beta_set_dev_container_start"),
                "needs the template `devcontainer`, which we do not provide",
            ),
        },
        {
            "Template.from_gcp_registry": "logs in with the key; not tested with Google's registries",
            **dict.fromkeys(
                _list_methods(
                    "Template",
                    "from_alpine_image from_arch_image from_base_image from_bun_image from_debian_image "
                    "from_fedora_image from_node_image from_python_image from_ubuntu_image",
                ),
                _IMAGE_REASON,
            ),
            **dict.fromkeys(
                _list_methods("TemplateBuilder", "apt_install bun_install git_clone npm_install pip_install"),
                _RUN_COMMAND_REASON,
            ),
        },
        {
            "E2B": "gives the other classes their configuration",
            "Template.skip_cache": "without effect: no step is cached",
            "TemplateBuilder.skip_cache": "without effect: no step is cached",
            **dict.fromkeys(_list_methods("Template", "to_dockerfile to_json"), "shows the steps"),
            "TemplateFinal": "a template after `set_start_cmd` or `set_ready_cmd`",
            "ReadyCmd.get_cmd": "returns a command for `set_start_cmd` or `set_ready_cmd`",
            **dict.fromkeys(
                ("wait_for_file", "wait_for_port", "wait_for_process", "wait_for_timeout", "wait_for_url"),
                "returns a command for `set_start_cmd` or `set_ready_cmd`",
            ),
            "default_build_logger": "prints the log of a build",
            "get_signature": "signs a URL; `download_url` and `upload_url` use it",
            **dict.fromkeys(
                (
                    *_list_methods("ApiClient", "get_async_httpx_client get_httpx_client set_async_httpx_client"),
                    *_list_methods("ApiClient", "set_httpx_client with_cookies with_headers with_timeout"),
                ),
                "configures the HTTP client of the other classes",
            ),
            **dict.fromkeys(
                (
                    *_list_methods("ConnectionConfig", "get_api_params get_host get_request_timeout"),
                    *_list_methods("ConnectionConfig", "get_sandbox_direct_url get_sandbox_url set_integration"),
                    *_list_methods("VolumeConnectionConfig", "get_api_params get_request_timeout"),
                ),
                "reads or sets the configuration of the other classes",
            ),
            "EntryInfo.from_dict": _LOCAL_DATA_REASON,
        },
        {"WatchHandle.get_new_events": "`AsyncSandbox.files.watch_dir` passes events to a callback"},
    ),
    Client(
        "e2b",
        e2b_code_interpreter,
        ("test_e2b_code_interpreter",),
        local={
            "E2B": "gives the other classes their configuration",
            **dict.fromkeys(
                ("Context.from_json", "Execution.to_json", "ExecutionError.to_json", "Logs.to_json", "Result.formats"),
                _LOCAL_DATA_REASON,
            ),
        },
    ),
    Client(
        "cubesandbox",
        cubesandbox,
        ("test_cubesandbox",),
        {
            **dict.fromkeys(_list_methods("Sandbox", "get_mcp_token get_mcp_url"), _MCP_REASON),
            "Template.update": "a template keeps its recipe: build a new one with the same name",
        },
        local={
            **dict.fromkeys(
                (
                    *_list_methods("Action", "to_wire"),
                    *_list_methods("Inject", "render to_wire"),
                    *_list_methods("Match", "to_wire"),
                    *_list_methods("Rule", "to_wire"),
                ),
                "for the option `rules`, which is refused",
            ),
            **dict.fromkeys(
                (
                    *_list_methods("Execution", "to_json"),
                    *_list_methods("ExecutionError", "to_dict to_json"),
                    *_list_methods("Logs", "to_dict to_json"),
                    *_list_methods("Result", "formats"),
                    *_list_methods("SandboxInfo", "from_dict get to_dict"),
                    *_list_methods("SnapshotInfo", "from_dict"),
                    *_list_methods("TemplateBuild", "from_dict"),
                    *_list_methods("TemplateInfo", "from_dict"),
                    *_list_methods("VolumeInfo", "from_dict"),
                ),
                _LOCAL_DATA_REASON,
            ),
        },
    ),
    Client("forkd", forkd, ("test_forkd",)),
)


find_names = functools.cache(find_public_names)


def list_tests_in(module: ModuleType) -> Iterator[Callable[..., Any]]:
    return (member for key, member in vars(module).items() if key.startswith("test_") and callable(member))


def find_coverage(client: Client) -> dict[str, list[tuple[str, bool]]]:
    """Return {method: [(note, whether the test needs snapshots with memory) for each of its tests]}."""
    coverage: dict[str, list[tuple[str, bool]]] = {}
    modules = [importlib.import_module(f"tests.sdk.{name}") for name in client.tests]
    for test in (test for module in modules for test in list_tests_in(module)):
        marks = getattr(test, "pytestmark", [])
        needs_memory = any("requires_memory" in mark.args for mark in marks)
        for method, note in getattr(test, "covers", {}).items():
            coverage.setdefault(method, []).append((note, needs_memory))
    return coverage


def list_table_rows(client: Client) -> list[tuple[str, str, str, str]]:
    """Return the table's rows: method, support on kvm_xfs, support on jail_zfs, remarks."""
    rows = [(method, "no", "no", reason) for method, reason in client.missing.items()]
    rows += [(method, "local", "local", reason) for method, reason in client.local.items()]
    rows += [(method, "untested", "no", reason) for method, reason in client.untested.items()]
    for method, coverage in find_coverage(client).items():
        remarks = "; ".join(dict.fromkeys(note for note, _ in coverage if note))
        rows.append((method, "yes", "no" if all(needs_memory for _, needs_memory in coverage) else "yes", remarks))
    return sorted(rows, key=lambda row: (row[1] == "local", row[0].rpartition(".")[0], row[0]))


def render_table(client: Client) -> str:
    lines = [f"### {client.title}", ""]
    if find_names(client.package).asynchronous_methods:
        exceptions = "; ".join(f"no `{method}`: {why}" for method, why in client.only_synchronous.items())
        lines += [
            "The asynchronous classes, such as `AsyncSandbox`, have the same methods"
            + (f" ({exceptions})" if exceptions else "")
            + ". Tests call some of them.",
            "",
        ]
    lines += ["| method | `kvm_xfs` | `jail_zfs` | |", "|---|---|---|---|"]
    lines += [f"| `{method}` | {kvm} | {jail} | {note} |" for method, kvm, jail, note in list_table_rows(client)]
    return "\n".join(lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package.__name__)
def test_every_method_is_tested_or_listed_with_a_reason(client: Client) -> None:
    groups = [find_coverage(client), client.missing, client.untested, client.local]
    listed_methods = set().union(*groups)
    assert len(listed_methods) == sum(map(len, groups)), "a method is in two lists"
    methods = find_names(client.package).methods
    assert sorted(methods - listed_methods) == [], "list these methods, or test them"
    known_names = methods | vars(client.package).keys()
    assert sorted(listed_methods - known_names) == [], "the client does not have these methods"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package.__name__)
def test_asynchronous_classes_have_the_same_methods(client: Client) -> None:
    names = find_names(client.package)
    titles = names.asynchronous_methods.keys()
    synchronous_methods = {method for method in names.methods if method.rpartition(".")[0] in titles}
    asynchronous_methods = {f"{title}.{name}" for title in titles for name in names.asynchronous_methods[title]}
    assert synchronous_methods - client.only_synchronous.keys() == asynchronous_methods


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.package.__name__)
def test_marked_tests_call_their_methods(client: Client) -> None:
    for name in client.tests:
        module = importlib.import_module(f"tests.sdk.{name}")
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
        called_names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        called_names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        for test in list_tests_in(module):
            for method in getattr(test, "covers", {}):
                assert method.rpartition(".")[2] in called_names, f"{module.__name__} does not call {method}"


def test_new_classes_methods_and_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent: ...

    class Helper:
        def run(self) -> None: ...

    def get_helper() -> Helper: ...

    get_helper.__annotations__["return"] = Helper
    monkeypatch.setattr(e2b, "Agent", Agent, raising=False)
    monkeypatch.setattr(e2b, "get_agent", lambda: None, raising=False)
    monkeypatch.setattr(e2b.Volume, "brand_new", lambda self: None, raising=False)
    monkeypatch.setattr(e2b.AsyncVolume, "other_new", lambda self: None, raising=False)
    monkeypatch.setattr(e2b.Template, "get_helper", get_helper, raising=False)
    old_names, new_names = find_names(e2b), find_public_names(e2b)
    assert new_names.methods - old_names.methods == {
        "Agent",
        "get_agent",
        "Volume.brand_new",
        "Template.get_helper",
        "Helper.run",
    }
    assert new_names.asynchronous_methods["Volume"] - old_names.asynchronous_methods["Volume"] == {"other_new"}


def test_shortcuts_of_the_template_builder_send_commands_and_images() -> None:
    for method, reason in CLIENTS[0].untested.items():
        name = method.rpartition(".")[2]
        if reason == _IMAGE_REASON:
            template = json.loads(e2b.Template.to_json(getattr(e2b.Template(), name)()))
            assert template["fromImage"] and template["steps"] == []
        elif reason == _RUN_COMMAND_REASON:
            builder = e2b.Template().from_image("image")
            template = json.loads(e2b.Template.to_json(getattr(builder, name)("argument")))
            assert {step["type"] for step in template["steps"]} == {"RUN"}, method


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
