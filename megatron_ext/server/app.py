"""ASGI application: routes, middleware, and a lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI

import megatron_ext
from megatron_ext.server.http.auth import ADMIN_PATHS
from megatron_ext.server.http.middleware import include_routers, install_middleware
from megatron_ext.server.routes import admin, generation, messages, models, observing, responses, tokens
from megatron_ext.server.serving import Serving

ROUTERS = (
    models.router,
    generation.router,
    responses.router,
    messages.router,
    tokens.router,
    observing.router,
)
ADMIN_ROUTERS = (admin.router,)  # with --enable-admin-routes


def create_app(
    serving: Serving,
    *,
    routers: Sequence[APIRouter] = (),
    admin_paths: frozenset[str] = frozenset(),
    tasks: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    answers_ids: bool = True,
) -> FastAPI:
    """Return the application. Its lifespan starts and stops the engine's thread.

    Args:
        serving: State of the routes.
        routers: More routes, which replace routes of equal paths.
        admin_paths: Paths of these routes that are for administrators.
        tasks: Functions that run beside the engine until the application stops.
        answers_ids: See `install_middleware`.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.requests.start()
        running = [asyncio.create_task(task()) for task in (serving.history.run, serving.response_store.run, *tasks)]
        yield
        for one in running:
            one.cancel()
        await serving.requests.stop()

    keys, settings = serving.keys, serving.settings
    assert keys is not None, "`__post_init__` has loaded them"
    app = FastAPI(
        title="megatron_ext", version=megatron_ext.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.serving = serving
    include_routers(app, (*routers, *ROUTERS, *(ADMIN_ROUTERS if serving.settings.enable_admin_routes else ())))
    install_middleware(app, settings, keys, admin_paths=ADMIN_PATHS | admin_paths, answers_ids=answers_ids)
    return app
