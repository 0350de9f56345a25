"""Synchronize, reopen and checkpoint pools, and run channel programs in them."""

from __future__ import annotations

import errno
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.constants import ZCP_DEFAULT_INSTRLIMIT, ZCP_DEFAULT_MEMLIMIT
from zfs_core.exceptions import (
    CheckpointDiscarding,
    CheckpointExists,
    CheckpointNotFound,
    DeviceRemovalRunning,
    DeviceTooBig,
    PoolNotFound,
    RaidzExpansionRunning,
    ZCPError,
    ZCPLimitInvalid,
    ZCPMemoryError,
    ZCPPermissionError,
    ZCPRuntimeError,
    ZCPSpaceError,
    ZCPSyntaxError,
    ZCPTimeout,
    ZFSError,
    ZFSGenericError,
    ZFSOutputError,
)
from zfs_core.names import Name, accepts_bytes, decode_name, is_possible_argument, validate_pool_name
from zfs_core.outcome import ErrorFactory, Outcome, check, make_error
from zfs_core.run import run

_NOT_FOUND_ERRORS: dict[Cause, ErrorFactory] = {Cause.MISSING: PoolNotFound, Cause.NO_POOL: PoolNotFound}
_CHECKPOINT_ERRORS: dict[Cause, ErrorFactory] = {
    **_NOT_FOUND_ERRORS,
    Cause.CHECKPOINT_EXISTS: lambda _: CheckpointExists(),
    Cause.CHECKPOINT_MISSING: lambda _: CheckpointNotFound(),
    Cause.CHECKPOINT_DISCARDING: lambda _: CheckpointDiscarding(),
    Cause.DEVICE_REMOVAL: lambda _: DeviceRemovalRunning(),
    Cause.DEVICE_TOO_BIG: lambda _: DeviceTooBig(),
    Cause.RAIDZ_EXPANSION: lambda _: RaidzExpansionRunning(),
}


def _require_support(function_name: str) -> None:
    if not detect_capabilities().pool_commands:
        raise NotImplementedError(f"{function_name}: this version of ZFS has no command for it")


@accepts_bytes
def lzc_sync(poolname: Name, force: bool = False) -> None:
    """Write all data of a pool to its devices. With ``force``, write the uberblock even if there is no new data.

    Raises PoolNotFound. Command: ``zpool sync [-f] POOLNAME``.
    """
    _require_support("lzc_sync")
    _run_zpool(["sync", *(["-f"] if force else [])], poolname, "sync pool", _NOT_FOUND_ERRORS)


@accepts_bytes
def lzc_reopen(poolname: Name, restart: bool = True) -> None:
    """Reopen the devices of a pool. Without ``restart``, do not restart an interrupted scrub.

    Raises PoolNotFound. Command: ``zpool reopen [-n] POOLNAME``.
    """
    _require_support("lzc_reopen")
    _run_zpool(["reopen", *([] if restart else ["-n"])], poolname, "reopen pool", _NOT_FOUND_ERRORS)


@accepts_bytes
def lzc_pool_checkpoint(name: Name) -> None:
    """Create a checkpoint of a pool.

    Raises PoolNotFound, CheckpointExists, CheckpointDiscarding, DeviceRemovalRunning, DeviceTooBig,
    RaidzExpansionRunning. Command: ``zpool checkpoint NAME``.
    """
    _require_support("lzc_pool_checkpoint")
    _run_zpool(["checkpoint"], name, "create pool checkpoint", _CHECKPOINT_ERRORS)


@accepts_bytes
def lzc_pool_checkpoint_discard(name: Name) -> None:
    """Discard the checkpoint of a pool, in the background.

    Raises PoolNotFound, CheckpointNotFound, CheckpointDiscarding. Command: ``zpool checkpoint -d NAME``.
    """
    _require_support("lzc_pool_checkpoint_discard")
    _run_zpool(["checkpoint", "-d"], name, "discard pool checkpoint", _CHECKPOINT_ERRORS)


