"""Names of fields in JSON."""

from __future__ import annotations

_UPPER = {"id": "ID", "mb": "MB"}


def json_name(field: str) -> str:
    """Return ``field`` in E2B's camelCase: `template_id` is `templateID`, `memory_mb` is `memoryMB`."""
    first, *rest = field.split("_")
    return first + "".join(_UPPER.get(word, word.capitalize()) for word in rest)
