"""Host and Origin checks against foreign web pages.

A page can make its visitor's browser send requests to addresses that only the visitor reaches, such as this machine's
own. Two headers reveal this. With DNS rebinding, the page's own name, resolved to this address, is in the `Host`
header: hosts that are not in the list are refused. Without rebinding the page can send but not read, and its requests
have its `Origin`: a request that may change something must come from this server's own page, or from no page at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ext.config.hosts import ANY_HOST, LOOPBACK_HOSTS, HostName, parse_host, parse_origin
from megatron_ext.server.api_errors import ApiError

HARMLESS_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_MAPPED = "::ffff:"  # IPv4 address on an IPv6 socket


class OriginCheck:
    """Middleware that refuses requests for other hosts, and requests from pages of other origins.

    Args:
        app: Next ASGI application.
        allowed_hosts: Value of `--allowed-hosts`; empty for the default.
        allowed_origins: Value of `--cors-allowed-origins`: pages of these origins may send requests.
        has_keys: Whether clients need a key, which no page has: then any host is accepted, unless hosts are named.
    """

    def __init__(
        self, app: ASGIApp, allowed_hosts: Iterable[str], allowed_origins: Iterable[str] = (), *, has_keys: bool
    ) -> None:
        self._app = app
        named = tuple(allowed_hosts)
        self._is_open = ANY_HOST in named or (not named and has_keys)
        self._trusted = {parse_host(host) for host in named if host != ANY_HOST}
        self._hosts = self._trusted or {parse_host(host) for host in LOOPBACK_HOSTS}
        self._has_defaults = not named
        origins = tuple(allowed_origins)
        self._allows_any_origin = ANY_HOST in origins
        self._origins = {parse_origin(origin) for origin in origins if origin != ANY_HOST}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        app: ASGIApp = self._app
        if scope["type"] == "http":
            error = self._refusal(scope)
            if error is not None:
                app = error.to_response()
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        given = _values(scope, b"host")
        host = parse_host(given[0]) if len(given) == 1 else None
        if not self._is_open and not self._is_allowed(host, scope):
            return _foreign_host(given)
        if scope["method"] not in HARMLESS_METHODS:
            for origin in _values(scope, b"origin"):
                if not self._is_own(origin, host):
                    return _foreign_origin(origin)
        return None

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
        if host is not None and (host.name == page.host.name and (host.port or page.usual_port) == page.host.port):
            return True
        is_named = page.has_usual_port and HostName(page.host.name) in self._trusted
        return is_named or page.host in self._trusted


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _foreign_host(given: list[str]) -> ApiError:
    asked = repr(given[0]) if len(given) == 1 else "no host" if not given else f"{len(given)} hosts"
    message = f"the request is for {asked}, which this server does not accept; add it with --allowed-hosts"
    return ApiError(403, message, kind="permission_error", code="host_not_allowed")


def _foreign_origin(origin: str) -> ApiError:
    message = f"pages of {origin!r} may not send requests to this server"
    return ApiError(403, message, kind="permission_error", code="origin_not_allowed")
