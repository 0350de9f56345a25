"""Options that several commands share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sandbox_gateway.cli import formats
from sandbox_gateway.cli.failure import ExitCode, Failure

Cpus = Annotated[int | None, typer.Option("--cpus", metavar="N", help="Virtual CPUs.", show_default=False)]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory, such as 512M.", show_default=False)]
Disk = Annotated[str, typer.Option("--disk", metavar="SIZE", help="Disk, such as 4G.", show_default=False)]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="Metadata; repeatable.")
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="KEY=VALUE", help="Environment variable for all processes; repeatable."),
]
Timeout = Annotated[
    str,
    typer.Option("--timeout", metavar="TIME", help="Lifetime, such as 90s, 10m, 2h, or never.", show_default=False),
]
OnTimeout = Annotated[
    str, typer.Option("--on-timeout", metavar="kill|pause", help="Action at the timeout.", show_default=False)
]
NoInternet = Annotated[bool, typer.Option("--no-internet", help="Block all outgoing connections.")]
AllowOut = Annotated[
    list[str] | None, typer.Option("--allow-out", metavar="CIDR|NAME", help="Network or domain name to allow.")
]
DenyOut = Annotated[list[str] | None, typer.Option("--deny-out", metavar="CIDR", help="Network to block.")]
Paused = Annotated[bool, typer.Option("--paused", help="Create the sandbox paused.")]
ColdStart = Annotated[bool, typer.Option("--cold-start", help="Boot from the disk, without the captured memory.")]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", metavar="NAME:PATH[:ro][:clone]", help="Mount a volume; repeatable. Default: the captured mounts."
    ),
]
NoVolumes = Annotated[bool, typer.Option("--no-volumes", help="Mount no volumes, not even the captured ones.")]
Host = Annotated[str, typer.Option("--host", metavar="NAME", help="In a fleet: only this host.", show_default=False)]
HostLabels = Annotated[
    list[str] | None,
    typer.Option("--host-label", metavar="KEY=VALUE", help="In a fleet: only hosts with this label; repeatable."),
]
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="local|spread|pack",
        help="In a fleet: how to choose hosts. Default: local for one sandbox, spread for several.",
        show_default=False,
    ),
]
NoMemory = Annotated[
    bool, typer.Option("--no-memory", help="Move only the disk, and boot the sandbox. Programs that run are lost.")
]
AntiAffinity = Annotated[bool, typer.Option("--anti-affinity", help="In a fleet: a host of its own for each sandbox.")]
Count = Annotated[
    int | None, typer.Option("--count", "-n", min=1, max=1000, help="Number of sandboxes.", show_default=False)
]
Names = Annotated[list[str] | None, typer.Option("--names", metavar="A,B,…", help="Create one sandbox for each name.")]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, max=256, help="Number of sandboxes to create at a time.", show_default=False),
]
Prewarm = Annotated[
    int | None,
    typer.Option("--prewarm", metavar="N", min=0, max=1000, help="Keep N forks ready.", show_default=False),
]
BestEffort = Annotated[bool, typer.Option("--best-effort", help="Create as many as possible. Default: all or nothing.")]
RegistryUsername = Annotated[
    str,
    typer.Option(
        "--registry-username",
        metavar="NAME",
        help="User name for the registry. Default: the gateway's credentials.",
        show_default=False,
    ),
]
AgeRecipients = Annotated[
    list[str] | None,
    typer.Option(
        "--age-recipient",
        metavar="RECIPIENT",
        help="Encrypt the file for this age key or SSH public key; repeatable.",
        show_default=False,
    ),
]
AgeIdentity = Annotated[
    str,
    typer.Option(
        "--age-identity", metavar="KEYFILE", help="File with the key that decrypts the file.", show_default=False
    ),
]
RegistryPasswordFile = Annotated[
    str,
    typer.Option(
        "--registry-password-file",
        metavar="FILE",
        help="File with the password for the registry; - reads it from the standard input.",
        show_default=False,
    ),
]
_MAX_PASSWORD_BYTES = 64 << 10


@dataclass
class SandboxOptions:
    """The options of a command that creates sandboxes; ``build_body`` returns the fields of the request."""

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

    def build_body(self) -> dict[str, Any]:
        network: dict[str, Any] = {"allowOut": formats.split_list(self.allow_out or [])}
        network["denyOut"] = formats.split_list(self.deny_out or [])
        fields = {
            **build_size_fields(self.cpus, self.memory, self.disk),
            "metadata": formats.parse_pairs(self.metadata or [], "metadata"),
            "envVars": formats.parse_pairs(self.env or [], "an environment variable"),
            "network": {key: value for key, value in network.items() if value},
            "paused": self.paused,
            "coldStart": self.cold_start,
        }
        body = {key: value for key, value in fields.items() if value}
        if self.volumes or self.no_volumes:
            body["volumeMounts"] = build_mount_fields(self.volumes or [], self.no_volumes)
        if self.timeout:
            body["timeout"] = formats.parse_duration(self.timeout)
        if self.on_timeout:
            body["lifecycle"] = {"onTimeout": self.on_timeout}
        if self.no_internet:
            body["allow_internet_access"] = False
        return body


def build_placement_fields(
    host: str, labels: list[str] | None, strategy: str, anti_affinity: bool
) -> dict[str, dict[str, Any]]:
    """Return the field of the request that says which hosts of a fleet to use, or nothing if no option is given."""
    fields = {
        "host": host,
        "labels": formats.parse_pairs(labels or [], "a label"),
        "strategy": strategy,
        "antiAffinity": anti_affinity,
    }
    placement = {key: value for key, value in fields.items() if value}
    return {"placement": placement} if placement else {}


def build_size_fields(cpus: int | None, memory: str, disk: str) -> dict[str, int]:
    fields = {
        "cpuCount": cpus,
        "memoryMB": formats.parse_size(memory) if memory else None,
        "diskSizeMB": formats.parse_size(disk) if disk else None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def build_mount_fields(volumes: list[str], no_volumes: bool) -> list[dict[str, Any]]:
    if volumes and no_volumes:
        raise Failure("--volume and --no-volumes are mutually exclusive", ExitCode.USAGE, "omit one of them")
    return [formats.parse_mount(volume) for volume in volumes]


def build_count_fields(
    count: int | None, names: list[str] | None, concurrency: int | None, best_effort: bool
) -> tuple[dict[str, Any], int]:
    """Return the request's fields for the number and names of sandboxes, and the number of sandboxes."""
    all_names = formats.split_list(names or [])
    fields: dict[str, Any] = {"names": all_names} if all_names else {"count": count or 1}
    if all_names and count is not None:
        fields["count"] = count
    if concurrency is not None:
        fields["concurrency"] = concurrency
    if best_effort:
        fields["atomic"] = False
    return fields, len(all_names) or count or 1


def build_login_fields(username: str, password_file: str) -> dict[str, str]:
    """Return the fields of a request with a login to a registry. Raises Failure if the password cannot be read."""
    fields = {"registryUsername": username, "registryPassword": _read_password(password_file) if password_file else ""}
    return {key: value for key, value in fields.items() if value}


def _read_password(file: str) -> str:
    """Return the password in ``file``, or in the standard input if ``file`` is "-". Raises Failure."""
    source = "the standard input" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_MAX_PASSWORD_BYTES + 1)
        else:
            with Path(file).open("rb") as opened_file:
                data = opened_file.read(_MAX_PASSWORD_BYTES + 1)
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        # The message of a decoding error would contain bytes of the password.
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise Failure(
            f"the password in {source} cannot be read: {reason}",
            ExitCode.USAGE,
            "check the path and the file's permissions",
        ) from None
    if not password or len(data) > _MAX_PASSWORD_BYTES or "\n" in password:
        raise Failure(
            f"{source} must contain one line with the password, of at most {_MAX_PASSWORD_BYTES >> 10} KiB",
            ExitCode.USAGE,
            "write only the password to it",
        )
    return password
