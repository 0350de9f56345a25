"""Run OpenZFS's own tests of libzfs_core on zfs_core.

    python -m tests.zfs_core.conformance DIRECTORY --json FILE

``DIRECTORY`` contains ``test_libzfs_core.py``, from Debian's package python3-pyzfs. The tests import zfs_core under the
name libzfs_core. They create pools, so they need root. Without OpenZFS, this program starts a
private zfs-fuse daemon.

The JSON file contains the outcome of each test. Exit status 0: exactly the tests that ``differences.py``
explains have failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import zfs_core
from zfs_core import constants, listing, nvlist
from zfs_core.capabilities import ZFS_FUSE_CAPABILITIES, Capabilities
from zfs_core.run import mount_lock

from tests.zfs_core.differences import DIFFERENCES, HANGING_TESTS

_SUITE = "test_libzfs_core.py"
_SECONDS_PER_TEST = 300
_COMMAND_SECONDS = 120
_PRIVATE_DAEMON_OPTION = "--private-zfs-fuse"
"""The option with which this program runs itself in namespaces with a zfs-fuse daemon."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", type=Path, help="write the outcome of each test to this file")
    parser.add_argument("--only", default="", help="run only tests whose name matches this regular expression")
    parser.add_argument(_PRIVATE_DAEMON_OPTION, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    is_openzfs = Path("/dev/zfs").exists()
    if not is_openzfs and not options.private_zfs_fuse:
        return _run_with_private_daemon(argv)
    with contextlib.nullcontext() if is_openzfs else _private_daemon():
        capabilities = zfs_core.detect_capabilities()
        results, seconds = _run_suite(options.directory, options.only)
    kind, version = get_kind(capabilities), ".".join(map(str, capabilities.version)) or "of unknown version"
    report = {"zfs": kind, "version": version, "seconds": round(seconds), "tests": results}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    counts = Counter(result["outcome"] for result in results.values())
    print(f"{kind} {report['version']}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    existing_tests = _find_functions(options.directory / _SUITE)
    problems = find_problems(results, DIFFERENCES[kind], existing_tests, may_lack_functions=kind == "zfs-fuse")
    for problem in problems:
        print(problem)
    return 1 if problems or not counts["passed"] else 0


def get_kind(capabilities: Capabilities) -> str:
    """Return the key of ``differences.DIFFERENCES`` for the installed ZFS."""
    return "zfs-fuse" if capabilities == ZFS_FUSE_CAPABILITIES else "openzfs"


def find_problems(
    results: dict[str, dict[str, Any]],
    differences: dict[str, str],
    existing_tests: Collection[str],
    *,
    may_lack_functions: bool,
) -> list[str]:
    """Return a sentence for each test that fails without explanation, or passes although its failure is explained.

    Also return one for each explanation of a test that does not exist.
    """
    problems = [
        f"{name}: is listed in differences.py, but the suite has no such test: remove it"
        for name in (*differences, *HANGING_TESTS)
        if name not in existing_tests
    ]
    good_outcomes = ["passed", "skipped", "expected failure", *(["not supported"] if may_lack_functions else [])]
    for name, result in results.items():
        is_good = result["outcome"] in good_outcomes
        if not is_good and name not in differences:
            problems.append(f"{name}: {result['outcome']}: {result['reason']}")
        if result["outcome"] in ("passed", "expected failure") and name in differences:
            problems.append(f"{name}: passed, but is listed as a difference: {differences[name]}")
    return problems


def _run_with_private_daemon(argv: list[str]) -> int:
    """Run this program with its own zfs-fuse daemon, in new mount and PID namespaces.

    A test that blocks the daemon does not affect other tests.
    """
    command = [sys.executable, "-m", "tests.zfs_core.conformance", *argv, _PRIVATE_DAEMON_OPTION]
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*unshare, "sh", "-c", '"$@"; exit $?', "sh", *command], check=False).returncode


