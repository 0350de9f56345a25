"""Prometheus metrics of requests, connections, sandboxes, snapshots and captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from sandbox_gateway.api.dependencies import EngineDep
from sandbox_gateway.engine.durations import Measurement
from sandbox_gateway.engine.loads import sum_samples
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import SandboxState, Snapshot

if TYPE_CHECKING:
    from sandbox_gateway.engine.engine import Engine
    from sandbox_gateway.engine.room import RoomReport

_PAUSE_BUCKETS = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_STATUS_LABELS = {str(status.value) for status in HTTPStatus} | {"499"}
"""The allowed label values: Prometheus keeps each value, and guests choose the status of their responses."""
_REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
_OPERATION_BUCKETS = (*_REQUEST_BUCKETS, 600, 1800)

router = APIRouter(tags=["gateway"])


class Metrics:
    """The gateway's metrics, in their own registry."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_Inventory(engine))
        self._request_histogram = Histogram(
            "sandbox_gateway_request_seconds",
            "Time to answer a request, by route.",
            ("method", "route", "status"),
            registry=self.registry,
            buckets=_REQUEST_BUCKETS,
        )
        self._operation_histogram = Histogram(
            "sandbox_gateway_operation_seconds",
            "Time that an operation took, by the kind of host, the memory mode of its snapshot, and its outcome.",
            ("operation", "host", "memory", "outcome"),
            registry=self.registry,
            buckets=_OPERATION_BUCKETS,
        )
        self._pause_histogram = Histogram(
            "sandbox_gateway_pause_seconds",
            "Time that a source was paused during its capture.",
            ("memory",),
            registry=self.registry,
            buckets=_PAUSE_BUCKETS,
        )
        self._memory_counter = Counter(
            "sandbox_gateway_memory_written_bytes", "Memory written by captures.", registry=self.registry
        )

        self._degraded_capture_counter = Counter(
            "sandbox_gateway_captures_degraded",
            "Captures that did not use the best memory mode, by the mode used.",
            ("memory",),
            registry=self.registry,
        )
        self._free_gauge, self._total_gauge, self._promised_gauge = (
            Gauge(f"sandbox_gateway_host_{name}_bytes", text, ("resource",), registry=self.registry)
            for name, text in (
                ("free", "Free disk space and memory of the host."),
                ("total", "Disk space and memory of the host."),
                ("promised", "Disk space and memory that sandboxes and volumes may use."),
            )
        )
        self._stalled_gauge = Gauge(
            "sandbox_gateway_sandboxes_stalled",
            "Sandboxes that are stopped because the host's disk has no space left.",
            registry=self.registry,
        )
        self.connection_gauge = Gauge(
            "sandbox_gateway_connections", "TCP connections that are open.", registry=self.registry
        )
        self._connection_end_counter = Counter(
            "sandbox_gateway_connections_ended",
            "TCP connections that were refused or cut off, by reason.",
            ("reason",),
            registry=self.registry,
        )

    def update_room(self, report: RoomReport) -> None:
        room = report.room
        for resource, *values in (
            ("disk", room.disk_free, room.disk_total, report.disk_promised),
            ("memory", room.memory_free, room.memory_total, report.memory_promised),
        ):
            for gauge, value in zip((self._free_gauge, self._total_gauge, self._promised_gauge), values, strict=True):
                gauge.labels(resource).set(value)
        if room.memory_disk is not None:
            self._free_gauge.labels("memory_root").set(room.memory_disk.free)
            self._total_gauge.labels("memory_root").set(room.memory_disk.total)
        self._stalled_gauge.set(len(report.stalled_ids))

    def record_connection_end(self, reason: str) -> None:
        self._connection_end_counter.labels(reason).inc()

    def record_request(self, method: str, route: str, status: int, seconds: float) -> None:
        method_label = method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE") else "other"
        status_label = str(status) if str(status) in _STATUS_LABELS else "other"
        self._request_histogram.labels(method_label, route, status_label).observe(seconds)

    def record_operation(self, measurement: Measurement) -> None:
        labels = (measurement.operation, self._engine.host.kind, measurement.memory, measurement.outcome)
        self._operation_histogram.labels(*labels).observe(measurement.seconds)

    def record_capture(self, snapshot: Snapshot) -> None:
        self._pause_histogram.labels(snapshot.memory.value).observe(snapshot.pause_ms / 1000)
        self._memory_counter.inc(snapshot.memory_bytes_written)
        if "degraded" in snapshot.host:
            self._degraded_capture_counter.labels(snapshot.memory.value).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Inventory(Collector):
    """A collector that reads the current numbers of sandboxes, snapshots and starts on each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        count_by_state = self._engine.sandboxes.count()
        sandbox_gauge = GaugeMetricFamily("sandbox_gateway_sandboxes", "Sandboxes, by state.", labels=["state"])
        for state in SandboxState:
            sandbox_gauge.add_metric([state.value], count_by_state[state.value])
        yield sandbox_gauge
        count_by_kind = self._engine.snapshots.count()
        snapshot_gauge = GaugeMetricFamily("sandbox_gateway_snapshots", "Visible snapshots, by kind.", labels=["kind"])
        for kind in ("snapshot", "template"):
            snapshot_gauge.add_metric([kind], count_by_kind[kind])
        yield snapshot_gauge
        level = self._engine.prewarm.get_total_level()
        prewarmed_fork_gauge = GaugeMetricFamily(
            "sandbox_gateway_prewarmed_forks",
            "Prewarmed forks: those that are ready, and the target.",
            labels=["state"],
        )
        prewarmed_fork_gauge.add_metric(["ready"], level.ready)
        prewarmed_fork_gauge.add_metric(["target"], level.target)
        yield prewarmed_fork_gauge
        start_counter = CounterMetricFamily(
            "sandbox_gateway_starts",
            "Machines that were started, by method: from a prewarmed fork, from memory, or by a boot.",
            labels=["how"],
        )
        for method in ("prewarmed", "memory", "boot"):
            start_counter.add_metric([method], self._engine.machines.start_counts[method])
        yield start_counter
        if (commands := self._engine.host.get_storage_commands()) is not None:
            yield CounterMetricFamily(
                "sandbox_gateway_zfs_timeouts",
                "ZFS commands that were killed because they did not finish in time.",
                commands.timeouts,
            )
            yield GaugeMetricFamily(
                "sandbox_gateway_zfs_slow_commands",
                "ZFS commands that are hung, or have been running for an unusually long time.",
                len(commands.slow_commands),
            )
        usage_sums = sum_samples(self._engine.loads.list_current_samples())
        yield GaugeMetricFamily("sandbox_gateway_used_cpus", "CPUs that running sandboxes use.", usage_sums["cpus"])
        for resource in ("memory", "disk"):
            yield GaugeMetricFamily(
                f"sandbox_gateway_used_{resource}_bytes",
                f"Bytes of {resource} that running sandboxes use; shared bytes count for each sandbox.",
                usage_sums[f"{resource}_bytes"],
            )
        for direction in ("received", "sent"):
            yield GaugeMetricFamily(
                f"sandbox_gateway_{direction}_bytes_per_second",
                f"Bytes per second that running sandboxes have {direction} over their networks (`kvm_xfs`).",
                usage_sums[f"{direction}_rate"],
            )

    def describe(self) -> Iterable[Metric]:
        return []


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
async def export_metrics(request: Request, engine: EngineDep) -> Response:
    with contextlib.suppress(GatewayError):  # Keep the last values if the host cannot report its room.
        request.app.state.metrics.update_room(await engine.room.report())
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)
