"""Create the configuration of a volume server (nfs-ganesha), with a marker that shows whether it is in effect."""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Mapping

from sandbox_gateway.hosts.kvm_xfs.volumes.server_process import ServerSettings

_MAX_TRANSFER_BYTES = 256 << 10
"""Maximum bytes that one request reads or writes.

The limit is low because replies that a guest does not fetch stay in memory.
"""


def render_configuration(
    address: str, gateway: str, volume: str, port: int, clients: Mapping[str, bool], marker: str
) -> str:
    """Return a configuration that serves NFSv3 over TCP on two ports of ``address``, with each client's access rights.

    ``gateway``: the address from which the gateway queries the configuration in effect.

    The duplicate request cache is disabled. It identifies requests by client address and transaction id, but a fork
    repeats the ids of its source, possibly at an address that another sandbox used before. The cache is not needed,
    because guests repeat requests only on a new connection.
    """
    lines = [
        "NFS_CORE_PARAM {",
        f"    Protocols = 3; Bind_addr = {address}; NFS_Port = {port}; MNT_Port = {port + 1};",
        "    Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;",
        "    DRC_Disabled = true; RPC_Ioq_ThrdMin = 2; RPC_Ioq_ThrdMax = 16;",
        "}",
        "NFS_KRB5 { Active_krb5 = false; }",
        "NFSv4 { Graceless = true; }",
        "MDCACHE { Entries_HWMark = 10000; Chunks_HWMark = 1000; }",
        # Without these levels, the server would log that D-Bus and Kerberos are missing.
        "LOG { Default_Log_Level = CRIT; Components { DBUS = FATAL; NFS_CB = FATAL; } }",
        # Root in a sandbox is root on the volume. This is safe because only sandboxes mount the file system.
        "EXPORT_DEFAULTS { Access_Type = None; Protocols = 3; Transports = TCP; SecType = sys;"
        " Squash = No_Root_Squash; }",
        "EXPORT {",
        f"    Export_Id = 1; Path = /{volume}; Pseudo = /{volume}; Access_Type = None; FSAL {{ Name = VFS; }}",
        f"    MaxRead = {_MAX_TRANSFER_BYTES}; PrefRead = {_MAX_TRANSFER_BYTES};"
        f" MaxWrite = {_MAX_TRANSFER_BYTES}; PrefWrite = {_MAX_TRANSFER_BYTES};",
    ]
    for access, read_only in (("RW", False), ("RO", True)):
        if addresses := sorted(client for client in clients if clients[client] is read_only):
            lines.append(f"    CLIENT {{ Clients = {', '.join(addresses)}; Access_Type = {access}; }}")
    lines.append(f"    CLIENT {{ Clients = {gateway}, {marker}; Access_Type = MDONLY_RO; }}")
    return "\n".join([*lines, "}", ""])


def derive_marker(settings: ServerSettings) -> str:
    """Return the marker for ``settings``: an address in the reserved range 240/4 that is derived from the clients."""
    digest = hashlib.sha256(json.dumps(sorted(settings.clients.items())).encode()).digest()
    return str(ipaddress.IPv4Address(0xF0000000 | int.from_bytes(digest[:4], "big") >> 5))
