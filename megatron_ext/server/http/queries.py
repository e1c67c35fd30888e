"""Query parameters of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError


def only_queries(*names: str) -> Callable[[Request], Awaitable[None]]:
    """Return a route dependency that refuses query parameters of other names, instead of ignoring them."""

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names:
                shown = name[:LONGEST_NAME]
                raise ApiError(400, f"{shown} is not a parameter of this route", param=shown)

    return check
