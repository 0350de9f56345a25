"""Test that `sandboxctl plan` accepts the same plan files as Ansible's plugins, with the same error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.cli import plan_file as reader
from sandbox_gateway.cli.failure import Failure
from tests.cli.running import Run
from tests.support.plan_files import PLAN_FILES, PlanFile


@pytest.mark.parametrize("plan_file", PLAN_FILES, ids=lambda each: each.name)
def test_the_command_line_accepts_the_same_files_as_all_readers(plan_file: PlanFile, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "plan.json"
    sentence = plan_file.write(path)
    if not sentence or plan_file.is_only_expired:
        assert reader.load(path).is_applicable is not plan_file.is_only_expired
        assert sentence.partition(" expired ")[2] in run("plan", "show", str(path)).out
        return
    with pytest.raises(Failure) as error_info:
        reader.load(path)
    assert error_info.value.message == sentence and error_info.value.hint
