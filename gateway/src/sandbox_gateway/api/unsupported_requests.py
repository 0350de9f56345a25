"""Requests of the published clients for which there is no route.

Clients treat 404 as the answer to a question: `Secret.exists` of E2B's client returns False. So these requests get 400,
with a reason.
"""

from __future__ import annotations

import re

from sandbox_gateway.errors import Unsupported

_LOGS_REASON = "no logs of sandboxes are stored: read files, or the output of commands, in the sandbox"
_SECRETS_REASON = "there are no secrets: use `envVars`"
_TAGS_REASON = "only E2B's dashboard uses it: use `GET /templates/{}/tags`"
_PUBLIC_REASON = "there are no public templates: every key can use every template"

REASONS = {
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
"""Why each request is not supported, and what to use instead. `{}` stands for one segment of the path."""

_PATTERNS = {re.compile(re.escape(request).replace(r"\{\}", "[^/]+")): request for request in REASONS}


def find_unsupported_request(method: str, path: str) -> Unsupported | None:
    """Return the error for the request if a published client can send it, or None."""
    for pattern, request in _PATTERNS.items():
        if pattern.fullmatch(f"{method} {path}"):
            return Unsupported(f"{request} is not supported: {REASONS[request]}")
    return None
