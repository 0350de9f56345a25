"""Plan sessions, and runs that apply a plan, in a fleet.

The gateway that opens a run is its home: it finds the host of each request, and opens a part of the run there when a
request first changes an object of that host. In the requests of a plan session, objects are where the session has put
them; see ``parts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandbox_gateway.api.access.auth import Caller, Permission, get_caller
from sandbox_gateway.api.access.forwarded import CALLER_HEADER, PART_HEADER, format_caller, is_forwarded
from sandbox_gateway.api.body import MAX_FORKS
from sandbox_gateway.api.fleet.forwarding import HOST_HEADER, PART_KEY, RawHeaders
from sandbox_gateway.api.fleet.local import read_body
from sandbox_gateway.api.fleet.locator import Locator
from sandbox_gateway.api.fleet.parts import (
    CLAIMS_PATH,
    COUNT_HEADER,
    LOAD_PATH,
    OBJECTS_PATH,
    PART_PATH,
    ClaimRequest,
    LoadChange,
    Objects,
    OpenPart,
    PartHeader,
    Refs,
    RunPath,
    create_holder,
    current_request,
    find_object,
    format_run_path,
    get_run_path,
    list_objects,
)
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.plans import applied_runs, sessions
from sandbox_gateway.engine.plans.applied_runs import AppliedRun, AppliedRuns
from sandbox_gateway.engine.plans.sessions import PlanSession, PlanSessions
from sandbox_gateway.errors import Conflict, GatewayError, Gone, Invalid, NotFound, Unsupported
from sandbox_gateway.fleet.directory import create_name_taken_error
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.peers import Answer
from sandbox_gateway.fleet.records import Holder, ObjectRecord, describe_object
from sandbox_gateway.log import Logger
from sandbox_gateway.records import PLANNED_PREFIX

_Run = PlanSession | AppliedRun
_BUILD_TIMEOUT_SECONDS = 10.0
_MAX_CLOCK_WAIT_SECONDS = 2.0
_MAX_KNOWN_HOMES = 1000
_KEEP_OPEN_SHARE = 0.5
"""Until when a part can be idle before it is told that its home still exists, as a share of the run's own time."""
_BASE_NUMBERS = 32
"""How many ids a request may create, besides those of new sandboxes and their volumes."""
_REQUEST_KEY = "sandbox_gateway.run_request"

log = Logger("fleet")


class _Refused(GatewayError):
    """Another gateway has refused a request of this one."""

    def __init__(self, answer: Answer) -> None:
        try:
            body = json.loads(answer.body)
            message, self.kind = body["message"], body["kind"]
        except (ValueError, KeyError, TypeError):
            raise Conflict(f"host {answer.host!r} has refused a request ({answer.status}): check its log") from None
        self.status = answer.status
        super().__init__(message, blockers=body.get("blockers") or (), details=body.get("details"))


@dataclass
class _Part:
    """The part of a run on another host, as its home knows it."""

    reached_at: float
    numbers: list[range] = field(default_factory=list)
    """The numbers of the ids that it may create."""
    used_count: int = 0
    """How many ids it has created."""
    pending_count: int = 0
    """How many ids the requests that it carries out may create."""

    def count_free_numbers(self) -> int:
        return sum(map(len, self.numbers)) - self.used_count - self.pending_count


