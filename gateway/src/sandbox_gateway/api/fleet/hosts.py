"""Routes and metrics of the fleet's hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Path
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field

from sandbox_gateway.api.native.requests import NativeBody
from sandbox_gateway.api.native.shapes import Shape
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.records import Load

HostName = Annotated[str, Path(max_length=64, description="The name of a host.")]


class FleetHostShape(Shape):
    name: str
    state: str = Field(description="running, or absent if its gateway does not run.")
    cordoned: bool = Field(description="Whether it gets no new sandboxes.")
    address: str | None
    kind: str | None
    platform: dict[str, str]
    labels: dict[str, str]
    version: str | None
    memory_total_bytes: int
    memory_free_bytes: int
    memory_reserved_bytes: int = Field(description="The memory that starting machines will need.")
    disk_total_bytes: int
    disk_free_bytes: int
    sandboxes: int
    max_sandboxes: int
    signer: str | None = Field(
        description="Fingerprint of the key with which it signs exported and pushed snapshots. The fleet trusts it."
    )


class FleetShape(Shape):
    host: str = Field(description="The host of the gateway that answered.")
    state: str = Field(description="joined, or the reason why this gateway is not a member at the moment.")
    is_current: bool = Field(description="Whether this gateway sees changes of the fleet at the moment.")
    conflicts: list[str] = Field(
        description="A sentence for each name that an object of this gateway's host and one of another host have."
    )
    hosts: list[FleetHostShape]


class PatchHost(NativeBody):
    cordoned: bool = Field(description="Whether the host gets no new sandboxes.")


class HostCollector(Collector):
    """A metric of this gateway's own host."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        host = self._fleet.view.hosts.get(self._fleet.name)
        yield GaugeMetricFamily(
            "sandbox_gateway_host_cordoned",
            "Whether the host is cordoned, and gets no new sandboxes (1 or 0).",
            int(host is not None and host.cordoned),
        )

    def describe(self) -> Iterable[Metric]:
        return []


def create_router(fleet: Fleet) -> APIRouter:
    router = APIRouter(tags=["fleet"])

    @router.get("/fleet", summary="Show the hosts of the fleet")
    async def show() -> FleetShape:
        return FleetShape(
            host=fleet.name,
            state=fleet.membership.describe_state(),
            is_current=fleet.view.is_current,
            conflicts=fleet.directory.list_conflicts(),
            hosts=[_describe_host(fleet, name) for name in sorted({*fleet.view.hosts, *fleet.view.members})],
        )

    @router.patch("/fleet/hosts/{host}", status_code=204, summary="Cordon a host, or end that")
    async def patch(host: HostName, body: PatchHost) -> None:
        await fleet.membership.set_cordoned(host, body.cordoned)

    @router.delete("/fleet/hosts/{host}", status_code=204, summary="Forget a host that will not come back")
    async def forget(host: HostName) -> None:
        await fleet.membership.forget_host(host)

    return router


def _describe_host(fleet: Fleet, name: str) -> FleetHostShape:
    host, member = fleet.view.hosts.get(name), fleet.view.members.get(name)
    load = member.load if member else Load()
    return FleetHostShape(
        name=name,
        state="running" if member else "absent",
        cordoned=bool(host and host.cordoned),
        address=member.address if member else None,
        kind=member.kind if member else None,
        platform=member.platform if member else {},
        labels=member.labels if member else {},
        version=member.version if member else None,
        memory_total_bytes=load.memory_total,
        memory_free_bytes=load.memory_free,
        memory_reserved_bytes=fleet.view.reserved_memory.get(name, 0),
        disk_total_bytes=load.disk_total,
        disk_free_bytes=load.disk_free,
        sandboxes=load.sandboxes,
        max_sandboxes=load.max_sandboxes,
        signer=(host.signer if host else "") or None,
    )
