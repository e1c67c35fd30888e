"""Middleware of a server or a coordinator: keys, hosts and origins, limits, the access log."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from megatron_ext.config import AccessConfig
from megatron_ext.server.access import AccessLog
from megatron_ext.server.api_errors import install_error_handlers
from megatron_ext.server.api_keys import Keys
from megatron_ext.server.http.auth import ADMIN_PATHS, KeyAuth, open_paths
from megatron_ext.server.http.description import install_description
from megatron_ext.server.http.origins import OriginCheck
from megatron_ext.server.http.request_ids import RequestIds

CORS_SECONDS = 600  # for which a browser caches a preflight response


def install_middleware(
    app: FastAPI, settings: AccessConfig, keys: Keys, *, access_log: bool, admin_paths: frozenset[str] = ADMIN_PATHS
) -> None:
    """Install all middleware on an application that has all its routes.

    Args:
        app: Application with its routes.
        settings: Access settings: hosts, origins, limits.
        keys: Keys of the tenants and the administrator.
        access_log: Whether each request is logged.
        admin_paths: Paths for administrators only.
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
    if access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(RequestIds)  # the last one added is the first to see a request
