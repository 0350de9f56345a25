"""A contract for import-linter that lists the allowed imports of a package."""

from __future__ import annotations

import sys
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class ImportOnly(Contract):
    """A contract that restricts the imports of ``modules`` and their submodules.

    They may import only each other, the standard library and ``extra_modules``.
    """

    modules = fields.ListField(subfield=fields.StringField())
    extra_modules = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        roots: list[str] = list(self.modules)  # type: ignore[call-overload]
        allowed_modules = [*roots, *self.extra_modules]  # type: ignore[misc]
        violations = [
            (module, imported)
            for module in sorted(graph.modules)
            if _is_submodule(module, roots)
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if imported.partition(".")[0] not in sys.stdlib_module_names
            and not _is_submodule(imported, allowed_modules)
        ]
        return ContractCheck(kept=not violations, metadata={"violations": violations})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported in check.metadata["violations"]:
            output.print_error(f"{module} must not import {imported}", bold=False)


def _is_submodule(module: str, packages: list[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
