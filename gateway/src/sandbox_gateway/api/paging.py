"""Paginate lists. A cursor identifies the last entry, so that concurrent changes do not shift pages."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

from fastapi import Query, Response

from sandbox_gateway.engine.creation_order import Key
from sandbox_gateway.errors import Invalid

Item = TypeVar("Item")
Order = Literal["asc", "desc"]

NEXT_TOKEN_HEADER = "x-next-token"
MAX_ITEMS = 1000
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="Maximum number of entries on a page.")]
NextToken = Annotated[str, Query(max_length=500, description=f"The `{NEXT_TOKEN_HEADER}` header of the previous page.")]


def paginate(
    walk: Callable[[Key | None, bool], Iterable[Item]],
    key: Callable[[Item], Key],
    response: Response,
    limit: int,
    token: str,
    order: Order = "asc",
) -> list[Item]:
    """Return the page after ``token``, and set the token of the next page in ``response``. Raises Invalid.

    ``walk(after, backwards)`` returns the entries after the key ``after``, sorted by ``key``, in reverse order if
    ``backwards``. At most ``limit + 1`` entries are taken from it.
    """
    last_key = decode_token(token, order) if token else None
    items = [*itertools.islice(walk(last_key, order == "desc"), limit + 1)]
    if len(items) > limit:
        response.headers[NEXT_TOKEN_HEADER] = encode_token(key(items[limit - 1]), order)
    return items[:limit]


def paginate_list(
    items: Iterable[Item], key: Callable[[Item], Key], response: Response, limit: int, token: str
) -> list[Item]:
    """Return the page after ``token`` of a short list, which need not be sorted. Raises Invalid, like ``paginate``."""
    sorted_items = sorted(items, key=key)
    return paginate(
        lambda after, _: sorted_items if after is None else [item for item in sorted_items if key(item) > after],
        key,
        response,
        limit,
        token,
    )


def encode_token(key: Key, order: Order) -> str:
    """Return the token of the page after the entry ``key``. It holds on every host."""
    text = json.dumps([key[0].astimezone(UTC).isoformat(), key[1], order], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str, order: Order) -> Key:
    try:
        created_at, id, token_order = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        creation_time = datetime.fromisoformat(created_at)
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise Invalid("the parameter 'nextToken' was not issued by this gateway: start again without it") from None
    if not isinstance(id, str) or creation_time.tzinfo is None or token_order != order:
        raise Invalid("the parameter 'nextToken' was issued for a different list or sort order: start again without it")
    return creation_time, id
