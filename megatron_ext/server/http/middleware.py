"""Middleware of a server: keys, hosts and origins, limits, the access log."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_ext.config import ServerConfig
from megatron_ext.server.access import AccessLog
from megatron_ext.server.anthropic.error_envelope import AnthropicClients
from megatron_ext.server.api_errors import install_error_handlers
from megatron_ext.server.api_keys import Keys
from megatron_ext.server.http.auth import ADMIN_PATHS, KeyAuth, open_paths
from megatron_ext.server.http.description import install_description
from megatron_ext.server.http.origins import OriginCheck
from megatron_ext.server.http.request_ids import RequestIds
from megatron_ext.server.http.unbegun import UnbegunAnswers

CORS_SECONDS = 600  # for which a browser caches a preflight response


def include_routers(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add routes to an application, and note them for its errors: FastAPI's own list does not show included routes."""
    found = list(app.routes)
    for router in routers:
        app.include_router(router)
        found += router.routes
    app.state.routes = [route for route in found if isinstance(route, Route)]


def install_middleware(
    app: FastAPI,
    settings: ServerConfig,
    keys: Keys,
    *,
    admin_paths: frozenset[str] = ADMIN_PATHS,
    answers_ids: bool = True,
) -> None:
    """Install all middleware on an application that has all its routes.

    Args:
        app: Application with its routes.
        settings: Settings of the server: hosts, origins, whether each request is logged.
        keys: Keys of the tenants and the administrator.
        admin_paths: Paths for administrators only.
        answers_ids: Whether answers have `X-Request-Id`; False where a proxy before the application adds it.
    """
    install_error_handlers(app)
    unkeyed = open_paths(hides_counts=settings.hide_cache_counts)
    install_description(app, open_paths=unkeyed, has_keys=keys.are_needed)
    app.add_middleware(KeyAuth, keys=keys, hides_counts=settings.hide_cache_counts, admin_paths=admin_paths)
    app.add_middleware(
        OriginCheck,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.cors_allowed_origins,
        has_keys=keys.are_needed,
    )
    if settings.cors_allowed_origins:  # before authentication: a preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            max_age=CORS_SECONDS,
        )
    build, app.state.unbegun = app.build_middleware_stack, UnbegunAnswers()

    def build_stack() -> ASGIApp:
        """Return all middleware, with ids and log lines around the handler of unexpected errors, too."""
        stack = AnthropicClients(app.state.unbegun.around(build()))
        return RequestIds(AccessLog(stack) if settings.access_log else stack, answers=answers_ids)

    app.build_middleware_stack = build_stack  # type: ignore[method-assign]  # `add_middleware` would be inside of it
