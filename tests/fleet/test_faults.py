"""Random faults, while clients use a fleet whose gateways run in processes and networks of their own.

`./dev test faults` injects 300 faults, or as many as GROVE_FAULTS says. GROVE_FAULT_SEED repeats a run: the faults, and
the choices of the clients as far as they do not depend on the times of answers.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import pytest

from tests.fleet.faults.processes import running_fleet
from tests.fleet.faults.runs import prepared_run
from tests.support.certificates import Authority

_FAULTS = int(os.environ.get("GROVE_FAULTS", "0"))
_BATCH_FAULTS = 10


@pytest.mark.skipif(not _FAULTS, reason="`./dev test faults` runs it; it still finds the defects in docs/testing.md")
def test_no_fault_loses_or_duplicates_anything(requires_root: None, tmp_path: Path, authority: Authority) -> None:
    seed, count = os.environ.get("GROVE_FAULT_SEED") or str(secrets.randbelow(1_000_000)), _FAULTS
    start = time.monotonic()
    with running_fleet(tmp_path, authority) as fleet, prepared_run(fleet, seed) as run:
        while (injected := run.count_faults()) < count:
            run.run_batch(min(_BATCH_FAULTS, count - injected))
    print(f"{time.monotonic() - start:.0f} s")
