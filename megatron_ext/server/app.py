"""The application: routes behind gates, and a lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import megatron_ext
from megatron_ext.server.access import AccessLog
from megatron_ext.server.description import install_description
from megatron_ext.server.errors import install_error_handlers
from megatron_ext.server.gate import KeyGate, open_paths
from megatron_ext.server.origins import OriginGate
from megatron_ext.server.routes import admin, generation, models, observing, replica, tokens
from megatron_ext.server.serving import Serving

ROUTERS = (models.router, generation.router, tokens.router, observing.router, replica.router)
ADMIN_ROUTERS = (admin.router,)  # with --enable-admin-routes
CORS_SECONDS = 600  # for which a browser remembers what it may ask


def create_app(serving: Serving) -> FastAPI:
    """The application. Its lifespan starts and stops the engine's loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.loop.start()
        sampling = asyncio.create_task(serving.history.run())
        yield
        sampling.cancel()
        await serving.loop.stop()

    keys, settings = serving.keys, serving.settings
    assert keys is not None, "`__post_init__` has loaded them"
    app = FastAPI(
        title="megatron_ext", version=megatron_ext.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.serving = serving
    for router in (*ROUTERS, *(ADMIN_ROUTERS if serving.settings.enable_admin_routes else ())):
        app.include_router(router)
    install_error_handlers(app)
    unkeyed = open_paths(hides_counts=settings.hide_cache_counts)
    install_description(app, open_paths=unkeyed, has_keys=keys.are_needed)
    app.add_middleware(KeyGate, keys=keys, hides_counts=settings.hide_cache_counts)
    app.add_middleware(
        OriginGate,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.cors_allowed_origins,
        has_keys=keys.are_needed,
    )
    if settings.cors_allowed_origins:  # before the gates: a browser asks without a key whether it may ask with one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            max_age=CORS_SECONDS,
        )
    if settings.access_log:
        app.add_middleware(AccessLog)  # the last one added is the first to see a request
    return app
