"""Parse WebSocket messages in fragments of bounded size, one at a time.

The library `websockets` buffers whole frames, so a peer could make the gateway hold 16 MiB per connection.
"""

from __future__ import annotations

import struct
from collections.abc import Generator

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, PayloadTooBig, ProtocolError
from websockets.frames import CTRL_OPCODES, CloseCode, Frame, Opcode, apply_mask  # type: ignore[attr-defined]
from websockets.protocol import CONNECTING, SERVER, Protocol
from websockets.server import ServerProtocol

MAX_FRAGMENT_BYTES = 16 << 10
"""Maximum bytes of a fragment; a multiple of four, the length of a mask. Larger frames are split."""
MAX_CONTROL_FRAMES = 32
"""Maximum number of control frames handled per turn of the event loop: one read may contain thousands."""
MAX_HANDSHAKE_BYTES = 64 << 10
"""Maximum size of a service's response to a handshake, including the body of a refusal."""
MAX_HANDSHAKE_READ_BYTES = 1 << 10
"""Maximum bytes of that response parsed per turn of the event loop, because `websockets` copies the whole body for each
of its chunks.
"""
_FIN_BIT, _OPCODE_MASK, _MASKED_BIT, _LENGTH_MASK = 0x80, 0x0F, 0x80, 0x7F
_LENGTH_FORMATS = {126: "!H", 127: "!Q"}


class FragmentProtocol(Protocol):
    """A protocol that pauses parsing after each fragment of a message, and after ``MAX_CONTROL_FRAMES`` control frames.

    ``receive_data(b"")`` continues with the data already read. ``max_size`` limits the size of a message.
    Extensions are not supported.
    """

    has_more = False
    """A fragment was passed on, and another one may be available without reading more data."""
    has_reached_control_limit = False
    """Parsing paused after ``MAX_CONTROL_FRAMES`` control frames without a fragment; no more data may be read yet."""
    _control_frame_count = 0

    def parse(self) -> Generator[None]:
        try:
            while True:
                self.has_more = self.has_reached_control_limit = False
                if (yield from self.reader.at_eof()):
                    raise EOFError("unexpected end of stream")
                yield from self._parse_frame()
        except ProtocolError as error:
            self._stop(error, CloseCode.PROTOCOL_ERROR, str(error))
        except EOFError as error:
            self._stop(error, CloseCode.ABNORMAL_CLOSURE, str(error))
        except UnicodeDecodeError as error:
            self._stop(error, CloseCode.INVALID_DATA, error.reason)
        except PayloadTooBig as error:
            error.set_current_size(self.current_size)
            self._stop(error, CloseCode.MESSAGE_TOO_BIG, str(error))
        yield

    def receive_eof(self) -> None:
        super().receive_eof()
        while self.has_more:
            next(self.parser)

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        self.has_more = self.has_reached_control_limit = False
        super().fail(code, reason)

    def _stop(self, error: Exception, code: CloseCode, reason: str) -> None:
        self.fail(code, reason)
        self.parser_exc = error

    def _parse_frame(self) -> Generator[None]:
        """Parse one frame: a control frame is handled immediately, any other frame is passed on in fragments."""
        first_byte, second_byte = yield from self.reader.read_exact(2)
        opcode, fin, length = self._parse_header(first_byte, second_byte)
        if length in _LENGTH_FORMATS:
            length_format = _LENGTH_FORMATS[length]
            (length,) = struct.unpack(
                length_format, (yield from self.reader.read_exact(struct.calcsize(length_format)))
            )
        if opcode in CTRL_OPCODES:
            if length > 125 or not fin:
                raise ProtocolError("the control frame is too long or fragmented")
        elif self.max_message_size is not None and length > (
            remaining := self.max_message_size - (self.current_size or 0)
        ):
            raise PayloadTooBig(length, remaining)
        mask = (yield from self.reader.read_exact(4)) if self.side is SERVER else b""
        while True:
            size = min(length, MAX_FRAGMENT_BYTES)
            data = yield from self.reader.read_exact(size)
            length -= size
            self.recv_frame(Frame(opcode, apply_mask(data, mask) if mask else bytes(data), fin and not length))
            if opcode not in CTRL_OPCODES:
                self._control_frame_count = 0
                self.has_more = True
                yield
            elif opcode is not Opcode.CLOSE:  # Nothing is parsed after a close frame.
                self._control_frame_count += 1
                if self._control_frame_count == MAX_CONTROL_FRAMES:
                    self._control_frame_count = 0
                    self.has_more = self.has_reached_control_limit = True
                    yield
            if not length:
                return
            self.has_more = False
            opcode = Opcode.CONT

    def _parse_header(self, first_byte: int, second_byte: int) -> tuple[Opcode, bool, int]:
        """Return the opcode, FIN bit and length from the first two bytes of a frame. Raises ProtocolError."""
        try:
            opcode = Opcode(first_byte & _OPCODE_MASK)
        except ValueError:
            raise ProtocolError("invalid opcode") from None
        if bool(second_byte & _MASKED_BIT) != (self.side is SERVER):
            raise ProtocolError("incorrect masking")
        if first_byte & ~(_FIN_BIT | _OPCODE_MASK):
            raise ProtocolError("reserved bits must be 0")
        return opcode, bool(first_byte & _FIN_BIT), second_byte & _LENGTH_MASK


class ServerFragmentProtocol(ServerProtocol, FragmentProtocol):
    """The gateway's end of a client's connection."""


class ClientFragmentProtocol(ClientProtocol, FragmentProtocol):
    """The gateway's end of a connection to a service.

    A response to the handshake that is longer than ``MAX_HANDSHAKE_BYTES`` sets ``handshake_exc`` and is not parsed.
    """

    _remaining_handshake_bytes = MAX_HANDSHAKE_BYTES

    def receive_data(self, data: bytes | bytearray) -> None:
        if self.state is CONNECTING and self.handshake_exc is None:
            self._remaining_handshake_bytes -= len(data)
            if self._remaining_handshake_bytes < 0:
                self.handshake_exc = InvalidHandshake(
                    f"its response to the handshake is longer than {MAX_HANDSHAKE_BYTES} bytes"
                )
                self.send_eof()
                self.parser = self.discard()
        super().receive_data(data)


def send_fragment(protocol: Protocol, frame: Frame) -> None:
    """Send a fragment. Raises InvalidState if the connection is being closed."""
    if frame.opcode is Opcode.CONT:
        protocol.send_continuation(frame.data, frame.fin)
    elif frame.opcode is Opcode.TEXT:
        protocol.send_text(frame.data, frame.fin)
    else:
        protocol.send_binary(frame.data, frame.fin)
