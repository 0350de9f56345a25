# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gateway's names of the modules' options. Modules write them in requests, and replace them in messages."""

from __future__ import annotations

import re

SIZE_FIELDS = {"cpus": "cpuCount", "memory_mb": "memoryMB", "disk_mb": "diskSizeMB"}
NETWORK_FIELDS = {"allow_internet": "allowInternetAccess", "allow_out": "allowOut", "deny_out": "denyOut"}
MOUNT_FIELDS = {"name": "name", "path": "path", "read_only": "readOnly"}
RETENTION_FIELDS = {"keep_last": "keepLast", "keep_daily": "keepDaily", "max_age": "maxAge"}
PLACEMENT_FIELDS = {"host": "host", "labels": "labels", "strategy": "strategy", "anti_affinity": "antiAffinity"}
LOGIN_FIELDS = {"registry_username": "registryUsername", "registry_password": "registryPassword"}
RECIPE_FIELDS = {
    "from": "from",
    "suite": "suite",
    "mirror": "mirror",
    "packages": "packages",
    "path": "path",
    "image": "image",
    "setup": "setup",
    "start_command": "startCommand",
    "ready_probe": "readyProbe",
    "ready_timeout": "readyTimeout",
    "setup_timeout": "setupTimeout",
    "setup_network": "setupNetwork",
    **SIZE_FIELDS,
}
_OTHER_FIELDS = {
    "cold_start": "coldStart",
    "env": "envVars",
    "expires_in": "expiresIn",
    "export_since": "since",
    "from_snapshot": "fromSnapshot",
    "size_mb": "sizeMB",
    "snapshot": "snapshotID",
    "template": "templateID",
    "volumes": "volumeMounts",
}
OPTIONS_BY_FIELD = {
    field: option
    for fields in (
        NETWORK_FIELDS,
        MOUNT_FIELDS,
        RETENTION_FIELDS,
        PLACEMENT_FIELDS,
        LOGIN_FIELDS,
        RECIPE_FIELDS,
        _OTHER_FIELDS,
    )
    for option, field in fields.items()
}
"""The option for each field of a request whose name may differ from it."""

_QUOTED_FIELD = re.compile(r"(?<!\w)'([A-Za-z]+)(?=(?:: [^']*)?')")
"""A field in a sentence: 'coldStart', or 'coldStart: true'."""
_LOCATION = re.compile(r"(?:^|(?<=[:;] ))[A-Za-z]+(?:\.[A-Za-z0-9]+)*(?=: )")
"""The path of an invalid field, which precedes the reason: `volumeMounts.0.readOnly: ...`."""


def replace_fields(message: str) -> str:
    """Return the gateway's message with the names of options in place of the names of fields."""
    message = _QUOTED_FIELD.sub(lambda match: "'" + _get_option(match.group(1)), message)
    return _LOCATION.sub(lambda match: ".".join(map(_get_option, match.group().split("."))), message)


def replace_field_names(fields: str) -> str:
    """Return a list of fields with the names of options, such as ``memory_mb, cpus`` for ``memoryMB, cpuCount``."""
    return re.sub("[A-Za-z]+", lambda match: _get_option(match.group()), fields)


def _get_option(field: str) -> str:
    return OPTIONS_BY_FIELD.get(field, field)
