"""ASGI application of the coordinator: routes, the server's middleware, and a lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import megatron_ext
from megatron_ext.coordinator.coordination import Coordination
from megatron_ext.coordinator.launcher.launch import Launcher
from megatron_ext.coordinator.routes import broadcast, generation, membership, observing, proxy, weights
from megatron_ext.server.http.auth import ADMIN_PATHS
from megatron_ext.server.http.middleware import include_routers, install_middleware

ROUTERS = (generation.router, proxy.router, observing.router, broadcast.router, weights.router)
ADMIN_ROUTERS = (membership.router,)  # with --enable-admin-routes
OUR_ADMIN_PATHS = ADMIN_PATHS | {"/replicas", "/replicas/join", "/replicas/drain", "/replicas/leave"}


def create_app(coordination: Coordination, launcher: Launcher | None = None) -> FastAPI:
    """Return the application. Its lifespan watches replicas, and runs the launched ones."""
    settings = coordination.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        coordination.start()
        if launcher is not None:
            launcher.start(coordination.fleet)
        yield
        await coordination.close()
        if launcher is not None:
            await launcher.close()

    app = FastAPI(
        title="megatron_ext coordinator",
        version=megatron_ext.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.coordination = coordination
    include_routers(app, (*ROUTERS, *(ADMIN_ROUTERS if settings.enable_admin_routes else ())))
    install_middleware(app, settings, coordination.keys, access_log=settings.access_log, admin_paths=OUR_ADMIN_PATHS)
    return app
