"""The gateway's configuration, which is read from one TOML file.

``docs/configuration.md`` is generated from the descriptions of the keys. Unknown keys are rejected by name.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from sandbox_gateway.errors import Invalid
from sandbox_gateway.image_references import is_registry_host
from sandbox_gateway.records import check_name
from sandbox_gateway.validation import explain


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Section):
    """`[server]`: where the gateway listens, and which clients it accepts."""

    socket: Path | None = Field(
        Path("/run/sandbox-gateway/gateway.sock"),
        description="Path of the Unix socket; anyone who can open it is an administrator. Empty string: no socket.",
    )
    socket_group: str = Field(
        "", description="Group that may open the socket (mode 0660). Empty string: only root may open it (0600)."
    )
    listen: str = Field(
        "", description="TCP address `host:port` on which the gateway also listens. Empty string: none."
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain for the TCP address.")
    tls_key: Path | None = Field(None, description="PEM private key of that certificate.")
    allow_plaintext: bool = Field(
        False, description="Allow a TCP address other than loopback without TLS (behind a proxy that provides TLS)."
    )
    key_file: Path | None = Field(
        None,
        description="File of API keys, readable only by root. It has one line per key, `name scope key`, where the "
        "scope is `read`, `exec` or `admin`.",
    )
    connections: int = Field(
        4096,
        ge=1,
        description="Maximum number of open connections to the TCP address. Further connections are closed "
        "immediately. If the service may not open enough files (`LimitNOFILE`), the effective maximum "
        "is lower.",
    )
    connections_per_address: int = Field(
        512,
        ge=0,
        description="Maximum number of connections from one IPv4 address, or from one IPv6 /64 network. In a fleet, it "
        "also applies to the connections of each other gateway. 0: no such "
        "limit; only `connections` applies. Behind a reverse proxy, all clients have the proxy's "
        "address: set 0, and limit clients in the proxy.",
    )
    request_seconds: float = Field(
        30,
        gt=0,
        le=3600,
        description="Time limit, in seconds, for each of three steps of a client at the TCP address: the TLS "
        "handshake, sending the headers of a request, and sending a body that the gateway itself "
        "reads.",
    )
    stalled_seconds: float = Field(
        300,
        gt=0,
        le=86_400,
        description="How long an upload or a response may stall because of the client, in seconds.",
    )
    domain: str = Field("sandbox.local", description="Domain of the data plane: `{port}-{sandboxID}.{domain}`.")

    @field_validator("socket", mode="before")
    @classmethod
    def _convert_empty_to_none(cls, value: object) -> object:
        return None if value == "" else value


class HostSection(_Section):
    """`[host]`: the kind of host, and where it stores its state."""

    kind: Literal["kvm_xfs", "jail_zfs"] = Field("kvm_xfs", description="Kind of host.")
    state_root: Path = Field(
        Path("/var/lib/sandbox-gateway"),
        description="Directory that contains all state. On `kvm_xfs`, it must be on an XFS file system with "
        "`reflink=1`.",
    )
    cache_root: Path | None = Field(
        None, description="Directory in which built root file systems are cached. Default: `state_root`/cache."
    )


class KvmXfs(_Section):
    """`[kvm_xfs]`: QEMU virtual machines on XFS."""

    qemu: str = Field("qemu-system-x86_64", description="QEMU's executable.")
    machine: str = Field(
        "pc-q35-7.2", description="Versioned machine type of QEMU. Each snapshot records the type of its machine."
    )
    accelerator: Literal["auto", "kvm", "tcg"] = Field(
        "auto", description="`auto`: KVM if a test guest boots on it (the result is cached), otherwise TCG."
    )
    probe_seconds: float = Field(20, gt=0, le=600, description="How long `auto` waits for the test guest, in seconds.")
    boot_seconds: float = Field(
        180, gt=0, le=3600, description="How long a booting sandbox may take to respond, in seconds."
    )
    resume_seconds: float = Field(
        20, gt=0, le=600, description="How long a sandbox forked with its memory may take to respond, in seconds."
    )
    memory_mode: Literal["auto", "written", "soft_dirty", "compare", "incremental", "full"] = Field(
        "auto",
        description="How captures find the memory pages that were written. If a mode does not work, the next one "
        "in this list is used. `auto`: the first one that works.",
    )
    page_tracker: Path | None = Field(
        None,
        description="Socket of the page tracker, which the mode `written` needs. Default: the gateway starts its "
        "own tracker.",
    )
    memory_root: Path | None = Field(
        None,
        description="Directory on a different file system for the memory images of new snapshots and of the machines "
        "forked from them. It must exist; the gateway creates a directory of its own in it. Existing "
        "snapshots stay where they are. Empty string: memory images are stored in `state_root`.",
    )
    uid_base: int = Field(
        1_900_000_000,
        ge=0,
        le=4_000_000_000,
        description="The QEMU process of network slot n runs with the user id `uid_base`+n. No such user needs to "
        "exist. 0: QEMU runs as root.",
    )

    insecure_registries: list[str] = Field(
        default_factory=list,
        description="Registries (HOST or HOST:PORT) from which images are also fetched without HTTPS, or with a "
        "certificate that cannot be verified.",
    )
    registry_auth_file: Path | None = Field(
        None,
        description="File with the credentials for registries, as `skopeo login --authfile FILE` writes it. Empty "
        "string: images are fetched without credentials.",
    )

    @field_validator("memory_root", "registry_auth_file", mode="before")
    @classmethod
    def _convert_empty_to_none(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("memory_root")
    @classmethod
    def _check_memory_root(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError(f"{str(value)!r} is not an absolute path")
        return value


class JailZfs(_Section):
    """`[jail_zfs]`: VNET jails on ZFS clones."""

    dataset: str = Field(
        "zroot/sandboxes",
        pattern=r"^[A-Za-z][A-Za-z0-9_.:-]*(/[A-Za-z0-9][A-Za-z0-9_.:-]*)*$",
        description="Parent dataset of all file systems and snapshots. It must exist, and only this gateway may "
        "use it.",
    )
    bridge: str = Field(
        "",
        pattern=r"^([a-z][a-z0-9_-]{0,14})?$",
        description="Bridge that connects the jails; created if it is missing. Empty string: `network.prefix` "
        "followed by `br`.",
    )
    egress: str = Field(
        "",
        pattern=r"^([a-z][a-z0-9_.-]{0,14})?$",
        description="Network interface that leads to the internet. Outgoing connections of sandboxes use its "
        "address. Empty string: the interface of the default route.",
    )
    boot_seconds: float = Field(
        30, gt=0, le=3600, description="How long a starting sandbox may take to respond, in seconds."
    )
    dying_seconds: float = Field(
        2, ge=0, le=60, description="How long to wait for a removed jail that is still `dying`, in seconds."
    )
    processes: int = Field(
        1000,
        ge=8,
        le=1_000_000,
        description="Maximum number of processes in a sandbox (`rctl` `maxproc`). It can have four times as many "
        "threads.",
    )


class Network(_Section):
    """`[network]`: the network of sandboxes."""

    prefix: str = Field(
        "sbx",
        pattern=r"^[a-z][a-z0-9]{0,5}$",
        description="Prefix of the names of network namespaces, jails and interfaces. Each gateway on a host needs "
        "its own prefix.",
    )
    subnet: str = Field(
        "10.231.0.0/16",
        description="IPv4 range for the addresses of sandboxes, which are used only on the host. Each sandbox "
        "needs four addresses on `kvm_xfs`, and one on `jail_zfs`.",
    )
    pool: int = Field(4, ge=0, le=1000, description="Number of network slots to prepare in advance (`kvm_xfs`).")
    dns: list[str] = Field(
        default_factory=list,
        description="Name servers that sandboxes use, and that the gateway asks for the domain names in network "
        "policies. Empty list: the host's name servers.",
    )
    public_ports: bool = Field(
        False,
        description="Whether anyone who can reach the gateway can connect to the ports of sandboxes, except the "
        "agent's, without a key or token. This is the default for sandboxes whose creation request "
        "does not contain `allowPublicTraffic`.",
    )

    @field_validator("subnet")
    @classmethod
    def _check_subnet(cls, value: str) -> str:
        network = ipaddress.IPv4Network(value)
        if network.prefixlen > 28:
            raise ValueError("the subnet must be /28 or larger, because a sandbox on kvm_xfs needs four addresses")
        return value


class Limits(_Section):
    """`[limits]`: limits on sandboxes, requests and builds."""

    sandboxes: int = Field(1000, ge=1, description="Maximum number of sandboxes on this host, including paused ones.")
    concurrency: int = Field(
        4, ge=1, le=256, description="Maximum number of forks that one request creates at the same time."
    )
    starts: int = Field(
        0,
        ge=0,
        le=1024,
        description="Maximum number of machines that start at the same time. If more are waiting, clients take "
        "turns, and so do the requests of each client. 0: as many as the host has cores.",
    )
    connections: int = Field(
        1000, ge=1, description="Maximum number of concurrent requests and WebSockets to one sandbox."
    )
    lock_seconds: float = Field(60, gt=0, description="How long a request waits for a busy sandbox, in seconds.")
    timeout_seconds: int = Field(0, ge=0, description="Default timeout of a new sandbox, in seconds. 0: no limit.")
    builds: int = Field(1, ge=1, le=16, description="Maximum number of templates that are built at the same time.")
    transfers: int = Field(
        2,
        ge=1,
        le=64,
        description="Maximum number of snapshots that are exported or imported, and of archives that are uploaded for "
        "builds, at the same time.",
    )
    upload_mb: int = Field(
        1024,
        ge=1,
        le=102_400,
        description="Maximum size, in MiB, of an archive that E2B's client uploads for a `COPY` step. All stored "
        "archives together can have four times this size.",
    )
    memory_overhead_mb: int = Field(
        256, ge=32, description="Memory that QEMU may use in addition to the sandbox's own, in MiB."
    )
    free_disk_mb: int = Field(
        512,
        ge=0,
        description="Disk space, in MiB, that forks, clones and captures must leave free on the file system of "
        "`state_root` or in the ZFS dataset. Captures with memory must also leave it free in "
        "`kvm_xfs.memory_root`. A request that would leave less is refused (507). Machines that "
        "stalled on a full disk continue when this much is free again. 0: no reserve.",
    )
    free_memory_mb: int = Field(
        256,
        ge=0,
        description="Host memory, in MiB, that forks, clones and builds must leave free. Each new machine counts as 64 "
        "MiB. A request that would leave less is refused (507). 0: no reserve.",
    )


class RegistrySection(_Section):
    """`[registry]`: the OCI registries to which snapshots and templates are pushed, and from which they are pulled."""

    allowed: list[str] = Field(
        default_factory=list,
        description="Registries (HOST or HOST:PORT) that requests may name. Empty list: none.",
    )
    plain_http: list[str] = Field(
        default_factory=list,
        description="The allowed registries that are contacted with HTTP instead of HTTPS. Anyone on the network path "
        "can then read what is transferred, including passwords.",
    )
    auth_file: Path | None = Field(
        None,
        description="File with the credentials for registries, as `skopeo login --authfile FILE` writes it. Empty "
        "string: requests without a user name and password are anonymous.",
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with certificate authorities to trust in addition to those of the system. Empty string: "
        "none.",
    )
    token_servers: list[str] = Field(
        default_factory=list,
        description="Hosts (HOST or HOST:PORT, with HTTPS) other than the registries themselves from which registries "
        "may require a token. The gateway sends them the credentials.",
    )
    download_servers: list[str] = Field(
        default_factory=list,
        description="Hosts (HOST or HOST:PORT, with HTTPS) other than the registries themselves to which registries "
        "may redirect downloads. The gateway sends them no credentials.",
    )
    kept_mb: int = Field(
        4096,
        ge=0,
        description="Maximum size, in MiB, of the data of interrupted pulls that is kept for a day, so that a repeated "
        "pull does not fetch it again. 0: keep none.",
    )

    @field_validator("allowed", "plain_http", "token_servers", "download_servers")
    @classmethod
    def _check_hosts(cls, value: list[str]) -> list[str]:
        for each in value:
            if not is_registry_host(each):
                raise ValueError(f"{each!r} is not a host: use HOST or HOST:PORT, such as registry.example:5000")
        return value

    @field_validator("auth_file", "ca_file", mode="before")
    @classmethod
    def _convert_empty_to_none(cls, value: object) -> object:
        return None if value == "" else value


class PrewarmSection(_Section):
    """`[prewarm]`: forks that are started before anyone requests them (`kvm_xfs`)."""

    maximum: int = Field(64, ge=0, le=1000, description="Maximum number of prewarmed forks per snapshot.")
    free_memory_mb: int = Field(
        1024,
        ge=0,
        description="Host memory, in MiB, that prewarmed forks must leave free. When less is free, the gateway "
        "stops prewarmed forks one after another.",
    )


class FleetSection(_Section):
    """`[fleet]`: many hosts as one. Without this section, a gateway knows only its own host."""

    name: str = Field(description="Name of this host; no other member of the fleet may have it.")
    address: str = Field(
        description="`host:port` at which the other gateways reach this one. Only gateways with a certificate from "
        "`tls_ca` can connect; clients use `server.listen`."
    )
    listen: str = Field(
        "", description="TCP address `host:port` on which the gateway listens for the others. Empty string: `address`."
    )
    etcd: list[str] = Field(
        min_length=1,
        description="Addresses of the members of the etcd cluster: `https://host:port`, or `http://` on loopback.",
    )
    prefix: str = Field(
        "/grove.sandbox/",
        pattern=r"^/([A-Za-z0-9_.-]+/)+$",
        description="Prefix of all keys in etcd. Each fleet needs its own.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels of this host, by which requests can choose hosts (`placement`)."
    )
    tls_ca: Path = Field(
        description="PEM certificates of the authorities that sign the certificates of the gateways and of etcd. "
        "Anyone with such a certificate has administrator rights on all hosts."
    )
    tls_cert: Path = Field(
        description="PEM certificate chain of this gateway, for the host in `address`, as a server and as a client."
    )
    tls_key: Path = Field(description="PEM private key of that certificate.")
    secret_file: Path = Field(
        description="File with the 32-byte secret of the fleet, readable only by root, from which the tokens of all "
        "sandboxes are derived. It replaces `state_root`/secret."
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return check_name(value)

    @field_validator("address", "listen")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        host, _, port = value.rpartition(":")
        if value and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{value!r} is not an address: use host:port, such as 10.0.0.1:8701")
        if info.field_name == "address" and host.strip("[]") in ("", "0.0.0.0", "::"):
            raise ValueError(f"{value!r} does not name this host: use a name or an address that the others can reach")
        return value

    @field_validator("etcd")
    @classmethod
    def _check_endpoints(cls, values: list[str]) -> list[str]:
        for value in values:
            url = urlsplit(value)
            try:
                is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port is not None
            except ValueError:
                is_valid = False
            if "@" in value:
                raise ValueError("the addresses must not contain passwords: use certificates (tls_cert)")
            if not is_valid or url.path or url.query:
                raise ValueError(f"{value!r} is not the address of a member of etcd: use https://host:port")
            if url.scheme == "http" and not _is_loopback(url.hostname or ""):
                raise ValueError(f"{value!r} is not encrypted: use https://, because it is not on this host")
        return values

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, values: dict[str, str]) -> dict[str, str]:
        for key, value in values.items():
            if not (_LABEL_PATTERN.fullmatch(key) and _LABEL_PATTERN.fullmatch(value)):
                raise ValueError(
                    f"{key} = {value!r} is not a label: use up to 64 letters, digits, '_', '.', '/' and '-' for its "
                    "name and for its value"
                )
        return values

    @field_validator("tls_ca", "tls_cert", "tls_key", "secret_file")
    @classmethod
    def _check_path(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError(f"{str(value)!r} is not an absolute path")
        return value


_LABEL_PATTERN = re.compile(r"[A-Za-z0-9_./-]{1,64}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LogSection(_Section):
    """`[log]`: structured logs."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest severity to log.")
    format: Literal["json", "text"] = Field(
        "json", description="`json`: one JSON object per line. `text`: text for a terminal."
    )
    file: Path | None = Field(
        None,
        description="Log file, readable only by root. When it reaches 16 MiB, the gateway renames it to `.1` and "
        "starts a new one. It keeps three old files. Empty string: log to standard error.",
    )

    @field_validator("file", mode="before")
    @classmethod
    def _convert_empty_to_none(cls, value: object) -> object:
        return None if value == "" else value


