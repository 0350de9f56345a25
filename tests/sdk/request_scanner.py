"""Find the HTTP requests in the source of a client, with their fields, without running it.

A request whose method, route or body is not found is a problem, because a new field could hide there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

_VERBS = frozenset({"get", "post", "put", "patch", "delete", "head", "options"})
_CALLS_WITH_METHOD = frozenset({"request", "stream", "build_request"})
_LOOKUP_VERBS = frozenset({"get", "delete", "head", "options"})
"""Methods that dictionaries and the client's own classes have, too."""
_HTTP_KEYWORDS = frozenset({"params", "json", "content", "data", "files", "headers"})
_HTTP_RECEIVER_PATTERN = re.compile(r"(session|client|api|http|requests|\bs)(\(\))?$", re.IGNORECASE)
_HTTP_MODULES = frozenset({"requests", "httpx", "urllib.request"})
_UNKNOWN = "{}"

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


def merge_fields(first: Fields, second: Fields) -> Fields:
    """Return the union of two objects' fields, at all depths."""
    return {name: merge_fields(first.get(name, {}), second.get(name, {})) for name in {**first, **second}}


def merge_requests(requests: Iterable[ClientRequest]) -> list[ClientRequest]:
    """Merge requests with the same method and route, and return them sorted."""
    requests_by_name: dict[str, ClientRequest] = {}
    for request in requests:
        merged_request = requests_by_name.setdefault(str(request), ClientRequest(request.method, request.route))
        merged_request.body = merge_fields(merged_request.body, request.body)
        merged_request.query |= request.query
    return sorted(requests_by_name.values(), key=lambda request: (request.route, request.method))


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(frozen=True, eq=False)
class _Function:
    """A function, or a module. ``nodes``: its nodes, without those of the functions in it."""

    file: str
    node: _Node
    parent: _Function | None
    nodes: list[ast.AST]

    @property
    def name(self) -> str:
        return "" if isinstance(self.node, ast.Module) else self.node.name

    @property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.Module):
            return []
        arguments = self.node.args
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    def takes_extra_keywords(self, name: str) -> bool:
        """Return whether ``name`` is the parameter for keywords that the caller invents."""
        return not isinstance(self.node, ast.Module) and getattr(self.node.args.kwarg, "arg", None) == name

    def list_returned_values(self) -> list[ast.expr]:
        return [node.value for node in self.nodes if isinstance(node, ast.Return) and node.value is not None]


@dataclass(frozen=True, eq=False)
class _Scope:
    """A function, with the values of its parameters if the caller is known."""

    function: _Function
    arguments: Mapping[str, tuple[ast.expr, _Scope]] = field(default_factory=dict)


_Entry = tuple[str, ast.expr, _Scope]


class _UnresolvedError(Exception):
    pass


class _CallerNeededError(Exception):
    """The result depends on a parameter of an internal function."""

    def __init__(self, scope: _Scope) -> None:
        super().__init__(scope)
        self.scope = scope


