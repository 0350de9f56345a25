"""Check that the files used by ``./dev mutation`` exist, because it runs too rarely to reveal renamed files."""

from __future__ import annotations

import pytest

from tests.mutation import COLLECTION_PATH, REPOSITORY, SUBJECTS


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_files_of_a_subject_exist(name: str) -> None:
    subject = SUBJECTS[name]
    sources = [
        source.replace(COLLECTION_PATH, ".") if COLLECTION_PATH in source else f"gateway/{source}"
        for source in subject.sources
    ]
    assert [path for path in (*sources, *subject.tests) if not (REPOSITORY / path).exists()] == []
