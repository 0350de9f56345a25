"""Measure the latency of a published client: through the gateway, and directly to the machine's agent."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import e2b_code_interpreter
import httpx
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

from benchmarks.context import TEMPLATE, Context, KvmXfs
from benchmarks.gateways import gateway_beside
from benchmarks.measure import Result
from benchmarks.timers import milliseconds
from sandbox_gateway.api.native.shapes import ENVD_VERSION
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Snapshot
from tests.support import session
from tests.support.gateway import Gateway

_AGENT, _INTERPRETER = 49983, 49999
_BYTES = 50_000_000
_KEY = "bench-key-0123456789abcdef"
_CODE = "1 + 1"
_BETWEEN_SECONDS = 0.3
_TITLES = {
    "command": "commands.run('true')",
    "up": "files.write of 50 MB",
    "down": "files.read of 50 MB",
    "raw": "GET /files of 50 MB by httpx, streamed",
}

Sandbox = e2b_code_interpreter.Sandbox


class Sdk:
    name = "sdk"
    title = "the e2b client: through the gateway, and directly to the agent"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.rounds(full=15, quick=2)
        result = Result(self.name, self.title, {"rounds": rounds, "clients": "e2b-code-interpreter"})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        with host.source() as snapshot, _served(host) as (gateway, url), ctx.steps("rounds", rounds) as steps:
            theirs = _warm(gateway)
            with _sandbox(gateway, url, theirs) as (through, straight, where):
                for _ in range(rounds):
                    samples["first_floor"].append(_first_straight(host, snapshot))
                    samples["first"].append(_first(theirs))
                    for way, sandbox in (("straight", straight), ("through", through)):
                        for key, taken in _verbs(sandbox).items():
                            samples[f"{way}_{key}"].append(taken)
                        samples[f"{way}_raw"].append(_raw(*where[way]))
                    time.sleep(_BETWEEN_SECONDS)
                    steps.done()
        title = f"Sandbox.create and run_code({_CODE!r})"
        result.measure(
            "first_floor", "a fork by the engine in-process and the first /execute", samples=samples["first_floor"]
        )
        result.measure("first", title, samples=samples["first"], floor="first_floor")
        for key, what in _TITLES.items():
            result.measure(f"straight_{key}", f"{what}: straight", samples=samples[f"straight_{key}"])
            over = samples[f"through_{key}"]
            result.measure(f"through_{key}", f"{what}: through the gateway", samples=over, floor=f"straight_{key}")
        return result


@contextmanager
def _served(host: KvmXfs) -> Iterator[tuple[Gateway, str]]:
    keys = session.run_dir() / "bench-keys"
    keys.write_text(f"bench admin {_KEY}\n")
    keys.chmod(0o600)
    address = f"127.0.0.1:{session.free_port()}"
    with gateway_beside(host, server={"listen": address, "key_file": str(keys)}) as gateway:
        url = f"http://{address}"
        names = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": _KEY}
        with mock.patch.dict(os.environ, names):
            yield gateway, url


def _warm(gateway: Gateway) -> str:
    """Create a snapshot like that of ``KvmXfs.source`` and return its id."""
    first = gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE})["sandboxID"]
    time.sleep(3)
    snapshot: str = gateway.call("POST", f"/sandboxes/{first}/snapshots", {})["snapshotID"]
    gateway.call("DELETE", f"/sandboxes/{first}")
    return snapshot


@contextmanager
def _sandbox(gateway: Gateway, url: str, snapshot: str) -> Iterator[tuple[Sandbox, Sandbox, dict[str, Any]]]:
    """Yield the same sandbox over both routes, and the address of its agent and the headers to send for each route."""
    through = Sandbox.create(snapshot)
    try:
        address = gateway.call("GET", f"/sandboxes/{through.sandbox_id}")["address"]
        token = {"X-Access-Token": str(through._envd_access_token)}
        straight = Sandbox(
            sandbox_id=through.sandbox_id,
            sandbox_domain=through.sandbox_domain,
            envd_version=Version(ENVD_VERSION),
            envd_access_token=through._envd_access_token,
            connection_config=ConnectionConfig(
                sandbox_url=f"http://{address}:{_AGENT}", api_key=_KEY, extra_sandbox_headers=token
            ),
        )
        by_header = {"E2b-Sandbox-Id": through.sandbox_id, "E2b-Sandbox-Port": str(_AGENT), **token}
        where = {"straight": (f"http://{address}:{_AGENT}", token), "through": (url, by_header)}
        yield through, straight, where
    finally:
        through.kill()


def _first(snapshot: str) -> float:
    def work() -> Sandbox:
        sandbox = Sandbox.create(snapshot)
        _check_equal(sandbox.run_code(_CODE).text, "2")
        return sandbox

    sandbox, taken = milliseconds(work)
    sandbox.kill()
    return taken


def _first_straight(host: KvmXfs, snapshot: Snapshot) -> float:
    engine = host.live.engine

    def work() -> Any:
        (fork,) = host.live.do(engine.forks.fork(snapshot.id, ForkSpec()))
        address, token = engine.agents.endpoint(fork.id)
        answer = httpx.post(
            f"http://{address}:{_INTERPRETER}/execute",
            json={"code": _CODE},
            headers={"X-Access-Token": token},
            timeout=60,
        )
        _check_equal('"text": "2"' in answer.text or '"text":"2"' in answer.text, True)
        return fork

    fork, taken = milliseconds(work)
    host.kill(fork)
    return taken


def _verbs(sandbox: Sandbox) -> dict[str, float]:
    data = b"\0" * _BYTES
    done, command = milliseconds(lambda: sandbox.commands.run("true"))
    _check_equal(done.exit_code, 0)
    _, up = milliseconds(lambda: sandbox.files.write("/dev/shm/big", data))
    read, down = milliseconds(lambda: sandbox.files.read("/dev/shm/big", format="bytes"))
    _check_equal(len(read), _BYTES)
    return {"command": command, "up": up, "down": down}


def _raw(url: str, headers: dict[str, str]) -> float:
    def work() -> int:
        with httpx.stream(
            "GET", f"{url}/files", params={"path": "/dev/shm/big"}, headers=headers, timeout=60
        ) as answer:
            return sum(map(len, answer.iter_raw()))

    size, taken = milliseconds(work)
    _check_equal(size, _BYTES)
    return taken


def _check_equal(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError(f"received {found!r} instead of {wanted!r}")