class RequestScanner:
    """The requests in a package's source.

    ``allowed`` are the functions (`file:name`) whose problems are not reported, with the reasons.
    """

    def __init__(self, sources: Mapping[str, str], allowed: Mapping[str, str] | None = None) -> None:
        self._allowed = dict(allowed or {})
        self._functions: list[_Function] = []
        for file, source in sources.items():
            self._add_function(file, ast.parse(source), None)
        self._visited: set[tuple[int, int]] = set()
        self._used_permissions: set[str] = set()
        self.problems: list[str] = []
        self.requests = merge_requests(self._find_requests())

    def _add_function(self, file: str, node: _Node, parent: _Function | None) -> None:
        function = _Function(file, node, parent, [])
        self._functions.append(function)
        pending: list[ast.AST] = list(node.body)
        while pending:
            child = pending.pop(0)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_function(file, child, function)
            else:
                function.nodes.append(child)
                pending = [*ast.iter_child_nodes(child), *pending]

    def _find_requests(self) -> Iterator[ClientRequest]:
        for function in self._functions:
            called = {node.func for node in function.nodes if isinstance(node, ast.Call)}
            for node in function.nodes:
                if not isinstance(node, ast.Call | ast.Attribute):
                    continue
                self._function, self._node = function, node
                try:
                    if isinstance(node, ast.Attribute):
                        if node not in called and _is_http_method(node):
                            raise _UnresolvedError(f"{ast.unparse(node)} is not called here")
                    elif self._is_request(node, _Scope(function)):
                        yield from self._resolve(node, _Scope(function))
                except _UnresolvedError as error:
                    self._report(error)
        for permission in sorted(self._allowed.keys() - self._used_permissions):
            self.problems.append(f"{permission}: there is no problem to permit")

    def _report(self, error: _UnresolvedError) -> None:
        permission = f"{self._function.file}:{self._function.name}"
        self._used_permissions.add(permission)
        if permission not in self._allowed:
            self.problems.append(f"{self._function.file}:{self._node.lineno}: {self._function.name}: {error}")

    def _is_request(self, call: ast.Call, scope: _Scope) -> bool:
        if isinstance(call.func, ast.Call) and ast.unparse(call.func.func) == "getattr":
            if _HTTP_RECEIVER_PATTERN.search(ast.unparse(call.func.args[0])):
                raise _UnresolvedError("the method is not constant")
            return False
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if name not in self._list_http_imports(scope.function.file):
                return False
        elif isinstance(call.func, ast.Attribute):
            name = call.func.attr
        else:
            return False
        if name == "urlopen":
            return not any(
                isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Request")
                for argument in call.args[:1]
                for value in (self._list_values(argument.id, scope.function) if isinstance(argument, ast.Name) else [])
            )
        if name not in _LOOKUP_VERBS or isinstance(call.func, ast.Name):
            return name in _VERBS | _CALLS_WITH_METHOD | {"Request"}
        if any(keyword.arg in _HTTP_KEYWORDS for keyword in call.keywords):
            return True
        if not call.args or (isinstance(call.args[0], ast.Constant) and "/" not in str(call.args[0].value)):
            return False
        if _HTTP_RECEIVER_PATTERN.search(ast.unparse(call.func.value)):
            return True
        try:
            return any("/" in text for text in self._find_texts(call.args[0], scope))
        except _CallerNeededError:
            return False

    def _list_http_imports(self, file: str) -> set[str]:
        return {
            alias.asname or alias.name
            for function in self._functions
            if function.file == file
            for node in function.nodes
            if isinstance(node, ast.ImportFrom) and node.module in _HTTP_MODULES
            for alias in node.names
        }

    def _resolve(self, call: ast.Call, scope: _Scope, depth: int = 0) -> Iterator[ClientRequest]:
        """Yield the requests of a call, once for each caller on which they depend."""
        try:
            self._visited.clear()
            requests = list(self._parse_request(call, scope))
        except _CallerNeededError as error:
            if depth == 5:
                raise _UnresolvedError("too many callers") from error
            for caller_scope in self._list_callers(error.scope.function):
                yield from self._resolve(call, _replace_scope(scope, error.scope, caller_scope), depth + 1)
        else:
            yield from requests

    def _parse_request(self, call: ast.Call, scope: _Scope) -> Iterator[ClientRequest]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        keywords: dict[str, list[tuple[ast.expr, _Scope]]] = {}
        for key, value, value_scope in self._list_keyword_entries(call.keywords, scope):
            keywords.setdefault(key, []).append((value, value_scope))
        arguments = list(call.args)
        if any(isinstance(argument, ast.Starred) for argument in arguments):
            raise _UnresolvedError("the arguments are not known")
        if name in _VERBS:
            methods = {name.upper()}
        else:
            methods = {"POST" if "data" in keywords else "GET"} if name in ("Request", "urlopen") else {_UNKNOWN}
            is_method_first = name in _CALLS_WITH_METHOD or (name == "Request" and "method" not in keywords)
            if "method" in keywords:
                methods = self._join_texts(keywords["method"])
            elif is_method_first and len(arguments) > (0 if "url" in keywords else 1):
                methods = self._find_texts(arguments.pop(0), scope)
        urls = self._join_texts(keywords["url"]) if "url" in keywords else self._find_texts(arguments.pop(0), scope)
        if arguments:
            raise _UnresolvedError("an argument has no name")
        unknown_methods = {method for method in methods if method.lower() not in _VERBS}
        if unknown_methods:
            raise _UnresolvedError("the method is not known")
        query: set[str] = set()
        body: Fields = {}
        for value, value_scope in keywords.get("params", []):
            query |= {key for key, _, _ in self._find_entries(value, value_scope)}
        for value, value_scope in keywords.get("json", []):
            body = merge_fields(body, self._collect_fields(self._find_entries(value, value_scope)))
        for keyword_name in ("content", "data", "files"):
            for value, value_scope in keywords.get(keyword_name, []):
                try:
                    body = merge_fields(body, self._find_encoded_fields(value, value_scope))
                except _UnresolvedError as error:
                    self._report(error)
        for method, url in product(methods, urls):
            route, url_query = _parse_url(url)
            yield ClientRequest(method.upper(), route, body, query | url_query)

    def _join_texts(self, values: list[tuple[ast.expr, _Scope]]) -> set[str]:
        return {text for value, scope in values for text in self._find_texts(value, scope)}

    def _list_callers(self, function: _Function) -> list[_Scope]:
        return [
            self._bind(function, call, _Scope(caller))
            for caller in self._functions
            for call in caller.nodes
            if isinstance(call, ast.Call) and _get_called_name(call) == function.name
        ]

    def _bind(self, function: _Function, call: ast.Call, caller_scope: _Scope) -> _Scope:
        """Return the scope of a function that ``call`` calls."""
        assert not isinstance(function.node, ast.Module)
        parameters = function.parameters
        arguments: dict[str, tuple[ast.expr, _Scope]] = {}
        all_arguments = function.node.args
        positional = [*all_arguments.posonlyargs, *all_arguments.args]
        defaults = dict(zip([each.arg for each in positional][::-1], all_arguments.defaults[::-1], strict=False)) | {
            parameter.arg: default
            for parameter, default in zip(all_arguments.kwonlyargs, all_arguments.kw_defaults, strict=True)
            if default is not None
        }
        for name, default in defaults.items():
            arguments[name] = (default, _Scope(self._get_module(function)))
        if parameters[:1] in (["self"], ["cls"]):
            parameters = parameters[1:]
        for name, value in zip(parameters, call.args, strict=False):
            arguments[name] = (value, caller_scope)
        for keyword in call.keywords:
            if keyword.arg:
                arguments[keyword.arg] = (keyword.value, caller_scope)
        return _Scope(function, arguments)

    def _get_module(self, function: _Function) -> _Function:
        while function.parent is not None:
            function = function.parent
        return function

    def _list_called(self, call: ast.Call) -> list[_Function]:
        name = _get_called_name(call)
        return [function for function in self._functions if name and function.name == name]

    def _enter(self, value: ast.AST, scope: _Scope) -> bool:
        """Return False if the value depends on itself, such as `params = clean(params)`."""
        key = (id(value), id(scope.function))
        if key in self._visited:
            return False
        self._visited.add(key)
        return True

    # Variables

    def _list_values(self, name: str, function: _Function) -> list[ast.expr]:
        """Return the values that are assigned to a variable in a function."""
        values: list[ast.expr] = []
        for node in function.nodes:
            match node:
                case ast.Assign(targets, value):
                    if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                        values.append(value)
                case (
                    ast.AnnAssign(ast.Name(target), value=ast.expr() as value)
                    | ast.NamedExpr(ast.Name(target), value)
                    | ast.AugAssign(ast.Name(target), value=value)
                ) if target == name:
                    values.append(value)
        return values

    def _look_up(self, name: str, scope: _Scope) -> list[tuple[ast.expr, _Scope]] | None:
        """Return the values of a variable. None: they are not known."""
        function: _Function | None = scope.function
        while function is not None:
            local_scope = scope if function is scope.function else _Scope(function)
            values = [(value, local_scope) for value in self._list_values(name, function)]
            if name in local_scope.arguments:
                return [local_scope.arguments[name], *values]
            if name in function.parameters:
                is_internal = function.name.startswith("_") and not function.name.startswith("__")
                if is_internal and not local_scope.arguments and self._list_callers(function):
                    raise _CallerNeededError(local_scope)
                return values or None
            if values:
                return values
            function = function.parent
        constants = [
            (value, _Scope(module))
            for module in self._functions
            if module.parent is None
            for value in self._list_values(name, module)
        ]
        return constants or None

    # Texts

    def _find_texts(self, value: ast.expr, scope: _Scope) -> set[str]:
        """Return the possible values of a text, with `{}` for each part that is not known."""
        match value:
            case ast.Constant(constant):
                return {str(constant)}
            case ast.JoinedStr(parts):
                return {"".join(texts) for texts in product(*(self._find_texts(part, scope) for part in parts))}
            case ast.FormattedValue(part) | ast.NamedExpr(value=part) | ast.Await(part):
                return self._find_texts(part, scope)
            case ast.BinOp(left, ast.Add(), right):
                return {a + b for a in self._find_texts(left, scope) for b in self._find_texts(right, scope)}
            case ast.IfExp(body=first, orelse=second):
                return self._find_texts(first, scope) | self._find_texts(second, scope)
            case ast.BoolOp(values=values):
                return {text for each in values for text in self._find_texts(each, scope)}
            case ast.Call(ast.Attribute(ast.Constant(str() as template), "format")):
                return {re.sub(r"\{\w*\}", _UNKNOWN, template)}
            case ast.Call() if _get_called_name(value) == "urlencode":
                return {"&".join(f"{key}={_UNKNOWN}" for key, _, _ in self._find_entries(value.args[0], scope))}
            case ast.Call() if _get_called_name(value) == "cast":
                return self._find_texts(value.args[1], scope)
            case ast.Call() if (_get_called_name(value) or "").startswith("_"):
                texts: set[str] = set()
                for function in self._list_called(value):
                    callee_scope = self._bind(function, value, scope)
                    for returned in function.list_returned_values():
                        texts |= self._find_texts(returned, callee_scope)
                return texts or {_UNKNOWN}
            case ast.Name(name) | ast.Attribute(attr=name):
                if isinstance(value, ast.Attribute) and not name.isupper():
                    return {_UNKNOWN}
                known_values = self._look_up(name, scope)
                if known_values is None or not self._enter(value, scope):
                    return {_UNKNOWN}
                return {text for each, each_scope in known_values for text in self._find_texts(each, each_scope)}
        return {_UNKNOWN}

    # Fields

    def _find_entries(self, value: ast.expr, scope: _Scope) -> list[_Entry]:
        """Return (key, value, scope of the value) of all fields that a dictionary may have."""
        match value:
            case ast.Constant(None):
                return []
            case ast.Dict(keys, values):
                entries: list[_Entry] = []
                for key, entry in zip(keys, values, strict=True):
                    if key is not None:
                        entries += self._make_entries(key, entry, scope)
                    else:
                        entries += self._find_entries(entry, scope)
                return entries
            case ast.IfExp(body=first, orelse=second) | ast.BinOp(first, ast.BitOr(), second):
                return self._find_entries(first, scope) + self._find_entries(second, scope)
            case ast.BoolOp(ast.Or(), values):
                return [entry for each in values for entry in self._find_entries(each, scope)]
            case ast.BoolOp(ast.And(), values):
                return self._find_entries(values[-1], scope)
            case ast.NamedExpr(value=inner) | ast.Await(inner):
                return self._find_entries(inner, scope)
            case ast.DictComp(
                ast.Name(key),
                _,
                [ast.comprehension(ast.Tuple([ast.Name(target), _]), ast.Call(ast.Attribute(inner, "items")))],
            ) if key == target:
                return self._find_entries(inner, scope)
            case ast.Call(ast.Attribute(_, "setdefault"), [_, inner]):
                return self._find_entries(inner, scope)
            case ast.Subscript(ast.Name() as inner, ast.Constant(key)):
                nested = [entry for entry in self._find_entries(inner, scope) if entry[0] == key]
                return [entry for _, each, each_scope in nested for entry in self._find_entries(each, each_scope)]
            case ast.Call(ast.Attribute(inner, "copy"), []):
                return self._find_entries(inner, scope)
            case ast.Call(ast.Name("dict"), arguments, keywords):
                entries = [entry for each in arguments for entry in self._find_entries(each, scope)]
                return entries + self._list_keyword_entries(keywords, scope)
            case ast.Call(args=arguments) if _get_called_name(value) in ("cast", "copy", "deepcopy"):
                return self._find_entries(arguments[-1], scope)
            case ast.Call() if functions := self._list_called(value):
                entries = []
                for function in functions:
                    if self._enter(value, _Scope(function)):
                        callee_scope = self._bind(function, value, scope)
                        for returned in function.list_returned_values():
                            entries += self._find_entries(returned, callee_scope)
                return entries
            case ast.Name(name):
                if scope.function.takes_extra_keywords(name) or not self._enter(value, scope):
                    return []
                known_values = self._look_up(name, scope)
                if known_values is None:
                    raise _UnresolvedError(f"the fields of {name} are not known")
                entries = []
                for each, each_scope in known_values:
                    try:
                        entries += self._find_entries(each, each_scope)
                    except _UnresolvedError:
                        # The response is often assigned to the variable that contained the body.
                        if each_scope.function is not self._function or each.lineno <= (self._node.end_lineno or 0):
                            raise
                return entries + self._find_changes(name, scope)
        raise _UnresolvedError(f"the fields of {ast.unparse(value)[:80]} are not known")

    def _make_entries(self, key: ast.expr, value: ast.expr, scope: _Scope) -> list[_Entry]:
        keys = self._find_texts(key, scope)
        if any(_UNKNOWN in text for text in keys):
            raise _UnresolvedError(f"the name of the field {ast.unparse(key)} is not known")
        return [(text, value, scope) for text in sorted(keys)]

    def _list_keyword_entries(self, keywords: list[ast.keyword], scope: _Scope) -> list[_Entry]:
        entries: list[_Entry] = []
        for keyword in keywords:
            entries += (
                [(keyword.arg, keyword.value, scope)] if keyword.arg else self._find_entries(keyword.value, scope)
            )
        return entries

    def _find_changes(self, name: str, scope: _Scope) -> list[_Entry]:
        """Return the entries that a function adds to the dictionary in a variable."""
        entries: list[_Entry] = []
        for node in scope.function.nodes:
            match node:
                case ast.Assign([ast.Subscript(ast.Name(target), key)], value) if target == name:
                    entries += self._make_entries(key, value, scope)
                case ast.Assign([ast.Subscript(ast.Subscript(ast.Name(target), key), inner_key)], value) if (
                    target == name
                ):
                    entries += self._make_entries(key, ast.Dict([inner_key], [value]), scope)
                case ast.Assign(
                    [ast.Subscript(ast.Call(ast.Attribute(ast.Name(target), "setdefault"), [key, _]), inner_key)], value
                ) if target == name:
                    entries += self._make_entries(key, ast.Dict([inner_key], [value]), scope)
                case ast.Assign(
                    [ast.Name() as alias],
                    ast.Subscript(ast.Name(target), key)
                    | ast.Call(ast.Attribute(ast.Name(target), "setdefault"), [key, *_]),
                ) if target == name:
                    entries += self._make_entries(key, alias, scope)
                case ast.AugAssign(ast.Subscript(ast.Name(target), key), ast.BitOr(), value) if target == name:
                    entries += self._make_entries(key, value, scope)
                case ast.Call(ast.Attribute(ast.Name(target), "update"), arguments, keywords) if target == name:
                    entries += [entry for each in arguments for entry in self._find_entries(each, scope)]
                    entries += self._list_keyword_entries(keywords, scope)
                case ast.Call(ast.Attribute(ast.Name(target), "setdefault"), [key, value]) if target == name:
                    entries += self._make_entries(key, value, scope)
                case ast.Call(ast.Attribute(ast.Subscript(ast.Name(target), key), "update"), [value]) if target == name:
                    entries += self._make_entries(key, value, scope)
                case ast.Call(
                    ast.Attribute(ast.Subscript(ast.Name(target), key), "setdefault"), [inner_key, value]
                ) if target == name:
                    entries += self._make_entries(key, ast.Dict([inner_key], [value]), scope)
                case ast.Call():
                    entries += self._find_changes_by_callee(node, name, scope)
        return entries

    def _find_changes_by_callee(self, call: ast.Call, name: str, scope: _Scope) -> list[_Entry]:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if not any(isinstance(value, ast.Name) and value.id == name for value in values):
            return []
        entries: list[_Entry] = []
        for function in self._list_called(call):
            if self._enter(call, _Scope(function)):
                callee_scope = self._bind(function, call, scope)
                for parameter, (value, _) in callee_scope.arguments.items():
                    if isinstance(value, ast.Name) and value.id == name:
                        entries += self._find_changes(parameter, callee_scope)
        return entries

    def _collect_fields(self, entries: Iterable[_Entry]) -> Fields:
        fields: Fields = {}
        for key, value, scope in entries:
            fields = merge_fields(fields, {key: self._find_fields(value, scope)})
        return fields

    def _find_fields(self, value: ast.expr, scope: _Scope) -> Fields:
        """Return the fields of a nested value, which need not be an object."""
        match value:
            case ast.List(items) | ast.Tuple(items):
                parts = [self._find_fields(item, scope) for item in items]
            case ast.ListComp(item):
                parts = [self._find_fields(item, scope)]
            case ast.Name(name):
                parts = [
                    self._find_fields(node.args[0], scope)
                    for node in scope.function.nodes
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.append"
                ]
                for each, each_scope in self._look_up(name, scope) or []:
                    if isinstance(each, ast.List | ast.Tuple | ast.ListComp | ast.Name):
                        parts.append(self._find_fields(each, each_scope) if self._enter(each, each_scope) else {})
                parts.append(self._find_object_fields(value, scope))
            case ast.Call() if functions := self._list_called(value):
                parts = [
                    self._find_fields(returned, self._bind(function, value, scope))
                    for function in functions
                    if self._enter(value, _Scope(function))
                    for returned in function.list_returned_values()
                ]
            case _:
                parts = [self._find_object_fields(value, scope)]
        fields: Fields = {}
        for part in parts:
            fields = merge_fields(fields, part)
        return fields

    def _find_object_fields(self, value: ast.expr, scope: _Scope) -> Fields:
        try:
            return self._collect_fields(self._find_entries(value, scope))
        except _UnresolvedError:
            return {}

    def _find_encoded_fields(self, value: ast.expr, scope: _Scope) -> Fields:
        """Return the fields of the object that `json.dumps` encodes somewhere in ``value``."""
        calls = [node for node in ast.walk(value) if isinstance(node, ast.Call) and _get_called_name(node) == "dumps"]
        if calls:
            return self._collect_fields(entry for call in calls for entry in self._find_entries(call.args[0], scope))
        fields: Fields = {}
        has_values = False
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and self._enter(node, scope):
                for each, each_scope in self._look_up(node.id, scope) or []:
                    if not (isinstance(each, ast.Constant) and each.value is None):
                        fields = merge_fields(fields, self._find_encoded_fields(each, each_scope))
                    has_values = True
        if not has_values:
            raise _UnresolvedError("the body is not known")
        return fields


def _is_http_method(node: ast.Attribute) -> bool:
    is_method = node.attr in _VERBS | {"request", "build_request"}
    return is_method and bool(_HTTP_RECEIVER_PATTERN.search(ast.unparse(node.value)))


def _get_called_name(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return None


def _replace_scope(scope: _Scope, old: _Scope, new: _Scope) -> _Scope:
    if scope is old:
        return new
    arguments = {name: (value, _replace_scope(each, old, new)) for name, (value, each) in scope.arguments.items()}
    return replace(scope, arguments=arguments)


def _parse_url(url: str) -> tuple[str, set[str]]:
    """Return the route and the names of the query parameters."""
    path, _, query_text = re.sub(r"^https?://", "", url).partition("?")
    route = re.sub(r"^[^/]*", "", path)
    parts = route.split("/")[1:]
    if not any(part and part != _UNKNOWN for part in parts):
        raise _UnresolvedError("the route is not known")
    if any(_UNKNOWN in part and part != _UNKNOWN for part in parts):
        raise _UnresolvedError("a part of the route is not known")
    query = {pair.partition("=")[0] for pair in query_text.split("&") if pair}
    if any(_UNKNOWN in name for name in query):
        raise _UnresolvedError("the query parameters are not known")
    return route, query
