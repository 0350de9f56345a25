"""Test the scanner of the clients' sources on small sources with invented requests."""

from __future__ import annotations

import textwrap

import pytest

from tests.sdk.request_scanner import ClientRequest, RequestScanner


def scan(source: str, **options: dict[str, str]) -> RequestScanner:
    return RequestScanner({"new.py": textwrap.dedent(source)}, **options)


BODIES = {
    "literal": 's.post(f"{base}/items", json={"new": 1})',
    "variable": 'payload = {"new": 1}\ns.post(f"{base}/items", json=payload)',
    "annotated variable": 'payload: dict = {"new": 1}\ns.post(f"{base}/items", json=payload)',
    "assigned key": 'payload = {}\npayload["new"] = 1\ns.post(f"{base}/items", json=payload)',
    "update with a dictionary": 'payload = {}\npayload.update({"new": 1})\ns.post(f"{base}/items", json=payload)',
    "update with keywords": 's_payload = {}\ns_payload.update(new=1)\ns.post(f"{base}/items", json=s_payload)',
    "setdefault": 'payload = {}\npayload.setdefault("new", 1)\ns.post(f"{base}/items", json=payload)',
    "union in place": 'payload = {}\npayload |= {"new": 1}\ns.post(f"{base}/items", json=payload)',
    "union": 'payload = {} | {"new": 1}\ns.post(f"{base}/items", json=payload)',
    "unpacked dictionary": 'extra = {"new": 1}\ns.post(f"{base}/items", json={**extra})',
    "condition": 's.post(f"{base}/items", json={"new": 1} if x else {})',
    "condition with or": 's.post(f"{base}/items", json=x and {"new": 1} or None)',
    "dict with keywords": 's.post(f"{base}/items", json=dict(new=1))',
    "dict of a variable": 'payload = {"new": 1}\ns.post(f"{base}/items", json=dict(payload))',
    "copy": 'payload = {"new": 1}\ns.post(f"{base}/items", json=payload.copy())',
    "filtered": 'p = {"new": 1}\np = {k: v for k, v in p.items() if v}\ns.post(f"{base}/items", json=p)',
    "encoded": 's.post(f"{base}/items", content=json.dumps({"new": 1}).encode())',
    "encoded in a variable": 'data = json.dumps({"new": 1}) if x else None\ns.post(f"{base}/items", data=data)',
    "method and URL": 's.request("POST", f"{base}/items", json={"new": 1})',
    "keywords": 's.request(method="POST", url=f"{base}/items", json={"new": 1})',
    "keywords in a variable": 'options = {"json": {"new": 1}}\ns.post(f"{base}/items", **options)',
    "stream": 'with s.stream("POST", f"{base}/items", json={"new": 1}) as reply: pass',
    "URL in a variable": 'url = f"{base}/items"\ns.post(url, json={"new": 1})',
    "joined URL": 's.post(base + "/items", json={"new": 1})',
    "formatted URL": 's.post("{}/items".format(base), json={"new": 1})',
    "request object": 'urllib.request.Request(f"{base}/items", method="POST", data=json.dumps({"new": 1}))',
    "imported function": 'from requests import post\npost(f"{base}/items", json={"new": 1})',
    "function that returns the body": """
        def build():
            payload = {}
            payload["new"] = 1
            return payload
        def send(s):
            s.post(f"{base}/items", json=build())
    """,
    "function that changes the body": """
        def add(target, value):
            target["new"] = value
        def send(s):
            payload = {}
            add(payload, 1)
            s.post(f"{base}/items", json=payload)
    """,
    "function that sends the request": """
        def _send(self, method, path, body=None):
            self.session.request(method, f"{self.base}{path}", json=body)
        def create(self):
            self._send("POST", "/items", {"new": 1})
    """,
    "functions that call each other": """
        def _send(self, path, body):
            self.session.post(f"{self.base}{path}", json=body)
        def _send_item(self, **fields):
            self._send("/items", dict(fields, new=1))
        def create(self):
            self._send_item()
    """,
}


@pytest.mark.parametrize("source", BODIES.values(), ids=BODIES)
def test_fields_are_found(source: str) -> None:
    scanner = scan(source)
    assert scanner.problems == []
    assert scanner.requests == [ClientRequest("POST", "/items", {"new": {}})]


