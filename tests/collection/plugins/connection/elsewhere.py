"""A connection to this machine that does not count as local, for tests of tasks that run as a module."""

from __future__ import annotations

from typing import Any

from ansible.plugins.connection.local import Connection as LocalConnection

DOCUMENTATION = r"""
name: elsewhere
short_description: Reach this machine as if it were another
description: For tests.
extends_documentation_fragment: [connection_pipelining]
"""


class Connection(LocalConnection):
    transport: Any = "elsewhere"
