"""The options that every making of sandboxes takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import words
from sandbox_gateway.cli.failure import Exit, Failure

Cpus = Annotated[int | None, typer.Option("--cpus", metavar="N", help="Virtual CPUs.", show_default=False)]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory, such as 512M.", show_default=False)]
Disk = Annotated[str, typer.Option("--disk", metavar="SIZE", help="Disk, such as 4G.", show_default=False)]
Metadata = Annotated[list[str] | None, typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="May be repeated.")]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment of its processes; repeatable.")
]
Life = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="How long it lives: 90s, 10m, 2h, never.", show_default=False)
]
OnTimeout = Annotated[str, typer.Option("--on-timeout", metavar="kill|pause", help="What then.", show_default=False)]
NoInternet = Annotated[bool, typer.Option("--no-internet", help="It reaches nothing outside itself.")]
AllowOut = Annotated[list[str] | None, typer.Option("--allow-out", metavar="CIDR", help="Reachable all the same.")]
DenyOut = Annotated[list[str] | None, typer.Option("--deny-out", metavar="CIDR", help="Not reachable.")]
Paused = Annotated[bool, typer.Option("--paused", help="Leave it paused.")]
ColdStart = Annotated[bool, typer.Option("--cold-start", help="Boot from the disk, without the captured memory.")]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", metavar="NAME:PATH[:ro][:clone]", help="Mount a volume; repeatable. Default: as it was captured."
    ),
]
NoVolumes = Annotated[bool, typer.Option("--no-volumes", help="Mount none, whatever was mounted at the capture.")]
Count = Annotated[int | None, typer.Option("--count", "-n", min=1, max=1000, help="How many.", show_default=False)]
Names = Annotated[list[str] | None, typer.Option("--names", metavar="A,B,…", help="One sandbox for each name.")]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", min=1, max=256, help="Made at a time.", show_default=False)
]
BestEffort = Annotated[bool, typer.Option("--best-effort", help="As many as can be made; default: all or none.")]


@dataclass
class Options:
    """What was said about the sandboxes to be made; ``body`` is what a gateway is sent."""

    cpus: int | None = None
    memory: str = ""
    disk: str = ""
    metadata: list[str] | None = None
    env: list[str] | None = None
    timeout: str = ""
    on_timeout: str = ""
    no_internet: bool = False
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    paused: bool = False
    cold_start: bool = False
    volumes: list[str] | None = None
    no_volumes: bool = False

    def body(self) -> dict[str, Any]:
        network: dict[str, Any] = {"allowOut": words.split(self.allow_out or [])}
        network["denyOut"] = words.split(self.deny_out or [])
        said = {
            **sizes(self.cpus, self.memory, self.disk),
            "metadata": words.pairs(self.metadata or [], "metadata"),
            "envVars": words.pairs(self.env or [], "an environment variable"),
            "network": {key: value for key, value in network.items() if value},
            "paused": self.paused,
            "coldStart": self.cold_start,
        }
        body = {key: value for key, value in said.items() if value}
        if self.volumes or self.no_volumes:
            body["volumeMounts"] = mounts(self.volumes or [], self.no_volumes)
        if self.timeout:
            body["timeout"] = words.seconds(self.timeout)
        if self.on_timeout:
            body["lifecycle"] = {"onTimeout": self.on_timeout}
        if self.no_internet:
            body["allow_internet_access"] = False
        return body


def sizes(cpus: int | None, memory: str, disk: str) -> dict[str, int]:
    said = {
        "cpuCount": cpus,
        "memoryMB": words.mebibytes(memory) if memory else None,
        "diskSizeMB": words.mebibytes(disk) if disk else None,
    }
    return {key: value for key, value in said.items() if value is not None}


def mounts(volumes: list[str], none: bool) -> list[dict[str, Any]]:
    if volumes and none:
        raise Failure("--volume and --no-volumes exclude each other", Exit.USAGE, "leave one of them out")
    return [words.mount(volume) for volume in volumes]


def siblings(
    count: int | None, names: list[str] | None, concurrency: int | None, best_effort: bool
) -> tuple[dict[str, Any], int]:
    """The part of a request that says how many, and that number."""
    wanted = words.split(names or [])
    body: dict[str, Any] = {"names": wanted} if wanted else {"count": count or 1}
    if wanted and count is not None:
        body["count"] = count
    if concurrency is not None:
        body["concurrency"] = concurrency
    if best_effort:
        body["atomic"] = False
    return body, len(wanted) or count or 1