class HomeRun:
    """A run whose home is this gateway."""

    def __init__(self, runs: FleetRuns, path: RunPath, run: _Run) -> None:
        self._runs = runs
        self._fleet = runs.fleet
        self.path = path
        self.run = run
        self.parts: dict[str, _Part] = {}
        """By host."""
        self.active_requests: set[str] = set()
        """Their tokens."""
        self._opening_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        """The other hosts where objects have got a name in this run, by name."""
        self._claims: defaultdict[str, dict[str, Holder]] = defaultdict(dict)
        """The objects that are about to get a name, by name and host."""
        self._claimed_names: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        """The keys of ``_claims``, by the token of the request."""
        self.locator = _RunLocator(self, run.engine) if isinstance(run, PlanSession) else runs.locator

    # -- parts ------------------------------------------------------------------------------------------------------

    async def open_part(self, host: str) -> _Part:
        if host not in self.parts:
            async with self._opening_locks[host]:
                if host not in self.parts:
                    try:
                        await self.call(host, "POST", PART_PATH, OpenPart(opened_at=self.run.opened_at.timestamp()))
                    except _Refused as refusal:
                        if refusal.status != NotFound.status:
                            raise
                        raise Unsupported(
                            f"the gateway of host {host!r} is too old for plan sessions and applied runs of other "
                            "gateways: upgrade it"
                        ) from None
                    self.parts[host] = _Part(time.monotonic())
        return self.parts[host]

    def keep_parts_open(self, idle_seconds: float) -> None:
        """Tell the parts that have not been used for some time that their home still exists, in the background.

        ``idle_seconds``: after how long a run ends that is not used.
        """
        limit = time.monotonic() - idle_seconds * _KEEP_OPEN_SHARE
        for host, part in self.parts.items():
            if part.reached_at < limit:
                part.reached_at = time.monotonic()
                self._fleet.background.start(self._keep_part_open(host))

    async def _keep_part_open(self, host: str) -> None:
        try:
            await self.call(host, "POST", PART_PATH, OpenPart(opened_at=self.run.opened_at.timestamp()))
        except GatewayError as error:
            log.info("a part of a run cannot be kept open", host=host, reason=error.message)

    async def end_parts(self) -> None:
        for host in [*self.parts]:
            try:
                await self.call(host, "DELETE", PART_PATH)
            except GatewayError as error:
                log.info("a part of a run ends only when it is idle", host=host, reason=error.message)

    async def call(self, host: str, method: str, path: str, message: BaseModel | None = None) -> Answer:
        """Send a request of this gateway itself to a part. Raises GatewayError."""
        header = PartHeader(home=self.run.token, host=self._fleet.name)
        headers = [(PART_HEADER.encode(), header.model_dump_json().encode())]
        return await self._runs.call(host, self.path, self.run.owner, method, path, message, headers)

    def build_header(self, host: str, token: str) -> bytes:
        numbers = [(each.start, each.stop - 1) for each in self.parts[host].numbers]
        header = PartHeader(home=self.run.token, host=self._fleet.name, request=token, numbers=numbers)
        return header.model_dump_json().encode()

    def allot_numbers(self, part: _Part, count: int) -> None:
        """Let a part create ``count`` ids in one request. Raises OverQuota."""
        if isinstance(self.run, PlanSession):
            if (missing_count := count - part.count_free_numbers()) > 0:
                numbers = self.run.allot_numbers(missing_count)
                if part.numbers and part.numbers[-1].stop == numbers.start:
                    part.numbers[-1] = range(part.numbers[-1].start, numbers.stop)
                else:
                    part.numbers.append(numbers)
            part.pending_count += count

    def record_used_ids(self, host: str, count: int) -> None:
        if (part := self.parts.get(host)) and isinstance(self.run, PlanSession):
            part.used_count = max(part.used_count, count)
            self.run.part_id_count = sum(each.used_count for each in self.parts.values())

    # -- objects of a plan session ----------------------------------------------------------------------------------

    async def find_holders(self, ref: str, kinds: Sequence[str]) -> list[Holder]:
        """Return the other hosts with an object that has this name or id in the session."""
        real_holders = await self._fleet.directory.find_holders(ref, kinds)
        holders = await self._find_planned_holders({ref: real_holders})
        return [each for each in holders[ref] if each.host != self._fleet.name and (not kinds or each.kind in kinds)]

    async def _find_planned_holders(self, real_holders: Mapping[str, Iterable[Holder]]) -> dict[str, list[Holder]]:
        """Return the hosts that have names or ids in the session. ``real_holders``: those that really have them."""
        assert isinstance(self.run, PlanSession)
        result: dict[str, list[Holder]] = {ref: [] for ref in real_holders}
        refs_by_host: defaultdict[str, list[str]] = defaultdict(list)
        for ref, real in real_holders.items():
            own_host = self._fleet.name
            if record := find_object(self.run.engine.index, ref):
                result[ref].append(create_holder(own_host, ref, record))
            hosts = {holder.host for holder in real} | self._places.get(ref, set()) | self._find_host_of_number(ref)
            for host in hosts - {own_host}:
                if host in self.parts:
                    refs_by_host[host].append(ref)
                else:
                    result[ref].extend(holder for holder in real if holder.host == host)

        async def ask(host: str) -> None:
            answer = await self.call(host, "POST", OBJECTS_PATH, Refs(refs=refs_by_host[host]))
            for ref, record in Objects.model_validate_json(answer.body).objects.items():
                result[ref].append(create_holder(host, ref, record))

        await asyncio.gather(*map(ask, refs_by_host))
        return result

    def _find_host_of_number(self, ref: str) -> set[str]:
        """Return the host whose part has created a planned id."""
        if not ref.startswith(PLANNED_PREFIX):
            return set()
        try:
            number = int(ref.removeprefix(PLANNED_PREFIX), 16)
        except ValueError:
            return set()
        return {host for host, part in self.parts.items() if any(number in numbers for numbers in part.numbers)}

    async def claim(self, host: str, token: str, records: Mapping[str, ObjectRecord | None]) -> None:
        """Let objects of a host get names. Until the request with this token ends, no other host can claim them.

        ``records``: the objects, by name. Raises NameTaken.
        """
        own = {
            name: create_holder(host, name, record) if record else Holder(host, "object", is_id=False)
            for name, record in records.items()
        }
        claimed = {name: [*self._claims[name].values()] for name in own if name in self._claims}
        _require_shareable(own, claimed)
        for name, holder in own.items():
            if token in self.active_requests:  # not the build of a template, which goes on after its request
                self._claims[name][host] = holder
                self._claimed_names[token].add((name, host))
        try:
            real_holders = {name: self._fleet.view.find_holders(name) for name in own}
            _require_shareable(own, await self._find_planned_holders(real_holders))
        except GatewayError:
            for name in own:
                self._drop_claim(name, host)
            raise
        if host != self._fleet.name:
            for name in own:
                self._places[name].add(host)

    def end_request(self, token: str) -> None:
        self.active_requests.discard(token)
        for name, host in self._claimed_names.pop(token, ()):
            self._drop_claim(name, host)

    def _drop_claim(self, name: str, host: str) -> None:
        if claims := self._claims.get(name):
            claims.pop(host, None)
            if not claims:
                del self._claims[name]

    async def find_load_changes(self, hosts: Iterable[str]) -> dict[str, LoadChange]:
        """Return how the session changes the load of each host on which it changes anything."""
        if not isinstance(self.run, PlanSession):
            return {}

        async def ask(host: str) -> LoadChange:
            if host == self._fleet.name:
                return await _compute_load_change(self.run)
            return LoadChange.model_validate_json((await self.call(host, "GET", LOAD_PATH)).body)

        changed_hosts = [host for host in hosts if host in self.parts or host == self._fleet.name]
        return dict(zip(changed_hosts, await asyncio.gather(*map(ask, changed_hosts)), strict=True))


