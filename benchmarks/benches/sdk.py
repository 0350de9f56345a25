"""Measure the published e2b client: through the gateway, and connected directly to the agent."""

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
from benchmarks.gateways import companion_gateway
from benchmarks.measure import Result
from benchmarks.timers import time_call
from sandbox_gateway.api.native.shapes import ENVD_VERSION
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.records import Snapshot
from tests.support import session
from tests.support.gateway import Gateway

_AGENT_PORT, _INTERPRETER_PORT = 49983, 49999
_FILE_BYTES = 50_000_000
_API_KEY = "bench-key-0123456789abcdef"
_CODE = "1 + 1"
_COOLDOWN_SECONDS = 0.3
_TITLES = {
    "command": "commands.run('true')",
    "up": "files.write of 50 MB",
    "down": "files.read of 50 MB",
    "raw": "GET /files of 50 MB by httpx, streamed",
}

Sandbox = e2b_code_interpreter.Sandbox


class Sdk:
    name = "sdk"
    title = "the e2b client, through the gateway and directly to the agent"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=15, quick=2)
        result = Result(self.name, self.title, {"rounds": rounds, "clients": "e2b-code-interpreter"})
        host = ctx.kvm_xfs
        samples: dict[str, list[float]] = defaultdict(list)
        with (
            host.temporary_snapshot() as snapshot,
            _running_gateway(host) as (gateway, url),
            ctx.showing_progress("rounds", rounds) as steps,
        ):
            gateway_snapshot = _create_snapshot(gateway)
            with _temporary_sandbox(gateway, url, gateway_snapshot) as (gateway_sandbox, direct_sandbox, endpoints):
                for _ in range(rounds):
                    samples["first_floor"].append(_time_first_result_in_process(host, snapshot))
                    samples["first"].append(_time_first_result(gateway_snapshot))
                    for route, sandbox in (("straight", direct_sandbox), ("through", gateway_sandbox)):
                        for key, elapsed in _time_operations(sandbox).items():
                            samples[f"{route}_{key}"].append(elapsed)
                        samples[f"{route}_raw"].append(_time_raw_download(*endpoints[route]))
                    time.sleep(_COOLDOWN_SECONDS)
                    steps.advance()
        title = f"Sandbox.create and run_code({_CODE!r})"
        result.add_measure(
            "first_floor",
            "floor: a fork by the engine in-process, and the first /execute",
            samples=samples["first_floor"],
        )
        result.add_measure("first", title, samples=samples["first"], floor="first_floor")
        for key, title in _TITLES.items():
            floor, through_key = f"straight_{key}", f"through_{key}"
            result.add_measure(floor, f"{title}: directly to the agent", samples=samples[floor])
            result.add_measure(through_key, f"{title}: through the gateway", samples=samples[through_key], floor=floor)
        return result


@contextmanager
def _running_gateway(host: KvmXfs) -> Iterator[tuple[Gateway, str]]:
    """Run a gateway, and set the URL and key of the client in the environment. Yields the gateway and its URL."""
    key_file = session.get_run_dir() / "bench-keys"
    key_file.write_text(f"bench admin {_API_KEY}\n")
    key_file.chmod(0o600)
    address = f"127.0.0.1:{session.allocate_port()}"
    with companion_gateway(host, server={"listen": address, "key_file": str(key_file)}) as gateway:
        url = f"http://{address}"
        variables = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": _API_KEY}
        with mock.patch.dict(os.environ, variables):
            yield gateway, url


def _create_snapshot(gateway: Gateway) -> str:
    """Create a snapshot as ``KvmXfs.temporary_snapshot`` does, and return its id."""
    source = gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE})["sandboxID"]
    time.sleep(3)
    snapshot: str = gateway.call("POST", f"/sandboxes/{source}/snapshots", {})["snapshotID"]
    gateway.call("DELETE", f"/sandboxes/{source}")
    return snapshot


