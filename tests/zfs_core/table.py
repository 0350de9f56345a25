"""Write the results of OpenZFS's own tests of libzfs_core into docs/zfs_core.md.

    python -m tests.zfs_core.table OPENZFS.json ZFS_FUSE.json

``python -m tests.zfs_core.conformance`` writes the two files.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zfs_core

from tests.support.session import REPOSITORY
from tests.zfs_core.differences import DIFFERENCES, HANGING_TESTS

PAGE = REPOSITORY / "docs/zfs_core.md"
_SECTIONS = {"openzfs": "OpenZFS", "zfs-fuse": "zfs-fuse"}
_GOOD_OUTCOMES = ("passed", "expected failure")
_EXCEPTIONS = {
    "expected failure": "the suite expects it to fail",
    "not supported": "not supported",
    "skipped": "skipped",
}

_Groups = dict[str, dict[str, list[str]]]
"""``{reason: {test: kinds of ZFS}}``"""


def main(argv: Sequence[str]) -> None:
    reports = [json.loads(Path(name).read_text()) for name in argv]
    text = PAGE.read_text()
    text = replace_section(text, "results", format_results(reports))
    text = replace_section(text, "functions", format_functions(reports))
    text = replace_section(text, "exceptions", format_exceptions(reports))
    text = replace_section(text, "differences", format_differences())
    PAGE.write_text(text)


def replace_section(text: str, name: str, content: str) -> str:
    """Replace the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no section {name}")
    return pattern.sub(lambda match: f"{match[1]}{content}{match[2]}", text)


def list_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of libzfs_core, without aliases."""
    functions = {name: getattr(zfs_core, name) for name in zfs_core.__all__}
    return {
        name: function
        for name, function in functions.items()
        if name == getattr(function, "__name__", None) and (name.startswith("lzc_") or name == "receive_header")
    }


def find_command(function: Callable[..., Any]) -> str:
    """Return the command that the function's docstring names, or an empty text."""
    match = re.search(r"Command:\s+(``.+)$", inspect.getdoc(function) or "", re.DOTALL)
    return " ".join(match[1].split()).removesuffix(".").replace("``", "`") if match else ""


def format_results(reports: Sequence[Mapping[str, Any]]) -> str:
    outcomes = ("passed", "expected failure", "failed", "not supported", "skipped")
    titles = ("passed", "failed as the tests expect", "failed", "not supported", "skipped")
    lines = [f"| ZFS | {' | '.join(titles)} | tests |", "|---" * (len(titles) + 2) + "|"]
    for report in reports:
        counts = Counter(test["outcome"] for test in report["tests"].values())
        counts["failed"] += counts.pop("unexpected success", 0) + counts.pop("error", 0)
        cells = [f"{_SECTIONS[report['zfs']]} {report['version']}", *(str(counts[name]) for name in outcomes)]
        lines.append(f"| {' | '.join([*cells, str(counts.total())])} |")
    return "\n".join(lines) + "\n"


def format_functions(reports: Sequence[Mapping[str, Any]]) -> str:
    titles = [f"{_SECTIONS[report['zfs']]} {report['version']}" for report in reports]
    lines = [f"| function | command | {' | '.join(titles)} |", "|---" * (2 + len(titles)) + "|"]
    for name, function in sorted(list_functions().items()):
        has_tests = any(name in _find_tested_functions(test) for report in reports for test in report["tests"].values())
        cells = [_count_passed(report, name, "not run" if has_tests else "no test") for report in reports]
        lines.append(f"| `{name}` | {find_command(function) or '-'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _find_tested_functions(test: Mapping[str, Any]) -> set[str]:
    """Return the functions that a test calls, under their own names instead of aliases."""
    return {getattr(getattr(zfs_core, name, None), "__name__", name) for name in test["functions"]}


def _count_passed(report: Mapping[str, Any], function: str, default: str) -> str:
    outcomes = [test["outcome"] for test in report["tests"].values() if function in _find_tested_functions(test)]
    run_outcomes = [outcome for outcome in outcomes if outcome != "skipped"]
    if not run_outcomes or set(run_outcomes) == {"not supported"}:
        return "not supported" if run_outcomes else "skipped" if outcomes else default
    return f"{sum(outcome in _GOOD_OUTCOMES for outcome in run_outcomes)} of {len(run_outcomes)}"


def format_exceptions(reports: Sequence[Mapping[str, Any]]) -> str:
    """Format the tests that neither passed nor failed, by reason."""
    groups: _Groups = {}
    for report in reports:
        for test, result in sorted(report["tests"].items()):
            if result["outcome"] in _EXCEPTIONS and test not in HANGING_TESTS:
                reason = f"{_EXCEPTIONS[result['outcome']]}: {_shorten_reason(result['reason'])}"
                groups.setdefault(reason, {}).setdefault(test, []).append(_SECTIONS[report["zfs"]])
    return _format_groups(dict(sorted(groups.items())))


def _shorten_reason(reason: str) -> str:
    """Remove the parts that differ between tests with the same reason: the line, the function and names of pools."""
    reason = re.sub(r" \(line \d+\)$", "", reason.removeprefix("NotImplementedError: "))
    reason = re.sub(r"^lzc_\w+: ", "", reason)
    return re.sub(r"'pool\.[^'/@]*", "'pool", reason).replace("|", "\\|")


def format_differences() -> str:
    groups: _Groups = {}
    for kind, differences in DIFFERENCES.items():
        for test, reason in differences.items():
            groups.setdefault(reason, {}).setdefault(test, []).append(_SECTIONS[kind])
    for test, reason in HANGING_TESTS.items():
        groups.setdefault(f"is not run: {reason}", {})[test] = [_SECTIONS["zfs-fuse"]]
    return _format_groups(groups)


def _format_groups(groups: _Groups) -> str:
    lines = ["| tests | ZFS | reason |", "|---|---|---|"]
    for reason, tests in groups.items():
        kinds = sorted({kind for test_kinds in tests.values() for kind in test_kinds})
        lines.append(f"| {', '.join(f'`{test}`' for test in tests)} | {', '.join(kinds)} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
