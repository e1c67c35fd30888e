"""Routes that observe: health, the model list, metrics, the prefix cache, and pages."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response

import megatron_ext
from megatron_ext.server.api_errors import unknown_model
from megatron_ext.server.http.body import ShortPath
from megatron_ext.server.http.description import ERRORS
from megatron_ext.server.http.status_page import ASSETS, DOCS_HEADERS, DOCS_PAGE, PAGE, PAGE_HEADERS, SCRIPT, SHEET
from megatron_ext.server.serving import ServerDependency

router = APIRouter(responses=ERRORS)
_SINCE = "Only samples after this moment: seconds since 1970 by the server's clock"
_FAILING: dict[int | str, dict[str, Any]] = {
    503: {"description": "The engine fails", "content": {"application/json": {"schema": {"type": "object"}}}}
}


@router.get("/health", responses=_FAILING)
async def health(serving: ServerDependency) -> JSONResponse:
    """Return 200 while the engine steps without failing, 503 otherwise."""
    requests = serving.requests
    is_healthy = requests.is_healthy and serving.engine.update_error is None
    status = requests.status if is_healthy else "failing"
    return JSONResponse({"status": status, "errors": requests.error_count}, 200 if is_healthy else 503)


for method in ("GET", "POST"):  # some platforms send POST
    router.add_api_route("/ping", health, methods=[method], summary="Ping", responses=_FAILING)
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of this package."""
    return {"version": megatron_ext.__version__}


@router.get("/load")
async def load(serving: ServerDependency) -> dict[str, int | str]:
    """Return the status, and the number of requests: running, waiting, paused (for want of blocks), the maximum."""
    state = serving.metrics.state
    counts = {name: 0 if state is None else state.value(name) for name in ("running", "waiting", "paused")}
    requests = serving.requests
    return {"status": requests.status, "server_load": requests.living, **counts, "capacity": requests.capacity}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(serving: ServerDependency) -> Response:
    """Return the metrics for Prometheus."""
    return Response(serving.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/metrics/history")
async def metrics_history(
    serving: ServerDependency, since: Annotated[float, Query(description=_SINCE)] = 0.0
) -> dict[str, object]:
    """Return the metrics of the last ten minutes, or since a moment, followed by the current values."""
    heading = {"model": serving.model, "version": megatron_ext.__version__, "started": serving.created}
    return heading | serving.history.since(since)


@router.get("/prefix_cache")
async def prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """Return the prefix cache's contents: sizes, usage, and the hottest prefixes as hashes. Never text."""
    return await serving.cache.describe()


class JsonLines(Response):
    """Response with one line of JSON per object."""

    media_type = "application/x-ndjson"


@router.get("/prefix_cache/trace", response_class=JsonLines)
async def prefix_cache_trace(serving: ServerDependency) -> Response:
    """Return recent requests as JSON lines for `megatron-ext simulate`: keyed hashes of blocks, no text."""
    recent = serving.requests.recent
    content = await asyncio.to_thread(recent.lines, recent.snapshot())
    return JsonLines(content)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """Empty the cache; requests in flight continue, and store nothing in it."""
    return await serving.cache.reset()


@router.get("/docs", response_class=HTMLResponse)
async def documentation() -> HTMLResponse:
    """Return a page of the OpenAPI description of this server."""
    return HTMLResponse(DOCS_PAGE, headers=DOCS_HEADERS)


@router.get(f"/docs/{SCRIPT}", include_in_schema=False)
async def documentation_script() -> FileResponse:
    """Return the script of the page."""
    return FileResponse(ASSETS / SCRIPT)


@router.get(f"/docs/{SHEET}", include_in_schema=False)
async def documentation_sheet() -> FileResponse:
    """Return the style sheet of the page."""
    return FileResponse(ASSETS / SHEET)


@router.get("/", response_class=HTMLResponse)
async def status_page() -> HTMLResponse:
    """Return the status page, which draws the metrics' history and the prefix cache."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


router.add_api_route("/", status_page, methods=["HEAD"], include_in_schema=False)


@router.get("/v1/models")
async def list_models(serving: ServerDependency) -> dict[str, object]:
    """Return the one model under each of its names."""
    return {"object": "list", "data": [serving.describe(name) for name in serving.names]}


router.add_api_route("/v1/models", list_models, methods=["HEAD"], include_in_schema=False)


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: ShortPath, serving: ServerDependency) -> dict[str, object]:
    """Return the model by one of its names."""
    if not serving.is_name(model):
        raise unknown_model(model, *serving.names)
    return serving.describe(serving.answered_name(model))
