"""Read the requests of the published clients, with their fields, from the installed sources.

No request is sent, so fields that a new release adds are found even if no test uses them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import cubesandbox
import e2b.api.client.api
import e2b.api.client.models
import e2b_code_interpreter
import forkd

_METHODS = frozenset({"get", "post", "put", "patch", "delete"})
Fields = dict[str, "Fields"]
"""The fields of a JSON object, each with the fields of the object (or of the list of objects) that it contains."""


@dataclass
class ClientRequest:
    """A request that a client can send. ``route`` is the path, with `{}` for each parameter."""

    method: str
    route: str
    body: Fields = field(default_factory=dict)
    query: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.method} {self.route}"


def list_e2b_requests() -> list[ClientRequest]:
    """Return the requests of the generated API client in the `e2b` package."""
    package = e2b.api.client.api
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    return _merge([_parse_e2b_request(module) for module in modules if hasattr(module, "_get_kwargs")])


def list_cubesandbox_requests() -> list[ClientRequest]:
    return _merge(_Source(cubesandbox).find_requests("api_url"))


def list_code_interpreter_requests() -> list[ClientRequest]:
    return _merge(_Source(e2b_code_interpreter).find_requests("_jupyter_url"))


def list_forkd_requests() -> list[ClientRequest]:
    return _merge(_Source(forkd).find_forkd_requests())


def _merge(requests: list[ClientRequest]) -> list[ClientRequest]:
    """Merge requests with the same method and route, and return them sorted."""
    requests_by_name: dict[str, ClientRequest] = {}
    for request in requests:
        merged_request = requests_by_name.setdefault(str(request), ClientRequest(request.method, request.route))
        merged_request.body |= request.body
        merged_request.query |= request.query
    return sorted(requests_by_name.values(), key=lambda request: (request.route, request.method))


def _parse_e2b_request(module: ModuleType) -> ClientRequest:
    function = ast.parse(inspect.getsource(module._get_kwargs)).body[0]
    assert isinstance(function, ast.FunctionDef)
    request_parts = {
        key.value: _parse_route(value, "") or ""
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    }
    query = {name for name, _ in _find_assigned_keys(function, "params")}
    body_annotation = next((arg.annotation for arg in function.args.kwonlyargs if arg.arg == "body"), None)
    fields = _find_e2b_fields(ast.unparse(body_annotation)) if body_annotation else {}
    return ClientRequest(request_parts["method"].upper(), request_parts["url"], fields, query)


def _find_constant(value: ast.expr) -> str:
    return next((str(node.value) for node in ast.walk(value) if isinstance(node, ast.Constant)), "")


@cache
def _find_e2b_fields(annotation: str) -> Fields:
    """Return the fields of the models that a type annotation names."""
    fields: Fields = {}
    for name in re.findall(r"\w+", annotation):
        model = getattr(e2b.api.client.models, name, None)
        if not hasattr(model, "from_dict"):
            continue
        annotations = {key: str(value) for key, value in vars(model)["__annotations__"].items()}
        for json_name in re.findall(r'd\.pop\(\s*"(\w+)"', inspect.getsource(model.from_dict)):
            fields[json_name] = _find_e2b_fields(annotations.get(_to_snake_case(json_name), ""))
    return fields


def _to_snake_case(name: str) -> str:
    return re.sub("(?<=[a-z])[A-Z]+", lambda match: f"_{match[0]}", name).lower()


class _Source:
    """The functions in the source of a handwritten client."""

    def __init__(self, package: ModuleType) -> None:
        modules = [
            importlib.import_module(module.name)
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        ]
        trees = [ast.parse(inspect.getsource(module)) for module in modules]
        self._functions = [
            node
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        self._by_name = {function.name: function for function in self._functions}

    def find_requests(self, base: str) -> Iterator[ClientRequest]:
        """Yield a request for each call such as `session.post(f"{config.api_url}/volumes", json=...)`."""
        for function in self._functions:
            for call in _find_calls(function):
                if not (isinstance(call.func, ast.Attribute) and call.args):
                    continue
                method, arguments = call.func.attr, call.args
                if method == "stream":
                    method, *arguments = _find_constant(call.args[0]).lower(), *call.args[1:]
                route = _parse_route(arguments[0], base) if method in _METHODS else None
                if route is None:
                    continue
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                body, query = (self._find_fields(keywords.get(name), function) for name in ("json", "params"))
                yield ClientRequest(method.upper(), route, body, set(query))

    def find_forkd_requests(self) -> Iterator[ClientRequest]:
        """Yield a request for each call such as `self._request("POST", "/v1/sandboxes", body)`."""
        for function in self._functions:
            for call in _find_calls(function):
                if isinstance(call.func, ast.Attribute) and call.func.attr == "_request":
                    route = _parse_route(call.args[1], "")
                    assert route is not None
                    yield ClientRequest(
                        _find_constant(call.args[0]),
                        route,
                        self._find_fields(call.args[2] if call.args[2:] else None, function),
                    )

    def _find_fields(self, value: ast.expr | None, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Fields:
        """Return the fields that an object may have. ``value`` is the expression for the object in ``function``."""
        fields: Fields = {}
        if isinstance(value, ast.Dict):
            for key, entry in zip(value.keys, value.values, strict=True):
                if key is None:
                    fields |= self._find_fields(entry, function)
                else:
                    fields[_find_constant(key)] = self._find_fields(entry, function)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self._by_name:
            callee = self._by_name[value.func.id]
            for node in ast.walk(callee):
                if isinstance(node, ast.Return):
                    fields |= self._find_fields(node.value, callee)
        elif isinstance(value, ast.Name):
            for assigned_value in _find_assigned_values(function, value.id):
                fields |= self._find_fields(assigned_value, function)
            for name, assigned_value in _find_assigned_keys(function, value.id):
                fields[name] = self._find_fields(assigned_value, function)
        return fields


def _find_calls(function: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Call))


def _parse_route(url: ast.expr, base: str) -> str | None:
    """Return the route of a URL written as `f"{....base}/path/{id}"`, or as a plain path if ``base`` is empty."""
    if isinstance(url, ast.Call) and isinstance(url.func, ast.Attribute) and url.func.attr == "format":
        return re.sub(r"\{\w+\}", "{}", _find_constant(url.func.value))
    parts = url.values if isinstance(url, ast.JoinedStr) else [url]
    texts = [part.value if isinstance(part, ast.Constant) else "{}" for part in parts]
    if not base:
        return "".join(map(str, texts))
    if not (isinstance(parts[0], ast.FormattedValue) and ast.unparse(parts[0].value).endswith(base)):
        return None
    return "".join(map(str, texts[1:]))


def _find_assigned_values(function: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield the values that are assigned to a variable, or appended to it."""
    for node in ast.walk(function):
        targets: list[Any] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.append":
            yield node.args[0]


def _find_assigned_keys(function: ast.AST, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (key, value) of each assignment such as `name["key"] = value`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and target.value.id == name:
                yield _find_constant(target.slice), node.value
