"""JSON from guests is parsed as the standard library would parse it, but in pieces of any size and within limits."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_gateway.engine import guest_json
from sandbox_gateway.errors import BackendFailed, OutputLost

json_value_strategy = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=20,
)
object_strategy = st.dictionaries(st.text(max_size=8), json_value_strategy, max_size=5)


def parse_response(data: bytes, limit: int = guest_json.DEFAULT_MAX_BYTES) -> dict[str, Any]:
    return asyncio.run(guest_json.parse("sandbox", "exec", data, limit))


async def parse_pieces(*pieces: bytes) -> dict[str, Any]:
    with guest_json.ResponseReader("sandbox", "exec") as response:
        for piece in pieces:
            await response.feed(piece)
        return await response.parse()


@given(object_strategy, st.booleans(), st.integers(1, 7))
@example({'a"\\b': ["\\", "\n\t\x00", "ä€😀", '"'], "": [{}, [], {"x": [1.5, -2, True, None]}]}, True, 1)
@example({'a"\\b': ["\\", "\n\t\x00", "ä€😀", '"']}, False, 3)
def test_valid_json_is_parsed_as_by_the_standard_library(
    value: dict[str, Any], is_escaped: bool, piece_size: int
) -> None:
    data = json.dumps(value, ensure_ascii=is_escaped).encode()
    assert parse_response(data) == value
    assert (
        asyncio.run(parse_pieces(*(data[offset : offset + piece_size] for offset in range(0, len(data), piece_size))))
        == value
    )


@given(st.binary(max_size=60) | st.text('{}[]",:\\u0d8 \n1ae', max_size=40).map(str.encode))
@example(b'{"a": "\\x"}')
@example(b'{"a": "\n"}')
@example(b'{"a": NaN}')
@example(b'{"a": -Infinity}')
@example(b'{"a": "b}')
@example(b'{"a": "\xff"}')
def test_arbitrary_input_gives_an_object_or_an_error(data: bytes) -> None:
    try:
        result = parse_response(data)
    except BackendFailed as failure:
        assert failure.message.startswith("the sandbox's agent answered exec with invalid JSON: ")
        return
    if data:
        expected = json.loads(data.decode("utf-8", "surrogatepass").encode(errors="replace"))
        assert result == (expected if isinstance(expected, dict) else {})
    else:
        assert result == {}


@pytest.mark.parametrize("data", [b"[1]", b'"text"', b"1", b"null", b""])
def test_a_value_that_is_not_an_object_is_parsed_as_an_empty_object(data: bytes) -> None:
    assert parse_response(data) == {}


def test_unpaired_surrogates_are_replaced() -> None:
    assert parse_response(b'{"a": "x\\ud83dy", "b": "\\ud83d\\ude00"}') == {"a": "x?y", "b": "\U0001f600"}


def test_depth_is_limited() -> None:
    def make_nested_json(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert parse_response(make_nested_json(guest_json.MAX_DEPTH))
    with pytest.raises(BackendFailed, match="invalid JSON"):
        parse_response(make_nested_json(guest_json.MAX_DEPTH + 1))
    assert parse_response(b'{"a": [' + b",".join([b"[]"] * 100) + b"]}") == {"a": [[]] * 100}


def test_size_is_limited() -> None:
    data = b'{"a": "xyz"}'
    assert parse_response(data, len(data)) == {"a": "xyz"}
    with pytest.raises(BackendFailed, match=f"answered exec with more than {len(data) - 1} bytes"):
        parse_response(data, len(data) - 1)


def test_structure_is_limited_without_counting_strings() -> None:
    assert parse_response(b'{"a":"' + b"x" * 100_000 + b'"}') == {"a": "x" * 100_000}
    whole_object = b'{"a":"x"}'
    padding = b" " * (guest_json.MAX_STRUCTURE_BYTES - len(whole_object) + len("ax"))
    assert parse_response(whole_object + padding) == {"a": "x"}
    with pytest.raises(BackendFailed, match="sent an invalid response to exec"):
        parse_response(whole_object + padding + b" ")


async def test_concurrent_responses_are_limited_per_sandbox_and_in_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_json, "MAX_HELD_BYTES", 30)
    monkeypatch.setattr(guest_json, "MAX_TOTAL_HELD_BYTES", 50)

    with guest_json.ResponseReader("one", "exec") as first_response:
        await first_response.feed(b'{"a": "' + b"x" * 13)
        with guest_json.ResponseReader("one", "exec") as second_response:
            await second_response.feed(b" " * 10)
            with pytest.raises(OutputLost, match="the sandbox's agent is sending more than"):
                await second_response.feed(b" ")
        with guest_json.ResponseReader("two", "exec") as other_sandbox_response:
            await other_sandbox_response.feed(b" " * 30)
            with (
                guest_json.ResponseReader("three", "exec") as third_sandbox_response,
                pytest.raises(OutputLost, match="the agents of all sandboxes"),
            ):
                await third_sandbox_response.feed(b" ")
        with guest_json.ResponseReader("one", "exec") as next_response:
            await next_response.feed(b" " * 10)
        await first_response.feed(b'"}')
        assert await first_response.parse() == {"a": "x" * 13}
    assert not guest_json._held_bytes


@given(st.binary(max_size=100))
def test_valid_base64_is_decoded(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    assert asyncio.run(guest_json.decode_base64(text)) == data


def test_long_base64_is_decoded_completely() -> None:
    data = bytes(range(256)) * 300
    assert asyncio.run(guest_json.decode_base64(base64.b64encode(data).decode())) == data


@pytest.mark.parametrize("text", [None, 1, b"YQ==", "YQ=", "Y", "YQ==x", "Y Q==", "ä", ["YQ=="]])
def test_invalid_base64_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        asyncio.run(guest_json.decode_base64(text))


def test_integers_are_limited() -> None:
    assert [guest_json.require_integer(value, -1, 3) for value in (-1, 0, 3)] == [-1, 0, 3]
    for value in (-2, 4, True, False, 1.0, "1", None):
        with pytest.raises(ValueError, match="not an integer from -1 to 3"):
            guest_json.require_integer(value, -1, 3)
