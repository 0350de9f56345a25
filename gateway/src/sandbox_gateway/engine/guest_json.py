"""JSON that a guest sent. Its root user is an enemy: size, structure, depth and numbers are bounded.

Parsing happens in pieces of at most a few milliseconds, between which the event loop serves others. A thread would
not do: ``json.loads`` holds the interpreter's lock until it returns, for 0.3 s with 48 MiB of short escapes.
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

USUAL = 256 << 10
"""Bytes of an answer that holds no output."""
LARGEST = 48 << 20
"""Bytes of an answer with output: twice 16 MiB in base64, and room."""
MOST_HELD = 2 * LARGEST
"""Bytes of all answers of one sandbox that are being read at the same time."""
MOST_HELD_IN_ALL = 512 << 20
"""The same, of all sandboxes together."""
MOST_STRUCTURE = 8 << 10
"""Bytes of an answer outside of its strings: each costs many times as much memory once it is parsed."""
DEEPEST = 16
_PIECE = 16 << 10
_CONTENT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Units that must not be torn apart: characters, escapes, and pairs of escapes that are one character.
_UNITS = re.compile(
    rb"(?:[\x20-\x5b\x5d-\x7f]{1,64}+|[\xc2-\xf4][\x80-\xbf]{1,3}+"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]){1,256}+"
)
_held: Counter[str] = Counter()


class Answer:
    """A JSON object that arrives in pieces; a context manager, at whose end its memory is accounted as free.

    ``sandbox``: whose answer it is (its address), ``what``: to what, ``most``: bytes it may have.
    """

    def __init__(self, sandbox: str, what: str, most: int = USUAL) -> None:
        self._sandbox = sandbox
        self._what = what
        self._most = most
        self._size = 0
        self._structure = bytearray()
        """The JSON, with the number of the string in place of each string's content."""
        self._outside = 0
        """Bytes of the structure that the guest sent."""
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
        """Take the next bytes. Linear in their number. Raises BackendFailed at the first that may not be, Busy."""
        for start in range(0, len(data), _PIECE):
            self._take(data[start : start + _PIECE])
            await asyncio.sleep(0)

    def _take(self, piece: bytes) -> None:
        self._size += len(piece)
        _held[self._sandbox] += len(piece)
        if self._size > self._most:
            raise BackendFailed(f"the sandbox's agent answered {self._what} with more than {self._most} bytes")
        if _held.total() > MOST_HELD_IN_ALL:
            raise Busy(
                f"the agents of all sandboxes are sending more than {MOST_HELD_IN_ALL >> 20} MiB of answers at once: "
                "try again later"
            )
        if _held[self._sandbox] > MOST_HELD:
            raise Busy(
                f"the sandbox's agent is sending more than {MOST_HELD >> 20} MiB of answers at once: "
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
        if self._outside > MOST_STRUCTURE:
            raise BackendFailed(f"the sandbox's agent answered {self._what} with something else than it should")
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
        """The object; an empty one where nothing came, or something else than an object. Raises BackendFailed."""
        if not self._size:
            return {}
        try:
            _check_depth(self._structure)
            structure = json.loads(self._structure.decode(), parse_constant=_refuse)
            strings = []
            self._strings.reverse()
            while self._strings:
                strings.append(await _text(self._strings.pop()))
            whole = _with_strings(structure, strings)
        except (ValueError, RecursionError):
            raise BackendFailed(f"the sandbox's agent answered {self._what} with something else than JSON") from None
        return whole if isinstance(whole, dict) else {}


async def parse(sandbox: str, what: str, data: bytes, most: int = USUAL) -> dict[str, Any]:
    """``data``, which came as a whole, as an object. Raises BackendFailed, Busy."""
    with Answer(sandbox, what, most) as answer:
        await answer.feed(data)
        return await answer.parse()


async def from_base64(text: object) -> bytes:
    """Raises ValueError for what is no base64, or no text."""
    if not isinstance(text, str):
        raise ValueError("no text")
    found = bytearray()
    for start in range(0, len(text), _PIECE):
        found += binascii.a2b_base64(text[start : start + _PIECE], strict_mode=True)
        await asyncio.sleep(0)
    return bytes(found)


def integer(value: object, low: int, high: int) -> int:
    """Raises ValueError for what is no integer from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"no integer from {low} to {high}")
    return value


def _check_depth(structure: bytearray) -> None:
    depth = 0
    for byte in structure:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > DEEPEST:
            raise ValueError("nested too deeply")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


async def _text(content: bytearray) -> str:
    """What a string's content stands for; halves of characters, which no answer can carry, are replaced.

    Raises ValueError.
    """
    pieces, position, worked = [], 0, 0
    while position < len(content):
        match = _UNITS.match(content, position)
        if match is None:
            raise ValueError("no text of JSON's")
        pieces.append(json.loads(f'"{match[0].decode()}"').encode(errors="replace").decode())
        worked += match.end() - position
        position = match.end()
        if worked >= _PIECE:
            worked = 0
            await asyncio.sleep(0)
    return "".join(pieces)


def _with_strings(value: Any, strings: list[str]) -> Any:
    if isinstance(value, dict):
        return {strings[int(key)]: _with_strings(each, strings) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_strings(each, strings) for each in value]
    return strings[int(value)] if isinstance(value, str) else value
