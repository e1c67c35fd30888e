"""API key authentication: which key opens which path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ext.server.api_errors import UNAUTHORIZED, ApiError
from megatron_ext.server.api_keys import Caller, Keys
from megatron_ext.server.http.status_page import SCRIPT, SHEET
from megatron_ext.server.scope import route_path

CALLER = "megatron_ext.caller"  # key of the caller in the ASGI scope

# Health, capabilities, and counts over all tenants: for load balancers, Prometheus and people. Neither
# texts nor hashes.
OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/docs", "/openapi.json"))
OPEN_PATHS |= {f"/docs/{name}" for name in (SCRIPT, SHEET)}
_COUNTS = frozenset(("/metrics", "/metrics/history"))
# Paths that affect all tenants.
ADMIN_PATHS = frozenset(
    (
        *("/prefix_cache", "/prefix_cache/trace", "/reset_prefix_cache", "/flush_cache", "/abort"),
        *("/sleep", "/wake_up", "/is_sleeping", "/update_weights_from_disk"),
        *("/start_profile", "/stop_profile"),
        *("/pause", "/resume", "/is_paused"),
    )
)


def open_paths(*, hides_counts: bool) -> frozenset[str]:
    """Return the paths that need no key."""
    return OPEN_PATHS if hides_counts else OPEN_PATHS | _COUNTS


class KeyAuth:
    """Middleware that admits requests with a valid key, before reading anything else of them, and notes the caller.

    Args:
        app: Next ASGI application.
        keys: All keys of the server.
        hides_counts: Whether counts are for administrators only.
        admin_paths: Paths that affect all tenants.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, *, hides_counts: bool, admin_paths: frozenset[str] = ADMIN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths(hides_counts=hides_counts)
        self._admin = admin_paths | _COUNTS if hides_counts else admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 (no key, or an unknown one) or 403 (a key without this permission)."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and route_path(scope) not in self._open:
            try:
                scope[CALLER] = self._admit(scope)
            except ApiError as error:
                app = error.to_response()
        await app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        known = self._keys.caller(key) if scheme.lower() == b"bearer" else None
        caller = known or self._keys.stranger
        is_admins = route_path(scope) in self._admin
        if caller.can_administrate if is_admins else caller.can_generate:
            return caller
        if is_admins and not self._keys.has_admin_key and (known or not self._keys.are_needed):
            raise _forbidden("no key gives access to this path; start the server with --admin-key-file")
        if known is not None:
            path = "needs the admin key" if is_admins else "needs an API key, and the given key is the admin key"
            raise _forbidden(f"this path {path}")
        raise _unauthorized(is_missing=not given)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="key_not_allowed")


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = "no API key was given; send Authorization: Bearer KEY" if is_missing else "the API key is wrong"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind=UNAUTHORIZED, code="invalid_api_key", headers=headers)
