"""What a rank other than 0 does in a run: it loads its part of the model, and follows."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.config import InferenceSettings
from megatron_ext.interruption import Interruption
from megatron_ext.mcore.assemble import build_follower
from megatron_ext.models.load import load_model, save_model
from megatron_ext.ranks.team import Team


def follow(settings: InferenceSettings, team: Team, interruption: Interruption) -> bool:
    """Take the same steps as rank 0, which has the prompts and writes the results, until it says stop.

    Returns:
        True: whether requests completed is rank 0's to say.
    """
    loaded = load_model(settings.source, dict(settings.model_overrides), parallel=settings.parallel)
    if settings.source.save is not None:
        save_model(settings.source.save, loaded)
    caches = [settings.cache]
    if settings.run.prefix_cache_compare:
        caches = [replace(settings.cache, enable_prefix_caching=is_on) for is_on in (False, True)]
    for cache in caches:
        follower = build_follower(
            loaded.model, loaded.config, loaded.tokenizer, settings.batching, cache, dtype=loaded.dtype, team=team
        )
        interruption.keep_quiet()  # this rank ends when rank 0 does
        follower.follow()
    return True
