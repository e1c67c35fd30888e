"""Routes that observe the fleet, for load balancers, Prometheus and people."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import megatron_ext
from megatron_ext.coordinator.coordination import CoordinationDependency
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.server.http.docs_page import DOCS_HEADERS, docs_page
from megatron_ext.server.http.status_page import FLEET_PAGE, FLEET_PAGE_HEADERS

router = APIRouter()


@router.get("/health")
async def health(coordination: CoordinationDependency) -> JSONResponse:
    """Return 200 while at least one replica takes requests or gets new weights, 503 otherwise; with counts of replicas.

    Requests wait for replicas that get new weights. `replicas` counts by status, `weights_versions` by weights.
    """
    fleet = coordination.fleet
    statuses = Counter(member.status.value for member in fleet.members.values())
    is_healthy = bool(fleet.ready()) or Status.UPDATING.value in statuses
    content = {
        "status": "ok" if is_healthy else "failing",
        "replicas": dict(statuses),
        "weights_versions": coordination.updates.summary(),
    }
    return JSONResponse(content, 200 if is_healthy else 503)


for method in ("GET", "POST"):  # some platforms send POST
    router.add_api_route("/ping", health, methods=[method], summary="Ping")
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of this package."""
    return {"version": megatron_ext.__version__}


@router.get("/load")
async def load(coordination: CoordinationDependency) -> dict[str, int]:
    """Return the number of requests in flight, and the replicas' capacity."""
    members = coordination.fleet.members.values()
    beats = [member.beat for member in coordination.fleet.ready() if member.beat is not None]
    living = sum(len(member.calls) for member in members)
    return {"server_load": living, "capacity": sum(beat.capacity for beat in beats)}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(coordination: CoordinationDependency) -> Response:
    """Return the metrics for Prometheus."""
    return Response(coordination.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/replicas")
async def replicas(coordination: CoordinationDependency) -> dict[str, object]:
    """Return all replicas in numbers; source of the status page."""
    routing = coordination.settings.routing
    return {
        "version": megatron_ext.__version__,
        "policy": routing.policy,
        "alpha": routing.alpha,
        "weights_update": coordination.updates.describe(),
        "replicas": coordination.rows(),
    }


@router.get("/docs", response_class=HTMLResponse)
async def documentation(request: Request) -> HTMLResponse:
    """Return the OpenAPI description as a page."""
    return HTMLResponse(docs_page(request.app.openapi()), headers=DOCS_HEADERS)


@router.get("/", response_class=HTMLResponse)
async def status_page() -> HTMLResponse:
    """Return the status page, with all replicas."""
    return HTMLResponse(FLEET_PAGE, headers=FLEET_PAGE_HEADERS)


router.add_api_route("/", status_page, methods=["HEAD"], include_in_schema=False)
