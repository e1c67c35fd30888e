"""Memory budget: bytes to blocks, running states and snapshot slots, with errors that name a value that fits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.config.batching import MAX_UNITS
from megatron_ext.errors import ConfigError
from megatron_ext.memory.arena import ArenaBudget, arena_bytes
from megatron_ext.prefix_cache.slab_layout import SlabLayout

STATES_OF_A_REQUEST = 2
GIB = 1024**3
HYBRID_BLOCK_MULTIPLE = 16
AUTOMATIC_SNAPSHOT_SHARE = 0.25  # of the buffer, in addition to it
FEWEST_AUTOMATIC_SLOTS = 2
SPARE_STATES = 2  # for padding: a running state and a snapshot
ASYNC_STATES = 4  # snapshots of a step that is launched before their block hashes are known
FASTEST_CHUNK = {"cpu": 64}  # tokens, by device type, if smaller than the usual training chunk
# Maximum bytes, outside the pools, of a piece of log-probs: logits, a copy in fp32, its log-softmax.
SCORING_BYTES = 256 * 1024**2
SHARES_MEMORY = True  # whether blocks and snapshots share an arena by default; see `shares_memory`


@dataclass(frozen=True)
class DraftMemory:
    """Memory that layers of multi-token prediction need per token and per sequence.

    A request has as many blocks there as in the engine's own pool. Of its two states one is after the accepted tokens,
    the other is the copy that drafting advances.

    Attributes:
        kv_bytes_per_token: Bytes of keys and values of one token, in all of their attention layers.
        state_bytes: Bytes of the states of one sequence, in all of their recurrent layers.
        hidden_bytes: Bytes of the target model's hidden states that are kept of one sequence.
    """

    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    hidden_bytes: int = 0

    def request_bytes(self, requests: int) -> int:
        """Return the bytes of the states of `requests` requests, hidden states included."""
        return requests * (STATES_OF_A_REQUEST * self.state_bytes + self.hidden_bytes)


NO_DRAFT_LAYERS = DraftMemory()


@dataclass(frozen=True)
class DraftKVCacheConfig:
    """Sizes of the pools of layers that draft, as printed at start-up and in a run's counts.

    Attributes:
        block_bytes: Bytes of one block; the pool has as many as the engine's own.
        state_bytes: Bytes of one sequence's states.
        states: Number of states in the pool.
        hidden_bytes: Bytes of the target model's hidden states, of all requests.
    """

    block_bytes: int
    state_bytes: int
    states: int
    hidden_bytes: int = 0

    def pool_bytes(self, blocks: int) -> int:
        """Return the bytes of the pools with `blocks` blocks and the dummy block."""
        return (blocks + 1) * self.block_bytes + self.states * self.state_bytes + self.hidden_bytes


def draft_kv_cache_config(draft: DraftMemory, block_size: int, requests: int) -> DraftKVCacheConfig | None:
    """Return the sizes of the pools of layers that draft; None without them."""
    if draft == NO_DRAFT_LAYERS:
        return None
    states = STATES_OF_A_REQUEST * requests if draft.state_bytes else 0
    hidden = requests * draft.hidden_bytes
    return DraftKVCacheConfig(block_size * draft.kv_bytes_per_token, draft.state_bytes, states, hidden)


@dataclass(frozen=True)
class ModelMemory:
    """Memory that a model needs per token and per request, on this rank."""

    kv_bytes_per_token: int  # all attention layers, key and value
    state_bytes: int  # all recurrent layers, one sequence
    chunk_size: int  # the model's scan chunk, tokens
    max_sequence_length: int
    speculative_tokens: int = 0  # drafts of a request in a step
    draft: DraftMemory = NO_DRAFT_LAYERS
    record_bytes: int = 0  # `state_bytes` as one record; see `StateShape.record_bytes`
    activation_bytes: int = 0  # temporary tensors of a full step
    log_prob_bytes: int = 0  # of a block's kept log-probs; see `LogProbPool`


@dataclass(frozen=True)
class KVCacheConfig:
    """Effective sizes of the pools (EX-6), as printed at start-up and in a run's counts.

    `live_states` counts the running state slots; with padded steps also two for padding (a running state and a
    snapshot), and with a cache four for snapshots of asynchronously launched steps until their hashes are known.

    With `slabs`, blocks and snapshots share an arena, and `blocks` and `snapshot_slots` are the maxima: the blocks if
    all slabs held blocks, the snapshots if all held snapshots. One slab has `slab_bytes`; `apart_slots` of the states
    after drafts and of `live_states` lie after the blocks.
    """

    block_size_tokens: int
    block_bytes: int
    state_bytes: int
    state_in_kv_tokens: int | None  # size of one state in tokens of KV; None without attention
    blocks: int
    snapshot_slots: int
    live_states: int
    kernel_chunk: int
    shortest_prompt_that_can_hit: int | None  # None without a cache
    draft_states: int = field(default=0, kw_only=True)  # states after drafts, until verified
    draft_layers: DraftKVCacheConfig | None = field(default=None, kw_only=True)  # their pools, in the same budget
    slabs: SlabLayout | None = field(default=None, kw_only=True)
    slab_bytes: int = field(default=0, kw_only=True)
    apart_slots: int = field(default=0, kw_only=True)
    log_prob_bytes: int = field(default=0, kw_only=True)  # of the log-probs kept with a block
    max_model_len: int = field(default=0, kw_only=True)  # see `SchedulerLimits.max_model_len`

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools: KV blocks with the dummy block, running states, states after drafts, and snapshots.

        The pools of layers that draft are included, and kept log-probs.
        """
        beside = (self.blocks + 1) * self.log_prob_bytes
        beside += 0 if self.draft_layers is None else self.draft_layers.pool_bytes(self.blocks)
        states = self.live_states + self.draft_states - self.apart_slots
        if self.slabs is not None:
            arena = arena_bytes(self.slabs, self.slab_bytes, self.apart_slots)
            return arena + states * self.state_bytes + beside
        states += self.snapshot_slots
        return (self.blocks + 1) * self.block_bytes + states * self.state_bytes + beside

    @property
    def cached_block_bytes(self) -> int:
        """Bytes that a block takes: its own, or in an arena its part of a slab."""
        return self.block_bytes if self.slabs is None else self.slab_bytes // self.slabs.blocks_per_slab

    @property
    def snapshot_bytes(self) -> int:
        """Bytes that a snapshot takes: its own, or in an arena a slab."""
        return self.state_bytes if self.slabs is None else self.slab_bytes

    def shown(self) -> dict[str, object]:
        """Return the fields for JSON; fields of speculation and slabs are left out where they do not apply."""
        optional = {"hidden_bytes", *(one.name for one in fields(KVCacheConfig) if one.kw_only)}
        return asdict(self, dict_factory=lambda found: {k: v for k, v in found if k not in optional or v})


