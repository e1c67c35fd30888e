"""Routes of the model list."""

from __future__ import annotations

from fastapi import APIRouter

from megatron_ext.server.api_errors import unknown_model
from megatron_ext.server.http.request_parts import ShortPath
from megatron_ext.server.serving import ServerDependency

router = APIRouter()


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
