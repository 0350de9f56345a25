"""Parse JSON from untrusted guests, with limits on its size, structure, depth and numbers.

Parsing happens in steps of at most a few milliseconds, between which the event loop handles other work. A thread would
not help: ``json.loads`` holds the GIL until it returns, which takes 0.3 s for 48 MiB of short escapes.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
from collections import Counter
from types import TracebackType
from typing import Any

from sandbox_gateway.errors import BackendFailed, OutputLost

DEFAULT_MAX_BYTES = 256 << 10
"""Maximum length of a response without command output."""
MAX_BYTES = 48 << 20
"""Maximum length of a response with command output: twice 16 MiB in base64, plus a margin."""
MAX_HELD_BYTES = 2 * MAX_BYTES
"""Maximum total length of the responses of one sandbox that are being read at the same time."""
MAX_TOTAL_HELD_BYTES = 512 << 20
"""Maximum total length of the responses of all sandboxes that are being read at the same time."""
MAX_STRUCTURE_BYTES = 8 << 10
"""Maximum bytes of a response outside its strings, because each such byte takes far more memory once parsed."""
MAX_DEPTH = 16
_PIECE_BYTES = 16 << 10
_STRING_CONTENTS_PATTERN = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Units that must not be split: characters, escapes, and pairs of escapes that form one character.
_UNITS_PATTERN = re.compile(
    rb"(?:[\x20-\x5b\x5d-\x7f]{1,64}+|[\xc2-\xf4][\x80-\xbf]{1,3}+"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]){1,256}+"
)
_held_bytes: Counter[str] = Counter()


class ResponseReader:
    """A reader for a JSON object that arrives in pieces. As a context manager, it frees its share of the quota on exit.

    ``sandbox``: the address of the sandbox. ``request``: the request, for error messages. ``max_bytes``: the maximum
    length of the response.
    """

    def __init__(self, sandbox: str, request: str, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._sandbox = sandbox
        self._request = request
        self._max_bytes = max_bytes
        self._size = 0
        self._structure = bytearray()
        """The JSON, with the contents of each string replaced by the number of the string."""
        self._structure_bytes = 0
        """Number of bytes that the guest sent outside of strings."""
        self._strings: list[bytearray] = []
        self._is_in_string = False
        self._is_after_backslash = False

    def __enter__(self) -> ResponseReader:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _held_bytes[self._sandbox] -= self._size
        if _held_bytes[self._sandbox] <= 0:
            del _held_bytes[self._sandbox]

    async def feed(self, data: bytes) -> None:
        """Process the next bytes of the response, in linear time.

        Raises BackendFailed if the JSON is invalid or too long, and OutputLost if a quota is exceeded.
        """
        for start in range(0, len(data), _PIECE_BYTES):
            self._consume(data[start : start + _PIECE_BYTES])
            await asyncio.sleep(0)

    def _consume(self, piece: bytes) -> None:
        self._size += len(piece)
        _held_bytes[self._sandbox] += len(piece)
        if self._size > self._max_bytes:
            raise create_invalid_response_error(f"answered {self._request} with more than {self._max_bytes} bytes")
        if _held_bytes.total() > MAX_TOTAL_HELD_BYTES:
            limit_mib = MAX_TOTAL_HELD_BYTES >> 20
            raise OutputLost(
                "the command may have run, but its output is lost: the agents of all sandboxes together are sending "
                f"more than {limit_mib} MiB of responses at the same time. Write large output to files"
            )
        if _held_bytes[self._sandbox] > MAX_HELD_BYTES:
            raise OutputLost(
                "the command may have run, but its output is lost: the sandbox's agent is sending more than "
                f"{MAX_HELD_BYTES >> 20} MiB of responses at the same time. Run fewer commands with large output"
            )
        position = 0
        while position < len(piece):
            consume = self._consume_string if self._is_in_string else self._consume_structure
            position = consume(piece, position)

    def _consume_structure(self, piece: bytes, position: int) -> int:
        quote_position = piece.find(b'"', position)
        end = len(piece) if quote_position < 0 else quote_position + 1
        self._structure += piece[position:end]
        self._structure_bytes += end - position
        if self._structure_bytes > MAX_STRUCTURE_BYTES:
            raise create_invalid_response_error(f"sent an invalid response to {self._request}")
        if quote_position >= 0:
            self._structure += b"%d" % len(self._strings)
            self._strings.append(bytearray())
            self._is_in_string = True
        return end

    def _consume_string(self, piece: bytes, position: int) -> int:
        contents = self._strings[-1]
        if self._is_after_backslash:
            contents += piece[position : position + 1]
            self._is_after_backslash = False
            return position + 1
        match = _STRING_CONTENTS_PATTERN.match(piece, position)
        assert match is not None
        contents += match[0]
        end = match.end()
        if end == len(piece):
            return end
        if piece[end : end + 1] == b"\\":
            contents += b"\\"
            self._is_after_backslash = True
            return end + 1
        self._structure += b'"'
        self._structure_bytes += 1
        self._is_in_string = False
        return end + 1

    async def parse(self) -> dict[str, Any]:
        """Return the object, or an empty object if the response is empty or not an object. Raises BackendFailed."""
        if not self._size:
            return {}
        try:
            _check_depth(self._structure)
            structure = json.loads(self._structure.decode(), parse_constant=_reject_constant)
            strings = []
            self._strings.reverse()
            while self._strings:
                strings.append(await _decode_string(self._strings.pop()))
            document = _insert_strings(structure, strings)
        except (ValueError, RecursionError):
            raise create_invalid_response_error(f"answered {self._request} with invalid JSON") from None
        return document if isinstance(document, dict) else {}


async def parse(sandbox: str, request: str, data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> dict[str, Any]:
    """Parse a complete response, as ``ResponseReader`` does. Raises BackendFailed or OutputLost."""
    with ResponseReader(sandbox, request, max_bytes) as response:
        await response.feed(data)
        return await response.parse()


async def decode_base64(text: object) -> bytes:
    """Decode base64. Raises ValueError if ``text`` is not a base64 string."""
    if not isinstance(text, str):
        raise ValueError("not a string")
    data = bytearray()
    for start in range(0, len(text), _PIECE_BYTES):
        data += binascii.a2b_base64(text[start : start + _PIECE_BYTES], strict_mode=True)
        await asyncio.sleep(0)
    return bytes(data)


def create_invalid_response_error(problem: str) -> BackendFailed:
    """Return the error for a response that an unmodified agent would not send. ``problem``: what the agent did."""
    return BackendFailed(
        f"the sandbox's agent {problem}: a program in the sandbox may have replaced the agent. Roll the sandbox back, "
        "or delete it"
    )


def require_integer(value: object, minimum: int, maximum: int) -> int:
    """Return ``value``. Raises ValueError if it is not an integer from ``minimum`` to ``maximum``."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ValueError(f"not an integer from {minimum} to {maximum}")
    return value


def _check_depth(structure: bytearray) -> None:
    depth = 0
    for byte in structure:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError("the JSON is nested too deeply")


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


async def _decode_string(contents: bytearray) -> str:
    """Decode the contents of a JSON string. Lone surrogates, which cannot be encoded in UTF-8, are replaced.

    Raises ValueError if the contents are invalid.
    """
    pieces, position, bytes_since_yield = [], 0, 0
    while position < len(contents):
        match = _UNITS_PATTERN.match(contents, position)
        if match is None:
            raise ValueError("not a valid JSON string")
        pieces.append(json.loads(f'"{match[0].decode()}"').encode(errors="replace").decode())
        bytes_since_yield += match.end() - position
        position = match.end()
        if bytes_since_yield >= _PIECE_BYTES:
            bytes_since_yield = 0
            await asyncio.sleep(0)
    return "".join(pieces)


def _insert_strings(value: Any, strings: list[str]) -> Any:
    if isinstance(value, dict):
        return {strings[int(key)]: _insert_strings(each, strings) for key, each in value.items()}
    if isinstance(value, list):
        return [_insert_strings(each, strings) for each in value]
    return strings[int(value)] if isinstance(value, str) else value
