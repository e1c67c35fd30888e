"""Warm restart of an engine: the identity of its cached entries, and the store that outlives the process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config import CacheConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.memory.budget import GIB
from megatron_ext.memory.entry_memory import PoolEntries
from megatron_ext.parallel.cache_ranks import open_beside_others
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.prefix_cache.disk.slot import FORMAT, DiskUnavailableError, unusable
from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.prefix_cache.hash_chain import root_hash

logger = logging.getLogger(__name__)


def open_disk_cache(
    engine: InferenceEngine,
    model: Sequence[bytes],
    settings: CacheConfig,
    parallel_context: ParallelContext | None = None,
) -> None:
    """Open the stores of an engine's caches on all ranks and put their entries back, if the directory can be used now.

    Args:
        engine: Engine whose caches are empty.
        model: See `cache_identity`.
        settings: Settings, with a directory.
        parallel_context: All ranks, of which this is the first; None for a world of one.

    Raises:
        ConfigError: The directory is not for this, or others can write to it; see `take_slot`.
        RankError: A rank has failed.
    """
    engine.core.attach_disk(lambda: open_rank_store(engine.controller, model, settings, parallel_context))


def open_rank_store(
    controller: InferenceController,
    model: Sequence[bytes],
    settings: CacheConfig,
    parallel_context: ParallelContext | None,
) -> WarmRestart | None:
    """Open the store of this rank's part of a cache, beside all other ranks.

    Args:
        controller: Model of this rank, and its pools.
        model: See `cache_identity`.
        settings: Settings, with a directory.
        parallel_context: All ranks; None for a world of one.

    Returns:
        The store; None on all ranks if it is optional and the directory of one cannot be used now, which is said once.

    Raises:
        ConfigError: The directory cannot be used now, is not for this, or others can write to it; see `take_slot`.
    """
    context = controller.inference_wrapped_model.inference_context
    ranks, others = None, []
    if parallel_context is not None:
        ranks = parallel_context.cache_ranks(parallel_context.here.replica)
        if parallel_context.is_driver:
            others = [parallel_context.cache_ranks(number) for number in range(1, parallel_context.replicas)]
    try:
        store = _opened(cache_identity(controller, model), settings, parallel_context)
    except DiskUnavailableError as error:
        if not settings.prefix_cache_dir_optional:
            raise unusable(error) from None
        if parallel_context is None or parallel_context.is_driver:
            logger.warning("prefix cache on disk: %s; serving goes on without it", error)
        return None
    return WarmRestart(
        store,
        PoolEntries(lambda: context.allocated),
        settings.prefix_cache_drain_seconds,
        settings.prefix_cache_load_seconds,
        ranks,
        others,
    )


def _opened(identity: bytes, settings: CacheConfig, parallel_context: ParallelContext | None) -> DiskStore:
    """Take this rank's slot and open its store."""
    assert settings.prefix_cache_dir is not None, "the caller has looked"
    directory, limit = Path(settings.prefix_cache_dir), int(settings.prefix_cache_disk_gb * GIB)
    if parallel_context is None:
        return open_directory_store(directory, identity, limit)
    replica = parallel_context.here.replica
    position = parallel_context.cache_ranks(replica).position
    assert position is not None, "this rank belongs to its replica"
    return open_beside_others(directory, identity, limit, replica, position, parallel_context.gather)


def cache_identity(controller: InferenceController, model: Sequence[bytes]) -> bytes:
    """Return a digest of all that the bytes of cached entries depend on, except tokens and salt, 32 bytes.

    Args:
        controller: Model and pools: the plan has configuration, types, block size, and how weights are packed or
            quantized.
        model: What these do not know: hash of the tokenizer, digest of the weights, this rank's part of the model.
    """
    plan = controller.inference_wrapped_model.inference_context.plan
    device = next(controller.inference_wrapped_model.model.parameters()).device.type
    return root_hash(
        [
            b"prefix cache on disk",
            FORMAT.to_bytes(4, "little"),
            sys.byteorder.encode(),
            plan.fingerprint,
            plan.limits.block_size.to_bytes(8, "little"),
            device.encode(),
            repr(controller.chosen_operators()).encode(),
            *model,
        ]
    )