@contextmanager
def _temporary_sandbox(gateway: Gateway, url: str, snapshot: str) -> Iterator[tuple[Sandbox, Sandbox, dict[str, Any]]]:
    """Yield two clients of one sandbox (through the gateway and directly), and the URL and headers of each route."""
    gateway_sandbox = Sandbox.create(snapshot)
    try:
        address = gateway.call("GET", f"/sandboxes/{gateway_sandbox.sandbox_id}")["address"]
        token_headers = {"X-Access-Token": str(gateway_sandbox._envd_access_token)}
        direct_sandbox = Sandbox(
            sandbox_id=gateway_sandbox.sandbox_id,
            sandbox_domain=gateway_sandbox.sandbox_domain,
            envd_version=Version(ENVD_VERSION),
            envd_access_token=gateway_sandbox._envd_access_token,
            connection_config=ConnectionConfig(
                sandbox_url=f"http://{address}:{_AGENT_PORT}", api_key=_API_KEY, extra_sandbox_headers=token_headers
            ),
        )
        gateway_headers = {
            "E2b-Sandbox-Id": gateway_sandbox.sandbox_id,
            "E2b-Sandbox-Port": str(_AGENT_PORT),
            **token_headers,
        }
        endpoints = {
            "straight": (f"http://{address}:{_AGENT_PORT}", token_headers),
            "through": (url, gateway_headers),
        }
        yield gateway_sandbox, direct_sandbox, endpoints
    finally:
        gateway_sandbox.kill()


def _time_first_result(snapshot: str) -> float:
    """Create a sandbox and run code in it. Return the milliseconds until the first result."""

    def create_and_run() -> Sandbox:
        sandbox = Sandbox.create(snapshot)
        _check_equal(sandbox.run_code(_CODE).text, "2")
        return sandbox

    sandbox, elapsed = time_call(create_and_run)
    sandbox.kill()
    return elapsed


def _time_first_result_in_process(host: KvmXfs, snapshot: Snapshot) -> float:
    """Create a fork in this process, run the same code through its agent, and return the milliseconds."""
    engine = host.live.engine

    def create_and_run() -> Any:
        (fork,) = host.live.do(engine.forks.fork(snapshot.id, ForkSpec()))
        address, token = engine.agents.get_endpoint(fork.id)
        response = httpx.post(
            f"http://{address}:{_INTERPRETER_PORT}/execute",
            json={"code": _CODE},
            headers={"X-Access-Token": token},
            timeout=60,
        )
        _check_equal('"text": "2"' in response.text or '"text":"2"' in response.text, True)
        return fork

    fork, elapsed = time_call(create_and_run)
    host.delete_sandboxes(fork)
    return elapsed


def _time_operations(sandbox: Sandbox) -> dict[str, float]:
    """Return the durations of a command, an upload and a download in milliseconds."""
    data = b"\0" * _FILE_BYTES
    result, command_ms = time_call(lambda: sandbox.commands.run("true"))
    _check_equal(result.exit_code, 0)
    _, upload_ms = time_call(lambda: sandbox.files.write("/dev/shm/big", data))
    downloaded_data, download_ms = time_call(lambda: sandbox.files.read("/dev/shm/big", format="bytes"))
    _check_equal(len(downloaded_data), _FILE_BYTES)
    return {"command": command_ms, "up": upload_ms, "down": download_ms}


def _time_raw_download(url: str, headers: dict[str, str]) -> float:
    def download() -> int:
        with httpx.stream(
            "GET", f"{url}/files", params={"path": "/dev/shm/big"}, headers=headers, timeout=60
        ) as response:
            return sum(map(len, response.iter_raw()))

    size, elapsed = time_call(download)
    _check_equal(size, _FILE_BYTES)
    return elapsed


def _check_equal(actual: object, expected: object) -> None:
    if actual != expected:
        raise RuntimeError(f"received {actual!r} instead of {expected!r}")
