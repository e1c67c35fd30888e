"""The application: routes behind gates, and a lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import megatron_ext
from megatron_ext.server.access import AccessLog
from megatron_ext.server.errors import install_error_handlers
from megatron_ext.server.gate import KeyGate
from megatron_ext.server.origins import OriginGate
from megatron_ext.server.routes import generation, models, observing
from megatron_ext.server.serving import Serving

ROUTERS = (models.router, generation.router, observing.router)


def create_app(serving: Serving) -> FastAPI:
    """The application. Its lifespan starts and stops the engine's loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.loop.start()
        sampling = asyncio.create_task(serving.history.run())
        yield
        sampling.cancel()
        await serving.loop.stop()

    app = FastAPI(
        title="megatron_ext", version=megatron_ext.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.serving = serving
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    keys = serving.keys
    assert keys is not None, "`__post_init__` has loaded them"
    app.add_middleware(KeyGate, keys=keys, hides_counts=serving.settings.hide_cache_counts)
    app.add_middleware(OriginGate, allowed_hosts=serving.settings.allowed_hosts, has_keys=keys.are_needed)
    if serving.settings.access_log:
        app.add_middleware(AccessLog)  # the last one added is the first to see a request
    return app
