"""Read the requests of the published clients, with their fields, from the installed sources.

No request is sent, so fields that a new release adds are found even if no test uses them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cubesandbox
import e2b.api.client.models
import e2b.volume.client.models
import e2b_code_interpreter
import forkd

from tests.sdk.request_scanner import ClientRequest, Fields, RequestScanner, merge_requests

_FILE_REASON = "sends the content of a file"
_CHANGED_ADDRESS_REASON = "sends a request of another function to another address"
_UPLOAD_REASON = "sends a file to the URL that the gateway returned"
ALLOWED = {
    "cubesandbox/_filesystem.py:write": _FILE_REASON,
    "cubesandbox/_transport.py:handle_request": _CHANGED_ADDRESS_REASON,
    "e2b/retry.py:_copy_request": _CHANGED_ADDRESS_REASON,
    "e2b/sandbox_async/filesystem/filesystem.py:_upload_file": _FILE_REASON,
    "e2b/sandbox_async/filesystem/filesystem.py:write_files": _FILE_REASON,
    "e2b/sandbox_sync/filesystem/filesystem.py:write_files": _FILE_REASON,
    "e2b/template_async/build_api.py:upload_file": _UPLOAD_REASON,
    "e2b/template_sync/build_api.py:upload_file": _UPLOAD_REASON,
}
"""The functions with requests that the scanner cannot resolve, with the reasons."""


@cache
def list_e2b_requests() -> list[ClientRequest]:
    """Return the requests of the generated and of the handwritten modules, and those of the protocol envd."""
    # `pkgutil` does not find all of these modules, because some of their directories are not packages.
    module_names = [
        name.removesuffix(".py").replace("/", ".") for name, source in _read_sources(e2b) if _is_generated(name, source)
    ]
    modules = [importlib.import_module(name) for name in module_names]
    requests = [_parse_generated_request(module) for module in modules if hasattr(module, "_get_kwargs")]
    envd_requests = _list_envd_requests([module for module in modules if module.__name__.endswith("_pb")])
    return merge_requests([*requests, *envd_requests, *scan(e2b).requests])


@cache
def list_cubesandbox_requests() -> list[ClientRequest]:
    return scan(cubesandbox).requests


@cache
def list_code_interpreter_requests() -> list[ClientRequest]:
    return scan(e2b_code_interpreter).requests


@cache
def list_forkd_requests() -> list[ClientRequest]:
    return scan(forkd).requests


@cache
def scan(package: ModuleType) -> RequestScanner:
    """Scan the handwritten modules of a package."""
    sources = {name: source for name, source in _read_sources(package) if not _is_generated(name, source)}
    allowed = {name: why for name, why in ALLOWED.items() if name.startswith(f"{package.__name__}/")}
    return RequestScanner(sources, allowed)


def list_imported_libraries(package: ModuleType) -> set[str]:
    """Return the distributed packages that a client imports, and the modules of Python that send requests."""
    nodes = [node for _, source in _read_sources(package) for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    network_modules = names & {"ftplib", "http.client", "socket", "xmlrpc.client"}
    distributed_packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {package.__name__}
    return network_modules | distributed_packages


def _read_sources(package: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the name of each source file, relative to the directory of the package's directory, and its text."""
    directory = Path(inspect.getfile(package)).parent
    for path in sorted(directory.rglob("*.py")):
        yield str(path.relative_to(directory.parent)), path.read_text()


def _is_generated(name: str, source: str) -> bool:
    return "def _get_kwargs(" in source or name.endswith(("_connect.py", "_pb.py"))


def _list_envd_requests(modules: list[ModuleType]) -> Iterator[ClientRequest]:
    """Yield the calls of the generated services of the protocol envd."""
    for module in modules:
        for service in module.desc().services:
            for method in service.methods:
                yield ClientRequest("POST", f"/{service.type_name}/{method.name}", _find_message_fields(method.input))


def _find_message_fields(message: Any) -> Fields:
    fields: Fields = {}
    for each in message.fields:
        nested = getattr(each.value, "message", None)
        fields[each.json_name] = _find_message_fields(nested) if nested is not None else {}
    return fields


def _parse_generated_request(module: ModuleType) -> ClientRequest:
    """Return the request of a module that describes it in the function `_get_kwargs`."""
    function = ast.parse(inspect.getsource(module._get_kwargs)).body[0]
    assert isinstance(function, ast.FunctionDef)
    values = {
        key.value: value
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    } | dict(_find_assigned_keys(function, "_kwargs"))
    assert values.keys() <= {"method", "url", "params", "json", "content", "headers"}, (
        f"{module.__file__}:{function.lineno}: {sorted(values)} are not known"
    )
    method, url = (ast.unparse(values[key]) for key in ("method", "url"))
    route = re.sub(r"\{\w*\}", "{}", re.findall(r"""["'](/.*?)["']""", url)[0])
    query = {name for name, _ in _find_assigned_keys(function, "params")}
    fields: Fields = {}
    if "json" in values:
        (annotation,) = (ast.unparse(arg.annotation or arg) for arg in function.args.kwonlyargs if arg.arg == "body")
        fields = _find_model_fields(annotation)
        assert fields, f"{module.__file__}:{function.lineno}: the fields of {annotation} are not known"
    return ClientRequest(ast.literal_eval(method).upper(), route, fields, query)


@cache
def _find_model_fields(annotation: str) -> Fields:
    """Return the fields of the models that a type annotation names."""
    fields: Fields = {}
    for name in re.findall(r"\w+", annotation):
        models = (e2b.api.client.models, e2b.volume.client.models)
        model: Any = next((getattr(module, name) for module in models if hasattr(module, name)), None)
        if not hasattr(model, "from_dict"):
            continue
        annotations = {key: str(value) for key, value in vars(model)["__annotations__"].items()}
        for json_name in re.findall(r'd\.pop\(\s*"(\w+)"', inspect.getsource(model.from_dict)):
            fields[json_name] = _find_model_fields(annotations.get(_to_snake_case(json_name), ""))
    return fields


def _to_snake_case(name: str) -> str:
    return re.sub("(?<=[a-z])[A-Z]+", lambda match: f"_{match[0]}", name).lower()


def _find_assigned_keys(function: ast.AST, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (key, value) of each assignment such as `name["key"] = value`."""
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Subscript(ast.Name(target), ast.Constant(str(key)))], value) if target == name:
                yield key, value