class _RunLocator(Locator):
    """Finds objects where a plan session has put them."""

    def __init__(self, home: HomeRun, engine: Engine) -> None:
        super().__init__(home._fleet, engine)
        self._home = home

    async def _look_up(self, ref: str, kinds: Sequence[str]) -> Sequence[Holder]:
        return await self._home.find_holders(ref, kinds)

    async def find_transfer_host(self, id: str, headers: RawHeaders) -> str:
        if not self.is_here("transfer", id):
            for host in [*self._home.parts]:
                with contextlib.suppress(_Refused):
                    await self._home.call(host, "GET", f"/transfers/{quote(id, safe='')}")
                    return host
        return self._fleet.name


class _RunClaims:
    """Implements ``engine.name_claims.NameClaims`` for a plan session: its home knows the names on all hosts."""

    def __init__(self, runs: FleetRuns, session: PlanSession) -> None:
        self._runs = runs
        self._session = session

    def require_free(self, names: Iterable[str]) -> None:
        pass  # ``held`` asks the home, which is able to wait for other hosts.

    def require_claimable(self, claims: Sequence[NameClaim]) -> None:
        pass

    @contextlib.asynccontextmanager
    async def held(self, claims: Sequence[NameClaim], *, may_be_late: bool = False) -> AsyncIterator[None]:
        records = {name: describe_object(claim.record) for claim in claims for name in claim.names}
        if records:
            await self._runs.claim(self._session, records)
        yield