def plan_memory(model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str) -> KVCacheConfig:
    """Compute the sizes of the pools.

    The buffer holds KV blocks and the running states of `max_requests` requests; snapshots have a budget of their own.
    Each running state comes with states after the request's drafts, as many as a step may verify (LA-4). States are
    written directly to snapshot slots, so the snapshot budget needs no staging buffer.

    Args:
        model: Memory of the model per token and per request.
        batching: Budget and limits.
        cache: Whether prefixes are cached, and the budget for snapshots.
        device_type: "cpu" or "cuda", for the defaults.

    Raises:
        ConfigError: The buffer cannot hold one block and the running states, or holds more blocks than the host can
            manage; the snapshot budget cannot hold one, or the block size does not suit recurrent layers.
    """
    block_size = batching.block_size
    if model.state_bytes and block_size % HYBRID_BLOCK_MULTIPLE:
        multiple = HYBRID_BLOCK_MULTIPLE
        fitting = max(multiple, round(block_size / multiple) * multiple)
        raise ConfigError(
            f"block size {block_size} is not a multiple of {multiple}, which recurrent layers need; give {fitting}"
        )
    block_bytes = block_size * model.kv_bytes_per_token
    per_token = model.kv_bytes_per_token
    blocks = _block_count(model, batching, cache, device_type)
    if block_bytes == 0 and blocks > MAX_UNITS:  # otherwise the device's memory is the limit
        raise ConfigError(
            f"{blocks} blocks are too many; --inference-dynamic-batching-block-count must be at most {MAX_UNITS}, "
            "or give larger blocks"
        )
    slots = _slot_count(model, batching, cache, (blocks + 1) * block_bytes, device_type)
    return KVCacheConfig(
        block_size_tokens=block_size,
        block_bytes=block_bytes,
        state_bytes=model.state_bytes,
        state_in_kv_tokens=math.ceil(model.state_bytes / per_token) if per_token else None,
        blocks=blocks,
        snapshot_slots=slots if cache.snapshot_slots is not None else min(slots, blocks),
        live_states=_live_states(model, batching, cache),
        draft_states=batching.effective_max_requests * model.speculative_tokens if model.state_bytes else 0,
        kernel_chunk=kernel_chunk(model.chunk_size, device_type),
        shortest_prompt_that_can_hit=_shortest_hit(model, cache, block_size, slots),
        draft_layers=draft_kv_cache_config(model.draft, block_size, batching.effective_max_requests),
        log_prob_bytes=model.log_prob_bytes,
    )


