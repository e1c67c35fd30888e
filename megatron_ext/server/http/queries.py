"""Query parameters of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError


def only_queries(*names: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency of a route: refuses query parameters of other names, which might have meant something."""

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names:
                shown = name[:LONGEST_NAME]
                raise ApiError(400, f"{shown} is no parameter that this route knows", param=shown)

    return check
