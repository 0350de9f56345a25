"""Test that `sandboxctl tree` shows chains of any length."""

from __future__ import annotations

import pytest

from sandbox_gateway.cli import render


def test_the_indentation_of_a_long_chain_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {"kind": "snapshot", "names": [f"s{depth}"], "id": f"{depth:012x}", "depth": depth} for depth in range(1000)
    ]
    render.print_tree([*nodes, {"kind": "template", "names": ["base"], "id": "f" * 12, "depth": 0}])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split("snapshot ")[1].split()[0] for line in lines] == [f"s{depth}" for depth in range(1000)]
    indentations = [line.index("snapshot") for line in lines]
    assert indentations[:17] == [4 * depth for depth in range(17)] and set(indentations[17:]) == {64}
    assert "level" not in lines[16] and lines[17].endswith("(level 17)")
    assert last.startswith("template base")


def test_siblings_are_shown_below_their_parent(capsys: pytest.CaptureFixture[str]) -> None:
    names_and_depths = [("a", 0), ("b", 1), ("c", 2), ("d", 1), ("e", 0)]
    render.print_tree(
        [{"kind": "sandbox", "names": [name], "id": name * 12, "depth": depth} for name, depth in names_and_depths]
    )
    assert [line.split("sandbox")[0] for line in capsys.readouterr().out.splitlines()] == [
        "", "├── ", "│   └── ", "└── ", ""
    ]  # fmt: skip
