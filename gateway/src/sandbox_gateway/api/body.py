"""The base class of all request bodies, and field types that both dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.engine.spec import UNSET
from sandbox_gateway.validation import has_more_values

MAX_FORKS = 1000
MAX_VALUES = 20_000
"""Maximum number of values in all lists and objects of a body together."""
_MAX_SECONDS = 3_153_600_000


def _convert_never_to_none(value: object) -> object:
    """Return None for -1, which means never in both dialects, and any other value unchanged."""
    if isinstance(value, bool):
        raise ValueError("must be a number of seconds, or -1 for never")
    return None if value == -1 else value


AnyRef = Annotated[str, Field(min_length=1, max_length=MAX_REF_LENGTH)]
Seconds = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Timeout = Annotated[Seconds | None, BeforeValidator(_convert_never_to_none)]
"""Seconds from now until the sandbox ends; null or -1: never."""
TIMEOUT_FIELD = Field(
    None, description="Seconds from now; -1 or null: never. Absent: the host's default, or no change."
)


@dataclass(frozen=True)
class Refusal:
    """The refusal of an unsupported field, because a caller that sets the field expects it to take effect.

    ``reason`` completes the sentence "FIELD: not supported, ..." and says what to do instead.
    ``accepted_values`` have no effect; null is always accepted.
    """

    reason: str
    accepted_values: tuple[Any, ...] = (False, "", [], {})

    def accepts(self, value: object) -> bool:
        # In Python 0 equals False, but a caller that sends 0 has set a number.
        return value is None or any(type(value) is type(each) and value == each for each in self.accepted_values)


class Body(BaseModel):
    """A request body.

    Unknown fields are ignored, as the dialects' clients expect. The ``unknown_fields`` module warns about them, and
    refuses the fields in ``refused_fields`` and ``misplaced_fields``. The three mappings contain the JSON names of
    fields. tests/sdk/test_fields.py compares the fields with those of the published clients, and generates the tables
    in docs/.
    """

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    ignored_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that known clients send and that are ignored without a warning, with the reason."""
    refused_fields: ClassVar[Mapping[str, Refusal]] = {}
    """Fields of known clients that the gateway does not support."""
    misplaced_fields: ClassVar[Mapping[str, Refusal]] = {}
    """Fields of other requests that a caller could expect to work in this one. They are refused as well."""

    @model_validator(mode="before")
    @classmethod
    def _check_value_count(cls, data: Any) -> Any:
        if has_more_values(data, MAX_VALUES):
            raise ValueError(f"there are more than {MAX_VALUES} values in its lists and objects: send fewer of them")
        return data

    def get_value_or_unset(self, field: str) -> Any:
        """Return the value of ``field``, or UNSET if the caller did not send it."""
        return getattr(self, field) if field in self.model_fields_set else UNSET
