"""Prefix cache that outlives the process: identity of what its entries depend on, and its store."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from megatron_ext.config import CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.memory.entry_memory import PoolEntries
from megatron_ext.models.identity import tokenizer_hash
from megatron_ext.models.load import LoadedModel
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.prefix_cache.disk.index import FORMAT
from megatron_ext.prefix_cache.disk.opening import open_directory_store
from megatron_ext.prefix_cache.disk.slot import DiskUnavailableError
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.prefix_cache.hash_chain import root_hash

logger = logging.getLogger(__name__)

GIB = 1024**3


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


def warm_restart(
    engine: InferenceEngine, loaded: LoadedModel, weights: bytes, cache: CacheConfig
) -> WarmRestart | None:
    """Open the store of an engine's cache and put its entries back; None if the directory cannot be used now.

    Args:
        engine: Engine of one rank, whose cache is empty.
        loaded: Model of the engine.
        weights: Digest of the weights; see `weights_digest`.
        cache: Settings, with a directory.

    Raises:
        ConfigError: The directory is not for this, or others can write to it; see `take_slot`.
    """
    assert cache.prefix_cache_dir is not None, "the caller has looked"
    limit = int(cache.prefix_cache_disk_gb * GIB)
    try:
        store = open_directory_store(Path(cache.prefix_cache_dir), cache_identity(engine, loaded, weights), limit)
    except DiskUnavailableError as error:
        logger.warning("prefix cache on disk: %s; serving goes on without it", error)
        return None
    memory = PoolEntries(lambda: engine.context.allocated)
    restart = WarmRestart(store, engine.scheduler.cache, memory, cache.prefix_cache_drain_seconds)
    restart.load()
    return restart


def cache_identity(engine: InferenceEngine, loaded: LoadedModel, weights: bytes) -> bytes:
    """Return a digest of all that the bytes of cached entries depend on, except tokens and salt, 32 bytes.

    Args:
        engine: Engine: its plan has configuration, types, block size, and how weights are packed or quantized.
        loaded: Model of the engine.
        weights: Digest of the weights.
    """
    plan, operators = engine.context.plan, engine.controller.chosen_operators()
    device = next(loaded.model.parameters()).device.type
    return root_hash(
        [
            b"prefix cache on disk, one rank",
            FORMAT.to_bytes(4, "little"),
            sys.byteorder.encode(),
            plan.fingerprint,
            plan.limits.block_size.to_bytes(8, "little"),
            device.encode(),
            repr(operators).encode(),
            tokenizer_hash(loaded.tokenizer).encode(),
            weights,
        ]
    )
