"""Admission of requests: which key opens which path, and checks of host and origin against foreign web pages.

A page can make its visitor's browser send requests to addresses that only the visitor reaches, such as this machine's
own. Two headers reveal this. With DNS rebinding, the page's own name, resolved to this address, is in the `Host`
header: hosts that are not in the list are refused. Without rebinding the page can send but not read, and its requests
have its `Origin`: a request that may change something must come from this server's own page, or from no page at all.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ext.config import ServerConfig
from megatron_ext.config.hosts import ANY_HOST, DEFAULT_PORTS, LOOPBACK_HOSTS, HostName, parse_host, parse_origin
from megatron_ext.server.api_errors import UNAUTHORIZED, ApiError
from megatron_ext.server.api_keys import Caller, Keys
from megatron_ext.server.http.body import route_path
from megatron_ext.server.http.status_page import SCRIPT, SHEET

HARMLESS_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_MAPPED = "::ffff:"  # IPv4 address on an IPv6 socket
CALLER = "megatron_ext.caller"  # key of the caller in the ASGI scope
# Health, capabilities, and counts over all tenants: for load balancers, Prometheus and people. Neither
# texts nor hashes.
OPEN_PATHS = frozenset(
    ("/", "/health", "/ping", "/version", "/docs", f"/docs/{SCRIPT}", f"/docs/{SHEET}", "/openapi.json")
)
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


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def open_paths(*, hides_counts: bool) -> frozenset[str]:
    """Return the paths that need no key."""
    return OPEN_PATHS if hides_counts else OPEN_PATHS | _COUNTS


class AuthMiddleware:
    """Middleware that admits requests by host, origin and key, before reading anything else, and notes the caller.

    Where clients need a key, which no page has, any host is accepted, unless hosts are named.

    Args:
        app: Next ASGI application.
        settings: Accepted hosts, origins whose pages may send requests, and whether counts are for administrators only.
        keys: All keys of the server.
        admin_paths: Paths that affect all tenants.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerConfig, keys: Keys, admin_paths: frozenset[str] = ADMIN_PATHS
    ) -> None:
        self._app, self._keys = app, keys
        named, origins = settings.allowed_hosts, settings.cors_allowed_origins
        self._is_open = ANY_HOST in named or (not named and keys.are_needed)
        self._trusted = {parse_host(host) for host in named if host != ANY_HOST}
        self._hosts = self._trusted or {parse_host(host) for host in LOOPBACK_HOSTS}
        self._has_defaults = not named
        self._allows_any_origin = ANY_HOST in origins
        self._origins = {parse_origin(origin) for origin in origins if origin != ANY_HOST}
        self._open = open_paths(hides_counts=settings.hide_cache_counts)
        self._admin = admin_paths | _COUNTS if settings.hide_cache_counts else admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 (no key, an unknown one) or 403 (host, origin, key without permission)."""
        app: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                self._check_source(scope)
                if route_path(scope) not in self._open:
                    scope[CALLER] = self._admit(scope)
            except ApiError as error:
                app = error.to_response()
        await app(scope, receive, send)

    def _check_source(self, scope: Scope) -> None:
        given = _values(scope, b"host")
        host = parse_host(given[0]) if len(given) == 1 else None
        if not self._is_open and not self._is_allowed(host, scope):
            asked = repr(given[0]) if len(given) == 1 else "no host" if not given else f"{len(given)} hosts"
            message = f"the request is for {asked}, which this server does not accept; add it with --allowed-hosts"
            raise _forbidden(message, "host_not_allowed")
        for origin in () if scope["method"] in HARMLESS_METHODS else _values(scope, b"origin"):
            if not self._is_own(origin, host):
                raise _forbidden(f"pages of {origin!r} may not send requests to this server", "origin_not_allowed")

    def _is_allowed(self, host: HostName | None, scope: Scope) -> bool:
        """Return whether a host is listed or, by default, is the address connected to, which no page has as name."""
        if host is None:
            return False
        if self._has_defaults and scope.get("server") and host.name == scope["server"][0].removeprefix(_MAPPED):
            return True
        return host in self._hosts or HostName(host.name) in self._hosts

    def _is_own(self, origin: str, host: HostName | None) -> bool:
        """Return whether a page's origin is the requested host, a listed host with its port, or allowed."""
        if self._allows_any_origin:
            return True
        page = parse_origin(origin)
        if page is None:
            return False
        if page in self._origins:
            return True
        port = DEFAULT_PORTS[page.scheme]
        if host is not None and (host.name == page.host.name and (host.port or port) == page.host.port):
            return True
        is_named = page.host.port == port and HostName(page.host.name) in self._trusted
        return is_named or page.host in self._trusted

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
        message = "the API key is wrong" if given else "no API key was given; send Authorization: Bearer KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, kind=UNAUTHORIZED, code="invalid_api_key", headers=headers)


def _forbidden(message: str, code: str = "key_not_allowed") -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)
