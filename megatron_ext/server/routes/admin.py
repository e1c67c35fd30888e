"""Routes that affect all tenants. Open to administrators' keys, with `--enable-admin-routes`."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import ConfigDict, Field, model_validator

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.config.in_flight import MAX_VERSION, InFlight
from megatron_ext.console.profiling import StepTracer
from megatron_ext.engine.pausing import PauseMode
from megatron_ext.errors import ConfigError
from megatron_ext.memory.host_limits import is_out_of_memory
from megatron_ext.server.api_errors import ApiError, aborted, no_memory
from megatron_ext.server.http.body import JsonRoute, only_queries
from megatron_ext.server.http.description import ERRORS
from megatron_ext.server.log import printable
from megatron_ext.server.openai.request_fields import Body, Name
from megatron_ext.server.serving import ServerDependency, Serving

logger = logging.getLogger(__name__)

LONGEST_ID = 100  # characters, in messages
LONGEST_PATH = 4096  # characters
LONGEST_PROFILE = 60.0  # seconds
USUAL_PAUSE, LONGEST_PAUSE = 600, 86_400  # seconds

Level = Literal["0", "1", "keep", "offload", "drop"]
_LEVELS: dict[str, SuspendLevel] = {"0": "keep", "keep": "keep", "offload": "offload", "1": "drop", "drop": "drop"}

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


class AdminBody(Body):
    """Base of bodies of administrators, whose mistakes concern all clients: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class EmptyBody(AdminBody):
    """Empty object, or no body at all."""


class AbortRequest(AdminBody):
    """Answers to abort."""

    request_id: Name | None = None
    """The `id` of the answer to abort; or `abort_all`."""
    abort_all: bool | None = None
    """Abort all requests; false by default."""

    @model_validator(mode="after")
    def _names_something(self) -> AbortRequest:
        if (self.request_id is None) is not bool(self.abort_all):
            raise ValueError("give either request_id or abort_all = true")
        return self


class UpdateRequest(AdminBody):
    """Location of new weights."""

    model_path: Annotated[str, Field(min_length=1, max_length=LONGEST_PATH)]
    """Directory of the new weights, below `--weights-root`."""
    in_flight: Literal["recompute", "finish", "abort", "continue"] = "recompute"
    """Treatment of requests in flight; "recompute" by default."""
    weights_version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    """Number of the new weights; by default one more than the last."""


@router.post("/sleep", dependencies=[Depends(only_queries("level"))])
async def sleep(
    serving: ServerDependency,
    body: EmptyBody | None = None,
    level: Annotated[
        Level | None,
        Query(
            description="0 or keep; offload: to host memory; 1 or drop. Weights stay. "
            "Default: of --rl-kv-cache-management-mode, drop without it"
        ),
    ] = None,
) -> dict[str, object]:
    """Free the pools' memory as the level says. Requests in flight wait and keep their tokens; new ones get a 503."""
    logger.info("asleep at level %s", await serving.requests.sleep(None if level is None else _LEVELS[level]))
    return {"is_sleeping": True}


@router.post("/wake_up", dependencies=[Depends(only_queries())])
async def wake_up(serving: ServerDependency, body: EmptyBody | None = None) -> dict[str, object]:
    """Allocate the pools again; requests recompute their KV and states, and continue."""
    try:
        await serving.requests.wake_up()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise no_memory("the pools; the server stays asleep") from error
    logger.info("awake: the pools are allocated again")
    return {"is_sleeping": False}


@router.get("/is_sleeping", dependencies=[Depends(only_queries())])
async def is_sleeping(serving: ServerDependency) -> dict[str, object]:
    """Return whether the server is asleep."""
    return {"is_sleeping": serving.requests.is_asleep}


