"""Warm restart of an engine: the identity of what its cache holds, and the store that outlives the process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.config import CacheConfig
from megatron_ext.engine.disk_loading import DiskLoading
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.memory.entry_memory import PoolEntries
from megatron_ext.prefix_cache.disk.index import FORMAT
from megatron_ext.prefix_cache.disk.opening import open_directory_store
from megatron_ext.prefix_cache.disk.slot import DiskUnavailableError
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.prefix_cache.hash_chain import root_hash

logger = logging.getLogger(__name__)

GIB = 1024**3


def warm_restart_of(engine: InferenceEngine, model: Sequence[bytes], cache: CacheConfig) -> WarmRestart | None:
    """Open the store of an engine's cache and put its entries back; None if the directory cannot be used now.

    Args:
        engine: Engine of one rank, whose cache is empty.
        model: See `cache_identity`.
        cache: Settings, with a directory.

    Raises:
        ConfigError: The directory is not for this, or others can write to it; see `take_slot`.
    """
    assert cache.prefix_cache_dir is not None, "the caller has looked"
    limit = int(cache.prefix_cache_disk_gb * GIB)
    try:
        store = open_directory_store(Path(cache.prefix_cache_dir), cache_identity(engine, model), limit)
    except DiskUnavailableError as error:
        logger.warning("prefix cache on disk: %s; serving goes on without it", error)
        return None
    memory = PoolEntries(lambda: engine.context.allocated)
    restart = WarmRestart(store, engine.scheduler.cache, memory, cache.prefix_cache_drain_seconds)
    restart.load()
    tier = restart.go_live(cache.prefix_cache_load_seconds)
    engine.core.replicas[0].loading = DiskLoading(engine.scheduler, tier, memory)
    return restart


def cache_identity(engine: InferenceEngine, model: Sequence[bytes]) -> bytes:
    """Return a digest of all that the bytes of cached entries depend on, except tokens and salt, 32 bytes.

    Args:
        engine: Engine: its plan has configuration, types, block size, and how weights are packed or quantized.
        model: What the engine does not know: hash of the tokenizer, digest of the weights.
    """
    plan, controller = engine.context.plan, engine.controller
    device = next(controller.inference_wrapped_model.model.parameters()).device.type
    return root_hash(
        [
            b"prefix cache on disk, one rank",
            FORMAT.to_bytes(4, "little"),
            sys.byteorder.encode(),
            plan.fingerprint,
            plan.limits.block_size.to_bytes(8, "little"),
            device.encode(),
            repr(controller.chosen_operators()).encode(),
            *model,
        ]
    )
