"""Format properties as arguments of the ``zfs`` command."""

from __future__ import annotations

import re
from collections.abc import Mapping

from zfs_core.exceptions import PropertyInvalid
from zfs_core.names import NAME_MAX, Name, decode_name, is_possible_argument
from zfs_core.property_values import TEXT_PROPERTIES, find_word

VALUE_MAX = 8191
"""Maximum length, in bytes, of a user property's value."""
USER_PROPERTY_NAME = re.compile(r"[a-z0-9_.+-]*:[a-z0-9_.:+-]*")
NATIVE_PROPERTY_NAME = re.compile(r"[a-z][a-z0-9_]*(@\S+)?")

Value = str | bytes | int | bool
Props = Mapping[str, Value] | Mapping[bytes, Value] | None


def format_property_assignment(name: Name, value: Value) -> str:
    """Return ``name=value``, as an argument of ``-o`` or ``set``. Formats a bool as ``on`` or ``off``.

    As in libzfs_core, an int is the index of a value (``atime``: 0) or a number, and bytes are the value of a user
    property or a text (``mountpoint``). A str is any value, as on the command line. Raises PropertyInvalid.
    """
    key = validate_property_name(name)
    text = _format_value(key, value)
    size = len(text.encode(errors="surrogatepass"))
    if not text or not is_possible_argument(text):
        raise PropertyInvalid(key).with_details("its value is empty, or contains a NUL character or a lone surrogate")
    if size > VALUE_MAX:
        raise PropertyInvalid(key).with_details(f"its value is {size} bytes long, but the limit is {VALUE_MAX}")
    return f"{key}={text}"


def _format_value(key: str, value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        word = find_word(key, value)
        if word is None:
            raise PropertyInvalid(key).with_details(f"{int(value)} is not the index of one of its values")
        return word
    if ":" not in key and key not in TEXT_PROPERTIES:
        raise PropertyInvalid(key).with_details("its value is bytes: pass an int, or a str")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise PropertyInvalid(key).with_details("its value is not UTF-8") from None


def validate_property_name(name: Name) -> str:
    key = decode_name(name)
    if (
        not (USER_PROPERTY_NAME if ":" in key.partition("@")[0] else NATIVE_PROPERTY_NAME).fullmatch(key)
        or key[0] == "-"
    ):
        raise PropertyInvalid(key)
    if len(key) > NAME_MAX:
        raise PropertyInvalid(key).with_details(f"its name is longer than {NAME_MAX} bytes")
    return key


def format_property_options(props: Props) -> list[str]:
    """Return the options that set these properties, such as ``["-o", "a=b", …]``."""
    return [word for key, value in (props or {}).items() for word in ("-o", format_property_assignment(key, value))]
