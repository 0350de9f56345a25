"""Tests for how a run of the benchmarks treats benches that fail."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import benchmarks.__main__ as runner
from benchmarks.context import Context
from benchmarks.measure import Result


class PartlyFailedBench:
    name = "partly"
    title = "a bench that fails after it has measured something"

    def run(self, ctx: Context) -> Result:
        result = Result(self.name, self.title, failure="the second half failed")
        result.add_measure("first", "the first half", samples=[1, 2, 3])
        result.add_measure("second", "the second half", floor="first")
        return result


class FailedBench:
    name = "failed"
    title = "a bench that fails"

    def run(self, ctx: Context) -> Result:
        raise RuntimeError("nothing was measured")


def test_the_measures_of_a_partly_failed_bench_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = [FailedBench(), PartlyFailedBench()]
    monkeypatch.setattr(runner, "BENCHES", benches)
    options = argparse.Namespace(
        json=tmp_path / "results.json", plot=None, quick=True, names=[bench.name for bench in benches]
    )
    assert runner._run(options) == ["failed", "partly"]
    document = json.loads(options.json.read_text())
    assert document["failed"] == ["failed", "partly"]
    assert list(document["benches"]) == ["partly"]
    assert document["benches"]["partly"]["measures"]["first"]["n"] == 3
    errors = capsys.readouterr().err
    assert "nothing was measured" in errors and "the second half failed" in errors
