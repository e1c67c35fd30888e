"""Header by which a coordinator names itself to its replicas, so that they can tell its requests from others."""

from __future__ import annotations

from fastapi import Request

SENDER_HEADER = "x-megatron-ext-coordinator"
MAX_SENDER = 64  # characters


def sender_of(request: Request) -> str:
    """Return the coordinator that sent a request; empty for a client."""
    return request.headers.get(SENDER_HEADER, "")[:MAX_SENDER]