def shares_memory(batching: BatchingConfig, cache: CacheConfig) -> bool:
    """Return whether the settings leave it to the engine how memory is split between blocks and snapshots."""
    given = (batching.block_count, cache.snapshot_buffer_gb, cache.snapshot_slots)
    return SHARES_MEMORY and cache.policy is not None and all(one is None for one in given)


def arena_budget(model: ModelMemory, geometry: KVCacheConfig, batching: BatchingConfig) -> ArenaBudget | None:
    """Return what a rank with this fixed split would put into an arena; None without attention or recurrent layers."""
    if not (geometry.block_bytes and geometry.state_bytes):
        return None
    padded = int(geometry.live_states > batching.effective_max_requests)
    ahead = async_states(geometry.live_states, batching.effective_max_requests)
    apart = geometry.draft_states + padded + ahead
    beside = geometry.log_prob_bytes + (0 if geometry.draft_layers is None else geometry.draft_layers.block_bytes)
    blocks = (geometry.blocks + 1) * (geometry.block_bytes + beside)
    total = blocks + (geometry.snapshot_slots + apart) * geometry.state_bytes
    return ArenaBudget(total, geometry.block_bytes, model.record_bytes, beside, apart)


def share(geometry: KVCacheConfig, budget: ArenaBudget, layout: SlabLayout) -> KVCacheConfig:
    """Return the sizes of a rank whose blocks and snapshots share an arena instead of a fixed split."""
    return replace(
        geometry,
        blocks=layout.blocks,
        snapshot_slots=layout.slabs,
        slabs=layout,
        slab_bytes=budget.slab_bytes(layout.blocks_per_slab),
        apart_slots=budget.apart_slots,
    )


def _live_states(model: ModelMemory, batching: BatchingConfig, cache: CacheConfig) -> int:
    if not model.state_bytes:
        return 0
    if not batching.has_input_buffers:
        return batching.effective_max_requests
    return batching.effective_max_requests + SPARE_STATES + (ASYNC_STATES if _async_snapshots(model, cache) else 0)


def _async_snapshots(model: ModelMemory, cache: CacheConfig) -> bool:
    """Return whether steps may be launched asynchronously and leave snapshots; never with speculation."""
    return (
        cache.policy is not None
        and 0 not in (cache.snapshot_slots, cache.snapshot_buffer_gb)
        and (not model.speculative_tokens)
    )


def async_states(live_states: int, requests: int) -> int:
    """Return how many of a `KVCacheConfig`'s `live_states` are for steps launched asynchronously."""
    return max(0, live_states - requests - SPARE_STATES)


def kernel_chunk(model_chunk: int, device_type: str) -> int:
    """Return the maximum tokens of a recurrent layer's chunk: the model's chunk, or less if that is faster (HY-12).

    It is independent of the block size: a chunk ends at a block boundary only if a state is needed there.
    """
    return min(model_chunk, FASTEST_CHUNK.get(device_type, model_chunk))


