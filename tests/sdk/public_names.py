"""Find the public classes, functions and methods of a client's package, from the installed release."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True)
class PublicNames:
    """``methods``: functions, methods (`Class.method`) and classes without methods.

    ``asynchronous_methods``: those of the asynchronous class of each class, under the name of the other class.
    """

    methods: frozenset[str]
    asynchronous_methods: dict[str, frozenset[str]]


def find_public_names(package: ModuleType) -> PublicNames:
    """Return the names that a package exports, and those of the classes that are reachable from these.

    Classes that only contain data (exceptions, enumerations, and data classes without methods) are left out, and so are
    base classes, whose methods are listed with the classes that inherit them.
    """
    methods: set[str] = set()
    asynchronous_methods: dict[str, set[str]] = {}
    reachable = _list_reachable(package)
    classes = [exported for exported in reachable.values() if inspect.isclass(exported)]
    for title, exported in reachable.items():
        if inspect.isclass(exported) and any(exported in kind.__mro__[1:] for kind in classes):
            continue
        if inspect.isclass(exported):
            names = set(_list_methods(exported, package))
            if ".asynchronous." in title:
                asynchronous_methods.setdefault(title.removeprefix(".asynchronous."), set()).update(names)
            elif names:
                methods |= {f"{title}.{name}" for name in names}
            elif not _is_data(exported):
                methods.add(title)
        else:
            methods.add(title)
    for title in [*asynchronous_methods]:
        if not any(name.startswith(f"{title}.") for name in methods):
            methods |= {f"Async{title}.{name}" for name in asynchronous_methods.pop(title)}
    return PublicNames(frozenset(methods), {title: frozenset(names) for title, names in asynchronous_methods.items()})


def _list_reachable(package: ModuleType) -> dict[str, Any]:
    """Return {title: class or function}. The title of an asynchronous class begins with `.asynchronous.`."""
    public_names = [name for name in vars(package) if not name.startswith("_")]
    exported_names = dict.fromkeys([*getattr(package, "__all__", []), *public_names])
    pending = [(name, getattr(package, name)) for name in exported_names]
    reachable: dict[str, Any] = {}
    namespace = _merge_namespaces(package)
    while pending:
        title, exported = pending.pop(0)
        if not (inspect.isclass(exported) or inspect.isfunction(exported)) or exported in reachable.values():
            continue
        if _is_imported(exported, package):
            continue
        if inspect.isclass(exported) and "async" in exported.__module__:
            title = f".asynchronous.{title.removeprefix('Async')}"
        assert title not in reachable, f"two classes are called {title}"
        reachable[title] = exported
        if inspect.isclass(exported):
            pending += _list_related_classes(exported, namespace)
    return reachable


def _is_imported(exported: Any, package: ModuleType) -> bool:
    """Return whether another distribution, or Python itself, defines a class or function."""
    module = str(getattr(inspect.unwrap(exported), "__module__", None)).partition(".")[0]
    return module != package.__name__ and (
        module == "None" or module in sys.stdlib_module_names or module in _list_installed_modules()
    )


@functools.cache
def _list_installed_modules() -> frozenset[str]:
    return frozenset(importlib.metadata.packages_distributions())


def _is_data(kind: type) -> bool:
    return issubclass(kind, BaseException | enum.Enum | dict | str) or dataclasses.is_dataclass(kind)


def _list_methods(kind: type, package: ModuleType) -> Iterator[str]:
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_") and not inspect.isclass(member) and not _is_imported(member, package):
            yield name


def _merge_namespaces(package: ModuleType) -> dict[str, Any]:
    """Return the names of all modules, because annotations name classes that are imported for type checkers only."""
    namespace: dict[str, Any] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        namespace.update(vars(importlib.import_module(module.name)))
    return namespace


def _list_related_classes(kind: type, namespace: dict[str, Any]) -> Iterator[tuple[str, type]]:
    """Yield the classes that public methods and properties return, or that the constructor assigns to attributes."""
    for name, member in inspect.getmembers(kind):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not callable(function):
            continue
        function = inspect.unwrap(function)
        annotation = getattr(function, "__annotations__", {}).get("return")
        while isinstance(annotation, str):
            annotation = eval(annotation, {**namespace, **function.__globals__})
        for returned in _list_classes(annotation):
            yield returned.__name__, returned
    if inspect.isfunction(constructor := vars(kind).get("__init__")) and not dataclasses.is_dataclass(kind):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(constructor)))):
            match node:
                case ast.Assign([ast.Attribute(ast.Name("self"), name)], ast.Call(ast.Name(class_name))) if (
                    not name.startswith("_") and inspect.isclass(related := constructor.__globals__.get(class_name))
                ):
                    yield f"{kind.__name__}.{name}", related


def _list_classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation):
        yield annotation
    if isinstance(annotation, typing.ForwardRef):
        raise AssertionError(f"the annotation {annotation} is not resolved")
    for argument in typing.get_args(annotation):
        yield from _list_classes(argument)
