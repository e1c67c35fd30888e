"""ASGI application: routes, middleware, and a lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import megatron_ext
from megatron_ext.server.access import AccessLog
from megatron_ext.server.anthropic.error_envelope import AnthropicMiddleware
from megatron_ext.server.api_errors import install_error_handlers, shutting_down
from megatron_ext.server.http.auth import ADMIN_PATHS, AuthMiddleware, open_paths
from megatron_ext.server.http.description import install_description
from megatron_ext.server.routes import admin, generation, observing, tokens
from megatron_ext.server.serving import Serving

CORS_SECONDS = 600  # for which a browser caches a preflight response
ROUTERS = (
    generation.router,
    tokens.router,
    observing.router,
)
ADMIN_ROUTERS = (admin.router,)  # with --enable-admin-routes


class PendingResponses:
    """Requests whose answers have not begun, wherever they wait: for their body, a tokenizer, or the engine."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._has_ended = False

    def end(self) -> None:
        """Answer them with 503."""
        self._has_ended = True
        for task in self._tasks:
            task.cancel()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with its requests noted."""

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            task = asyncio.current_task()
            if scope["type"] != "http" or task is None:
                await app(scope, receive, send)
                return

            async def begin(message: Message) -> None:
                self._tasks.discard(task)
                await send(message)

            self._tasks.add(task)
            try:
                await app(scope, receive, begin)
            except asyncio.CancelledError:
                if not self._has_ended:
                    raise
                if task in self._tasks:
                    await shutting_down().to_response()(scope, receive, send)
            finally:
                self._tasks.discard(task)

        return noted


def create_app(
    serving: Serving,
    *,
    routers: Sequence[APIRouter] = (),
    admin_paths: frozenset[str] = frozenset(),
    answers_ids: bool = True,
) -> FastAPI:
    """Return the application. Its lifespan starts and stops the engine's thread.

    Args:
        serving: State of the routes.
        routers: More routes, which replace routes of equal paths.
        admin_paths: Paths of these routes that are for administrators.
        answers_ids: Whether answers have `X-Request-Id`; False where a proxy before the application adds it.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.requests.start()
        running = [asyncio.create_task(task()) for task in (serving.history.run, serving.response_store.run)]
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
    for router in (*routers, *ROUTERS, *(ADMIN_ROUTERS if settings.enable_admin_routes else ())):
        app.include_router(router)
    install_error_handlers(app)
    unkeyed = open_paths(hides_counts=settings.hide_cache_counts)
    install_description(app, open_paths=unkeyed, has_keys=keys.are_needed)
    app.add_middleware(AuthMiddleware, settings=settings, keys=keys, admin_paths=ADMIN_PATHS | admin_paths)
    if settings.cors_allowed_origins:  # before authentication: a preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            max_age=CORS_SECONDS,
        )
    build, app.state.unbegun = app.build_middleware_stack, PendingResponses()

    def build_stack() -> ASGIApp:
        """Return all middleware, with ids and log lines around the handler of unexpected errors, too."""
        stack = AnthropicMiddleware(app.state.unbegun.around(build()))
        return AccessLog(stack, answers=answers_ids, logs=settings.access_log)

    app.build_middleware_stack = build_stack  # type: ignore[method-assign]  # `add_middleware` would be inside of it
    return app
