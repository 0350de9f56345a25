"""Parse JSON from guests, which are untrusted: size, structure, depth and numbers are limited.

Parsing happens in steps of at most a few milliseconds, between which the event loop serves others. A thread would not
help: ``json.loads`` holds the GIL until it returns, for 0.3 s with 48 MiB of short escapes.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from collections import Counter
from types import TracebackType
from typing import Any

from sandbox_gateway.errors import BackendFailed, Busy

DEFAULT_BYTES = 256 << 10
"""Maximum bytes of an answer without command output."""
MAX_BYTES = 48 << 20
"""Maximum bytes of an answer with output: twice 16 MiB in base64, plus a margin."""
MAX_HELD_BYTES = 2 * MAX_BYTES
"""Maximum bytes of all answers of one sandbox that are being read at the same time."""
MAX_TOTAL_HELD_BYTES = 512 << 20
"""The same limit for all sandboxes together."""
MAX_STRUCTURE_BYTES = 8 << 10
"""Maximum bytes of an answer outside its strings: each byte takes many times as much memory once parsed."""
MAX_DEPTH = 16
_PIECE = 16 << 10
_CONTENT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Units that must not be split: characters, escapes, and pairs of escapes that form one character.
_UNITS = re.compile(
    rb"(?:[\x20-\x5b\x5d-\x7f]{1,64}+|[\xc2-\xf4][\x80-\xbf]{1,3}+"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]){1,256}+"
)
_held: Counter[str] = Counter()


class Answer:
    """A JSON object that arrives in pieces. As a context manager, it releases its memory from the quota at the end.

    ``sandbox``: the address of the answering sandbox; ``what``: the request; ``most``: maximum number of bytes.
    """

    def __init__(self, sandbox: str, what: str, most: int = DEFAULT_BYTES) -> None:
        self._sandbox = sandbox
        self._what = what
        self._most = most
        self._size = 0
        self._structure = bytearray()
        """The JSON, with each string's content replaced by the string's number."""
        self._outside = 0
        """Bytes that the guest sent outside of strings."""
        self._strings: list[bytearray] = []
        self._in_string = False
        self._after_backslash = False

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _held[self._sandbox] -= self._size
        if _held[self._sandbox] <= 0:
            del _held[self._sandbox]

    async def feed(self, data: bytes) -> None:
        """Add the next bytes, in linear time.

        Raises BackendFailed for invalid JSON or too many bytes, Busy beyond a quota.
        """
        for start in range(0, len(data), _PIECE):
            self._take(data[start : start + _PIECE])
            await asyncio.sleep(0)

    def _take(self, piece: bytes) -> None:
        self._size += len(piece)
        _held[self._sandbox] += len(piece)
        if self._size > self._most:
            raise BackendFailed(f"the sandbox's agent answered {self._what} with more than {self._most} bytes")
        if _held.total() > MAX_TOTAL_HELD_BYTES:
            limit = MAX_TOTAL_HELD_BYTES >> 20
            raise Busy(
                f"the agents of all sandboxes are sending more than {limit} MiB of answers at once: try again later"
            )
        if _held[self._sandbox] > MAX_HELD_BYTES:
            raise Busy(
                f"the sandbox's agent is sending more than {MAX_HELD_BYTES >> 20} MiB of answers at once: "
                "run fewer commands with large output at the same time"
            )
        position = 0
        while position < len(piece):
            scan = self._take_string if self._in_string else self._take_structure
            position = scan(piece, position)

    def _take_structure(self, piece: bytes, position: int) -> int:
        quote = piece.find(b'"', position)
        end = len(piece) if quote < 0 else quote + 1
        self._structure += piece[position:end]
        self._outside += end - position
        if self._outside > MAX_STRUCTURE_BYTES:
            raise BackendFailed(f"the sandbox's agent sent an invalid answer to {self._what}")
        if quote >= 0:
            self._structure += b"%d" % len(self._strings)
            self._strings.append(bytearray())
            self._in_string = True
        return end

    def _take_string(self, piece: bytes, position: int) -> int:
        content = self._strings[-1]
        if self._after_backslash:
            content += piece[position : position + 1]
            self._after_backslash = False
            return position + 1
        match = _CONTENT.match(piece, position)
        assert match is not None
        content += match[0]
        end = match.end()
        if end == len(piece):
            return end
        if piece[end : end + 1] == b"\\":
            content += b"\\"
            self._after_backslash = True
            return end + 1
        self._structure += b'"'
        self._outside += 1
        self._in_string = False
        return end + 1

    async def parse(self) -> dict[str, Any]:
        """Return the object; an empty object if nothing or no object was received. Raises BackendFailed."""
        if not self._size:
            return {}
        try:
            _check_depth(self._structure)
            structure = json.loads(self._structure.decode(), parse_constant=_reject_constant)
            strings = []
            self._strings.reverse()
            while self._strings:
                strings.append(await _decode_string(self._strings.pop()))
            whole = _insert_strings(structure, strings)
        except (ValueError, RecursionError):
            raise BackendFailed(f"the sandbox's agent answered {self._what} with invalid JSON") from None
        return whole if isinstance(whole, dict) else {}


async def parse(sandbox: str, what: str, data: bytes, most: int = DEFAULT_BYTES) -> dict[str, Any]:
    """Parse a complete answer into an object. Raises BackendFailed, Busy."""
    with Answer(sandbox, what, most) as answer:
        await answer.feed(data)
        return await answer.parse()


async def decode_base64(text: object) -> bytes:
    """Decode base64. Raises ValueError if ``text`` is not a string of base64."""
    if not isinstance(text, str):
        raise ValueError("no text")
    found = bytearray()
    for start in range(0, len(text), _PIECE):
        found += binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        await asyncio.sleep(0)
    return bytes(found)


def read_integer(value: object, low: int, high: int) -> int:
    """Return ``value``. Raises ValueError if it is not an integer from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"not an integer from {low} to {high}")
    return value


def _check_depth(structure: bytearray) -> None:
    depth = 0
    for byte in structure:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError("the JSON is nested too deeply")


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


async def _decode_string(content: bytearray) -> str:
    """Decode the content of a JSON string; lone surrogates, which answers cannot contain, are replaced.

    Raises ValueError.
    """
    pieces, position, worked = [], 0, 0
    while position < len(content):
        match = _UNITS.match(content, position)
        if match is None:
            raise ValueError("not a valid JSON string")
        pieces.append(json.loads(f'"{match[0].decode()}"').encode(errors="replace").decode())
        worked += match.end() - position
        position = match.end()
        if worked >= _PIECE:
            worked = 0
            await asyncio.sleep(0)
    return "".join(pieces)


def _insert_strings(value: Any, strings: list[str]) -> Any:
    if isinstance(value, dict):
        return {strings[int(key)]: _insert_strings(each, strings) for key, each in value.items()}
    if isinstance(value, list):
        return [_insert_strings(each, strings) for each in value]
    return strings[int(value)] if isinstance(value, str) else value
