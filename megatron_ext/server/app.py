"""ASGI application: routes, middleware, and a lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import megatron_ext
from megatron_ext.server.http.middleware import install_middleware
from megatron_ext.server.routes import admin, generation, models, observing, replica, tokens
from megatron_ext.server.serving import Serving

ROUTERS = (models.router, generation.router, tokens.router, observing.router, replica.router)
ADMIN_ROUTERS = (admin.router,)  # with --enable-admin-routes


def create_app(serving: Serving) -> FastAPI:
    """Return the application. Its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.requests.start()
        sampling = asyncio.create_task(serving.history.run())
        yield
        sampling.cancel()
        await serving.requests.stop()

    keys, settings = serving.keys, serving.settings
    assert keys is not None, "`__post_init__` has loaded them"
    app = FastAPI(
        title="megatron_ext", version=megatron_ext.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.serving = serving
    for router in (*ROUTERS, *(ADMIN_ROUTERS if serving.settings.enable_admin_routes else ())):
        app.include_router(router)
    install_middleware(app, settings, keys, access_log=settings.access_log)
    return app