@router.post("/pause", dependencies=[Depends(only_queries("mode", "max_seconds"))])
async def pause(
    serving: ServerDependency,
    body: EmptyBody | None = None,
    mode: Annotated[PauseMode, Query(description="keep: requests wait; abort: they end with their tokens")] = "keep",
    max_seconds: Annotated[
        float, Query(gt=0, le=LONGEST_PAUSE, allow_inf_nan=False, description="Seconds until generation resumes")
    ] = USUAL_PAUSE,
) -> dict[str, object]:
    """Stop generation after the step in flight; it resumes by itself after `max_seconds`. New requests wait."""
    ended = await asyncio.to_thread(serving.requests.client.pause, max_seconds, mode)
    logger.info("generation is paused for %g s at most; %d requests ended", max_seconds, ended)
    return {"is_paused": True, "ended": ended}


@router.post("/resume", dependencies=[Depends(only_queries())])
async def resume(serving: ServerDependency, body: EmptyBody | None = None) -> dict[str, object]:
    """Continue generation."""
    await asyncio.to_thread(serving.requests.client.unpause)
    logger.info("generation is resumed")
    return {"is_paused": False}


@router.get("/is_paused", dependencies=[Depends(only_queries())])
async def is_paused(serving: ServerDependency) -> dict[str, object]:
    """Return whether generation is paused."""
    return {"is_paused": serving.requests.is_paused}


@router.post("/start_profile", dependencies=[Depends(only_queries("max_seconds"))])
async def start_profile(
    serving: ServerDependency,
    body: EmptyBody | None = None,
    max_seconds: Annotated[
        float, Query(gt=0, le=LONGEST_PROFILE, allow_inf_nan=False, description="Seconds in which traced steps begin")
    ] = LONGEST_PROFILE,
) -> dict[str, object]:
    """Trace the next steps with torch's profiler, at most 100, into the directory of `--profile`."""
    try:
        await asyncio.wrap_future(serving.requests.client.call(_tracer(serving).start, max_seconds))
    except ConfigError as error:
        raise ApiError(409, str(error)) from None
    logger.info("steps are traced for %g s at most", max_seconds)
    return {"is_profiling": True}


@router.post("/stop_profile", dependencies=[Depends(only_queries())])
async def stop_profile(serving: ServerDependency, body: EmptyBody | None = None) -> dict[str, object]:
    """End the trace and write it; `file` is its name in the directory of `--profile`, null if nothing was traced."""
    file = await asyncio.wrap_future(serving.requests.client.call(_tracer(serving).end))
    return {"is_profiling": False, "file": None if file is None else file.name}


def _tracer(serving: Serving) -> StepTracer:
    if serving.tracer is None:
        raise ApiError(400, "this server traces no steps; start it with --profile DIR")
    return serving.tracer


@router.post("/flush_cache", dependencies=[Depends(only_queries())])
async def flush_cache(serving: ServerDependency, body: EmptyBody | None = None) -> dict[str, object]:
    """Empty the prefix cache; alias of `/reset_prefix_cache`."""
    return await serving.cache.reset()


@router.post("/abort", dependencies=[Depends(only_queries())])
async def abort(serving: ServerDependency, body: AbortRequest) -> dict[str, object]:
    """Abort one answer, or all. Their clients get an error; their memory is free after the step in flight."""
    if body.request_id is not None:
        group = serving.requests.groups.get(body.request_id)
        count = 0 if group is None else serving.requests.end(group, aborted())
        if count == 0:
            message = f"no running request has the id {printable(body.request_id, LONGEST_ID)!r}"
            raise ApiError(404, message, param="request_id", code="request_not_found")
    else:
        count = serving.requests.living
        serving.requests.give_up(aborted())
    logger.info("%d requests ended by an administrator", count)
    return {"aborted": count}


@router.post("/update_weights_from_disk", dependencies=[Depends(only_queries())])
async def update_weights_from_disk(serving: ServerDependency, body: UpdateRequest) -> dict[str, object]:
    """Write the weights of a checkpoint into the model, all or nothing; the prefix cache is emptied."""
    if serving.updater is None:
        raise ApiError(400, "this server cannot read new weights; start it with --weights-root DIR", param="model_path")
    count = await serving.updater.update(body.model_path, InFlight(body.in_flight), body.weights_version)
    serving.weights_hash = serving.updater.weights_hash
    message = f"{count} tensors were read from {body.model_path}"
    version = serving.engine.weights_version
    return {"success": True, "message": message, "tensors": count, "weights_version": version}
