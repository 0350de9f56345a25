"""Test the evaluation of OpenZFS's own tests of libzfs_core, and the page that shows the results."""

from __future__ import annotations

import pytest

from tests.zfs_core import conformance, table


def test_unexplained_failures_and_unnecessary_explanations_are_reported() -> None:
    results = {
        "test_a": {"outcome": "passed", "reason": ""},
        "test_b": {"outcome": "failed", "reason": "AssertionError"},
        "test_c": {"outcome": "error", "reason": "NotImplementedError"},
        "test_d": {"outcome": "passed", "reason": ""},
        "test_e": {"outcome": "unexpected success", "reason": ""},
        "test_f": {"outcome": "skipped", "reason": "x"},
        "test_g": {"outcome": "expected failure", "reason": "x"},
        "test_h": {"outcome": "not supported", "reason": "x"},
    }
    explanations = {"test_c": "reason", "test_d": "reason"}
    problems = conformance.find_problems(results, explanations, may_lack_functions=True)
    assert [problem.partition(":")[0] for problem in problems] == ["test_b", "test_d", "test_e"]
    problems = conformance.find_problems(results, explanations, may_lack_functions=False)
    assert [problem.partition(":")[0] for problem in problems] == ["test_b", "test_d", "test_e", "test_h"]


def test_each_function_names_its_command() -> None:
    missing_commands = {name for name, function in table.list_functions().items() if not table.command_of(function)}
    # These do not run commands, or are described as variants of a function that does.
    assert missing_commands == {
        *("lzc_list", "lzc_receive_one", "lzc_receive_with_header", "receive_header"),
    }


def test_the_page_lists_each_function() -> None:
    page = table.PAGE.read_text()
    for name, function in table.list_functions().items():
        command = table.command_of(function) or "-"
        assert f"| `{name}` | {command} |" in page, "run `python -m tests.zfs_core.table OPENZFS.json ZFS_FUSE.json`"
    assert table.format_differences() in page


def test_results_are_counted_by_function() -> None:
    tests = {
        "test_a": {"outcome": "passed", "functions": ["lzc_sync"]},
        "test_b": {"outcome": "error", "functions": ["lzc_sync", "lzc_hold"]},
        "test_c": {"outcome": "skipped", "functions": ["lzc_reopen"]},
    }
    report = {"zfs": "openzfs", "version": "2.3.2", "tests": tests}
    text = table.format_functions([report])
    assert "| `lzc_sync` | `zpool sync [-f] POOLNAME` | 1 of 2 |" in text
    assert "| 0 of 1 |" in text and "| skipped |" in text and "| no test |" in text
    assert "| OpenZFS 2.3.2 | 1 | 0 | 1 | 0 | 1 | 3 |" in table.format_results([report])
    with pytest.raises(ValueError, match="no section"):
        table.replace_section("", "results", "")
