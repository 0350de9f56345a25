"""Test the raw rollback with which the benchmarks compare a rollback of a jail, with a fake `zfs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.benches import jail


@pytest.mark.parametrize("rollback_fails", [False, True])
def test_the_raw_rollback_undoes_a_change_of_a_clone_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollback_fails: bool
) -> None:
    commands: list[str] = []

    def run(argv: tuple[str, ...]) -> str:
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        commands.append(f"{' '.join(argv)} with {size >> 20} MiB")
        if rollback_fails and argv[1] == "rollback":
            raise RuntimeError("zfs rollback failed")
        return f"{tmp_path}\n"

    monkeypatch.setattr(jail, "run_command", run)
    monkeypatch.setattr(jail.pools, "destroy_all", lambda name: commands.append(f"destroy {name}"))
    if rollback_fails:
        with pytest.raises(RuntimeError):
            jail.measure_raw_rollback("tank/a@1", "tank/raw")
    else:
        assert 0 < jail.measure_raw_rollback("tank/a@1", "tank/raw") < 60_000
    assert commands == [
        "zfs clone tank/a@1 tank/raw with 0 MiB",
        "zfs snapshot tank/raw@raw with 0 MiB",
        "zfs get -H -o value mountpoint tank/raw with 0 MiB",
        "zfs rollback tank/raw@raw with 1 MiB",
        "destroy tank/raw",
    ]
