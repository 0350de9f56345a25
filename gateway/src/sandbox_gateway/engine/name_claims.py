"""Claim names beyond this host. The engine claims each new name before it commits the object with this name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from sandbox_gateway.records import Record


@dataclass(frozen=True)
class NameClaim:
    """The names that an object is about to get."""

    record: Record
    names: Sequence[str]


class NameClaims(Protocol):
    def require_free(self, names: Iterable[str]) -> None:
        """Raise NameTaken if a name is known to be in use. Does not wait, so that a later claim may still fail."""

    def require_claimable(self, claims: Sequence[NameClaim]) -> None:
        """Raise NameTaken like ``require_free``, except for the names of copies of the objects."""

    def held(self, claims: Sequence[NameClaim], *, may_be_late: bool = False) -> AbstractAsyncContextManager[None]:
        """Claim names inside this context. Names that no object of the index has at its end are released.

        Raises NameTaken, or another GatewayError if the names cannot be claimed at the moment. ``may_be_late``: in the
        latter case, objects without names are announced later.
        """


class LocalNameClaims:
    """The claims of a gateway that knows only its own host, whose index is enough."""

    def require_free(self, names: Iterable[str]) -> None:
        pass

    def require_claimable(self, claims: Sequence[NameClaim]) -> None:
        pass

    @contextlib.asynccontextmanager
    async def held(self, claims: Sequence[NameClaim], *, may_be_late: bool = False) -> AsyncIterator[None]:
        yield


class PlannedNameClaims:
    """The claims of a plan session, which only checks the names."""

    def __init__(self, claims: NameClaims) -> None:
        self._claims = claims

    def require_free(self, names: Iterable[str]) -> None:
        self._claims.require_free(names)

    def require_claimable(self, claims: Sequence[NameClaim]) -> None:
        self._claims.require_claimable(claims)

    @contextlib.asynccontextmanager
    async def held(self, claims: Sequence[NameClaim], *, may_be_late: bool = False) -> AsyncIterator[None]:
        self._claims.require_claimable(claims)
        yield
