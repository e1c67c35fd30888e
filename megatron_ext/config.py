"""Every setting, in frozen dataclasses. Defaults live here, once; `arguments/` binds them to flags.

A `None` default means "decided later", and the comment says from what.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.errors import ConfigError

LAYER_SYMBOLS = {"M": "Mamba-2", "*": "attention", "-": "MLP", "E": "MoE"}
POSITION_EMBEDDINGS = ("none", "rope", "learned_absolute")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
DTYPES = ("fp32", "bf16", "fp16")


class EvictionPolicyName(str, enum.Enum):
    """What happens to cached blocks that nobody uses (KV-4)."""

    LRU = "lru"  # kept until memory is needed: the least recently used goes first, never a block before its children
    REF_ZERO = "ref_zero"  # dropped at once: only requests that overlap in time share


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: what a checkpoint saves and a builder needs. Defaults: a tiny hybrid."""

    hybrid_override_pattern: str = "M-M*M-M-"  # one letter a layer, see LAYER_SYMBOLS
    num_layers: int | None = None  # default: the pattern's length
    hidden_size: int = 256
    ffn_hidden_size: int | None = None  # default: 4 * hidden_size
    num_attention_heads: int = 4
    group_query_attention: bool = False
    num_query_groups: int | None = None  # default: num_attention_heads, or 1 with group_query_attention
    kv_channels: int | None = None  # default: hidden_size // num_attention_heads
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_heads: int | None = None  # default: 2 * hidden_size // mamba_head_dim
    mamba_num_groups: int = 8
    mamba_conv_kernel: int = 4
    mamba_chunk_size: int = 128
    num_experts: int | None = None  # of each E layer
    moe_ffn_hidden_size: int | None = None  # of one expert; default: ffn_hidden_size
    moe_shared_expert_intermediate_size: int | None = None  # default: no shared experts
    moe_latent_size: int | None = None  # width of the routed experts' inputs and outputs; default: hidden_size
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_num_groups: int | None = None  # default: one group
    moe_router_group_topk: int | None = None  # groups that a token may choose from; default: all
    moe_router_topk_scaling_factor: float | None = None  # default: 1
    moe_router_enable_expert_bias: bool = False
    position_embedding_type: str = "none"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False  # of long wavelengths, as Llama 3.1 does it
    rope_scaling_factor: float = 8.0
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-5
    squared_relu: bool = False
    swiglu: bool = False
    disable_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    max_position_embeddings: int = 4096
    vocab_size: int | None = None  # default: the tokenizer's
    spec: tuple[str, str] | None = None  # (module, name) of a stack spec; default: ours

    def __post_init__(self) -> None:
        self._check_pattern()
        self._check_sizes()
        _require(
            self.kv_channels is not None or self.hidden_size % self.num_attention_heads == 0,
            f"hidden size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention heads; "
            "change one of them or give --kv-channels",
        )
        _require(
            self.num_attention_heads % self.query_groups == 0,
            f"{self.num_attention_heads} attention heads cannot be shared by {self.query_groups} query groups; "
            "the groups must divide the heads",
        )
        self._check_rotary()
        self._check_mamba()
        self._check_moe()
        for name, value, allowed in (
            ("position embedding type", self.position_embedding_type, POSITION_EMBEDDINGS),
            ("normalization", self.normalization, NORMALIZATIONS),
            ("router score function", self.moe_router_score_function, ROUTER_SCORE_FUNCTIONS),
        ):
            _require(value in allowed, f"{name} {value!r} is unknown; one of {', '.join(allowed)}")
        epsilon = self.norm_epsilon
        _require(math.isfinite(epsilon) and epsilon > 0, f"--norm-epsilon {epsilon} must be more than zero")
        _require(
            not (self.squared_relu and self.swiglu),
            "--squared-relu and --swiglu contradict each other; give one of them",
        )

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        _require(len(pattern) > 0, "the hybrid pattern is empty; give at least one layer, as in 'M-*-'")
        unknown = sorted(set(pattern) - set(LAYER_SYMBOLS))
        known = ", ".join(f"{symbol} ({name})" for symbol, name in LAYER_SYMBOLS.items())
        _require(not unknown, f"pattern {pattern!r} has unknown letter {''.join(unknown)!r}; known are {known}")
        _require(
            self.num_layers in (None, len(pattern)),
            f"--num-layers {self.num_layers} contradicts --hybrid-override-pattern {pattern!r} "
            f"of {len(pattern)} layers; leave --num-layers out or make them equal",
        )

    def _check_sizes(self) -> None:
        for name, value in self.to_dict().items():
            is_size = isinstance(value, int) and not isinstance(value, bool)
            _require(not is_size or value > 0, f"{_flag(name)} {value} must be positive")

    def _check_rotary(self) -> None:
        factor = self.rope_scaling_factor
        _require(math.isfinite(factor) and factor >= 1, f"--rope-scaling-factor {factor} must be 1 or more")
        _require(
            not self.use_rope_scaling or self.position_embedding_type == "rope",
            f"--use-rope-scaling needs --position-embedding-type rope, not {self.position_embedding_type}",
        )
        share = self.rotary_percent
        _require(0 < share <= 1, f"--rotary-percent {share} must be more than 0 and at most 1: it is a share of a head")
        rotated = int(self.head_channels * share)
        _require(
            self.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0),
            f"--rotary-percent {share} of an attention head of {self.head_channels} rotates {rotated} channels; "
            "rotary embeddings need an even number",
        )

    def _check_mamba(self) -> None:
        if not self.is_hybrid:
            return
        heads, groups = self.mamba_heads, self.mamba_num_groups
        _require(
            heads > 0 and heads % groups == 0,
            f"{heads} Mamba heads cannot be shared by {groups} Mamba groups; the groups must divide the heads "
            "(--mamba-num-heads, --mamba-num-groups)",
        )
        _require(self.mamba_conv_kernel >= 2, f"Mamba convolution window {self.mamba_conv_kernel} must be at least 2")

    def _check_moe(self) -> None:
        pattern, experts, chosen = self.hybrid_override_pattern, self.num_experts, self.moe_router_topk
        if not self.is_moe:
            _require(
                experts is None,
                f"--num-experts {experts} is for MoE layers, and pattern {pattern!r} has none; put an E into it",
            )
            return
        _require(experts is not None, f"pattern {pattern!r} has MoE layers (E), which need --num-experts")
        _require(
            chosen <= experts,
            f"--moe-router-topk {chosen} experts of --num-experts {experts} cannot be chosen; give at most {experts}",
        )
        _require(
            self.disable_bias_linear,
            f"pattern {pattern!r} has MoE layers (E), which have no biases; leave --no-disable-bias-linear out",
        )
        scale = self.moe_router_topk_scaling_factor
        _require(
            scale is None or (math.isfinite(scale) and scale > 0),
            f"--moe-router-topk-scaling-factor {scale} must be more than zero",
        )
        self._check_router_scores()
        self._check_router_groups()

    def _check_router_scores(self) -> None:
        if self.moe_router_score_function != "softmax":
            return
        use_sigmoid = "give --moe-router-score-function sigmoid"
        _require(
            not self.moe_router_enable_expert_bias, f"--moe-router-enable-expert-bias needs sigmoid; {use_sigmoid}"
        )
        _require(
            self.moe_router_topk > 1, f"--moe-router-topk 1 gives every expert the softmax weight 1; {use_sigmoid}"
        )

    def _check_router_groups(self) -> None:
        groups, open_groups = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and open_groups is None:
            return
        given = f"--moe-router-num-groups {groups} and --moe-router-group-topk {open_groups}"
        _require(groups is not None and open_groups is not None, f"{given}: give both or neither")
        experts, chosen = self.num_experts, self.moe_router_topk
        _require(experts % groups == 0, f"{given}: {groups} groups cannot share {experts} experts evenly")
        _require(open_groups <= groups, f"{given}: at most {groups} groups can be open")
        _require(
            open_groups <= chosen <= open_groups * experts // groups,
            f"{given}: {open_groups} groups of {experts // groups} experts give at least {open_groups} and "
            f"at most {open_groups * experts // groups} experts to a token, not --moe-router-topk {chosen}",
        )

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return "E" in self.hybrid_override_pattern

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer carries a recurrent state."""
        return "M" in self.hybrid_override_pattern

    @property
    def layer_count(self) -> int:
        """Layers, of every kind."""
        return len(self.hybrid_override_pattern)

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads)

    @property
    def head_channels(self) -> int:
        """Size of one attention head (D of query, key and value)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width inside one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    def to_dict(self) -> dict:
        """A plain dictionary, as saved with a checkpoint."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class SourceConfig:
    """Where the weights and the tokenizer come from, and in which type they live."""

    load: str | None = None
    load_hf: str | None = None
    save: str | None = None
    model_config: str | None = None  # a YAML file of flags
    tokenizer_type: str | None = None  # "NullTokenizer" or "HuggingFaceTokenizer"; default: what the checkpoint has
    tokenizer_model: str | None = None  # a directory or tokenizer.json
    bf16: bool = False
    fp16: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        _require(
            not (self.load and self.load_hf),
            f"--load {self.load} and --load-hf {self.load_hf} contradict each other; give one of them",
        )
        _require(not (self.bf16 and self.fp16), "--bf16 and --fp16 contradict each other; give one of them")
        _require(0 <= self.seed < 2**63, f"--seed {self.seed} must be between 0 and {2**63 - 1}")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    distributed_backend: str | None = None  # default: nccl on CUDA, gloo elsewhere

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
            size = getattr(self, name)
            _require(size == 1, f"{_flag(name)} {size}: this version runs on one rank; leave it out or give 1")


@dataclass(frozen=True)
class BatchingConfig:
    """Memory and batch limits of the dynamic engine."""

    buffer_size_gb: float | None = None  # default: 1 on CPU, 40 on CUDA
    block_count: int | None = None  # usable KV blocks exactly, in place of buffer_size_gb
    paused_buffer_size_gb: float | None = None  # KV that paused requests may keep; default: no limit
    block_size: int = 64  # tokens
    max_requests: int = 64
    max_tokens: int | None = None  # a step; default: 2048 on CPU, 16384 on CUDA
    max_sequence_length: int | None = None  # default: the model's
    enable_chunked_prefill: bool = True
    conv_states_dtype: str | None = None  # default: the parameters' type
    ssm_states_dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_requests", "max_tokens", "max_sequence_length", "block_count"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name.replace('_', ' ')} {value} must be positive")
        for name in ("buffer_size_gb", "paused_buffer_size_gb"):
            value = getattr(self, name)
            valid = value is None or (math.isfinite(value) and value >= 0)
            _require(valid, f"{name.replace('_', ' ')} {value} must be zero or more")
        _require(
            self.buffer_size_gb is None or self.block_count is None,
            f"--inference-dynamic-batching-buffer-size-gb {self.buffer_size_gb} and "
            f"--inference-dynamic-batching-block-count {self.block_count} contradict each other; give one of them",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= self.max_requests,
            f"--inference-dynamic-batching-max-tokens {self.max_tokens} must be at least "
            f"--inference-dynamic-batching-max-requests {self.max_requests}, so that every running request can decode",
        )
        for name in ("conv_states_dtype", "ssm_states_dtype"):
            value = getattr(self, name)
            _require(value is None or value in DTYPES, f"{name} {value!r} is unknown; one of {', '.join(DTYPES)}")


class SnapshotMode(str, enum.Enum):
    """How the states at a block boundary inside a prompt come to be kept (LA-1)."""

    KERNEL = "kernel"  # out of the middle of a prefill, from the states between kernel chunks
    ALIGN = "align"  # prefill chunks end on the boundary, and the live states are copied


@dataclass(frozen=True)
class CacheConfig:
    """Prefix caching."""

    enable_prefix_caching: bool = True
    eviction_policy: str = EvictionPolicyName.LRU.value
    snapshot_buffer_gb: float | None = None  # GiB; default: a quarter of the buffer, on top of it
    snapshot_slots: int | None = None  # exactly so many instead
    snapshot_mode: str = SnapshotMode.KERNEL.value

    def __post_init__(self) -> None:
        budget, slots = self.snapshot_buffer_gb, self.snapshot_slots
        flag = "--inference-dynamic-batching-prefix-caching-mamba"
        valid_budget = budget is None or (math.isfinite(budget) and budget >= 0)
        _require(valid_budget, f"{flag}-gb {budget} must be zero (no snapshots) or more")
        _require(slots is None or slots >= 0, f"{flag}-slots {slots} must be zero (no snapshots) or more")
        _require(
            budget is None or slots is None,
            f"{flag}-gb {budget} and {flag}-slots {slots} contradict each other; give one of them",
        )
        names = [policy.value for policy in EvictionPolicyName]
        _require(
            self.eviction_policy in names,
            f"eviction policy {self.eviction_policy!r} is unknown; one of {', '.join(names)}",
        )
        modes = [mode.value for mode in SnapshotMode]
        _require(
            self.snapshot_mode in modes, f"{flag}-mode {self.snapshot_mode!r} is unknown; one of {', '.join(modes)}"
        )

    @property
    def is_aligned(self) -> bool:
        """Whether states are kept at the ends of prefill chunks only."""
        return self.snapshot_mode == SnapshotMode.ALIGN.value

    @property
    def policy(self) -> EvictionPolicyName | None:
        """The eviction policy; None if nothing is cached."""
        return EvictionPolicyName(self.eviction_policy) if self.enable_prefix_caching else None


@dataclass(frozen=True)
class RequestParams:
    """What one request asks for: sampling, stopping, log-probs. Greedy by default."""

    num_tokens_to_generate: int = 30
    min_tokens: int = 0  # before them neither the termination token nor a stop word ends the generation
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off, 1 is greedy
    top_p: float = 0.0  # 0 is off
    seed: int | None = None  # default: derived from the run's seed and the request id
    stop_words: tuple[str, ...] = ()
    termination_id: int | None = None  # default: the tokenizer's end-of-document
    ignore_eos: bool = False
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    top_n_logprobs: int = 0
    cache_salt: str | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        count, n = self.num_tokens_to_generate, self.top_n_logprobs
        _require(count >= 1, f"num_tokens_to_generate {count} must be at least 1")
        fewest = self.min_tokens
        _require(
            0 <= fewest <= count,
            f"min_tokens {fewest} must be between 0 and num_tokens_to_generate, which is {count}",
        )
        valid_temperature = math.isfinite(self.temperature) and self.temperature >= 0
        _require(valid_temperature, f"temperature {self.temperature} must be zero (greedy) or more")
        _require(self.top_k >= 0, f"top_k {self.top_k} must be zero (off) or more")
        _require(0 <= self.top_p <= 1, f"top_p {self.top_p} must be between 0 (off) and 1")
        _require(n >= 0, f"top_n_logprobs {n} must be zero (off) or more")
        _require(
            n == 0 or self.return_log_probs,
            f"top_n_logprobs {n} needs return_log_probs; set it or leave top_n_logprobs out",
        )
        is_text = isinstance(self.stop_words, str)
        _require(not is_text, f"stop_words {self.stop_words!r} is one text; give a list of them")
        _require(all(self.stop_words), "a stop word is empty; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, without randomness."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_prompt_log_probs(self) -> bool:
        """Whether the log-probs of the prompt's own tokens are asked for."""
        return self.return_log_probs and not self.skip_prompt_log_probs