def _shortest_hit(model: ModelMemory, cache: CacheConfig, block_size: int, slots: int) -> int | None:
    """Return a block's tokens; with recurrent layers one more, since computing must resume at a block's end."""
    if cache.policy is None or (model.state_bytes and not slots):
        return None
    return block_size + 1 if model.state_bytes else block_size


def _slot_count(
    model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, kv_bytes: int, device_type: str
) -> int:
    """Return the snapshots that fit the budget; the caller limits them to the number of blocks."""
    if not model.state_bytes or cache.policy is None:
        return 0
    if cache.snapshot_slots is not None:
        return cache.snapshot_slots
    if cache.snapshot_buffer_gb is None:
        buffer = int(batching.buffer_gb_on(device_type) * GIB) if batching.block_count is None else kv_bytes
        return max(FEWEST_AUTOMATIC_SLOTS, int(buffer * AUTOMATIC_SNAPSHOT_SHARE) // model.state_bytes)
    budget = int(cache.snapshot_buffer_gb * GIB)
    if cache.snapshot_buffer_gb > 0 and budget < model.state_bytes:
        flag = "--inference-dynamic-batching-prefix-caching-mamba-gb"
        raise ConfigError(
            f"{flag} {cache.snapshot_buffer_gb:g} is too small for one snapshot of {model.state_bytes} bytes; "
            f"it must be at least {_gigabytes(model.state_bytes)}, or 0 for none"
        )
    return budget // model.state_bytes


def _block_count(model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str) -> int:
    """Return the blocks that fit the buffer besides the running states, each with one of layers that draft."""
    if batching.block_count is not None:
        return batching.block_count
    buffer_gb = batching.buffer_gb_on(device_type)
    kv_block_bytes = batching.block_size * (model.kv_bytes_per_token + model.draft.kv_bytes_per_token)
    block_bytes = kv_block_bytes + model.log_prob_bytes
    states = _live_states(model, batching, cache) + batching.effective_max_requests * model.speculative_tokens
    live_bytes = states * model.state_bytes + model.draft.request_bytes(batching.effective_max_requests)
    kv_bytes = int(buffer_gb * GIB) - live_bytes
    if kv_bytes < 2 * block_bytes:  # one is the dummy that padding points to
        drafts = model.speculative_tokens if model.state_bytes else 0
        hint = _included(model.draft != NO_DRAFT_LAYERS)
        hint += ", or fewer --inference-dynamic-batching-max-requests" if live_bytes else ""
        hint += ", or fewer --num-speculative-tokens" if drafts else ""
        each = f", each with {drafts} more after drafts" if drafts else ""
        raise ConfigError(
            f"a buffer of {buffer_gb:g} GB is too small for {live_bytes} bytes of live states "
            f"({batching.effective_max_requests} requests{each}) and {2 * block_bytes} bytes of KV "
            f"(one block and the dummy block); give at least {_gigabytes(live_bytes + 2 * block_bytes)} GB{hint}"
        )
    if kv_block_bytes == 0:  # no attention: blocks take no memory to speak of, so allow enough for all requests
        return batching.effective_max_requests * math.ceil(model.max_sequence_length / batching.block_size)
    return kv_bytes // block_bytes - 1


def described_needs(geometry: KVCacheConfig, activation_bytes: int) -> str:
    """Describe the bytes of the pools, and of the temporary tensors of a full step, for an error."""
    step = f", the largest step {_gigabytes(activation_bytes)} GB" if activation_bytes else ""
    included = _included(geometry.draft_layers is not None)
    return f"KV blocks, live states and snapshots need {_gigabytes(geometry.pool_bytes)} GB{included}{step}"


def _included(has_draft_layers: bool) -> str:
    return " (drafting layers included)" if has_draft_layers else ""


def _gigabytes(count: int) -> str:
    """Format `count` bytes in GB, rounded up so that the number is enough as a setting."""
    return f"{math.ceil(count / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")
