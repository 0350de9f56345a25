"""Measure the gateway's resident memory under load, with and without its allocator settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.context import TEMPLATE, Context
from benchmarks.gateways import companion_gateway
from benchmarks.measure import Result
from benchmarks.mixed_use import MixedUse
from tests.support.gateway import PROGRAM

_CLIENT_COUNT = 2
_DEFAULT_ALLOCATOR_PROGRAM = (
    "from sandbox_gateway.server import daemon, heap; heap.configure_allocator = lambda: None; daemon.main()"
)
_NOTE = (
    "in a round each client creates a sandbox, runs commands, uploads and downloads a file, takes a "
    "snapshot, makes two forks, rolls back, lists, and removes everything. The floor is the same gateway "
    "with the C library's own settings"
)


class Memory:
    name = "memory"
    title = "the gateway's resident memory in mixed use"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=60, quick=3)
        result = Result(self.name, self.title, {"rounds": rounds, "clients": _CLIENT_COUNT}, notes=[_NOTE])
        default_samples = _measure_memory(ctx, rounds, (sys.executable, "-c", _DEFAULT_ALLOCATOR_PROGRAM))
        tuned_samples = _measure_memory(ctx, rounds, PROGRAM)
        result.add_measure(
            "before", "after each round, with the C library's default settings", "bytes", samples=default_samples
        )
        result.add_measure("now", "after each round", "bytes", samples=tuned_samples, floor="before")
        return result


def _measure_memory(ctx: Context, rounds: int, program: Sequence[str]) -> list[float]:
    """Run ``program`` as the gateway. Return its resident memory in bytes after each round."""
    samples: list[float] = []
    with companion_gateway(ctx.kvm_xfs, program) as gateway, ctx.showing_progress("rounds", rounds) as steps:
        assert gateway.process
        mixed_use = MixedUse(lambda: _create_client(gateway.socket), TEMPLATE, clients=_CLIENT_COUNT)
        for _ in range(rounds):
            mixed_use.run_rounds(_CLIENT_COUNT)
            samples.append(_read_resident_bytes(gateway.process.pid))
            steps.advance()
    return samples


def _create_client(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway", timeout=600)


def _read_resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
