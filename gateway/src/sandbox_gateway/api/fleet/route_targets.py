"""Where the requests of each route are carried out.

Each route has one of these classes. tests/fleet/test_routes.py compares the table with the routes of the application.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sandbox", "snapshot", "template", "volume"]


@dataclass(frozen=True)
class Local:
    """Carried out by the gateway that receives the request."""


@dataclass(frozen=True)
class OfRun:
    """Carried out by the gateway that has opened a run; here, if it opens one. The path or the body identifies it."""

    kind: Literal["plans", "applied-runs"]


@dataclass(frozen=True)
class ByObject:
    """Carried out by the host of an object."""

    kind: Kind
    parameter: str = "ref"
    """The parameter of the path that names the object."""


@dataclass(frozen=True)
class ByTransfer:
    """Carried out by the host that runs a push or a pull, which only that host knows."""


@dataclass(frozen=True)
class ByBody:
    """Carried out by the host of the object that a field of the body names; here, if there is no such field."""

    kind: Kind
    fields: tuple[str, ...]


@dataclass(frozen=True)
class ByQuery:
    """Carried out by the host that a parameter of the query names; here, if there is no such parameter."""

    parameter: str


@dataclass(frozen=True)
class AllHolders:
    """Carried out by each host with a copy of the object, because a name stands for all its copies."""

    kind: Kind
    fields: tuple[str, ...] = ()
    """The fields of the body that name the object. None: the path does."""


@dataclass(frozen=True)
class Placed:
    """Creates sandboxes: carried out by hosts with the snapshot, as ``placement`` says."""

    fields: tuple[str, ...] = ()
    """The fields of the body that name the snapshot. None: the path does."""


@dataclass(frozen=True)
class Merged:
    """The lists of all hosts, merged. ``id``: the field that identifies an entry, next to its creation time."""

    time: str
    id: str
    is_paged: bool = True
    root_parameter: str = ""
    """A parameter of the query. If it names an object, only its host is asked."""
    kinds: tuple[Kind, ...] = ()
    """The kinds of objects in the list, if the query can name one of them."""


@dataclass(frozen=True)
class MergedStream:
    """The events of all hosts."""


RouteClass = Local | OfRun | ByObject | ByTransfer | ByBody | ByQuery | AllHolders | Placed | Merged | MergedStream

_SANDBOX, _SNAPSHOT = ByObject("sandbox"), ByObject("snapshot")
_TEMPLATE, _VOLUME = ByObject("template"), ByObject("volume")

ROUTES: dict[tuple[str, str], RouteClass] = {
    # The gateway itself
    ("GET", "/health"): Local(),
    ("GET", "/healthz"): Local(),
    ("GET", "/version"): Local(),
    ("GET", "/metrics"): Local(),
    ("GET", "/signer"): Local(),
    ("GET", "/openapi.json"): Local(),
    ("GET", "/fleet"): Local(),
    ("PATCH", "/fleet/hosts/{host}"): Local(),
    ("DELETE", "/fleet/hosts/{host}"): Local(),
    # Plan sessions and applied runs, which have one home
    ("POST", "/plans"): OfRun("plans"),
    ("GET", "/plans"): Merged("openedAt", "planID", is_paged=False),
    ("GET", "/plans/{id}"): OfRun("plans"),
    ("DELETE", "/plans/{id}"): OfRun("plans"),
    ("POST", "/applied-runs"): OfRun("applied-runs"),
    ("GET", "/applied-runs"): Merged("openedAt", "runID", is_paged=False),
    ("DELETE", "/applied-runs/{id}"): OfRun("applied-runs"),
    # New objects that need nothing of other hosts
    ("POST", "/snapshots/import"): Local(),
    ("GET", "/interrupted-imports"): Local(),
    ("DELETE", "/interrupted-imports/{id}"): Local(),
    ("POST", "/snapshots/pull"): Local(),
    ("POST", "/templates/pull"): Local(),
    ("POST", "/volumes/import"): Local(),
    ("POST", "/templates"): ByBody("template", ("template",)),
    ("POST", "/dockerfiles"): Local(),
    ("POST", "/v3/templates"): Local(),
    ("POST", "/v1/snapshots"): Local(),
    ("POST", "/volumes"): ByBody("volume", ("fromSnapshot",)),
    ("PUT", "/build-files/{digest}"): ByQuery("host"),
    # Registries, with the credentials of the gateway
    ("GET", "/artifacts"): Local(),
    ("GET", "/transfers/{transfer}"): ByTransfer(),
    ("DELETE", "/transfers/{transfer}"): ByTransfer(),
    # New sandboxes
    ("POST", "/sandboxes"): Placed(("templateID",)),
    ("POST", "/v2/sandboxes"): Placed(("templateID",)),
    ("POST", "/snapshots/{ref}/fork"): Placed(),
    ("POST", "/v1/sandboxes"): Placed(("snapshot_tag",)),
    # Lists
    ("GET", "/sandboxes"): Merged("createdAt", "sandboxID", kinds=("sandbox",)),
    ("GET", "/v2/sandboxes"): Merged("createdAt", "sandboxID", kinds=("sandbox",)),
    ("GET", "/snapshots"): Merged("createdAt", "snapshotID", kinds=("snapshot",)),
    ("GET", "/templates"): Merged("createdAt", "templateID", kinds=("template",)),
    ("GET", "/volumes"): Merged("createdAt", "name", kinds=("volume",)),
    ("GET", "/v1/sandboxes"): Merged("created_at_unix", "id", is_paged=False),
    ("GET", "/v1/snapshots"): Merged("created_at_unix", "id", is_paged=False),
    ("GET", "/transfers"): Merged("startedAt", "transferID", is_paged=False),
    ("GET", "/lineage"): Merged("", "", is_paged=False, root_parameter="root"),
    ("GET", "/events"): MergedStream(),
    # Sandboxes
    ("GET", "/sandboxes/{ref}"): _SANDBOX,
    ("PATCH", "/sandboxes/{ref}"): _SANDBOX,
    ("DELETE", "/sandboxes/{ref}"): _SANDBOX,
    ("GET", "/sandboxes/{ref}/usage"): _SANDBOX,
    ("GET", "/sandboxes/{ref}/metrics"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/connect"): _SANDBOX,
    ("POST", "/v2/sandboxes/{ref}/connect"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/resume"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/pause"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/timeout"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/refreshes"): _SANDBOX,
    ("PUT", "/sandboxes/{ref}/network"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/exec"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/snapshots"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/rollback"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/promote"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/clone"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/fork"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/volumes"): _SANDBOX,
    ("DELETE", "/sandboxes/{ref}/volumes/{volume}"): _SANDBOX,
    ("GET", "/v1/sandboxes/{ref}"): _SANDBOX,
    ("DELETE", "/v1/sandboxes/{ref}"): _SANDBOX,
    ("POST", "/v1/sandboxes/{ref}/exec"): _SANDBOX,
    ("POST", "/v1/sandboxes/{ref}/eval"): _SANDBOX,
    ("POST", "/v1/sandboxes/{ref}/ping"): _SANDBOX,
    ("POST", "/v1/sandboxes/{ref}/branch"): _SANDBOX,
    ("POST", "/sandboxes/{ref}/move"): _SANDBOX,
    # Snapshots
    ("GET", "/snapshots/{ref}"): _SNAPSHOT,
    ("GET", "/snapshots/{ref}/export"): _SNAPSHOT,
    ("POST", "/snapshots/{ref}/push"): _SNAPSHOT,
    ("POST", "/snapshots/{ref}/copy"): ByQuery("host"),
    ("POST", "/snapshots/{ref}/prewarm"): AllHolders("snapshot"),
    ("DELETE", "/snapshots/{ref}"): AllHolders("snapshot"),
    ("GET", "/v1/snapshots/{ref}/info"): _SNAPSHOT,
    ("POST", "/v1/snapshots/{ref}/compact"): AllHolders("snapshot"),
    ("DELETE", "/v1/snapshots/{ref}"): AllHolders("snapshot"),
    # Templates
    ("GET", "/templates/{ref}"): _TEMPLATE,
    ("POST", "/templates/{ref}"): _TEMPLATE,
    ("DELETE", "/templates/{ref}"): AllHolders("template"),
    ("GET", "/templates/aliases/{ref}"): _TEMPLATE,
    ("PUT", "/templates/{ref}/alias"): AllHolders("template"),
    ("GET", "/templates/{ref}/tags"): _TEMPLATE,
    ("POST", "/templates/{ref}/push"): _TEMPLATE,
    ("POST", "/templates/tags"): AllHolders("template", ("target",)),
    ("DELETE", "/templates/tags"): AllHolders("template", ("name",)),
    ("POST", "/v2/templates/{ref}/builds/{build}"): _TEMPLATE,
    ("GET", "/templates/{ref}/builds/{build}/status"): _TEMPLATE,
    ("GET", "/templates/{ref}/builds/{build}/logs"): _TEMPLATE,
    ("GET", "/templates/{ref}/files/{digest}"): _TEMPLATE,
    # Volumes
    ("GET", "/volumes/{ref}"): _VOLUME,
    ("PATCH", "/volumes/{ref}"): _VOLUME,
    ("DELETE", "/volumes/{ref}"): _VOLUME,
    ("POST", "/volumes/{ref}/snapshots"): _VOLUME,
    ("GET", "/volumes/{ref}/snapshots"): _VOLUME,
    ("GET", "/volumes/{ref}/snapshots/{snapshot}/export"): _VOLUME,
    ("DELETE", "/volumes/{ref}/snapshots/{snapshot}"): _VOLUME,
    ("POST", "/volumes/{ref}/rollback"): _VOLUME,
}


def _compile(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))


def _has_parameters(route: tuple[tuple[str, str], RouteClass]) -> bool:
    (_, path), _ = route
    return "{" in path


# As in the application, a fixed path comes before one with parameters.
_PATTERNS = [(method, _compile(path), route) for (method, path), route in sorted(ROUTES.items(), key=_has_parameters)]


def find_route(method: str, path: str) -> tuple[RouteClass, dict[str, str]]:
    """Return the class of a request's route, and the parameters in its path. An unknown route is local."""
    for route_method, pattern, route in _PATTERNS:
        if route_method == method and (match := pattern.fullmatch(path)):
            return route, match.groupdict()
    return Local(), {}