NESTED = {
    "literal": 's.post("/items", json={"outer": {"new": 1}})',
    "list": 's.post("/items", json={"outer": [{"new": each} for each in x]})',
    "assigned key": 'p = {"outer": {}}\np["outer"]["new"] = 1\ns.post("/items", json=p)',
    "update": 'p = {"outer": {}}\np["outer"].update({"new": 1})\ns.post("/items", json=p)',
    "setdefault": 'p = {}\np.setdefault("outer", {})["new"] = 1\ns.post("/items", json=p)',
    "alias": 'p = {}\nouter = p.setdefault("outer", {})\nouter["new"] = 1\ns.post("/items", json=p)',
    "alias of a field": 'p = {"outer": {}}\nouter = p["outer"]\nouter["new"] = 1\ns.post("/items", json=p)',
}


@pytest.mark.parametrize("source", NESTED.values(), ids=NESTED)
def test_nested_fields_are_found(source: str) -> None:
    scanner = scan(source)
    assert scanner.problems == []
    assert scanner.requests == [ClientRequest("POST", "/items", {"outer": {"new": {}}})]


QUERIES = {
    "literal": 's.get(f"{base}/items", params={"new": 1})',
    "update": 'params = {}\nparams.update(new=1)\ns.get(f"{base}/items", params=params)',
    "in the URL": 's.get(f"{base}/items?new={x}")',
    "encoded": 's.get(f"{base}/items?{urlencode(dict(new=1))}")',
    "unknown receiver": 'url = f"{base}/items?new=1"\nconnection.get(url)',
}


@pytest.mark.parametrize("source", QUERIES.values(), ids=QUERIES)
def test_query_parameters_are_found(source: str) -> None:
    scanner = scan(source)
    assert scanner.problems == []
    assert scanner.requests == [ClientRequest("GET", "/items", {}, {"new"})]


UNRESOLVED = {
    "unknown URL": "s.post(make_url(), json={})",
    "URL of a parameter": "def send(s, url):\n    s.post(url)",
    "unknown end of the URL": 's.post(f"{base}/items{suffix}")',
    "unknown query": 's.get(f"{base}/items?{query}")',
    "unknown method": 's.request(method, f"{base}/items")',
    "method by name": 'getattr(session, verb)(f"{base}/items")',
    "method in a variable": 'send = session.post\nsend(f"{base}/items", json={"new": 1})',
    "unknown body": 's.post(f"{base}/items", json=make_body())',
    "body of a parameter": 'def send(s, body):\n    s.post(f"{base}/items", json=body)',
    "unknown part of the body": 's.post(f"{base}/items", json={"old": 1, **make_body()})',
    "unknown name of a field": 'p = {}\np[name] = 1\ns.post(f"{base}/items", json=p)',
    "unknown update": 'p = {}\np.update(make_body())\ns.post(f"{base}/items", json=p)',
    "unknown encoding": 's.post(f"{base}/items", content=encode({"new": 1}))',
    "unknown keywords": 's.post(f"{base}/items", **make_options())',
    "body without a name": 's.post(f"{base}/items", {"new": 1})',
}


@pytest.mark.parametrize("source", UNRESOLVED.values(), ids=UNRESOLVED)
def test_requests_that_cannot_be_resolved_are_problems(source: str) -> None:
    (problem,) = scan(source).problems
    line_number = len(source.splitlines())
    if source.startswith("send = "):
        line_number = 1
    assert problem.startswith(f"new.py:{line_number}: ")


def test_permitted_problems_are_not_reported() -> None:
    source = 'def upload(s, data):\n    s.put(f"{base}/files", content=data, params={"path": 1})'
    assert len(scan(source).problems) == 1
    permitted = scan(source, allowed={"new.py:upload": "sends the content of a file"})
    assert permitted.problems == [] and permitted.requests == [ClientRequest("PUT", "/files", {}, {"path"})]
    (problem,) = scan("", allowed={"new.py:upload": "sends the content of a file"}).problems
    assert problem == "new.py:upload: there is no problem to permit"


@pytest.mark.parametrize(
    "source",
    ["cache.get(key)", 'x = environ.get("NAME")', "queue.get()"],
)
def test_look_ups_are_not_requests(source: str) -> None:
    scanner = scan(source)
    assert scanner.requests == scanner.problems == []
