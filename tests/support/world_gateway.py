"""A real gateway process on a host of either kind, with its own state root or dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from tests.support.gateway import PROGRAM, Gateway
from tests.support.worlds import World


@contextmanager
def world_gateway(
    world: World,
    scratch: Path,
    *,
    config: Config | None = None,
    program: Sequence[str] = PROGRAM,
    **sections: dict[str, Any],
) -> Iterator[Gateway]:
    """Run a gateway on ``world`` with the world's template. At the end, remove everything that it created.

    ``scratch``: the directory for the gateway's files outside its state root. ``config``: a configuration from
    ``world.config``, or None for a new one.
    """
    config = config or world.make_config()
    config_values = config.model_dump(mode="json")
    settings: dict[str, dict[str, Any]] = {
        "host": {key: config_values["host"][key] for key in ("kind", "state_root")},
        "jail_zfs": {"dataset": config.jail_zfs.dataset},
        "network": {key: config_values["network"][key] for key in ("prefix", "subnet")},
    }
    merged_sections = {key: settings.get(key, {}) | sections.get(key, {}) for key in {*settings, *sections}}
    gateway = Gateway(scratch, merged_sections, world.get_environment(), program=program)
    gateway.state_root = config.host.state_root
    problems: list[str] = []
    try:
        try:
            gateway.start()
            yield gateway
        finally:
            problems = gateway.end()
    finally:
        world.clean_up(config)
    if problems:
        raise RuntimeError("; ".join(problems))
