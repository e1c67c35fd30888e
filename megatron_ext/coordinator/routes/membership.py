"""Routes to add, drain and remove replicas. Open to administrators' keys, with `--enable-admin-routes`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from megatron_ext.config.coordinator import replica_problem
from megatron_ext.coordinator.coordination import Coordination, CoordinationDependency
from megatron_ext.coordinator.membership.member import Source
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.body import check_content_type, parse_json, read_body
from megatron_ext.server.log import printable

router = APIRouter()


LONGEST_URL = 300  # characters


@router.post("/replicas/join")
async def join(request: Request, coordination: CoordinationDependency) -> dict[str, object]:
    """Add the replica at `url`, which takes requests once it answers; also resumes a draining one."""
    url = await _url(request, coordination)
    coordination.fleet.add(url, Source.ADMIN)
    return {"url": url, "status": coordination.fleet.members[url].status.value}


@router.post("/replicas/drain")
async def drain(request: Request, coordination: CoordinationDependency) -> dict[str, object]:
    """Drain a replica: it gets no new requests, and those in flight continue."""
    url = _known(await _url(request, coordination), coordination)
    coordination.fleet.drain(url)
    return {"url": url, "in_flight": len(coordination.fleet.members[url].calls)}


@router.post("/replicas/leave")
async def leave(request: Request, coordination: CoordinationDependency) -> dict[str, object]:
    """Remove a replica at once: its requests in flight are retried elsewhere, and started streams end."""
    url = _known(await _url(request, coordination), coordination)
    count = len(coordination.fleet.members[url].calls)
    coordination.fleet.remove(url)
    return {"url": url, "in_flight": count}


async def _url(request: Request, coordination: Coordination) -> str:
    """Return the only field of the body.

    Raises:
        ApiError: The body has other fields or types.
    """
    body = await read_body(request, coordination.settings.limits.body_bytes)
    check_content_type(request.headers.get("content-type"))
    content = parse_json(body)
    url = content.get("url") if isinstance(content, dict) and set(content) == {"url"} else None
    if not isinstance(url, str) or len(url) > LONGEST_URL:
        raise ApiError(400, 'the body must be an object such as {"url": "http://10.0.0.5:8000"}', param="url")
    problem = replica_problem(url)
    if problem is not None:
        raise ApiError(400, f"url: {printable(url, LONGEST_URL)!r} {problem}", param="url")
    return url


def _known(url: str, coordination: Coordination) -> str:
    if url not in coordination.fleet.members:
        raise ApiError(404, f"replica {url} does not exist; GET /replicas lists all replicas", param="url")
    return url
