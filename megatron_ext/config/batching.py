"""Engine settings: batch limits, memory, and the prefix cache."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_ext.config.options import option, require, require_options

_BATCHING = "--inference-dynamic-batching"
DTYPES = ("fp32", "bf16", "fp16")
# auto: on CUDA Triton, on CPUs C++ and, for large weights, oneDNN, else plain torch; onednn: for all weights
OPERATOR_BACKENDS = ("auto", "reference", "triton", "onednn")
WEIGHT_QUANTIZATIONS = ("none", "int8")
# Log-probs of generated tokens: of the model's logits, or of the distributions that the tokens were drawn from
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
# Defaults by device type.
DEFAULT_BUFFER_GB = {"cpu": 1.0, "cuda": 40.0}  # GiB
DEFAULT_MAX_TOKENS = {"cpu": 2048, "cuda": 16384}  # per step
DEFAULT_MAX_REQUESTS = 64  # or the maximum of tokens per step, if that is smaller
# Without `max_prefills_per_step`: a step that has this many prefill tokens starts no other prefill; docs/batching.md.
ENOUGH_PREFILL_TOKENS = {"cpu": 64}
# Prefill tokens of a step in which requests decode; see `prefill_tokens_beside_on`, docs/batching.md.
PREFILL_TOKENS_BESIDE_DECODES = {"cpu": 224}
MAX_DISK_GB = 2**14  # GiB of a directory of cache entries
MAX_DECODE_SHARE = 0.95
MAX_OVERTAKE_TOKENS = 2**40
DEFAULT_OVERTAKE_TOKENS = 65_536  # more gained nothing on recorded traces; docs/batching.md
MAX_UNITS = 2**24  # blocks, requests, tokens or slots: each also costs the host some bytes


GRAPH_IMPLS = ("none", "local")
DEFAULT_GRAPHS = 16
# Sizes of the captured graphs of steps with prefills: number of prefills, and their total tokens.
MIXED_STEPS = ((4, 64), (4, 256))


def _by_device(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.10g} on {device.upper()}" for device, number in numbers.items())


class EvictionPolicyName(str, enum.Enum):
    """Policy for cached blocks that no request uses (KV-4)."""

    LRU = "lru"  # kept until memory is needed; the least recently used first, never a block before its children
    REF_ZERO = "ref_zero"  # dropped at once: only requests that overlap in time share


class SchedulePolicy(str, enum.Enum):
    """Order in which waiting requests are admitted (SC-5)."""

    FCFS = "fcfs"  # by arrival
    LPM = "lpm"  # those with the longest cached prefix first, within the overtake budgets of earlier ones


class SnapshotMode(str, enum.Enum):
    """Method to capture the states at a block boundary inside a prompt (LA-1)."""

    KERNEL = "kernel"  # in the middle of a prefill, from the states between kernel chunks
    ALIGN = "align"  # prefill chunks end on the boundary, and the running states are copied


SuspendLevel = Literal["keep", "offload", "drop"]
"""Level of a suspend: the pools stay, go to host memory and come back, or are freed with their contents.

