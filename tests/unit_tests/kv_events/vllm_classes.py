"""Messages of vLLM 0.32's KV events, declared with msgspec from the fields that its documentation lists.

A batch is an array; an event is a map whose name is under `type`.
"""

# No postponed annotations: msgspec resolves them at the definition.

from typing import Any

import msgspec

ExternalBlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decode(payload: bytes) -> KVEventBatch:
    """Decode as vLLM's clients do.

    Raises:
        msgspec.ValidationError: The payload has another type of event, or a field of another type.
    """
    return msgspec.msgpack.decode(payload, type=KVEventBatch)
