"""What a rank other than 0 does: it loads its part of the model, and follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.config import BatchingConfig, CacheConfig, ParallelConfig, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.mcore.assemble import build_follower
from megatron_ext.models.load import load_model, save_model
from megatron_ext.ranks.team import Team


def follow(
    source: SourceConfig,
    overrides: FieldValues,
    parallel: ParallelConfig,
    batching: BatchingConfig,
    caches: Sequence[CacheConfig],
    *,
    team: Team,
    on_ready: Callable[[], None],
    speculative_tokens: int = 0,
) -> None:
    """Take the same steps as rank 0, which has requests and results, until it says stop.

    Args:
        source: As rank 0 loads it, with the next two.
        overrides: See `load_model`.
        parallel: How the model is spread.
        batching: What engines are built for.
        caches: Of rank 0's engines, one after the other.
        team: All ranks.
        on_ready: Called before the first step: from now on this rank ends when rank 0 does.
        speculative_tokens: Drafts of a request that a step may verify.
    """
    loaded = load_model(source, dict(overrides), parallel=parallel)
    if source.save is not None:
        save_model(source.save, loaded)
    for cache in caches:
        follower = build_follower(
            loaded.model,
            loaded.config,
            loaded.tokenizer,
            batching,
            cache,
            dtype=loaded.dtype,
            team=team,
            speculative_tokens=speculative_tokens,
        )
        on_ready()
        follower.follow()
