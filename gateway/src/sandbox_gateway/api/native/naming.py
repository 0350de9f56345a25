"""Names of fields in JSON."""

from __future__ import annotations

_UPPERCASE_WORDS = {"id": "ID", "mb": "MB"}


def to_json_name(field: str) -> str:
    """Return ``field`` in E2B's camelCase: `template_id` becomes `templateID`, `memory_mb` becomes `memoryMB`."""
    first, *rest = field.split("_")
    return first + "".join(_UPPERCASE_WORDS.get(word, word.capitalize()) for word in rest)
