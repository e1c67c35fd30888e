"""Route for a coordinator in front of several servers (docs/fleet.md)."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

from megatron_ext.server.http.request_parts import only_queries, sender_of
from megatron_ext.server.serving import ServerDependency, Serving

router = APIRouter()


@router.get("/replica", dependencies=[Depends(only_queries())])
async def replica(request: Request, serving: ServerDependency) -> dict[str, object]:
    """Return this process's instance id, model, health, progress, and its counts of computed and cached tokens.

    `instance` changes with a restart. `steps` grows while the engine computes: it is the heartbeat that `/health` is
    not, since `/health` is answered without the engine. Replicas of equal `model`, `aliases`, `configuration` and
    `tokenizer` can answer for each other; `root` is the directory of the tokenizer, which load generators send as the
    model's name; `weights` is a hash of the weights, `weights_version` their number, and `is_updating` tells whether
    new ones are being read or written. `others` has the requests that the asking coordinator has not sent, their prompt
    tokens that are yet to be computed, and the sum of their `max_tokens`. Counts are null where `--hide-cache-counts`
    hides them.
    """
    others, prompt_tokens, output_tokens = serving.requests.load_of_others(sender_of(request))
    requests, state = serving.requests, serving.metrics.state
    geometry = serving.engine.geometry
    return {
        "instance": serving.instance,
        "model": serving.model,
        "aliases": list(serving.aliases),
        "root": serving.root,
        "configuration": serving.identity.configuration,
        "tokenizer": serving.identity.tokenizer,
        "weights": serving.identity.weights,
        "weights_version": serving.engine.core.weights_version,
        "is_updating": serving.updater is not None and serving.updater.is_updating,
        "status": requests.status,
        "has_keys": serving.keys is not None and serving.keys.are_needed,
        "block_size": geometry.block_size_tokens,
        "blocks": geometry.blocks,
        "has_states": geometry.state_bytes > 0,
        "capacity": requests.capacity,
        "living": requests.living,
        "others": {"requests": others, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens},
        "steps": 0 if state is None else state.steps,
        "kv_events": list(serving.kv_events),
        "prompt_tokens": _prompt_tokens(serving),
    }


def _prompt_tokens(serving: Serving) -> dict[str, int] | None:
    state = serving.metrics.state
    if state is None or serving.settings.hide_cache_counts:
        return None
    return {"skipped": state.counters.skipped_tokens, "computed": state.counters.prefill_tokens}