@dataclass(frozen=True)
class RunConfig:
    """What `tools/run_inference.py` does with the prompts, and when."""

    prompts: tuple[str, ...] = ()
    prompt_file: str | None = None  # "-" is standard input; default: the shipped prompts
    output_path: str | None = None
    output_request_events: bool = False
    inference_repeat_n: int = 1
    drain_between_batches: bool = False
    batch_boundaries: tuple[int, ...] = ()  # indices of the prompts that start a batch
    incoming_requests_per_step: int | None = None  # default: all at once
    incoming_requests_per_sec: float | None = None  # default: all at once
    inference_logging_step_interval: int = 0  # steps; 0 is no log
    suspend_resume_interval: int = 0  # steps; 0 is never
    prefix_cache_compare: bool = False

    def __post_init__(self) -> None:
        self._check_contradictions()
        rate, per_step, interval = (
            self.incoming_requests_per_sec,
            self.incoming_requests_per_step,
            self.inference_logging_step_interval,
        )
        _require(self.inference_repeat_n >= 1, f"--inference-repeat-n {self.inference_repeat_n} must be at least 1")
        _require(per_step is None or per_step >= 1, f"--incoming-requests-per-step {per_step} must be at least 1")
        valid_rate = rate is None or (math.isfinite(rate) and rate > 0)
        _require(valid_rate, f"--incoming-requests-per-sec {rate} must be more than zero")
        _require(interval >= 0, f"--inference-logging-step-interval {interval} must be zero (no log) or more")
        suspend = self.suspend_resume_interval
        _require(suspend >= 0, f"--suspend-resume-interval {suspend} must be zero (never) or more")
        increasing = all(a < b for a, b in zip(self.batch_boundaries, self.batch_boundaries[1:], strict=False))
        _require(
            increasing and all(index >= 0 for index in self.batch_boundaries),
            f"--batch-boundaries {','.join(map(str, self.batch_boundaries))} must be increasing indices, as in 0,4,8",
        )

    def _check_contradictions(self) -> None:
        alone = "contradict each other; give one of them"
        for one, other in (
            ("prompts", "prompt_file"),
            ("incoming_requests_per_step", "incoming_requests_per_sec"),
            ("drain_between_batches", "incoming_requests_per_step"),
            ("drain_between_batches", "incoming_requests_per_sec"),
        ):
            both = getattr(self, one) and getattr(self, other)
            _require(not both, f"{_flag(one)} and {_flag(other)} {alone}")
        for name, needed in (
            ("drain_between_batches", "batch_boundaries"),
            ("batch_boundaries", "drain_between_batches"),
            ("output_request_events", "output_path"),
        ):
            satisfied = not getattr(self, name) or getattr(self, needed)
            _require(satisfied, f"{_flag(name)} needs {_flag(needed)}; give both or neither")


