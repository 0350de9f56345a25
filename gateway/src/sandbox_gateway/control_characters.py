"""Make untrusted text safe for terminals, logs and error messages."""

from __future__ import annotations

import json
import re

# Matches whole escape sequences (colours, window titles), then single characters: control characters except tab and
# newline, marks that reorder or hide text, line separators, and lone surrogates.
_CONTROL_CHARACTER_PATTERN = re.compile(
    r"\x1b\[[0-?]*+[ -/]*+[@-~]?|\x1b[\]PX^_][^\x07\x1b\x9c]*+(?:\x07|\x1b\\|\x9c)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f\ud800-\udfff]"
)


def remove_control_characters(text: str) -> str:
    """Return ``text`` without control sequences and characters that hide or reorder text."""
    return _CONTROL_CHARACTER_PATTERN.sub("", text)


def escape_control_characters(document: str) -> str:
    """Return an equivalent JSON document in which terminal control sequences are escaped."""
    return _CONTROL_CHARACTER_PATTERN.sub(lambda match: json.dumps(match[0])[1:-1], document)
