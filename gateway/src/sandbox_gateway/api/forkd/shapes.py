"""Models of forkd's request and response bodies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field

from sandbox_gateway.api.body import MAX_FORKS, TIMEOUT_FIELD, AnyRef, Body, Refusal, Timeout
from sandbox_gateway.engine.agent_client import EvalResult, ExecResult
from sandbox_gateway.records import MemoryMode, Sandbox, Snapshot, SnapshotKind, SnapshotStatus

FORKD_AGENT_PORT = 8888
"""The port of forkd's agent in a sandbox."""
MAX_TAG_LENGTH = 64
_TAG_PATTERN = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TAG_LENGTH}}}")
_MIB = 1 << 20


def _check_tag(value: str) -> str:
    if not _TAG_PATTERN.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not a valid tag: use 1 to {MAX_TAG_LENGTH} letters, digits, '_' or '-'")
    return value


Tag = Annotated[str, AfterValidator(_check_tag)]
TimeoutSeconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False, description="Timeout in seconds.")]


class BuildSnapshot(Body):
    tag: Tag
    rootfs: str = Field(
        min_length=1, max_length=4096, description="Absolute path of a directory or tarball on the gateway's host."
    )

    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "kernel": Refusal("because each template has its own kernel: omit this field, or use POST /templates"),
    }


class CompactSnapshot(Body):
    to: Tag = Field(description="The new tag.")


class CreateSandboxes(Body):
    snapshot_tag: AnyRef = Field(description="A snapshot or template, by name or id.")
    n: int = Field(1, strict=True, ge=1, le=MAX_FORKS)
    memory_limit_mib: int | None = Field(
        None, strict=True, ge=64, le=1 << 20, description="Absent: the snapshot's size."
    )
    timeout: Timeout = TIMEOUT_FIELD
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "per_child_netns": "every sandbox has its own network",
        "prewarm": "it only affects the speed of the first snapshot, and captures here are fast without it",
        "hugepages": "it only affects speed, and forkd itself also works without huge pages",
    }
    refused_fields: ClassVar[Mapping[str, Refusal]] = {
        "live_fork": Refusal(
            "because a sandbox is paused for a few milliseconds while it is captured: omit this field"
        ),
    }


class RunCommand(Body):
    args: list[str] = Field(min_length=1, max_length=10_000, description="The program and its arguments; no shell.")
    timeout_secs: TimeoutSeconds = 30


class EvaluateCode(Body):
    code: str = Field(max_length=1 << 20, description="Python.")
    timeout_secs: TimeoutSeconds = 30


class Branch(Body):
    ignored_fields: ClassVar[Mapping[str, str]] = {
        "measure_diff": "the response always has these numbers",
        "wait": "the response is sent when the snapshot is ready, which takes a few milliseconds",
    }

    tag: Tag | None = Field(None, description="Absent: `branch-ID-N`.")
    mode: Literal["full", "diff", "live"] | None = None
    diff: bool = Field(False, description="Deprecated: use mode diff.")
    live: bool = Field(False, description="Deprecated: use mode live.")
    measure_diff: bool = Field(False, description="Without effect: the response always has these numbers.")
    wait: bool = Field(True, description="Without effect: the response is sent when the snapshot is ready.")
    parent_tag: AnyRef | None = Field(None, description="The snapshot that the sandbox was made from, or its head.")


class HealthInfo(BaseModel):
    ok: Literal[True] = True


class VersionInfo(BaseModel):
    version: str
    api: Literal["v1"] = "v1"


class SandboxInfo(BaseModel):
    id: str
    snapshot_tag: str = Field(
        description="Tag of the snapshot that the sandbox was made from; the id if the snapshot has no tag or was "
        "removed."
    )
    netns: None = Field(None, description="Always null: the host names the network.")
    guest_addr: str = Field(
        description="ADDRESS:8888, where ADDRESS is the sandbox's address on the gateway's host. No agent listens on "
        "port 8888. Empty while the sandbox is paused."
    )
    created_at_unix: int
    pid: None = Field(None, description="Always null: the host manages the machines.")
    memory_limit_mib: int
    state: Literal["running", "paused"]


class SnapshotInfo(BaseModel):
    tag: str
    id: str
    dir: str = Field(description="Directory of the snapshot on the host.")
    vmstate: str | None = Field(None, description="Path of the machine state, if it is a file.")
    memory: str | None = Field(None, description="Path of the memory image, if it is a file.")
    created_at_unix: int
    branched_from: str | None = Field(None, description="Id of the source sandbox; null for templates.")
    pause_ms: int | None = Field(None, description="Milliseconds for which the source was paused, rounded up.")
    diff_physical_bytes: int | None = Field(None, description="Bytes of memory written, if only changes were written.")
    diff_logical_bytes: int | None = None
    status: Literal["ready", "writing", "failed"]
    bootable: bool = Field(description="Whether sandboxes can be made from the snapshot.")


