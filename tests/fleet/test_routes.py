"""Each route of the API has a class, which says where its requests are carried out."""

from __future__ import annotations

import re

import pytest

from sandbox_gateway.api.fleet.route_targets import (
    ROUTES,
    AllHolders,
    ByBody,
    ByObject,
    Local,
    Merged,
    MergedStream,
    Placed,
    find_route,
)
from tests.fleet.world import World
from tests.security.routes import list_route_templates

_OWN_ROUTES = {
    ("GET", "/fleet"),
    ("PATCH", "/fleet/hosts/{host}"),
    ("DELETE", "/fleet/hosts/{host}"),
    ("POST", "/snapshots/{ref}/copy"),
    ("POST", "/sandboxes/{ref}/move"),
}


def test_every_route_of_the_application_has_a_class() -> None:
    routes = {*list_route_templates()}
    assert routes - ROUTES.keys() == set(), "add these routes to ROUTES"
    assert ROUTES.keys() - routes == _OWN_ROUTES, "these routes do not exist"


def test_the_routes_of_the_fleet_have_a_class(world: World) -> None:
    (one,) = world.start("h1")
    document = one.get("/openapi.json")
    routes = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert routes - ROUTES.keys() == set()
    assert routes >= _OWN_ROUTES


@pytest.mark.parametrize(("method", "template"), sorted(ROUTES))
def test_a_request_finds_its_own_route(method: str, template: str) -> None:
    path = re.sub(r"{\w+}", "x1", template)
    route, parameters = find_route(method, path)
    assert route == ROUTES[method, template]
    assert parameters == dict.fromkeys(re.findall(r"{(\w+)}", template), "x1")


def test_classes_of_typical_requests() -> None:
    for method, path, route_class in (
        ("POST", "/snapshots/import", Local),
        ("POST", "/snapshots/import/fork", Placed),
        ("GET", "/templates/tags", ByObject),
        ("POST", "/templates/tags", AllHolders),
        ("POST", "/volumes", ByBody),
        ("GET", "/lineage", Merged),
        ("GET", "/events", MergedStream),
        ("GET", "/nowhere", Local),
        ("DELETE", "/health", Local),
        ("GET", "/sandboxes/a/b", Local),
    ):
        assert isinstance(find_route(method, path)[0], route_class), (method, path)