class RunRequest:
    """A request of a run, at the home of the run."""

    def __init__(self, home: HomeRun) -> None:
        self.home = home
        self.token = secrets.token_hex(8)
        home.active_requests.add(self.token)
        self._pending: list[tuple[_Part, int]] = []

    async def address(self, host: str, scope: Scope, body: bytes | None) -> Scope:
        """Return the request as another host must get it. Opens a part there if the request may change something."""
        home = self.home
        if scope["method"] in ("GET", "HEAD"):
            if host not in home.parts:
                return scope
        else:
            part = await home.open_part(host)
            count = _count_numbers(body)
            home.allot_numbers(part, count)
            self._pending.append((part, count))
        home.parts[host].reached_at = time.monotonic()
        prefix = format_run_path(home.path)
        addressed = add_prefix(scope, prefix)
        addressed[PART_KEY] = home.build_header(host, self.token)
        return addressed

    def end(self) -> None:
        self.home.end_request(self.token)
        for part, count in self._pending:
            part.pending_count -= count


class FleetRuns:
    """The runs of this gateway, and the parts of other gateways' runs on this host."""

    def __init__(
        self,
        fleet: Fleet,
        locator: Locator,
        plans: PlanSessions,
        runs: AppliedRuns,
    ) -> None:
        self.fleet = fleet
        self.locator = locator
        self._plans = plans
        self._applied_runs = runs
        self._home_runs: dict[str, HomeRun] = {}
        """By the token of the run."""
        self._homes: dict[RunPath, str] = {}
        """The hosts of the homes of other runs, oldest first."""
        self._part_homes: dict[str, str] = {}
        """The hosts of the homes of the parts on this host, by the token of the run."""
        plans.create_name_claims = lambda session: _RunClaims(self, session)
        plans.end_listener = lambda session: self._handle_end(("plans", session.id), session)
        runs.end_listener = lambda run: self._handle_end(("applied-runs", run.id), run)

    def _get_registry(self, path: RunPath) -> PlanSessions | AppliedRuns:
        return self._plans if path[0] == "plans" else self._applied_runs

    def _handle_end(self, path: RunPath, run: _Run) -> None:
        if run.home:
            self._part_homes.pop(run.home, None)
            return
        self.fleet.runs.release(format_run_path(path))
        if home := self._home_runs.pop(run.token, None):
            self.fleet.background.start(home.end_parts())

    async def call(
        self,
        host: str,
        path: RunPath,
        owner: str,
        method: str,
        subpath: str,
        message: BaseModel | None,
        headers: RawHeaders,
    ) -> Answer:
        """Send a request to another gateway about a run, on behalf of its owner. Raises GatewayError."""
        target = f"{format_run_path(path)}{subpath}".encode()
        body = message.model_dump_json().encode() if message else None
        caller = format_caller(Caller(owner, Permission.ADMIN))
        all_headers = [*headers, (CALLER_HEADER.encode(), caller), (b"content-type", b"application/json")]
        if body is not None:
            all_headers.append((b"content-length", str(len(body)).encode()))
        answer = await self.fleet.peers.request(host, method, target, all_headers, body)
        if answer.status >= 300:
            raise _Refused(answer)
        return answer

    # -- the home of a run ------------------------------------------------------------------------------------------

    async def find_home(self, path: RunPath, owner: str, *, may_open: bool = False) -> str:
        """Return the host whose gateway has opened a run; this one, if there is none.

        ``may_open``: whether this gateway is about to open the run if there is none. Raises StoreUnavailable.
        """
        registry = self._get_registry(path)
        if registry.find(owner, path[1]) is not None or registry.has_ended(path[1]):
            return self.fleet.name
        host = self._homes.get(path, "")
        if host not in self.fleet.view.members:
            key = format_run_path(path)
            host = await (self.fleet.runs.claim(key) if may_open else self.fleet.runs.find(key))
        if not host or host == self.fleet.name:
            return self.fleet.name
        self._homes[path] = host
        if len(self._homes) > _MAX_KNOWN_HOMES:
            del self._homes[next(iter(self._homes))]
        return host

    def release_unopened(self, path: RunPath, owner: str) -> None:
        """Forget that this gateway was about to open a run, if it has not opened it."""
        if self._get_registry(path).find(owner, path[1]) is None:
            self.fleet.runs.release(format_run_path(path))

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Iterator[bool]:
        """Treat a request as part of a run inside this context. Yields False if this gateway is not the run's home."""
        path, owner = get_run_path(scope), get_caller(scope).name
        run = self._get_registry(path).find(owner, path[1]) if path else None
        if path is None or run is None:
            yield False
            return
        if run.token not in self._home_runs:
            self._home_runs[run.token] = HomeRun(self, path, run)
        home = self._home_runs[run.token]
        module = sessions if path[0] == "plans" else applied_runs
        home.keep_parts_open(module.IDLE_SECONDS)
        request = scope[_REQUEST_KEY] = RunRequest(home)
        token = current_request.set(request.token)
        try:
            yield True
        finally:
            current_request.reset(token)
            request.end()

    def get_locator(self, scope: Scope) -> Locator:
        request = _get_request(scope)
        return request.home.locator if request else self.locator

    async def address(self, scope: Scope, host: str, body: bytes | None = None) -> Scope:
        """Return a request as another host must get it: in a run, with the path and the header of the run's part."""
        request = _get_request(scope)
        return await request.address(host, scope, body) if request else scope

    def record(self, scope: Scope, host: str, headers: Mapping[str, str]) -> None:
        """Note how many ids a part has created, from its response."""
        request = _get_request(scope)
        count = headers.get(COUNT_HEADER.decode(), "")
        if request and count.isdecimal():
            request.home.record_used_ids(host, int(count))

    def record_response(self, scope: Scope, message: Message) -> Message:
        """Like ``record``, from the message that starts a response. Returns it without the header."""
        if _get_request(scope) is None:
            return message
        headers = Headers(raw=message["headers"])
        self.record(scope, headers.get(HOST_HEADER.decode(), ""), headers)
        return {**message, "headers": [pair for pair in message["headers"] if pair[0] != COUNT_HEADER]}

    async def find_load_changes(self, scope: Scope, hosts: Iterable[str]) -> dict[str, LoadChange]:
        request = _get_request(scope)
        return await request.home.find_load_changes(hosts) if request else {}

    async def claim(self, session: PlanSession, records: Mapping[str, ObjectRecord | None]) -> None:
        """Let objects of a session, or of a part of one, get names. Raises NameTaken."""
        if not session.home:
            home = self._home_runs.get(session.token)
            if home is not None:
                await home.claim(self.fleet.name, current_request.get(), records)
            return
        message = ClaimRequest(host=self.fleet.name, request=current_request.get(), names=dict(records))
        home_host = self._part_homes.get(session.home, "")
        header = PartHeader(home=session.home, host=self.fleet.name)
        headers = [(PART_HEADER.encode(), header.model_dump_json().encode())]
        await self.call(home_host, ("plans", session.id), session.owner, "POST", CLAIMS_PATH, message, headers)

    # -- requests of other gateways ---------------------------------------------------------------------------------

    async def carry_out(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> bool:
        """Carry out a request of another gateway about a run. Returns False if it is a client's request."""
        path, headers = get_run_path(scope), Headers(scope=scope)
        if path is None or not is_forwarded(scope):
            return False
        # Only gateways send the header. A client's request for the home can also come from another gateway.
        if PART_HEADER not in headers:
            return False
        owner = get_caller(scope).name
        header = PartHeader.try_parse(headers[PART_HEADER])
        if header is None:
            raise Invalid(f"the header {PART_HEADER} is invalid: the gateways of the fleet need the same release")
        if scope["path"] == CLAIMS_PATH:
            await self._answer_claim(path, owner, header, _parse(ClaimRequest, await read_body(receive)))
            await Response(status_code=204)(scope, receive, send)
            return True
        if scope["path"] == PART_PATH and scope["method"] == "POST":
            await self._open_part(path, owner, header, _parse(OpenPart, await read_body(receive)))
            await Response(status_code=204)(scope, receive, send)
            return True
        if scope["path"] == PART_PATH:
            self._get_registry(path).end_part(owner, path[1], header.home)
            await Response(status_code=204)(scope, receive, send)
            return True
        part = self._find_part(path, owner, header.home)
        if scope["path"] == OBJECTS_PATH and isinstance(part, PlanSession):
            refs = _parse(Refs, await read_body(receive)).refs
            await _respond(Objects(objects=list_objects(part.engine, refs)), scope, receive, send)
        elif scope["path"] == LOAD_PATH and isinstance(part, PlanSession):
            await _respond(await _compute_load_change(part), scope, receive, send)
        else:
            await self._run_in_part(app, part, header, scope, receive, send)
        return True

    async def _answer_claim(self, path: RunPath, owner: str, header: PartHeader, message: ClaimRequest) -> None:
        home = self._home_runs.get(header.home)
        if home is None or home.path != path or home.run.owner != owner:
            raise Gone("the plan session has ended: start the check-mode run again")
        await home.claim(message.host, message.request, message.names)

    async def _open_part(self, path: RunPath, owner: str, header: PartHeader, message: OpenPart) -> None:
        if path[0] == "applied-runs":
            self._applied_runs.open_part(owner, path[1], header.home)
            return
        # The client takes what was created after the beginning of the session for planned.
        delay = message.opened_at - time.time()
        if delay > _MAX_CLOCK_WAIT_SECONDS:
            raise Conflict(
                f"the clock of host {self.fleet.name!r} is {delay:.0f} s behind the clock of host {header.host!r}: "
                "synchronize them"
            )
        await asyncio.sleep(max(delay, 0))
        self._part_homes[header.home] = header.host
        session = self._plans.open_part(owner, path[1], header.home)
        await session.engine.background.wait(_BUILD_TIMEOUT_SECONDS)

    def _find_part(self, path: RunPath, owner: str, home: str) -> _Run:
        part = self._get_registry(path).find_part(owner, path[1], home)
        if part is None:
            noun, remedy = (
                ("plan session", "Start the check-mode run again")
                if path[0] == "plans"
                else ("run that applies a plan", "Make a new plan with a check-mode run")
            )
            raise Gone(
                f"the {noun} has ended on host {self.fleet.name!r}, because it was idle there, or the gateway of this "
                f"host was restarted. {remedy}"
            )
        return part

    async def _run_in_part(
        self, app: ASGIApp, part: _Run, header: PartHeader, scope: Scope, receive: Receive, send: Send
    ) -> None:
        current_request.set(header.request)
        if isinstance(part, PlanSession):
            numbers = [range(first, last + 1) for first, last in header.numbers]
            # A request may arrive after a later one, which has brought more numbers.
            part.allotted_numbers = max(part.allotted_numbers, numbers, key=lambda each: sum(map(len, each)))

        async def send_with_count(message: Message) -> None:
            if message["type"] == "http.response.start" and isinstance(part, PlanSession):
                headers = [*message.get("headers", []), (COUNT_HEADER, str(part.id_count).encode())]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_with_count)


