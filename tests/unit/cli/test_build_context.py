"""The code that packs the files of a Dockerfile's context is the same in the collection and in sandboxctl."""

from __future__ import annotations

from tests.support.session import REPOSITORY


def test_both_copies_are_identical() -> None:
    paths = ("plugins/module_utils/_build_context.py", "gateway/src/sandbox_gateway/cli/build_context.py")
    collection_text, gateway_text = ((REPOSITORY / path).read_text() for path in paths)
    assert collection_text == gateway_text
