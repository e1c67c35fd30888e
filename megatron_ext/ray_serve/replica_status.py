"""Status page of a fleet under Ray Serve, and the row of one replica in it."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from starlette.responses import HTMLResponse

import megatron_ext
from megatron_ext.server.http.body import only_queries
from megatron_ext.server.http.status_page import FLEET_PAGE, FLEET_PAGE_HEADERS
from megatron_ext.server.serving import ServerDependency, Serving

ADMIN_PATHS = frozenset(("/replicas",))


def _row(serving: Serving, replica: str, node: str) -> dict[str, object]:
    """Return the row of a replica in the status page; counts are since its process has started.

    Args:
        serving: State of the replica.
        replica: Name of the replica.
        node: Address of its node.
    """
    requests, state = serving.requests, serving.metrics.state

    def value(path: str) -> int:
        return 0 if state is None else state.value(path)

    in_flight, load_tokens, _ = requests.load_of_others("")
    return {
        "replica": replica,
        "node": node,
        "status": requests.status,
        "problem": "" if requests.is_healthy else "its last steps have failed; the log has their tracebacks",
        "model": serving.model,
        "weights": serving.weights_hash,
        "in_flight": in_flight,
        "waiting": value("waiting"),
        "load_tokens": load_tokens,
        "skipped": value("counters.skipped_tokens"),
        "computed": value("counters.prefill_tokens"),
        "hits": value("counters.hits"),
        "blocks": serving.engine.geometry.blocks,
        "blocks_cached": value("use.blocks_cached"),
        "states": value("use.slots_used"),
        "state_slots": value("use.slots_total"),
        "errors": requests.error_count,
    }


def status_router(replica: str, node: str) -> APIRouter:
    """Return the routes `/`, the status page, and `/replicas`, of which each replica gives its own row.

    Args:
        replica: Name of the replica.
        node: Address of its node.
    """
    router = APIRouter()

    @router.get("/replicas", dependencies=[Depends(only_queries())])
    async def replicas(serving: ServerDependency) -> dict[str, object]:
        """Return all replicas in numbers; source of the status page."""
        return {"version": megatron_ext.__version__, "replicas": [_row(serving, replica, node)]}

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def status_page() -> HTMLResponse:
        """Return the status page, with all replicas."""
        return HTMLResponse(FLEET_PAGE, headers=FLEET_PAGE_HEADERS)

    return router