def add_prefix(scope: Scope, prefix: str) -> Scope:
    """Return a request with a longer path."""
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    return {**scope, "path": prefix + scope["path"], "raw_path": prefix.encode() + raw_path}


def _get_request(scope: Scope) -> RunRequest | None:
    request: RunRequest | None = scope.get(_REQUEST_KEY)
    return request


async def _compute_load_change(session: Any) -> LoadChange:
    freed_memory, new_sandboxes = await session.compute_load_change()
    return LoadChange(freed_memory=freed_memory, new_sandboxes=new_sandboxes)


async def _respond(message: BaseModel, scope: Scope, receive: Receive, send: Send) -> None:
    await Response(message.model_dump_json(), media_type="application/json")(scope, receive, send)


def _parse(model: type[Any], body: bytes) -> Any:
    try:
        return model.model_validate_json(body)
    except ValueError as error:
        raise Invalid(
            f"the request of another gateway is invalid ({error}): upgrade all gateways of the fleet"
        ) from None


def _require_shareable(own: Mapping[str, Holder], others: Mapping[str, Iterable[Holder]]) -> None:
    """Raise NameTaken unless all other objects with the names are copies of the objects that are to get them."""
    taken = {
        name: conflicting
        for name, holder in own.items()
        if (
            conflicting := [
                each for each in others.get(name, ()) if each.host != holder.host and not holder.may_share_name(each)
            ]
        )
    }
    if taken:
        raise create_name_taken_error(taken)


def _count_numbers(body: bytes | None) -> int:
    """Return how many ids a request can create at most."""
    try:
        data = json.loads(body or b"")
    except (ValueError, RecursionError):
        return _BASE_NUMBERS
    if not isinstance(data, dict):
        return _BASE_NUMBERS
    names, count, mounts = data.get("names"), data.get("count", data.get("n")), data.get("volumeMounts")
    if isinstance(names, list):
        count = len(names)
    mount_count = len(mounts) if isinstance(mounts, list) else 0
    sandbox_count = count if isinstance(count, int) and 0 < count <= MAX_FORKS else 1
    return _BASE_NUMBERS + sandbox_count * (4 + 2 * mount_count)
