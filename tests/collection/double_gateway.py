"""A stand-in for the gateway, for tests alone: its HTTP answers over a state in memory, and no sandbox behind them.

It lets the modules be tested without a host that runs virtual machines, and lets tests cause what a real gateway
does only when something breaks. The same tests run against a real gateway, named by ``SANDBOX_GATEWAY_URL``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import socketserver
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

PAGING = ("limit", "nextToken")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NEVER = "9999-01-01T00:00:00Z"
RECIPE = {
    "from": "debootstrap",
    "suite": "bookworm",
    "mirror": "",
    "packages": [],
    "path": "",
    "setup": [],
    "startCommand": "",
    "readyProbe": "",
    "readyTimeout": 60.0,
    "setupTimeout": 1800.0,
    "cpuCount": 1,
    "memoryMB": 256,
    "diskSizeMB": 2048,
}
SIZES = ("cpuCount", "memoryMB", "diskSizeMB")
PATH = re.compile(r"(/[A-Za-z0-9_.@+:=-]+)+")
TOP = ("/etc", "/usr", "/bin", "/sbin", "/lib", "/boot", "/root", "/home", "/var", "/tmp")


class Refused(Exception):
    def __init__(self, status: int, kind: str, message: str, blockers: list[str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": status, "message": message, "error": message, "kind": kind, "blockers": blockers or []}


def stamp(moment: datetime | None) -> str:
    return NEVER if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


class DoubleGateway:
    """The state, and ``answer`` to one request. ``fail_at`` is the name whose fork fails, or ``rollback``."""

    def __init__(self, *, token: str = "", version: str = "0.1.0") -> None:
        self.token = token
        self.version = version
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.builds: dict[str, dict[str, Any]] = {}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.captures: dict[str, dict[str, Any]] = {}
        """Snapshots of volumes."""
        self.calls: list[tuple[str, str]] = []
        self.fail_at = ""
        self.busy = 0
        self.build_polls = 1
        """How often a build is asked after before it ends."""
        self.vanish: set[str] = set()
        """Snapshots and sandboxes (ids) that are gone as soon as somebody has seen them."""
        self._lock = threading.RLock()

    def answer(
        self, method: str, target: str, body: dict[str, Any] | None, key: str = ""
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (None: no body) and headers."""
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query))
        path = [unquote(step) for step in parts.path.strip("/").split("/")]
        with self._lock:
            self.calls.append((method, target))
            try:
                if path == ["health"]:
                    return 200, {"status": "ok", "sandboxes": len(self.sandboxes), "version": self.version}, {}
                if self.token and not secrets.compare_digest(self.token, key):
                    raise Refused(401, "unauthorized", "this needs a key")
                if self.busy:
                    self.busy -= 1
                    raise Refused(429, "busy", "too much at once: try again")
                self._sweep()
                return self._route(method, path, query, body or {})
            except Refused as refused:
                headers = {"Retry-After": "0"} if refused.status == 429 else {}
                return refused.status, refused.body, headers

    def _sweep(self) -> None:
        now = datetime.now(UTC)
        for ident, box in list(self.sandboxes.items()):
            if box["end"] is not None and box["end"] <= now:
                del self.sandboxes[ident]

    def _route(
        self, method: str, path: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, Any, dict[str, str]]:
        match (method, *path):
            case ("GET", "sandboxes"):
                return self._list_sandboxes(query)
            case ("POST", "sandboxes"):
                return 201, self._detail(self._create(body)), {}
            case ("GET", "sandboxes", ref):
                box = self._sandbox(ref)
                if box["id"] in self.vanish:
                    self._kill(box)
                return 200, {**self._detail(box), "diverged": box["diverged"]}, {}
            case ("DELETE", "sandboxes", ref):
                self._kill(self._sandbox(ref))
                return 204, None, {}
            case ("PATCH", "sandboxes", ref):
                return 200, self._detail(self._patch(self._sandbox(ref), body)), {}
            case ("POST", "sandboxes", ref, "volumes"):
                return 201, self._mount_shape(self._attach(self._sandbox(ref), body)), {}
            case ("DELETE", "sandboxes", ref, "volumes", name):
                self._detach(self._sandbox(ref), self._volume(name))
                return 204, None, {}
            case (_, "sandboxes", ref, verb):
                return self._verb(method, verb, self._sandbox(ref), body)
            case (_, "volumes", *rest):
                return self._volumes(method, rest, query, body)
            case ("GET", "snapshots"):
                shown = [self._snapshot_shape(s) for s in self._visible("snapshot") if self._matches(s, query)]
                return _page(shown, query)
            case ("GET", "snapshots", ref):
                snapshot = self._snapshot(ref)
                shape = self._snapshot_shape(snapshot)
                if snapshot["id"] in self.vanish:
                    del self.snapshots[snapshot["id"]]
                return 200, shape, {}
            case ("DELETE", "snapshots", ref):
                return self._delete(self._snapshot(ref), query)
            case ("POST", "snapshots", ref, "fork"):
                return self._fork(self._snapshot(ref), body)
            case ("GET", "templates"):
                shown = [self._template_shape(t) for t in self._visible("template") if self._matches(t, query)]
                return _page(shown, query)
            case ("POST", "templates"):
                return self._build(body)
            case ("GET", "templates", ref):
                return 200, self._template_shape(self._template(ref)), {}
            case ("DELETE", "templates", ref):
                return self._delete(self._template(ref), query)
            case ("GET", "templates", _, "builds", build, "status"):
                return 200, self._build_status(self.builds[build], int(query.get("logsOffset", 0))), {}
        raise Refused(
            404, "not_found", f"route {method} /{'/'.join(path)} not found: GET /openapi.json lists the routes"
        )

    # Finding

    def _sandbox(self, ref: str) -> dict[str, Any]:
        for box in self.sandboxes.values():
            if ref in (box["name"], box["id"]):
                return box
        raise Refused(404, "not_found", f"sandbox {ref!r} not found")

    def _snapshot(self, ref: str) -> dict[str, Any]:
        for snapshot in self._visible("snapshot", "template"):
            if ref in (*snapshot["names"], snapshot["id"]):
                return snapshot
        raise Refused(404, "not_found", f"snapshot {ref!r} not found")

    def _template(self, ref: str) -> dict[str, Any]:
        for template in self._visible("template"):
            if ref in (*template["names"], template["id"]):
                return template
        raise Refused(404, "not_found", f"template {ref!r} not found")

    def _visible(self, *kinds: str) -> list[dict[str, Any]]:
        return [s for s in self.snapshots.values() if s["kind"] in kinds and not s["doomed"]]

    def _matches(self, snapshot: dict[str, Any], query: dict[str, str]) -> bool:
        _only(query, "name", "sandboxID", "templateID", *PAGING)
        if "name" in query and query["name"] not in snapshot["names"]:
            return False
        source = self.sandboxes.get(snapshot["source"], {"name": None})["name"]
        taken_of = query.get("sandboxID") in (None, snapshot["source"], source)
        return taken_of and self._is(query.get("templateID"), snapshot["template"])

    def _volume(self, ref: str) -> dict[str, Any]:
        for volume in self.volumes.values():
            if ref in (volume["name"], volume["id"]):
                return volume
        raise Refused(404, "not_found", f"volume {ref!r} not found")

    def _captured(self, volume: dict[str, Any], ref: str) -> dict[str, Any]:
        for capture in self._captures_of(volume):
            if ref in (capture["name"], capture["id"]):
                return capture
        raise Refused(404, "not_found", f"snapshot {ref!r} of volume {volume['name']} not found")

    def _captures_of(self, volume: dict[str, Any]) -> list[dict[str, Any]]:
        return [capture for capture in self.captures.values() if capture["volume"] == volume["id"]]

    def _mounts_of(self, volume: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [
            (box, mount)
            for box in self.sandboxes.values()
            for mount in box["mounts"]
            if mount["volume"] == volume["id"]
        ]

    def _users(self, snapshot: dict[str, Any]) -> list[dict[str, Any]]:
        return [box for box in self.sandboxes.values() if box["forked_from"] == snapshot["id"]]

    def _reserve(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise Refused(400, "invalid", f"the name {name[:80]!r} is not allowed")
        taken = {box["name"] for box in self.sandboxes.values()}
        taken |= {known for s in self._visible("snapshot", "template") for known in s["names"]}
        taken |= {volume["name"] for volume in self.volumes.values()}
        if name in taken:
            raise Refused(409, "name_taken", f"the name {name!r} is taken")
        return name

    # Sandboxes

    def _list_sandboxes(self, query: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
        _only(query, "name", "snapshotID", "template", "state", "metadata", "startedAfter", "diverged", *PAGING)
        found = [
            {**self._detail(box), **({"diverged": box["diverged"]} if query.get("diverged") == "true" else {})}
            for box in self.sandboxes.values()
            if query.get("name", box["name"]) == box["name"]
            and self._is(query.get("snapshotID"), box["forked_from"])
            and self._is(query.get("template"), box["template"])
            and box["state"] in query.get("state", "running,paused").split(",")
            and dict(parse_qsl(query.get("metadata", ""))).items() <= box["metadata"].items()
            and box["begun"] > datetime.fromisoformat(query.get("startedAfter", "2000-01-01T00:00:00Z"))
        ]
        return _page(found, query)

    def _is(self, ref: str | None, ident: str) -> bool:
        """Is ``ref`` (None: any) the id, or a name of the snapshot or template of that id?"""
        return ref in (None, ident, *self.snapshots.get(ident, {"names": []})["names"])

    def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            source = self._snapshot(str(body.get("templateID")))
        except Refused:
            raise Refused(404, "not_found", f"template {body.get('templateID')!r} not found") from None
        return self._make(source, body, body.get("name") or secrets.token_hex(6))

    def _make(self, source: dict[str, Any], body: dict[str, Any], name: str) -> dict[str, Any]:
        resized = any(body.get(size, source[size]) != source[size] for size in SIZES)
        if resized and source["memory"] != "none" and not body.get("coldStart"):
            raise Refused(400, "unsupported", f"snapshot {source['id']} holds the memory of a machine of other sizes")
        network = body.get("network") or {}
        mounts = self._wanted(source, body.get("volumeMounts"))
        now = datetime.now(UTC)
        life = body.get("timeout")
        box = {
            "id": secrets.token_hex(6),
            "name": self._reserve(name),
            "state": "paused" if body.get("paused") else "running",
            "reason": "",
            "template": source["template"],
            "forked_from": source["id"],
            "head": source["id"],
            "parent": source["source"],
            "diverged": False,
            "metadata": _strings(body.get("metadata") or {}),
            "network": {
                "allowInternetAccess": network.get("allowInternetAccess", True),
                "allowOut": network.get("allowOut") or [],
                "denyOut": network.get("denyOut") or [],
            },
            "begin": now,
            "begun": now,
            "end": None if life in (None, -1) else now + timedelta(seconds=life),
            **{size: body.get(size) or source[size] for size in SIZES},
        }
        if name == self.fail_at:
            raise Refused(500, "backend_failed", f"sandbox {name!r} did not answer within 20 s")
        self.sandboxes[box["id"]] = box
        box["mounts"] = [self._own(box, mount) for mount in mounts]
        return box

    def _wanted(self, source: dict[str, Any], given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        if given is None:
            lost = [mount for mount in source["mounts"] if mount["volume"] not in self.volumes]
            if lost:
                raise Refused(409, "conflict", f"the volume at {lost[0]['path']} is gone: say with volumeMounts what …")
            return [dict(mount) for mount in source["mounts"]]
        mounts: list[dict[str, Any]] = []
        for each in given:
            _only(each, "name", "path", "readOnly", "clone")
            mount = self._mount(each, mounts)
            if each.get("clone"):
                held = {capture["volume"]: capture["snapshot"] for capture in source["volumes"]}
                if mount["volume"] not in held:
                    raise Refused(400, "invalid", f"snapshot {source['id']} holds no capture of {each['name']}")
                mount["from"] = held[mount["volume"]]
            mounts.append(mount)
        return mounts

    def _mount(self, body: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
        volume, path = self._volume(body["name"]), body["path"]
        steps = path.split("/")
        if not PATH.fullmatch(path) or {".", ".."} & set(steps) or len(path) > 255:
            raise Refused(400, "invalid", f"a volume cannot be mounted at {path!r}: give an absolute path")
        if path in TOP or steps[1] in ("proc", "sys", "dev", "run"):
            raise Refused(400, "invalid", f"a volume cannot be mounted at {path!r}, which the system needs")
        for other in others:
            if f"{path}/".startswith(f"{other['path']}/") or f"{other['path']}/".startswith(f"{path}/"):
                raise Refused(400, "invalid", f"the mounts at {other['path']} and {path} overlap")
            if other["volume"] == volume["id"]:
                raise Refused(400, "invalid", f"volume {volume['name']} is named more than once")
        return {"volume": volume["id"], "path": path, "readOnly": bool(body.get("readOnly"))}

    def _own(self, box: dict[str, Any], mount: dict[str, Any]) -> dict[str, Any]:
        """``mount``, of a clone of its own where that is asked for."""
        source = mount.pop("from", None)
        if source is None:
            return mount
        name = f"{box['name']}-{self.volumes[mount['volume']]['name']}"
        clone = self._new_volume(
            name, self.captures[source]["size"], source=source, owner=box["id"], suffix=secrets.token_hex(6)
        )
        return {**mount, "volume": clone["id"]}

    def _attach(self, box: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        _only(body, "name", "path", "readOnly")
        if box["state"] == "paused":
            raise Refused(409, "conflict", f"sandbox {box['name']!r} is paused: resume it first")
        if any(mount["volume"] == self._volume(body["name"])["id"] for mount in box["mounts"]):
            raise Refused(409, "conflict", f"sandbox {box['name']} has volume {body['name']} already: detach it first")
        box["mounts"].append(self._mount(body, box["mounts"]))
        return box["mounts"][-1]  # type: ignore[no-any-return]

    def _detach(self, box: dict[str, Any], volume: dict[str, Any]) -> None:
        if all(mount["volume"] != volume["id"] for mount in box["mounts"]):
            raise Refused(404, "not_found", f"in sandbox {box['name']}, volume {volume['name']} not found")
        box["mounts"] = [mount for mount in box["mounts"] if mount["volume"] != volume["id"]]
        self._collect()

    def _collect(self) -> None:
        """What is hidden goes with its last user, and what it holds of volumes with it; own clones do likewise."""
        heads = {box["head"] for box in self.sandboxes.values()}
        for ident, snapshot in list(self.snapshots.items()):
            hidden = snapshot["doomed"] or snapshot["kind"] == "transient"
            if hidden and ident not in heads and not self._users(snapshot):
                del self.snapshots[ident]
        for ident, capture in list(self.captures.items()):
            if capture["with"] and capture["with"] not in self.snapshots:
                del self.captures[ident]
        for ident, volume in list(self.volumes.items()):
            if volume["owner"] and not self._mounts_of(volume) and not self._captures_of(volume):
                del self.volumes[ident]

    def _detail(self, box: dict[str, Any]) -> dict[str, Any]:
        return {
            "sandboxID": box["id"],
            "name": box["name"],
            "templateID": box["template"],
            "clientID": "local",
            "envdVersion": "0.6.4",
            "envdAccessToken": "an-access-token-nobody-should-see",
            "domain": "sandbox.local",
            "state": box["state"],
            "stateReason": box["reason"],
            "createdAt": stamp(box["begin"]),
            "startedAt": stamp(box["begun"]),
            "endAt": stamp(box["end"]),
            "onTimeout": "kill",
            **{size: box[size] for size in SIZES},
            "metadata": box["metadata"],
            "snapshotID": box["head"],
            "forkedFrom": box["forked_from"],
            "parentSandboxID": box["parent"],
            "network": box["network"],
            "volumeMounts": [self._mount_shape(mount) for mount in box["mounts"]],
            "backend": "kvm_xfs",
            **({"address": "10.231.0.2"} if box["state"] == "running" else {}),
        }

    def _kill(self, box: dict[str, Any]) -> None:
        del self.sandboxes[box["id"]]
        self._collect()

    def _patch(self, box: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        if body.get("name"):
            box["name"] = self._reserve(body["name"])
        if body.get("metadata") is not None:
            box["metadata"] = _strings(body["metadata"])
        return box

    def _verb(
        self, method: str, verb: str, box: dict[str, Any], body: dict[str, Any]
    ) -> tuple[int, Any, dict[str, str]]:
        match (method, verb):
            case ("POST", "pause"):
                if box["state"] == "paused":
                    raise Refused(409, "conflict", f"sandbox {box['name']!r} is paused already")
                box["state"] = "paused"
                return 204, None, {}
            case ("POST", "resume" | "connect"):
                box.update(state="running", reason="", begun=datetime.now(UTC))
                return 201, self._detail(box), {}
            case ("POST", "timeout"):
                life = body["timeout"]
                box["end"] = None if life == -1 else datetime.now(UTC) + timedelta(seconds=life)
                return 204, None, {}
            case ("PUT", "network"):
                box["network"] = {
                    "allowInternetAccess": body.get("allowInternetAccess") is not False,
                    "allowOut": body.get("allowOut") or [],
                    "denyOut": body.get("denyOut") or [],
                }
                return 204, None, {}
            case ("POST", "exec"):
                box["diverged"] = True
                return 200, {"exitCode": 0, "stdout": "", "stderr": "", "timedOut": False}, {}
            case ("POST", "snapshots"):
                return 201, self._snapshot_shape(self._capture(box, body)), {}
            case ("POST", "rollback"):
                target = self._snapshot(body["snapshotID"])
                if self.fail_at == "rollback":
                    raise Refused(500, "backend_failed", f"sandbox {box['name']!r} did not answer within 20 s")
                box.update(head=target["id"], diverged=False, state="running", reason="", begun=datetime.now(UTC))
                box.update({size: target[size] for size in SIZES})
                box["mounts"] = [dict(mount) for mount in target["mounts"] if mount["volume"] in self.volumes]
                self._collect()
                shape = {"sandboxID": box["id"], "snapshotID": target["id"], "operationID": "0", "status": "READY"}
                return 200, shape, {}
            case ("POST", "clone"):
                cloned = [each["name"] for each in body.get("volumeMounts") or [] if each.get("clone")]
                return self._fork(self._capture(box, {"volumes": cloned}, kind="transient"), body)
        raise Refused(
            404, "not_found", f"route {method} /sandboxes/…/{verb} not found: GET /openapi.json lists the routes"
        )

    # Snapshots and templates

    def _capture(self, box: dict[str, Any], body: dict[str, Any], kind: str = "snapshot") -> dict[str, Any]:
        names = [self._reserve(body["name"])] if body.get("name") else []
        if box["state"] == "paused":
            raise Refused(409, "conflict", f"sandbox {box['name']!r} is paused: resume it first")
        _only(body, "name", "description", "memory", "volumes", "expiresIn", "retention")
        if "retention" in body:
            _only(body["retention"], "keepLast", "keepDaily", "maxAge")
        ident, life = secrets.token_hex(6), body.get("expiresIn")
        volumes = [self._volume(ref) for ref in body.get("volumes") or []]
        for volume in volumes:
            if all(mount["volume"] != volume["id"] for mount in box["mounts"]):
                raise Refused(400, "invalid", f"volume {volume['name']} is not mounted in sandbox {box['name']}")
        held = [self._new_capture(volume, ident, owner=ident) for volume in volumes]
        snapshot = {
            "id": ident,
            "kind": kind,
            "names": names,
            "description": body.get("description", ""),
            "source": box["id"],
            "template": box["template"],
            "parent": box["head"],
            "memory": "none" if body.get("memory") == "none" else "incremental",
            "doomed": False,
            "recipe": {},
            "mounts": [dict(mount) for mount in box["mounts"]],
            "volumes": [{"volume": capture["volume"], "snapshot": capture["id"]} for capture in held],
            "expires": None if life is None else datetime.now(UTC) + timedelta(seconds=life),
            **{size: box[size] for size in SIZES},
        }
        self.snapshots[snapshot["id"]] = snapshot
        box.update(head=snapshot["id"], diverged=False)
        return snapshot

    def _fork(self, source: dict[str, Any], body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        names = body.get("names") or [secrets.token_hex(6) for _ in range(body.get("count") or 1)]
        made: list[dict[str, Any]] = []
        errors = []
        for name in names:
            try:
                made.append(self._make(source, body, name))
            except Refused as refused:
                if body.get("atomic", True):
                    for box in made:
                        self._kill(box)
                    raise
                errors.append({"name": name, **{key: refused.body[key] for key in ("code", "kind", "message")}})
        return 201, {"sandboxes": [self._detail(box) for box in made], "errors": errors}, {}

    def _delete(self, snapshot: dict[str, Any], query: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
        users = [box["id"] for box in self._users(snapshot)]
        if users and query.get("when") == "unused":
            snapshot["doomed"] = True
            return 202, {"snapshotID": snapshot["id"], "status": "hidden", "blockers": users}, {}
        if users:
            raise Refused(409, "in_use", f"in_use: {len(users)} forks ({', '.join(users)})", users)
        del self.snapshots[snapshot["id"]]
        self._collect()
        return 204, None, {}

    def _snapshot_shape(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        return {
            "snapshotID": snapshot["id"],
            "kind": snapshot["kind"],
            "names": snapshot["names"],
            "description": snapshot["description"],
            "status": "ready",
            "sourceSandboxID": snapshot["source"],
            "originSandboxID": snapshot["source"],
            "templateID": snapshot["template"],
            "parentSnapshotID": snapshot["parent"],
            "originID": snapshot["template"],
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
            "expiresAt": None if snapshot.get("expires") is None else stamp(snapshot["expires"]),
            "memory": snapshot["memory"],
            "coldStartable": True,
            "memoryBytesWritten": 4096,
            "diskBytesUnique": 8192,
            "pauseMs": 6.5,
            **{size: snapshot[size] for size in SIZES},
            "forks": len(self._users(snapshot)),
            "volumeMounts": [self._mount_shape(mount) for mount in snapshot["mounts"]],
            "volumes": [
                {"name": self.volumes[capture["volume"]]["name"], "snapshotID": capture["snapshot"]}
                for capture in snapshot["volumes"]
            ],
            "backend": "kvm_xfs",
        }

    # Volumes

    def _volumes(
        self, method: str, rest: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, Any, dict[str, str]]:
        match (method, *rest):
            case ("GET",):
                _only(query, "name", *PAGING)
                shown = [v for v in self.volumes.values() if query.get("name", v["name"]) == v["name"]]
                return _page([self._volume_shape(volume) for volume in shown], query)
            case ("POST",):
                return 201, self._with_token(self._create_volume(body)), {}
            case ("GET", ref):
                return 200, self._with_token(self._volume(ref)), {}
            case ("PATCH", ref):
                _only(body, "sizeMB")
                return 200, self._volume_shape(self._grow(self._volume(ref), body["sizeMB"])), {}
            case ("DELETE", ref):
                _only(query, "withSnapshots")
                self._delete_volume(self._volume(ref), purge=query.get("withSnapshots") == "true")
                return 204, None, {}
            case ("GET", ref, "snapshots"):
                found = self._captures_of(self._volume(ref))
                return _page([self._capture_shape(capture) for capture in found], query)
            case ("POST", ref, "snapshots"):
                _only(body, "name")
                return 201, self._capture_shape(self._new_capture(self._volume(ref), body["name"])), {}
            case ("DELETE", ref, "snapshots", name):
                capture = self._captured(self._volume(ref), name)
                if capture["with"]:
                    raise Refused(409, "in_use", "a snapshot of a sandbox holds it", [capture["with"]])
                del self.captures[capture["id"]]
                self._collect()
                return 204, None, {}
            case ("POST", ref, "rollback"):
                _only(body, "snapshot", "force")
                return 200, self._volume_shape(self._restore(self._volume(ref), body)), {}
        raise Refused(404, "not_found", f"route {method} /volumes/{'/'.join(rest)} not found: …")

    def _create_volume(self, body: dict[str, Any]) -> dict[str, Any]:
        _only(body, "name", "sizeMB", "fromSnapshot")
        size, source = body.get("sizeMB", 1024), None
        if ref := body.get("fromSnapshot"):
            volume, at, name = ref.rpartition("@")
            places = [self._volume(volume)] if at else list(self.volumes.values())
            found = [c for place in places for c in self._captures_of(place) if name in (c["id"], at and c["name"])]
            if not found:
                raise Refused(404, "not_found", f"volume snapshot {name!r} not found")
            source, size = found[0]["id"], body.get("sizeMB", found[0]["size"])
            if size < found[0]["size"]:
                raise Refused(400, "invalid", f"{size} MiB is less than the {found[0]['size']} MiB of the snapshot")
        return self._new_volume(body["name"], size, source=source)

    def _new_volume(
        self, name: str, size: int, *, source: str | None = None, owner: str = "", suffix: str = ""
    ) -> dict[str, Any]:
        if isinstance(size, bool) or not isinstance(size, int) or size < 64:
            raise Refused(400, "invalid", f"a volume of {size} MiB is not possible")
        try:
            self._reserve(name)
        except Refused:
            if not suffix:
                raise
            name = self._reserve(f"{name[:51]}-{suffix}")
        volume = {"id": secrets.token_hex(6), "name": name, "size": size, "from": source or "", "owner": owner}
        self.volumes[volume["id"]] = {**volume, "at": datetime.now(UTC)}
        return self.volumes[volume["id"]]

    def _new_capture(self, volume: dict[str, Any], name: str, owner: str = "") -> dict[str, Any]:
        if not NAME.fullmatch(name):
            raise Refused(400, "invalid", f"the name {name[:80]!r} is not allowed")
        if any(name in (capture["name"], capture["id"]) for capture in self._captures_of(volume)):
            raise Refused(409, "name_taken", f"volume {volume['name']} has a snapshot {name!r} already")
        ident = secrets.token_hex(6)
        capture = {"id": ident, "name": name, "volume": volume["id"], "size": volume["size"], "with": owner}
        self.captures[ident] = capture
        return capture

    def _grow(self, volume: dict[str, Any], size: int) -> dict[str, Any]:
        if size < volume["size"]:
            raise Refused(400, "invalid", f"volume {volume['name']} has {volume['size']} MiB and cannot shrink")
        volume["size"] = size
        return volume

    def _delete_volume(self, volume: dict[str, Any], *, purge: bool) -> None:
        captures = self._captures_of(volume)
        blockers = [box["id"] for box, _ in self._mounts_of(volume)]
        blockers += [capture["with"] or capture["id"] for capture in captures if capture["with"] or not purge]
        if blockers:
            raise Refused(409, "in_use", f"volume {volume['name']} is in use: {', '.join(blockers)}", blockers)
        for capture in captures:
            del self.captures[capture["id"]]
        del self.volumes[volume["id"]]

    def _restore(self, volume: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        self._captured(volume, body["snapshot"])
        writers = [box["id"] for box, mount in self._mounts_of(volume) if not mount["readOnly"]]
        if writers and not body.get("force"):
            raise Refused(409, "in_use", f"volume {volume['name']} is mounted read-write", writers)
        return volume

    def _mount_shape(self, mount: dict[str, Any]) -> dict[str, Any]:
        name = self.volumes.get(mount["volume"], {"name": mount["volume"]})["name"]
        return {"name": name, "path": mount["path"], "readOnly": mount["readOnly"]}

    def _with_token(self, volume: dict[str, Any]) -> dict[str, Any]:
        return {**self._volume_shape(volume), "token": "a-volume-token-nobody-should-see"}

    def _volume_shape(self, volume: dict[str, Any]) -> dict[str, Any]:
        return {
            "volumeID": volume["name"],
            "name": volume["name"],
            "sizeMB": volume["size"],
            "usedMB": 1,
            "createdAt": stamp(volume["at"]),
            "mounts": [
                {
                    "sandboxID": box["id"],
                    "sandboxName": box["name"],
                    "path": mount["path"],
                    "readonly": mount["readOnly"],
                    "state": box["state"],
                }
                for box, mount in self._mounts_of(volume)
            ],
            "fromSnapshot": volume["from"],
            "ownerSandboxID": volume["owner"],
            "stuck": [],
        }

    def _capture_shape(self, capture: dict[str, Any]) -> dict[str, Any]:
        return {
            "snapshotID": capture["id"],
            "name": capture["name"],
            "volumeID": self.volumes[capture["volume"]]["name"],
            "sizeMB": capture["size"],
            "sandboxSnapshotID": capture["with"],
            "createdAt": "2026-01-01T00:00:00Z",
        }

    def _build(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        recipe = {**RECIPE, **{key: value for key, value in body.items() if key in RECIPE}}
        recipe["packages"] = sorted(set(recipe["packages"]))
        for build in self.builds.values():
            there = next((t for t in self._visible("template") if t["id"] == build["template"]), {"names": []})
            named = build["status"] == "building" or build["name"] in there["names"]
            if build["name"] == body["name"] and build["recipe"] == recipe and named:
                return (200 if build["status"] == "ready" else 202), _started(build), {}
        build = {
            "id": secrets.token_hex(6),
            "template": secrets.token_hex(6),
            "name": body["name"],
            "recipe": recipe,
            "status": "building",
            "polls": 0,
            "lines": ["building the file system"],
            "reason": None,
        }
        self.builds[build["id"]] = build
        if all(body["name"] not in template["names"] for template in self._visible("template")):
            self._reserve(body["name"])
        return 202, _started(build), {}

    def _build_status(self, build: dict[str, Any], offset: int) -> dict[str, Any]:
        build["polls"] += 1
        if build["status"] == "building" and build["polls"] > self.build_polls:
            self._finish(build)
        return {
            "buildID": build["id"],
            "templateID": build["template"],
            "status": build["status"],
            "logs": build["lines"][offset:],
            "reason": build["reason"],
        }

    def _finish(self, build: dict[str, Any]) -> None:
        broken = [command for command in build["recipe"]["setup"] if command.startswith("false")]
        if broken:
            build["lines"] += [f"setup: {broken[0]}", "exit code 1"]
            build.update(status="error", reason=f"the set-up command {broken[0]!r} ended with exit code 1")
            return
        for template in self._visible("template"):
            if build["name"] in template["names"]:
                template["names"].remove(build["name"])
                if not self._users(template):
                    del self.snapshots[template["id"]]
        build["status"] = "ready"
        self.snapshots[build["template"]] = {
            "id": build["template"],
            "kind": "template",
            "names": [build["name"]],
            "description": "",
            "source": "",
            "template": build["template"],
            "parent": "",
            "memory": "full",
            "doomed": False,
            "recipe": build["recipe"],
            "mounts": [],
            "volumes": [],
            "build": build["id"],
            **{size: build["recipe"][size] for size in SIZES},
        }

    def _template_shape(self, template: dict[str, Any]) -> dict[str, Any]:
        return {
            "templateID": template["id"],
            "names": template["names"],
            "aliases": template["names"],
            "buildID": template["build"],
            "buildStatus": "ready",
            "digest": _digest(template["recipe"]),
            "recipe": template["recipe"],
            "description": "",
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
            **{size: template[size] for size in SIZES},
            "memory": template["memory"],
            "forks": len(self._users(template)),
        }


def _only(given: dict[str, Any], *known: str) -> None:
    """Stricter than the gateway, which passes over what it does not know: who sends that is caught."""
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise Refused(400, "invalid", f"unknown: {', '.join(unknown)}")


def _started(build: dict[str, Any]) -> dict[str, Any]:
    return {
        "templateID": build["template"],
        "buildID": build["id"],
        "names": [build["name"]],
        "aliases": [build["name"]],
        "buildStatus": build["status"],
        "digest": _digest(build["recipe"]),
    }


def _digest(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _strings(metadata: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(400, "invalid", "metadata: Input should be a valid string")
    return dict(metadata)


def _page(entries: list[Any], query: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
    # Never more than three, so that whoever forgets the next page is caught.
    limit, start = min(int(query.get("limit", 100)), 3), int(query.get("nextToken") or 0)
    more = {"x-next-token": str(start + limit)} if len(entries) > start + limit else {}
    return 200, entries[start : start + limit], more


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: DoubleGateway

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, data, headers = self.gateway.answer(self.command, self.path, json.loads(raw) if raw else None, key)
        payload = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def serve(gateway: DoubleGateway, socket: Path | None = None) -> Iterator[str]:
    """Serve ``gateway`` on a loopback port, or a unix socket; gives its URL."""
    handler = type("Handler", (_Handler,), {"gateway": gateway})
    server: socketserver.BaseServer
    if socket is not None:
        server, url = _UnixServer(str(socket), handler), f"unix://{socket}"
    else:
        tcp = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server, url = tcp, f"http://127.0.0.1:{tcp.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
