"""Parts of requests besides the body: query parameters, and the header by which a router names itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Path, Request

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError

SENDER_HEADER = "x-megatron-ext-router"  # replicas tell a router's requests from others by it
MAX_SENDER = 64  # characters
LONGEST_PATH_PART = 8192  # characters

ShortPath = Annotated[str, Path(max_length=LONGEST_PATH_PART)]


def only_queries(*names: str) -> Callable[[Request], Awaitable[None]]:
    """Return a route dependency that refuses query parameters of other names, instead of ignoring them."""

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names:
                shown = name[:LONGEST_NAME]
                raise ApiError(400, f"{shown} is not a parameter of this route", param=shown)

    return check


def sender_of(request: Request) -> str:
    """Return the router that sent a request; empty for a client."""
    return request.headers.get(SENDER_HEADER, "")[:MAX_SENDER]
