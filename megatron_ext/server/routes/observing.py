"""How the server is, and what its cache holds."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse, Response

from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.prefix_cache.shown import shown
from megatron_ext.server.page import PAGE, PAGE_HEADERS
from megatron_ext.server.serving import ServerDependency

HOTTEST_PREFIXES = 20

router = APIRouter()


@router.get("/health")
async def health(serving: ServerDependency) -> JSONResponse:
    """200 while the engine steps without failing."""
    is_healthy = serving.loop.is_healthy
    body = {"status": "ok" if is_healthy else "failing", "errors": serving.loop.error_count}
    return JSONResponse(body, 200 if is_healthy else 503)


@router.get("/metrics")
async def metrics(serving: ServerDependency) -> Response:
    """For Prometheus."""
    return Response(serving.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/metrics/history")
async def metrics_history(serving: ServerDependency, since: float = 0.0) -> dict[str, object]:
    """The last ten minutes of the metrics, or what came since then, and how it is now."""
    return serving.describe_server() | serving.history.since(since)


@router.get("/prefix_cache")
async def prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """What the cache holds: sizes, use, and the hottest prefixes as digests. Never text."""
    return await serving.loop.call(_describe_cache, serving.engine)


def _describe_cache(engine: InferenceEngine) -> dict[str, object]:
    block_size = engine.geometry.block_size_tokens
    return {
        "geometry": dataclasses.asdict(engine.geometry),
        "occupancy": engine.prefix_cache_statistics(),
        "hottest_prefixes": [
            {"digest": shown(prefix.digest), "tokens": prefix.blocks * block_size, "hits": prefix.hits}
            for prefix in engine.hottest_prefixes(HOTTEST_PREFIXES)
        ],
    }


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """Empty the cache; requests in flight go on, and leave nothing in it."""
    return {"occupancy": await serving.loop.reset_prefix_cache()}


@router.get("/", response_class=HTMLResponse)
async def status_page() -> HTMLResponse:
    """What the history and the cache's own route say, drawn."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)
