"""Check that the files that ``./dev mutation`` uses exist, because it runs too rarely to reveal a renamed file."""

from __future__ import annotations

import pytest

from tests.mutation import COLLECTION, REPOSITORY, SUBJECTS


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_files_of_a_subject_exist(name: str) -> None:
    subject = SUBJECTS[name]
    sources = [
        source.replace(COLLECTION, ".") if COLLECTION in source else f"gateway/{source}" for source in subject.sources
    ]
    assert [path for path in (*sources, *subject.tests) if not (REPOSITORY / path).exists()] == []
