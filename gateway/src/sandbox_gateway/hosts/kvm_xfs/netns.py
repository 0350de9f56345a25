"""Network slots (constants first; the pool follows)."""

from __future__ import annotations

GUEST_ADDRESS = "169.254.0.21"
GUEST_PREFIX = 30
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_MAC = "02:5b:78:00:00:01"
TAP_MAC = "02:5b:78:00:00:02"
