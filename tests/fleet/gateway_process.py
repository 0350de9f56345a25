"""Run one gateway of a fleet, with an in-memory host, as a process of its own.

Usage: python -m tests.fleet.gateway_process ROOT SECTIONS FORK_SECONDS [patient], where SECTIONS is a configuration as
JSON. It prints its TCP port when it is ready. With `patient`, it has the times for a busy machine.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from tests.fleet.times import PATIENT_TIMES, set_times
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemoryHost


def main() -> None:
    root, sections, fork_seconds, *patience = sys.argv[1:]
    if patience == ["patient"]:
        set_times(PATIENT_TIMES)
    host = MemoryHost()
    gateway = MemoryGateway(Path(root), host, **json.loads(sections))
    gateway.build_template()
    host.fork_seconds = float(fork_seconds)
    print(gateway.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