class SnapshotDetail(SnapshotInfo):
    memory_logical_bytes: int
    memory_physical_bytes: int = Field(description="Bytes of memory written for the snapshot.")
    disk_bytes_unique: int
    parent_tag: str | None = Field(None, description="The last of `ancestors`.")
    chain_depth: int = Field(description="Number of `ancestors`. A start takes equally long at each depth.")
    ancestors: list[str] = Field(
        description="Tags of the snapshots, and of the template, from which it descends, oldest first. It does not "
        "need them."
    )
    dependents: list[str] = Field(description="Tags of the snapshots whose parent it is. They do not need it.")
    sandboxes: list[str] = Field(description="Ids of the sandboxes that prevent its deletion.")


class ExecInfo(BaseModel):
    stdout: str
    stderr: str
    exit_code: int


class EvalInfo(BaseModel):
    result: str | None
    error: str | None
    exit_code: int


class Pong(BaseModel):
    pong: Literal[True] = True
    numpy_version: None = Field(None, description="Always null: the interpreter is not queried.")


def list_tags(snapshot: Snapshot) -> list[str]:
    """Return the names of a snapshot that are valid tags, or else its id, which is always valid."""
    return [name for name in snapshot.names if _TAG_PATTERN.fullmatch(name)] or [snapshot.id]


def choose_tag(snapshot: Snapshot, ref: str = "") -> str:
    """Return the tag ``ref`` if the snapshot has it, or else the first of its tags."""
    tags = list_tags(snapshot)
    return ref if ref in tags else tags[0]


def describe_sandbox(sandbox: Sandbox, snapshot_tag: str, address: str) -> SandboxInfo:
    """Describe a sandbox. ``address`` is empty if the sandbox is paused."""
    return SandboxInfo(
        id=sandbox.id,
        snapshot_tag=snapshot_tag,
        guest_addr=f"{address}:{FORKD_AGENT_PORT}" if address else "",
        created_at_unix=int(sandbox.created_at.timestamp()),
        memory_limit_mib=sandbox.resources.memory_mb,
        state=sandbox.state.value,
    )


def describe_snapshot(snapshot: Snapshot, tag: str, files: dict[str, str]) -> SnapshotInfo:
    info = SnapshotInfo(
        tag=tag,
        id=snapshot.id,
        created_at_unix=int(snapshot.created_at.timestamp()),
        status=snapshot.status.value,
        bootable=snapshot.status is SnapshotStatus.READY,
        **files,
    )
    if snapshot.kind is SnapshotKind.SNAPSHOT:
        info.branched_from, info.pause_ms = snapshot.source_sandbox, math.ceil(snapshot.pause_ms)
    if snapshot.memory not in (MemoryMode.NONE, MemoryMode.FULL):
        info.diff_physical_bytes = snapshot.memory_bytes_written
        info.diff_logical_bytes = snapshot.resources.memory_mb * _MIB
    return info


def describe_snapshot_in_detail(
    snapshot: Snapshot,
    tag: str,
    files: dict[str, str],
    *,
    ancestors: Sequence[Snapshot],
    children: Sequence[Snapshot],
    sandboxes: list[str],
) -> SnapshotDetail:
    has_memory = snapshot.memory is not MemoryMode.NONE
    ancestor_tags = [choose_tag(each) for each in ancestors]
    return SnapshotDetail(
        **describe_snapshot(snapshot, tag, files).model_dump(),
        parent_tag=ancestor_tags[-1] if ancestor_tags else None,
        chain_depth=len(ancestor_tags),
        ancestors=ancestor_tags,
        dependents=[choose_tag(each) for each in children],
        memory_logical_bytes=snapshot.resources.memory_mb * _MIB if has_memory else 0,
        memory_physical_bytes=snapshot.memory_bytes_written,
        disk_bytes_unique=snapshot.disk_bytes_unique,
        sandboxes=sandboxes,
    )


def build_exec_fields(result: ExecResult, seconds: float) -> dict[str, bytes | int]:
    """Return the fields of ``ExecInfo`` for a result. ``seconds`` is the timeout of the command."""
    stderr = result.stderr
    if result.timed_out:
        stderr += f"the command did not finish within {seconds:g} s and was killed\n".encode()
    return {"stdout": result.stdout, "stderr": stderr, "exit_code": result.exit_code}


def build_eval_fields(result: EvalResult) -> dict[str, str | int | None]:
    """Return the fields of ``EvalInfo`` for a result."""
    has_failed = result.exit_code != 0
    return {
        "result": None if has_failed else result.result,
        "error": result.error if has_failed else None,
        "exit_code": result.exit_code,
    }
