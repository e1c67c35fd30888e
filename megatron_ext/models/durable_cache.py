"""Prefix cache that outlives the process: what of a loaded model its entries depend on."""

from __future__ import annotations

from megatron_ext.config import CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.warm_restart_setup import warm_restart_of
from megatron_ext.models.identity import tokenizer_hash
from megatron_ext.models.load import LoadedModel
from megatron_ext.parallel.parallel_context import ParallelContext


def require_one_rank(cache: CacheConfig, parallel_context: ParallelContext | None) -> None:
    """Raise if there are several ranks.

    Raises:
        ConfigError: There are.
    """
    if parallel_context is not None:
        raise ConfigError(
            f"--prefix-cache-dir {cache.prefix_cache_dir} works with one rank only, for now; leave it out, or start "
            "replicas of one rank each"
        )


def keep_cache(engine: InferenceEngine, loaded: LoadedModel, weights: bytes, cache: CacheConfig) -> None:
    """Make an engine's cache outlive the process, and put back what an earlier one left.

    Args:
        engine: Engine of one rank, whose cache is empty.
        loaded: Model of the engine.
        weights: Digest of the weights; see `weights_digest`.
        cache: Settings, with a directory.

    Raises:
        ConfigError: The directory is not for this, or others can write to it.
    """
    engine.core.disk = warm_restart_of(engine, [tokenizer_hash(loaded.tokenizer).encode(), weights], cache)
