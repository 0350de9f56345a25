"""Text of strangers, for terminals, logs and error sentences."""

from __future__ import annotations

import json
import re

# Escape sequences as a whole (colours, titles of windows), then single characters: controls but for tab and newline,
# marks that reorder or hide what follows, separators of lines, and halves of characters.
_UNPRINTABLE = re.compile(
    r"\x1b\[[0-?]*+[ -/]*+[@-~]?|\x1b[\]PX^_][^\x07\x1b\x9c]*+(?:\x07|\x1b\\|\x9c)?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f\ud800-\udfff]"
)


def printable(text: str) -> str:
    """``text`` without what a terminal would obey."""
    return _UNPRINTABLE.sub("", text)


def escaped(document: str) -> str:
    """A JSON document that means the same, with escapes for what a terminal would obey."""
    return _UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], document)
