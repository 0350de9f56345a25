"""Times that suit a busy machine, on which a gateway or etcd may pause for seconds.

Such a pause must neither end a lease nor fail a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sandbox_gateway.api.fleet import merging
from sandbox_gateway.fleet import holds, membership, peers, store

PATIENT_TIMES: Mapping[tuple[object, str], float] = {
    (membership, "LEASE_SECONDS"): 60,
    (store, "_REQUEST_SECONDS"): 15.0,
    (store, "_TOTAL_SECONDS"): 30.0,
    (peers, "_CONNECT_SECONDS"): 15.0,
    (merging, "_LIST_SECONDS"): 30.0,
}
FAULT_TIMES: Mapping[tuple[object, str], float] = {
    (membership, "LEASE_SECONDS"): 3,
    (membership, "_RENEW_SECONDS"): 1.0,
    (store, "_REQUEST_SECONDS"): 1.0,
    (store, "_TOTAL_SECONDS"): 3.0,
    (peers, "_CONNECT_SECONDS"): 2.0,
    (peers, "_PROBE_SECONDS"): 2.0,
    (merging, "_LIST_SECONDS"): 5.0,
    (holds, "_HOLD_SECONDS"): 10.0,
}
"""Shorter times than the real ones, so that faults last longer than a lease or a request without taking minutes."""
REAL_TIMES = {(module, name): getattr(module, name) for module, name in PATIENT_TIMES}


def set_times(
    times: Mapping[tuple[object, str], float], set_value: Callable[[object, str, float], object] = setattr
) -> None:
    for (module, name), value in times.items():
        set_value(module, name, value)