After "drop" the cache is empty, and requests compute their tokens again.
"""
# By the names of Megatron's modes.
SUSPEND_LEVELS: Mapping[str, SuspendLevel] = {"persist": "keep", "offload": "offload", "recompute": "drop"}


@dataclass(frozen=True)
class BatchingConfig:
    """Memory and batch limits of the dynamic engine."""

    buffer_size_gb: float | None = option(
        None,
        f"GiB of memory for KV blocks and running states; default: {_by_device(DEFAULT_BUFFER_GB)}",
        flag=f"{_BATCHING}-buffer-size-gb",
        minimum=0,
    )  # see `buffer_gb_on`
    block_count: int | None = option(
        None,
        "Exact number of KV blocks, instead of a buffer size",
        flag=f"{_BATCHING}-block-count",
        minimum=1,
        maximum=MAX_UNITS,
    )
    paused_buffer_size_gb: float | None = option(
        None,
        "GiB of KV that paused requests may keep; default: no limit",
        flag=f"{_BATCHING}-paused-buffer-size-gb",
        minimum=0,
    )
    block_size: int = option(64, "Tokens per KV block", flag=f"{_BATCHING}-block-size", minimum=1, maximum=MAX_UNITS)
    max_requests: int | None = option(
        None,
        f"Maximum number of running requests; default: {DEFAULT_MAX_REQUESTS}, or the tokens of a step if fewer",
        flag=f"{_BATCHING}-max-requests",
        minimum=1,
        maximum=MAX_UNITS,
    )  # see `effective_max_requests`
    max_tokens: int | None = option(
        None,
        f"Maximum number of tokens in a step; default: {_by_device(DEFAULT_MAX_TOKENS)}",
        flag=f"{_BATCHING}-max-tokens",
        minimum=1,
        maximum=MAX_UNITS,
    )  # see `max_tokens_on`
    max_sequence_length: int | None = option(
        None,
        "Maximum length of a sequence, prompt and generated tokens together; default: the model's",
        flag="--inference-max-seq-length",
        aliases=("--max-model-len",),
        minimum=1,
        maximum=MAX_UNITS,
    )
    allow_long_max_model_len: bool = option(
        False,
        "Allow an --inference-max-seq-length above the model's rotary positions, where its output is likely wrong",
    )
    max_prefills_per_step: int | None = option(
        None,
        "Maximum number of prompts in prefill per step; 0: no limit; default: on CPU a step starts no further "
        f"prompt once it has {ENOUGH_PREFILL_TOKENS['cpu']} prefill tokens, on CUDA no limit",
        flag=f"{_BATCHING}-max-prefills-per-step",
        minimum=0,
        bounds="1 or more, or 0 for no limit",
    )
    decode_share: float | None = option(
        None,
        "Share of their own rate, 0 to "
        f"{MAX_DECODE_SHARE}, that requests which decode keep beside prefills; 0: steps are filled with prefill; "
        f"above 0 steps beside decodes have at most {PREFILL_TOKENS_BESIDE_DECODES['cpu']} prefill tokens on CPU; "
        "default: only this bound on a server, 0 elsewhere",
        minimum=0,
        maximum=MAX_DECODE_SHARE,
        bounds=f"0 (steps are filled with prefill) to {MAX_DECODE_SHARE}",
    )  # see `prefill_tokens_beside_on`
    is_served: bool = False  # whether clients wait for single tokens; see `ServerSettings`
    schedule_policy: str = option(
        SchedulePolicy.FCFS.value,
        "Order of admission of waiting requests: fcfs, by arrival; lpm, those with the longest cached prefix first",
        choices=tuple(policy.value for policy in SchedulePolicy),
    )
    schedule_overtake_tokens: int = option(
        DEFAULT_OVERTAKE_TOKENS,
        "Tokens, of prefills and to be generated, of later requests that a waiting request lets pass under lpm",
        minimum=0,
        maximum=MAX_OVERTAKE_TOKENS,
        bounds=f"0 (no request is overtaken) to {MAX_OVERTAKE_TOKENS}",
    )
    enable_chunked_prefill: bool = option(
        True, "Split the prefill of a prompt that does not fit a step over several steps"
    )
    conv_states_dtype: str | None = option(
        None,
        "Type of Mamba convolution states; default: the parameters' type",
        flag="--mamba-inference-conv-states-dtype",
        choices=DTYPES,
    )
    ssm_states_dtype: str = option(
        "fp32", "Type of Mamba SSM states", flag="--mamba-inference-ssm-states-dtype", choices=DTYPES
    )
    operator_backend: str = option(
        OPERATOR_BACKENDS[0],
        "Implementation of attention, convolutions and scans: auto is Triton on CUDA if it can be imported, C++ on "
        "CPUs if it could be compiled, else plain torch (reference)",
        choices=OPERATOR_BACKENDS,
    )
    pack_weights: bool | None = option(
        None,
        "On CPUs, compute large linear layers with packed weights, which replace the weights; default: yes, but no "
        "for a model that attach_engine shares, whose weights are then held twice",
    )
    cpu_weight_quantization: str = option(
        WEIGHT_QUANTIZATIONS[0],
        "int8: quantize the weights of linear layers, with a scale for each output and 128 inputs, on CPUs: less "
        "memory and faster decodes, and results that differ (docs/operators.md)",
        choices=WEIGHT_QUANTIZATIONS,
    )
    cuda_graph_impl: str = option(
        GRAPH_IMPLS[0],
        "local: pad steps to fixed sizes and compute them in static buffers, by CUDA graphs on CUDA",
        choices=GRAPH_IMPLS,
    )  # off until graphs have run on a GPU; "local" pads steps on a CPU, too
    moe_enable_routing_replay: bool = option(
        False, "Record the experts of each token, routing_indices in the JSON; steps are no CUDA graphs then"
    )
    logprobs_mode: str = option(  # docs/sampling.md
        LOGPROBS_MODES[0],
        "Log-probs of generated tokens: of the model's logits (raw_logprobs), or after "
        "penalties, masks, temperature and filters (processed_logprobs)",
        aliases=(f"{_BATCHING}-logprobs-mode",),
        choices=LOGPROBS_MODES,
    )
    kv_cache_management_mode: str = option(
        "recompute",
        "What a suspended engine does with its pools: keep them (persist), move them to host memory and back "
        "(offload), or free them and compute again (recompute)",
        flag="--rl-kv-cache-management-mode",
        choices=tuple(SUSPEND_LEVELS),
    )
    num_cuda_graphs: int = option(
        DEFAULT_GRAPHS,
        "With --cuda-graph-impl local: number of decode batch sizes, up to the maximum of requests; -1: default",
        flag=f"{_BATCHING}-num-cuda-graphs",
    )

    def __post_init__(self) -> None:
        require_options(self)
        require(
            self.buffer_size_gb is None or self.block_count is None,
            f"--inference-dynamic-batching-buffer-size-gb {self.buffer_size_gb} and "
            f"--inference-dynamic-batching-block-count {self.block_count} contradict each other; give one of them",
        )
        require(
            self.max_tokens is None or self.max_tokens >= self.effective_max_requests,
            f"--inference-dynamic-batching-max-tokens {self.max_tokens} must be at least "
            f"--inference-dynamic-batching-max-requests {self.effective_max_requests}, "
            "so that every running request can decode",
        )
        sizes = self.num_cuda_graphs
        flag = "--inference-dynamic-batching-num-cuda-graphs"
        valid_sizes = sizes == -1 or 1 <= sizes <= MAX_UNITS
        require(valid_sizes, f"{flag} {sizes} must be 1 to {MAX_UNITS}, or -1 for {DEFAULT_GRAPHS}")

    @property
    def suspend_level(self) -> SuspendLevel:
        """Level of a suspend that names none."""
        return SUSPEND_LEVELS[self.kv_cache_management_mode]

    @property
    def has_processed_log_probs(self) -> bool:
        """True if log-probs of generated tokens are of the distributions that the tokens were drawn from."""
        return self.logprobs_mode != LOGPROBS_MODES[0]

    @property
    def overtake_tokens(self) -> int | None:
        """Overtake budget of each request; None if requests are admitted by arrival."""
        return self.schedule_overtake_tokens if self.schedule_policy == SchedulePolicy.LPM.value else None

    @property
    def has_input_buffers(self) -> bool:
        """True if steps are padded and computed in static input buffers, if they fit."""
        return self.cuda_graph_impl != GRAPH_IMPLS[0]

    @property
    def quantizes_weights(self) -> bool:
        """True if the weights of linear layers are quantized."""
        return self.cpu_weight_quantization != WEIGHT_QUANTIZATIONS[0]

    @property
    def graph_sizes(self) -> int:
        """Maximum number of decode batch sizes."""
        return DEFAULT_GRAPHS if self.num_cuda_graphs == -1 else self.num_cuda_graphs

    @property
    def effective_max_requests(self) -> int:
        """Maximum number of running requests; by default not more than a step has tokens."""
        if self.max_requests is not None:
            return self.max_requests
        return min(DEFAULT_MAX_REQUESTS, self.max_tokens or DEFAULT_MAX_REQUESTS)

    def buffer_gb_on(self, device_type: str) -> float:
        """Return the GiB for KV blocks and running state slots."""
        return DEFAULT_BUFFER_GB[device_type] if self.buffer_size_gb is None else self.buffer_size_gb

    def max_tokens_on(self, device_type: str) -> int:
        """Return the maximum tokens of a step: enough for every running request to decode."""
        return self.max_tokens or max(DEFAULT_MAX_TOKENS[device_type], self.effective_max_requests)

    def enough_prefill_tokens_on(self, device_type: str) -> int | None:
        """Return the prefill tokens after which a step starts no other prefill; None if only the budget decides."""
        return None if self.max_prefills_per_step is not None else ENOUGH_PREFILL_TOKENS.get(device_type)

    def prefill_tokens_beside_on(self, device_type: str) -> int | None:
        """Return the maximum prefill tokens of a step in which requests decode; None if only the budget decides.

        A share of 0 lifts the bound; without a share only a server has it. At least a block, so that chunks can end on
        the block grid.
        """
        is_bounded = self.is_served if self.decode_share is None else self.decode_share > 0
        tokens = PREFILL_TOKENS_BESIDE_DECODES.get(device_type) if is_bounded else None
        return None if tokens is None else max(tokens, self.block_size)


@dataclass(frozen=True)
class CacheConfig:
    """Settings of the prefix cache."""

    enable_prefix_caching: bool = option(
        True,
        "Skip the cached prefix of a prompt",
        flag=f"{_BATCHING}-enable-prefix-caching",
        aliases=(f"{_BATCHING}-prefix-caching",),
    )
    eviction_policy: str = option(
        EvictionPolicyName.LRU.value,
        "Eviction of cached blocks that no request uses: least recently used first, when memory is needed (lru), "
        "or at once (ref_zero)",
        flag=f"{_BATCHING}-prefix-caching-eviction-policy",
        choices=tuple(policy.value for policy in EvictionPolicyName),
    )
    snapshot_buffer_gb: float | None = option(
        None,
        "GiB of memory for snapshots of recurrent states; 0: no snapshots; default: blocks and snapshots "
        "share the buffer and a quarter more",
        flag=f"{_BATCHING}-prefix-caching-mamba-gb",
        minimum=0,
        bounds="zero (no snapshots) or more",
    )
    snapshot_slots: int | None = option(
        None,
        "Number of snapshot slots, instead of GiB",
        flag=f"{_BATCHING}-prefix-caching-mamba-slots",
        minimum=0,
        maximum=MAX_UNITS,
        bounds=f"between 0 (no snapshots) and {MAX_UNITS}",
    )
    snapshot_mode: str = option(
        SnapshotMode.KERNEL.value,
        "Position of a prefill's snapshots: inside its chunks (kernel), or at the ends of chunks cut at block "
        "boundaries (align)",
        flag=f"{_BATCHING}-prefix-caching-mamba-mode",
        choices=tuple(mode.value for mode in SnapshotMode),
    )
    provisional_slots: int | None = option(
        None,
        "Maximum number of opportunistic checkpoints: snapshots that no request asked for, in slots that are free "
        "anyway; 0: none; default: all free slots",
        flag=f"{_BATCHING}-prefix-caching-provisional-slots",
        minimum=0,
        maximum=MAX_UNITS,
        bounds=f"between 0 (none) and {MAX_UNITS}",
    )
    explain_prefix_cache: bool = option(
        False,
        "Explain for each request why it skipped no more: where it diverged from the cache, or which entry is gone",
    )  # keeps 4 bytes on the host for each cached token
    prefix_cache_log_probs: bool = option(
        False,
        "Keep the log-probs of prompt tokens with their cached blocks, so that requests for them skip like others",
    )
    audit_interval: int = option(
        0,
        "Compute every N-th hit once more without the cache, when there is time, and compare the cached entries; "
        "0: never",
        flag="--prefix-cache-audit",
        minimum=0,
        maximum=MAX_UNITS,
        bounds=f"between 0 (no audits) and {MAX_UNITS}",
    )
    prefix_cache_dir: str | None = option(
        None, "Directory, of a local file system, that keeps the cache's contents for the next start", metavar="DIR"
    )
    prefix_cache_dir_optional: bool = option(
        False, "Go on without --prefix-cache-dir, with a warning, if it cannot be used; default: an error"
    )
    prefix_cache_disk_gb: float = option(
        16.0, "GiB of the files in --prefix-cache-dir, of each process", above=0, maximum=MAX_DISK_GB
    )
    prefix_cache_drain_seconds: float = option(
        10.0,
        "Seconds at the end to write the most valuable entries; a second signal ends it",
        minimum=0,
        bounds="zero (write nothing) or more seconds",
    )
    prefix_cache_load_seconds: float = option(
        10.0,
        "Maximum seconds that a request waits for evicted entries to be loaded from the directory; 0: never",
        minimum=0,
        bounds="zero (load nothing) or more seconds",
    )

    def __post_init__(self) -> None:
        require_options(self)
        budget, slots = self.snapshot_buffer_gb, self.snapshot_slots
        flag = "--inference-dynamic-batching-prefix-caching-mamba"
        require(
            budget is None or slots is None,
            f"{flag}-gb {budget} and {flag}-slots {slots} contradict each other; give one of them",
        )
        place = self.prefix_cache_dir
        require(place != "", "--prefix-cache-dir is empty; leave it out for a cache that ends with the process")
        require(
            place is None or self.eviction_policy != EvictionPolicyName.REF_ZERO.value,
            f"--prefix-cache-dir {place} and eviction policy ref_zero contradict each other: that policy keeps nothing "
            "to be written; give lru",
        )

    @property
    def is_durable(self) -> bool:
        """True if the contents of the cache are kept between processes."""
        return self.enable_prefix_caching and self.prefix_cache_dir is not None

    @property
    def keeps_log_probs(self) -> bool:
        """True if the log-probs of prompts are kept with their blocks."""
        return self.enable_prefix_caching and self.prefix_cache_log_probs

    @property
    def is_aligned(self) -> bool:
        """True if states are kept at the ends of prefill chunks only."""
        return self.snapshot_mode == SnapshotMode.ALIGN.value

    @property
    def policy(self) -> EvictionPolicyName | None:
        """Eviction policy; None if prefix caching is off."""
        return EvictionPolicyName(self.eviction_policy) if self.enable_prefix_caching else None
