"""Test that pages stay correct while entries are created and removed."""

from __future__ import annotations

import base64

import httpx
import pytest

from tests.support.memory_gateway import create_sandbox


def walk_pages(api: httpx.Client, route: str, key: str, **params: str | int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        response = api.get(route, params={**params, **({"nextToken": token} if token else {})})
        assert response.status_code == 200, response.text
        pages.append([item[key] for item in response.json()])
        token = response.headers.get("x-next-token", "")
        if not token:
            return pages


def test_every_page_is_returned(api: httpx.Client) -> None:
    for number in range(5):
        create_sandbox(api, name=f"n{number}")
    names = [f"n{number}" for number in range(5)]
    assert walk_pages(api, "/sandboxes", "name", limit=2) == [names[:2], names[2:4], names[4:]]
    assert walk_pages(api, "/sandboxes", "name", limit=5) == [names]
    assert walk_pages(api, "/v2/sandboxes", "name", limit=3, order="desc") == [names[:1:-1], names[1::-1]]


def test_changes_between_pages_do_not_shift_entries(api: httpx.Client) -> None:
    for number in range(4):
        create_sandbox(api, name=f"n{number}")
    first_page = api.get("/sandboxes", params={"limit": 2})
    api.delete("/sandboxes/n1")
    api.delete("/sandboxes/n2")
    create_sandbox(api, name="n4")
    second_page = api.get("/sandboxes", params={"limit": 2, "nextToken": first_page.headers["x-next-token"]})
    assert [item["name"] for item in second_page.json()] == ["n3", "n4"]


def test_pages_of_snapshots_do_not_shift_while_snapshots_are_created_and_removed(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for number in range(5):
        api.post("/sandboxes/one/snapshots", json={"name": f"s{number}"})
    params: dict[str, str | int] = {"limit": 2, "sandboxID": "one"}
    first_page = api.get("/snapshots", params=params)
    for name in ("s0", "s1", "s2"):
        assert api.delete(f"/snapshots/{name}").status_code == 204
    api.post("/sandboxes/one/snapshots", json={"name": "s5"})
    second_page = api.get("/snapshots", params={**params, "nextToken": first_page.headers["x-next-token"]})
    third_page = api.get("/snapshots", params={**params, "nextToken": second_page.headers["x-next-token"]})
    pages = [[item["names"] for item in response.json()] for response in (first_page, second_page, third_page)]
    assert pages == [[["s0"], ["s1"]], [["s3"], ["s4"]], [["s5"]]] and "x-next-token" not in third_page.headers


def test_snapshots_and_templates_are_paged(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    for number in range(3):
        api.post("/sandboxes/one/snapshots", json={"name": f"s{number}"})
    assert [len(page) for page in walk_pages(api, "/snapshots", "snapshotID", limit=2)] == [2, 1]
    assert len(walk_pages(api, "/templates", "templateID", limit=1)) == len(api.get("/templates").json())


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "!!!!",
        "e30",
        base64.urlsafe_b64encode(b'["2020-01-01", "a", "asc"]').decode(),
        "W10",
        "AAAA",
        "é",
    ],
)
def test_invalid_page_tokens_are_refused(api: httpx.Client, token: str) -> None:
    response = api.get("/sandboxes", params={"nextToken": token})
    assert response.status_code == 400 and "nextToken" in response.json()["message"]


def test_a_page_token_for_another_sort_order_is_refused(api: httpx.Client) -> None:
    create_sandbox(api), create_sandbox(api)
    token = api.get("/sandboxes", params={"limit": 1}).headers["x-next-token"]
    assert api.get("/sandboxes", params={"order": "desc", "nextToken": token}).status_code == 400


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many"])
def test_invalid_limits_are_refused(api: httpx.Client, limit: str) -> None:
    assert api.get("/sandboxes", params={"limit": limit}).status_code == 400
