# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which gateway has which sandbox, as the inventory found it, for the connections of the same run.

Ansible forks its workers from the process that read the inventory, so they inherit this memory. A key thus gets from
the inventory's file to the connection without being a variable, and no fact that a hostile sandbox reports can send
it, or a task, to another place: what is remembered here goes before the variables of the host.
"""

from __future__ import annotations

from pathlib import Path

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure


class Gateway:
    """How one gateway is reached. ``token``, or else what is in ``token_file``, is the key; both may be empty."""

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

    def key(self) -> str:
        """Raises Failure for a file that cannot be read."""
        if self.token or not self.token_file:
            return self.token
        try:
            with Path(self.token_file).expanduser().open(encoding="ascii") as file:
                return file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not a line of plain text"
            raise Failure(f"the key file {self.token_file} cannot be read: {why}") from None


_known: dict[str, Gateway] = {}


def remember(sandbox_id: str, gateway: Gateway) -> None:
    _known[sandbox_id] = gateway


def recall(sandbox_id: str) -> Gateway | None:
    """The gateway of a sandbox that an inventory of this run listed; None for any other."""
    return _known.get(sandbox_id)
