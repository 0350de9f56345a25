"""Tests for the import contract, which detects imports that a package must not use."""

from __future__ import annotations

import importlib
import re
import tomllib
from typing import Any

import pytest
from grimp import ImportGraph

from tests.lint.contracts import ImportOnly
from tests.support.session import REPOSITORY


def make_contract(**options: Any) -> ImportOnly:
    return ImportOnly("only", {}, {"modules": ["small"], **options})


@pytest.fixture
def graph() -> ImportGraph:
    graph = ImportGraph()
    for importer, imported in (("small.one", "small.two"), ("small.one", "json"), ("large", "httpx")):
        graph.add_import(importer=importer, imported=imported)
    return graph


def test_the_package_itself_and_the_standard_library_may_be_imported(graph: ImportGraph) -> None:
    assert make_contract().check(graph, verbose=False).kept


def test_other_imports_are_detected(graph: ImportGraph) -> None:
    graph.add_import(importer="small.two", imported="large.part")
    result = make_contract().check(graph, verbose=False)
    assert not result.kept
    assert result.metadata["violations"] == [("small.two", "large.part")]
    assert make_contract(extra_modules=["large"]).check(graph, verbose=False).kept
    assert not make_contract(extra_modules=["larg"]).check(graph, verbose=False).kept


def test_contract_ids_are_unique() -> None:
    data = tomllib.loads((REPOSITORY / "tests" / "lint" / "imports.toml").read_text())["tool"]["importlinter"]
    contract_ids = [each["id"] for each in data["contracts"]]
    assert len(contract_ids) == len(set(contract_ids)) >= 6


@pytest.mark.parametrize("kind", ["jail_zfs", "kvm_xfs"])
def test_the_docstring_of_a_host_kind_lists_the_layers(kind: str) -> None:
    data = tomllib.loads((REPOSITORY / "tests" / "lint" / "imports.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in data["contracts"] if each["id"] == kind]
    docstring = importlib.import_module(f"sandbox_gateway.hosts.{kind}").__doc__ or ""
    (layers,) = [block for block in re.split(r"\n\n", docstring) if block.startswith("    host\n")]
    assert layers.replace(", ", " | ").split() == " ".join(contract["layers"]).split()
    described = re.findall(r"^    (\w+)  +\S", docstring, re.MULTILINE) + re.findall(r"``(\w+)``", docstring)
    assert {*re.findall(r"\w+", " ".join(contract["layers"]))} <= {*described}


def test_the_docstring_of_the_fleet_lists_the_layers() -> None:
    data = tomllib.loads((REPOSITORY / "tests" / "lint" / "imports.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in data["contracts"] if each["id"] == "fleet"]
    docstring = importlib.import_module("sandbox_gateway.fleet").__doc__ or ""
    items = re.findall(r"^\* (.*?)(?=^\* |\Z)", docstring, re.MULTILINE | re.DOTALL)
    assert [sorted(re.findall(r"``(\w+)``", item)) for item in items] == [
        sorted(layer.split(" | ")) for layer in contract["layers"]
    ]
