"""Test that test runs and their lanes do not share networks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from subprocess import PIPE

from tests.support import session

_CODE = """
import json
from tests.support import session
print(json.dumps([session.allocate_network() for _ in range(40)]), flush=True)
input()
"""


def test_processes_that_live_at_the_same_time_have_different_networks() -> None:
    # The same lane of the same run: both processes start their search at the same network.
    command, environment = [sys.executable, "-c", _CODE], {**os.environ, "PYTHONPATH": str(session.REPOSITORY)}
    networks = []
    with (
        subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as first,
        subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True) as second,
    ):
        for process in (first, second):
            assert process.stdin is not None and process.stdout is not None
            networks += json.loads(process.stdout.readline())
        for process in (first, second):
            process.communicate("\n", timeout=10)
    for setting in ("prefix", "subnet"):
        assert len({network[setting] for network in networks}) == 80
