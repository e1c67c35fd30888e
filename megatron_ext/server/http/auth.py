"""Which key opens which path."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ext.server.api_errors import UNAUTHORIZED, ApiError
from megatron_ext.server.api_keys import Caller, Keys

CALLER = "megatron_ext.caller"  # where routes find it in the scope

# How the server is and what it can do, and counts of everybody: for load balancers, Prometheus and people. Neither
# texts nor digests.
OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/docs", "/openapi.json", "/replica"))
_COUNTS = frozenset(("/metrics", "/metrics/history"))
# What concerns everybody.
ADMIN_PATHS = frozenset(
    (
        *("/prefix_cache", "/prefix_cache/trace", "/reset_prefix_cache", "/flush_cache", "/abort"),
        *("/sleep", "/wake_up", "/is_sleeping", "/update_weights_from_disk"),
    )
)


def open_paths(*, hides_counts: bool) -> frozenset[str]:
    """What needs no key."""
    return OPEN_PATHS if hides_counts else OPEN_PATHS | _COUNTS


class KeyAuth:
    """Lets in who has the key, before anything of the request is read, and notes who it is.

    Args:
        app: What is behind the gate.
        keys: All of them.
        hides_counts: Whether counts are for administrators.
        admin_paths: What concerns everybody.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, *, hides_counts: bool, admin_paths: frozenset[str] = ADMIN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths(hides_counts=hides_counts)
        self._admin = admin_paths | _COUNTS if hides_counts else admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 (no key, or none of ours) or 403 (a key for something else)."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"] not in self._open:
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
        is_admins = scope["path"] in self._admin
        if caller.can_administrate if is_admins else caller.can_generate:
            return caller
        if is_admins and not self._keys.has_admin_key and (known or not self._keys.are_needed):
            raise _forbidden("no key opens this path; the server needs --admin-key-file for it")
        if known is not None:
            path = "needs the admin key" if is_admins else "needs an API key, and this one is for administrators"
            raise _forbidden(f"this path {path}")
        raise _unauthorized(is_missing=not given)


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="key_not_allowed")


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = "no API key was given; send Authorization: Bearer KEY" if is_missing else "the API key is wrong"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind=UNAUTHORIZED, code="invalid_api_key", headers=headers)