class Config(_Section):
    server: Server = Field(default_factory=Server)
    host: HostSection = Field(default_factory=HostSection)
    kvm_xfs: KvmXfs = Field(default_factory=KvmXfs)
    jail_zfs: JailZfs = Field(default_factory=JailZfs)
    network: Network = Field(default_factory=Network)
    limits: Limits = Field(default_factory=Limits)
    registry: RegistrySection = Field(default_factory=RegistrySection)
    prewarm: PrewarmSection = Field(default_factory=PrewarmSection)
    fleet: FleetSection | None = Field(None, description="Absent: the gateway knows only its own host.")
    log: LogSection = Field(default_factory=LogSection)
    restart: Literal["start", "stay"] = Field(
        "start",
        description="Action for a sandbox that was running when its host went down: `start` boots it from its disk, "
        "`stay` leaves it paused.",
    )

    @property
    def cache_root(self) -> Path:
        return self.host.cache_root or self.host.state_root / "cache"

    @property
    def secret_path(self) -> Path:
        """The file with the secret from which the tokens of sandboxes are derived."""
        return self.fleet.secret_file if self.fleet else self.host.state_root / "secret"


def load(path: Path) -> Config:
    """Read a configuration file. Raises Invalid with the file, the key and the reason."""
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise Invalid(
            f"the configuration file {path} does not exist: pass a different file with --config, or run the gateway "
            "role"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Invalid(
            f"the configuration file {path} cannot be read: {error}. Correct the file or its permissions"
        ) from None
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise Invalid(f"the configuration file {path} is invalid: {explain(error)}. Correct these keys") from None