@dataclass(frozen=True)
class ServerConfig:
    """What `tools/run_server.py` listens on, whom it lets in, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = None  # default: everybody is let in
    served_model_name: str | None = None  # default: the last part of the checkpoint's path
    max_waiting_requests: int = 256
    shutdown_timeout: float = 30.0  # seconds
    inference_logging_step_interval: int = 0  # steps; 0 is no log

    def __post_init__(self) -> None:
        _require(bool(self.host), "--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every network")
        _require(0 <= self.port <= 65535, f"--port {self.port} must be between 0 (any free one) and 65535")
        # Headers are bytes: what lies outside ASCII would depend on the client's encoding.
        key = self.api_key
        is_printable = key is None or (key.isascii() and key.isprintable() and key.strip() == key != "")
        _require(is_printable, "--api-key must be printable ASCII without spaces around it; leave it out to let all in")
        _require(self.served_model_name != "", "--served-model-name is empty; leave it out for the checkpoint's name")
        waiting, timeout = self.max_waiting_requests, self.shutdown_timeout
        _require(waiting >= 0, f"--max-waiting-requests {waiting} must be zero or more")
        valid_timeout = math.isfinite(timeout) and timeout >= 0
        _require(valid_timeout, f"--shutdown-timeout {timeout} must be zero (cancel at once) or more seconds")
        interval = self.inference_logging_step_interval
        _require(interval >= 0, f"--inference-logging-step-interval {interval} must be zero (no log) or more")


@dataclass(frozen=True)
class ServerSettings:
    """Everything that a command line says about a server. `model_overrides` as in `InferenceSettings`."""

    source: SourceConfig = SourceConfig()
    model_overrides: Mapping[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = ParallelConfig()
    batching: BatchingConfig = BatchingConfig()
    cache: CacheConfig = CacheConfig()
    server: ServerConfig = ServerConfig()


@dataclass(frozen=True)
class InferenceSettings:
    """Everything that a command line says about a run.

    `model_overrides` are the fields of `ModelConfig` that were given; a checkpoint's own configuration fills the
    others, the dataclass's defaults what is left.
    """

    source: SourceConfig = SourceConfig()
    model_overrides: Mapping[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = ParallelConfig()
    sampling: RequestParams = RequestParams()
    batching: BatchingConfig = BatchingConfig()
    cache: CacheConfig = CacheConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        _require(
            self.cache.enable_prefix_caching or not self.run.prefix_cache_compare,
            "--no-inference-dynamic-batching-enable-prefix-caching and --prefix-cache-compare contradict each other; "
            "give one of them",
        )
        _require(
            self.sampling.return_log_probs or not self.sampling.skip_prompt_log_probs,
            "--skip-prompt-log-probs says which log-probs to leave out, and none are asked for; give "
            "--return-log-probs too, or leave it out",
        )
