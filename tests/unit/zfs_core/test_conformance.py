"""Test the evaluation of OpenZFS's own tests of libzfs_core, and the page that shows the results."""

from __future__ import annotations

import pytest
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES, make_openzfs_capabilities

from tests.zfs_core import conformance, table
from tests.zfs_core.differences import HANGING_TESTS


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
    tests = [*results, *HANGING_TESTS]
    problems = conformance.find_problems(results, explanations, tests, may_lack_functions=True)
    assert [problem.partition(":")[0] for problem in problems] == ["test_b", "test_d", "test_e"]
    problems = conformance.find_problems(results, explanations, tests, may_lack_functions=False)
    assert [problem.partition(":")[0] for problem in problems] == ["test_b", "test_d", "test_e", "test_h"]


def test_an_explanation_for_a_missing_test_is_reported() -> None:
    (hanging_test, *_), explanations = HANGING_TESTS, {"test_gone": "reason", "test_not_run": "reason"}
    tests = ["test_not_run", *(name for name in HANGING_TESTS if name != hanging_test)]
    problems = conformance.find_problems({}, explanations, tests, may_lack_functions=False)
    assert [problem.partition(":")[0] for problem in problems] == ["test_gone", hanging_test]
    assert "the suite has no such test" in problems[0]


def test_openzfs_is_recognized_even_if_its_version_is_unknown() -> None:
    assert conformance.get_kind(make_openzfs_capabilities(())) == "openzfs"
    assert conformance.get_kind(make_openzfs_capabilities((2, 3))) == "openzfs"
    assert conformance.get_kind(ZFS_FUSE_CAPABILITIES) == "zfs-fuse"


def test_tests_that_neither_pass_nor_fail_are_listed_with_their_reason() -> None:
    tests = {
        "test_a": {"outcome": "skipped", "reason": "no bookmarks", "functions": []},
        "test_b": {"outcome": "not supported", "reason": "NotImplementedError: lzc_sync: no command (line 7)"},
        "test_c": {"outcome": "not supported", "reason": "NotImplementedError: lzc_reopen: no command (line 8)"},
        "test_d": {"outcome": "expected failure", "reason": "X: 'pool.7db8-57/fs1' | y"},
        "test_e": {"outcome": "passed", "reason": ""},
        next(iter(HANGING_TESTS)): {"outcome": "skipped", "reason": "hangs"},
    }
    text = table.format_exceptions([{"zfs": "openzfs", "tests": tests}, {"zfs": "zfs-fuse", "tests": tests}])
    assert text.splitlines()[2:] == [
        "| `test_b`, `test_c` | OpenZFS, zfs-fuse | not supported: no command |",
        "| `test_a` | OpenZFS, zfs-fuse | skipped: no bookmarks |",
        "| `test_d` | OpenZFS, zfs-fuse | the suite expects it to fail: X: 'pool/fs1' \\| y |",
    ]
    assert all(f"`{test}`" in table.format_differences() for test in HANGING_TESTS)


def test_each_function_names_its_command() -> None:
    missing_commands = {name for name, function in table.list_functions().items() if not table.find_command(function)}
    assert missing_commands == {"lzc_list", "receive_header"}, "these do not run commands"


def test_the_page_lists_each_function() -> None:
    page = table.PAGE.read_text()
    for name, function in table.list_functions().items():
        command = table.find_command(function) or "-"
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
