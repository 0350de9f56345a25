"""Create the state root."""

from __future__ import annotations

from pathlib import Path

from sandbox_gateway.errors import BackendFailed


def create_state_root(root: Path) -> None:
    try:
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
    except OSError as error:
        raise BackendFailed(
            f"the state root {root} cannot be created ({error.strerror}): run the gateway as root"
        ) from None
