"""Requests and query parameters of the published clients that the gateway does not support.

In requests, `{}` stands for one segment of the path.
"""

from __future__ import annotations

import re

from sandbox_gateway.errors import Unsupported

_LOGS_REASON = "no logs of sandboxes are stored: read files, or the output of commands, in the sandbox"
_SECRETS_REASON = "there are no secrets: use 'envVars'"
_TAGS_REASON = "only E2B's dashboard uses it: use `GET /templates/{}/tags`"
_PUBLIC_REASON = "there are no public templates: every key can use every template"

UNSUPPORTED_REQUESTS = {
    "GET /default-templates": "there are none: use `GET /templates`",
    "GET /v2/templates": "use `GET /templates`",
    "PATCH /templates/{}": _PUBLIC_REASON,
    "PATCH /v2/templates/{}": _PUBLIC_REASON,
    "GET /sandboxes/metrics": "query each sandbox: use `GET /sandboxes/{}/metrics`",
    "GET /sandboxes/{}/logs": _LOGS_REASON,
    "GET /v2/sandboxes/{}/logs": _LOGS_REASON,
    "GET /secrets": _SECRETS_REASON,
    "POST /secrets": _SECRETS_REASON,
    "DELETE /secrets/{}": _SECRETS_REASON,
    "GET /secrets/{}": _SECRETS_REASON,
    "POST /secrets/{}": _SECRETS_REASON,
    "GET /templates/{}/tags/count": _TAGS_REASON,
    "GET /templates/{}/tags/exists": _TAGS_REASON,
    "GET /templates/{}/tags/groups": _TAGS_REASON,
    "GET /templates/{}/tags/{}/assignments": _TAGS_REASON,
}
"""For each request without a route: why it is not supported, and what to use instead.

The status of the response is 400, because clients treat 404 as the answer to a question: `Secret.exists` of E2B's
client returns False.
"""

_ONE_BUILD_REASON = "a template has only one build"
IGNORED_PARAMETERS = {
    "GET /templates": {"teamID": "there are no teams"},
    "GET /templates/{}": {"limit": _ONE_BUILD_REASON, "nextToken": _ONE_BUILD_REASON},
    "GET /templates/{}/builds/{}/logs": {"source": "a log is stored in only one place"},
}
"""For each request: the query parameters without an effect, with the reasons."""

_PATTERNS = {re.compile(re.escape(request).replace(r"\{\}", "[^/]+")): request for request in UNSUPPORTED_REQUESTS}


def find_unsupported_request(method: str, path: str) -> Unsupported | None:
    """Return the error for the request if a published client can send it, or None."""
    for pattern, request in _PATTERNS.items():
        if pattern.fullmatch(f"{method} {path}"):
            return Unsupported(f"{request} is not supported: {UNSUPPORTED_REQUESTS[request]}")
    return None
