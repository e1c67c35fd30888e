"""Parts of requests besides the body: query parameters, and the header by which a coordinator names itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.http.auth import CALLER

SENDER_HEADER = "x-megatron-ext-coordinator"  # replicas tell a coordinator's requests from others by it
MAX_SENDER = 64  # characters
TENANT_HEADER = "x-megatron-ext-tenant"  # a coordinator that checks keys names their tenants to replicas without keys


def only_queries(*names: str) -> Callable[[Request], Awaitable[None]]:
    """Return a route dependency that refuses query parameters of other names, instead of ignoring them."""

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names:
                shown = name[:LONGEST_NAME]
                raise ApiError(400, f"{shown} is not a parameter of this route", param=shown)

    return check


def sender_of(request: Request) -> str:
    """Return the coordinator that sent a request; empty for a client."""
    return request.headers.get(SENDER_HEADER, "")[:MAX_SENDER]


def tenant_of(request: Request) -> str:
    """Return the tenant of a request: that of its key, or where there are no keys the one that a coordinator names."""
    caller: Caller = request.scope[CALLER]
    return caller.tenant or request.headers.get(TENANT_HEADER, "")[:MAX_SENDER]
