"""A connection that is not local by name, and reaches this machine: to see what takes the way of the module."""

from __future__ import annotations

from typing import Any

from ansible.plugins.connection.local import Connection as LocalConnection

DOCUMENTATION = r"""
name: elsewhere
short_description: Reach this machine as if it was another
description: For tests.
extends_documentation_fragment: [connection_pipelining]
"""


class Connection(LocalConnection):
    transport: Any = "elsewhere"