def _run_zpool(args: Sequence[str], poolname: Name, action: str, specific_errors: Mapping[Cause, ErrorFactory]) -> None:
    pool = validate_pool_name(poolname)
    check(run(*args, pool, name=pool, program="zpool"), pool, action, specific_errors)


@accepts_bytes
def lzc_channel_program(
    poolname: Name,
    program: Name,
    instrlimit: int = ZCP_DEFAULT_INSTRLIMIT,
    memlimit: int = ZCP_DEFAULT_MEMLIMIT,
    params: Sequence[Name] | None = None,
) -> Any:
    """Run a Lua program, which changes a pool atomically. Returns what the program returns, or None.

    ``params``: text, which the program finds in ``(...)["argv"]``.

    Raises PoolNotFound, ZCPSyntaxError and ZCPRuntimeError (``details``: the message), ZCPTimeout, ZCPSpaceError,
    ZCPMemoryError, ZCPLimitInvalid, ZCPPermissionError. Command: ``zfs program -j -t LIMIT -m LIMIT -- POOLNAME -``.
    """
    return _run_program("lzc_channel_program", [], poolname, program, instrlimit, memlimit, params)


@accepts_bytes
def lzc_channel_program_nosync(
    poolname: Name,
    program: Name,
    instrlimit: int = ZCP_DEFAULT_INSTRLIMIT,
    memlimit: int = ZCP_DEFAULT_MEMLIMIT,
    params: Sequence[Name] | None = None,
) -> Any:
    """Run a Lua program, which cannot change the pool. Otherwise the same as ``lzc_channel_program``.

    Command: ``zfs program -n -j -t LIMIT -m LIMIT -- POOLNAME -``.
    """
    return _run_program("lzc_channel_program_nosync", ["-n"], poolname, program, instrlimit, memlimit, params)


def _run_program(
    function_name: str,
    options: Sequence[str],
    poolname: Name,
    program: Name,
    instrlimit: int,
    memlimit: int,
    params: Sequence[Name] | None,
) -> Any:
    _require_support(function_name)
    pool = validate_pool_name(poolname)
    limits = ["-t", str(instrlimit), "-m", str(memlimit)]
    args = [decode_name(param) for param in params or []]
    for arg in args:
        if not is_possible_argument(arg):
            raise ZFSGenericError(errno.EINVAL, pool, f"the parameter {arg!r} contains NUL or a lone surrogate")
    with tempfile.TemporaryFile() as file:
        file.write(decode_name(program).encode())
        file.seek(0)
        outcome = run("program", *options, "-j", *limits, "--", pool, "-", *args, name=pool, stdin=file.fileno())
    if outcome.cause is not None:
        raise _make_program_error(outcome, pool)
    try:
        return json.loads(outcome.output or "{}").get("return")
    except ValueError:
        raise ZFSOutputError(pool).with_details(f"{outcome.output[:200]!r} is not JSON") from None


_PROGRAM_FAILURE_PREFIX = "Channel program execution failed:; "
_PROGRAM_ERRORS: dict[str, type[ZCPError]] = {
    "Invalid instruction or memory limit.": ZCPLimitInvalid,
    "Return value too large.": ZCPMemoryError,
    "Memory limit exhausted.": ZCPSpaceError,
    "Timed out.": ZCPTimeout,
    "Permission denied.": ZCPPermissionError,
}


def _make_program_error(outcome: Outcome, pool: str) -> ZFSError:
    _, is_from_program, text = outcome.message.partition(_PROGRAM_FAILURE_PREFIX)
    if not is_from_program:
        return make_error(outcome, pool, "execute channel program", _NOT_FOUND_ERRORS)
    for start, error_class in _PROGRAM_ERRORS.items():
        if text.startswith(start):
            return outcome.explain(error_class())
    if re.search(r"\d+ Lua instructions$", text):
        return outcome.explain(ZCPTimeout())
    # Lua describes where a running program failed. A program with syntax errors never runs.
    return ZCPRuntimeError(text) if "stack traceback:" in text else ZCPSyntaxError(text)
