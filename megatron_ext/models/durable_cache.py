"""Prefix cache that outlives the process: what of a loaded model its entries depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.config import CacheConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.warm_restart_setup import StoreOpener, keep_engine, opener_of_part
from megatron_ext.models.identity import tokenizer_hash
from megatron_ext.models.load import LoadedModel
from megatron_ext.parallel.parallel_context import ParallelContext


def keep_cache(
    engine: InferenceEngine,
    loaded: LoadedModel,
    weights: bytes,
    cache: CacheConfig,
    parallel: ParallelConfig | None = None,
    parallel_context: ParallelContext | None = None,
) -> None:
    """Make an engine's cache outlive the process, and put back what an earlier one left.

    Args:
        engine: Engine whose cache is empty.
        loaded: Model of the engine.
        weights: Digest of the weights; see `weights_digest`.
        cache: Settings, with a directory.
        parallel: Parallel sizes.
        parallel_context: All ranks; None for a world of one.

    Raises:
        ConfigError: The directory is not for this, or others can write to it.
    """
    keep_engine(engine, _facts(loaded, weights, parallel, parallel_context), cache, parallel_context)


def store_opener(
    loaded: LoadedModel,
    weights: bytes,
    cache: CacheConfig,
    parallel: ParallelConfig,
    parallel_context: ParallelContext,
) -> Callable[[InferenceController], StoreOpener]:
    """Return what a rank other than 0 does when `keep_cache` is called on rank 0: opens its part; see `open_part`.

    The arguments are those of `keep_cache`.
    """
    facts = _facts(loaded, weights, parallel, parallel_context)
    return lambda controller: opener_of_part(controller, facts, cache, parallel_context)


def _facts(
    loaded: LoadedModel, weights: bytes, parallel: ParallelConfig | None, parallel_context: ParallelContext | None
) -> Sequence[bytes]:
    """Return what of a model and its layout the engine does not know."""
    facts = [tokenizer_hash(loaded.tokenizer).encode(), weights]
    if parallel_context is None:
        return [*facts, b"one rank"]
    here, sizes = parallel_context.here, platform.group_sizes(parallel)
    return [*facts, f"tensor {here.tensor}, stage {here.pipeline} of {sizes.described()}".encode()]