@contextlib.contextmanager
def _private_daemon() -> Iterator[None]:
    from tests.support import pools

    for directory in ("/run/zfs", "/run/lock/zfs", "/var/lib/zfs"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", directory)
    # The file systems of the machine's daemon would stay in use here.
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, path, kind, *_ = line.split()
        if kind == "fuse.zfs":
            subprocess.run(["umount", "--lazy", "--no-canonicalize", path], check=False, timeout=_COMMAND_SECONDS)
    with tempfile.TemporaryDirectory(prefix="grove-conformance-") as directory:
        pid_file = Path(directory) / "pid"
        pools.start_daemon(pid_file)
        try:
            yield
        finally:
            pools.stop_daemon(pid_file)


def _run_suite(directory: Path, name_pattern: str) -> tuple[dict[str, dict[str, Any]], float]:
    module = _import_suite(directory)
    functions = _find_functions(directory / _SUITE)
    if not zfs_core.detect_capabilities().bookmarks:
        for name, reason in HANGING_TESTS.items():
            if test := getattr(module.ZFSTest, name, None):
                setattr(module.ZFSTest, name, unittest.skip(reason)(test))
    suite = unittest.TestLoader().loadTestsFromModule(module)
    tests = [test for group in suite for test in group if re.search(name_pattern, test.id())]
    result = _Result()
    start = time.monotonic()
    unittest.TestSuite(tests).run(result)
    for name, outcome in result.outcomes.items():
        outcome["functions"] = functions.get(name, [])
    return result.outcomes, time.monotonic() - start


def _import_suite(directory: Path) -> types.ModuleType:
    """Import the test suite of libzfs_core, with zfs_core in place of libzfs_core."""
    if not (directory / _SUITE).is_file():
        sys.exit(f"{directory} does not contain test_libzfs_core.py: install the python3-pyzfs package")
    package = _add_module("libzfs_core", vars(zfs_core))
    package.__path__ = []
    _add_module("libzfs_core._libzfs_core", vars(zfs_core) | vars(constants) | {"lzc_list": listing.lzc_list})
    _add_module("libzfs_core._constants", vars(constants))
    _add_module("libzfs_core.exceptions", vars(zfs_core.exceptions))
    _add_module("libzfs_core._nvlist", {"packed_nvlist_out": _unpack_nvlist})
    _add_module("libzfs_core.test", {}).__path__ = [str(directory)]
    # Some tests use a method that only Python 2 had.
    unittest.TestCase.assertItemsEqual = unittest.TestCase.assertCountEqual  # type: ignore[attr-defined]
    sys.dont_write_bytecode = True
    module = importlib.import_module("libzfs_core.test.test_libzfs_core")
    if not zfs_core.detect_capabilities().bookmarks:
        module._TempPool.isPoolFeatureEnabled = lambda _pool, _feature: False
        module.zfs_mount = _mount_on_zfs_fuse
        module.subprocess = _SubprocessForZfsFuse()
        module.cleanup_fd = _skip_without_device
    return module


def _skip_without_device() -> NoReturn:
    raise unittest.SkipTest("zfs-fuse has no device /dev/zfs")


class _SubprocessForZfsFuse:
    """The module subprocess, without the options of ``zpool import`` that zfs-fuse lacks.

    Therefore, a pool that should be read-only is writable. Commands are repeated while a pool is busy.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def check_output(self, argv: list[Any], **options: Any) -> bytes:
        if argv[:2] == ["zpool", "import"]:
            position = argv.index("readonly=on")
            argv = [word for word in argv[: position - 1] + argv[position + 1 :] if word != "-N"]
        deadline = time.monotonic() + _COMMAND_SECONDS
        while True:
            try:
                return subprocess.check_output(argv, timeout=_COMMAND_SECONDS, **options)
            except subprocess.CalledProcessError as error:
                # Mount namespaces that other programs create keep the mounts in a pool in use.
                if b"pool is busy" not in error.output or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


def _add_module(name: str, content: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update({key: value for key, value in content.items() if not key.startswith("__")})
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _unpack_nvlist(data: bytes, size: int) -> dict[bytes, Any]:
    return {name.encode(): value for name, value in nvlist.unpack(data[:size]).items()}


@contextlib.contextmanager
def _mount_on_zfs_fuse(name: bytes) -> Iterator[str]:
    """Mount a filesystem, or a clone of a snapshot, in a temporary directory.

    zfs-fuse has no program for ``mount -t zfs``, and cannot mount snapshots.
    """
    target = name.decode()
    clone = f"{target.partition('/')[0].partition('@')[0]}/mounted-{time.monotonic_ns()}" if "@" in target else None
    with tempfile.TemporaryDirectory(prefix="grove-mount-", ignore_cleanup_errors=True) as directory:
        if clone is not None:
            _run("zfs", "clone", target, clone)
            target = clone
        try:
            with mount_lock("mount", _COMMAND_SECONDS, None):
                _run("zfs", "set", f"mountpoint={directory}", target)
            zfs_core.mount(target)
            yield directory
        finally:
            _unmount(target, directory, clone is not None)


def _unmount(name: str, directory: str, is_clone: bool) -> None:
    with contextlib.suppress(zfs_core.exceptions.ZFSError, subprocess.CalledProcessError):
        try:
            zfs_core.unmount(name)
        except zfs_core.exceptions.DatasetBusy:
            # A test that failed has a file open. A leftover mount would keep the pool busy for all later tests.
            _run("umount", "-l", directory)
        if is_clone:
            zfs_core.lzc_destroy(name, unmounted=True)
        else:
            _run("zfs", "set", "mountpoint=legacy", name)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=_COMMAND_SECONDS, stdin=subprocess.DEVNULL, capture_output=True)


def _find_functions(file: Path) -> dict[str, list[str]]:
    """Return ``{test: functions of libzfs_core that it calls}``."""
    result = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = (
                each.func.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Call)
                and isinstance(each.func, ast.Attribute)
                and isinstance(each.func.value, ast.Name)
                and each.func.value.id == "lzc"
            )
            result[node.name] = sorted(set(calls))
    return result


class _TestTimeout(Exception):
    pass


class _Result(unittest.TestResult):
    """The outcomes of tests. Interrupts a test that takes too long."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}
        signal.signal(signal.SIGALRM, self._interrupt)

    @staticmethod
    def _interrupt(_signal: int, _frame: object) -> None:
        raise _TestTimeout(f"the test did not finish within {_SECONDS_PER_TEST} s")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        signal.alarm(_SECONDS_PER_TEST)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.alarm(0)
        super().stopTest(test)

    def _record(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        # After a failure, the cleanup of a test may fail, too. The first failure counts.
        if name not in self.outcomes:
            self.outcomes[name] = {"outcome": outcome, "reason": reason}
            print(f"{outcome:17} {name}" + (f": {reason}" if reason else ""), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "failed", _describe(err))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        # If the installed ZFS lacks the command for a function, the function raises this exception.
        self._record(test, "not supported" if issubclass(err[0], NotImplementedError) else "error", _describe(err))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._record(test, "skipped", reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "expected failure", _describe(err))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "unexpected success")


def _describe(err: Any) -> str:
    """Describe an exception in one line: its type, its text, and the line of the test where it was raised.

    If cleaning up after an exception failed, too, describes the first one.
    """
    value = err[1]
    while value.__context__ is not None and not value.__suppress_context__:
        value = value.__context__
    kind, trace, line = type(value), value.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("test_libzfs_core.py"):
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{kind.__name__}: {' '.join(str(value).split())}"[:400] + line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
