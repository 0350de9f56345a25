# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Store the gateway of each sandbox that an inventory lists, for connections of the same Ansible run.

Ansible forks its workers from the process that read the inventory, so they inherit these values. This passes an API
key from the inventory file to the connection without making it a variable.
"""

from __future__ import annotations

from pathlib import Path

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure


class Gateway:
    """The address and API key of one gateway.

    The key is ``token``, or else the contents of ``token_file``. Both can be empty.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        token_file: str = "",
        ca_path: str = "",
        validate_certs: bool = True,
        name: str = "",
    ) -> None:
        self.url = url
        self.token = token
        self.token_file = token_file
        self.ca_path = ca_path
        self.validate_certs = validate_certs
        self.name = name

    def read_key(self) -> str:
        """Return the API key. Raises Failure if the key file cannot be read."""
        if self.token or not self.token_file:
            return self.token
        try:
            with Path(self.token_file).expanduser().open(encoding="ascii") as file:
                return file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a single line of plain text"
            raise Failure(f"the key file {self.token_file} cannot be read: {reason}") from None


_gateways: dict[tuple[str, str], Gateway] = {}


def store_gateway(sandbox_id: str, gateway: Gateway) -> None:
    _gateways[sandbox_id, gateway.url] = gateway


def find_gateway(sandbox_id: str, url: str) -> Gateway | None:
    """Return the gateway at ``url`` if an inventory of this run listed the sandbox there, or None.

    The id alone is not sufficient, because a gateway can list any id, including the ids of another gateway's sandboxes.
    """
    return _gateways.get((str(sandbox_id), str(url)))
