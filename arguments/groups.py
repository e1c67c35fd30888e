"""All flags of the command line, in the groups of `--help`."""

from __future__ import annotations

from collections.abc import Mapping

from arguments.flags import Flag, FlagGroup, option_flags
from arguments.server_groups import ACCESS, KV_EVENTS, LIMITS, SERVER
from arguments.source_groups import SOURCE, TOKENIZER
from arguments.speculation_group import SPECULATION
from megatron_ext.config import (
    DTYPES,
    LAYER_SYMBOLS,
    NORMALIZATIONS,
    OUTPUT_FORMATS,
    POSITION_EMBEDDINGS,
    RECURRENT_LAYERS,
    ROUTER_SCORE_FUNCTIONS,
    BatchingConfig,
    CacheConfig,
    EvictionPolicyName,
    ModelConfig,
    ParallelConfig,
    RequestParams,
    RunConfig,
    SnapshotMode,
)
from megatron_ext.config.batching import (
    DEFAULT_BUFFER_GB,
    DEFAULT_MAX_REQUESTS,
    DEFAULT_MAX_TOKENS,
    ENOUGH_PREFILL_TOKENS,
    GRAPH_IMPLS,
    OPERATOR_BACKENDS,
)
from megatron_ext.config.checks import flags_of

_BATCHING = "--inference-dynamic-batching"


def _by_device(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.10g} on {device.upper()}" for device, number in numbers.items())


MODEL = FlagGroup(
    "model (random weights if no checkpoint is given)",
    ModelConfig,
    (
        Flag("spec", "Module and name of a layer spec; default: the package's own", metavar=("MODULE", "NAME")),
        Flag(
            "hybrid_override_pattern",
            "One letter a layer: " + ", ".join(f"{symbol} {name}" for symbol, name in LAYER_SYMBOLS.items()),
            aliases=("--hybrid-layer-pattern",),
            metavar="PATTERN",
        ),
        Flag("recurrent_layer", "What an M in the pattern is", choices=RECURRENT_LAYERS),
        Flag("num_layers", "Layers; default: as many as the pattern has letters"),
        Flag("hidden_size", "Width of the model"),
        Flag("ffn_hidden_size", "Width inside an MLP; default: 4 * hidden size"),
        Flag("num_attention_heads", "Query heads of an attention layer"),
        Flag("group_query_attention", "Share key/value heads; one group unless --num-query-groups says otherwise"),
        Flag("num_query_groups", "Key/value heads; default: one for each query head"),
        Flag("kv_channels", "Size of one attention head; default: hidden size / attention heads"),
        *(Flag(name, text) for name, text in flags_of(ModelConfig).items()),
        Flag("qk_layernorm", "A norm of each query and key head, before they are rotated"),
        Flag("attention_output_gate", "Attention outputs times a sigmoid of the layer's input"),
        Flag("add_qkv_bias", "Biases of queries, keys and values"),
        Flag("num_experts", "Experts of each MoE layer (E)"),
        Flag("moe_ffn_hidden_size", "Width inside one expert; default: that of an MLP"),
        Flag("moe_shared_expert_intermediate_size", "Width inside the shared experts; default: there are none"),
        Flag("moe_shared_expert_gate", "Shared experts' output times a sigmoid of the layer's input"),
        Flag("moe_latent_size", "Width that tokens are projected to for the experts; default: they are not"),
        Flag("moe_router_topk", "Experts that compute a token"),
        Flag("moe_router_score_function", "How router logits become weights", choices=ROUTER_SCORE_FUNCTIONS),
        Flag("moe_router_num_groups", "Groups of experts; with --moe-router-group-topk"),
        Flag("moe_router_group_topk", "Groups that the experts of one token are chosen from; default: all"),
        Flag("moe_router_pre_softmax", "Softmax over all experts, not only over those that are chosen"),
        Flag("moe_router_topk_scaling_factor", "Factor of the experts' weights; default: 1"),
        Flag("moe_router_enable_expert_bias", "A bias of each expert for choosing, not for weighting; needs sigmoid"),
        Flag("position_embedding_type", "How positions are told", choices=POSITION_EMBEDDINGS),
        Flag("rotary_base", "Base of the rotary embeddings' wavelengths, with rope"),
        Flag("rotary_percent", "Share of each attention head that is rotated, with rope"),
        Flag("use_rope_scaling", "Stretch the long wavelengths of rotary embeddings, as Llama 3.1 does"),
        Flag("rope_scaling_factor", "By how much"),
        Flag("normalization", "Kind of norm", choices=NORMALIZATIONS),
        Flag("norm_epsilon", "Added to the variance in norms"),
        Flag("apply_layernorm_1p", "Norms multiply by one plus their weight"),
        Flag("squared_relu", "Squared ReLU in MLPs"),
        Flag("swiglu", "SwiGLU in MLPs"),
        Flag("disable_bias_linear", "Linear layers without bias"),
        Flag("untie_embeddings_and_output_weights", "An output layer with weights of its own"),
        Flag("max_position_embeddings", "Longest sequence of the model, in tokens"),
        Flag("vocab_size", "Entries of the vocabulary; default: the tokenizer's"),
    ),
)

PARALLEL = FlagGroup(
    "parallelism",
    ParallelConfig,
    (
        Flag("tensor_model_parallel_size", "Ranks that share each layer"),
        Flag("pipeline_model_parallel_size", "Ranks that share the stack of layers"),
        Flag("expert_model_parallel_size", "Ranks that share the experts"),
        Flag("expert_tensor_parallel_size", "Ranks that share each expert; default: --tensor-model-parallel-size"),
        Flag(
            "num_layers_in_first_pipeline_stage",
            "Layers of the first stage; default: as many as the others, the first stages one more if they must",
        ),
        Flag("num_layers_in_last_pipeline_stage", "Layers of the last stage; default: as above"),
        Flag(
            "distributed_backend",
            "How ranks talk to each other; default: nccl on CUDA, gloo elsewhere",
            choices=("nccl", "gloo"),
        ),
        Flag("distributed_timeout_minutes", "How long a rank waits for another before all end"),
        Flag("check_ranks", "Compare what ranks are about to compute before each step; a difference ends them"),
    ),
)

SAMPLING = FlagGroup(
    "sampling (greedy unless told otherwise; a line of a prompt file decides over these)",
    RequestParams,
    option_flags(RequestParams),
)

BATCHING = FlagGroup(
    "batching",
    BatchingConfig,
    (
        Flag(
            "buffer_size_gb",
            f"GiB for KV blocks and live states; default: {_by_device(DEFAULT_BUFFER_GB)}",
            name=f"{_BATCHING}-buffer-size-gb",
        ),
        Flag("block_count", "KV blocks, exactly, in place of a buffer size", name=f"{_BATCHING}-block-count"),
        Flag(
            "paused_buffer_size_gb",
            "GiB of KV that paused requests may keep; default: no limit",
            name=f"{_BATCHING}-paused-buffer-size-gb",
        ),
        Flag("block_size", "Tokens in a KV block", name=f"{_BATCHING}-block-size"),
        Flag(
            "max_requests",
            f"Requests that run at the same time; default: {DEFAULT_MAX_REQUESTS}, or the tokens of a step if fewer",
            name=f"{_BATCHING}-max-requests",
        ),
        Flag(
            "max_tokens",
            f"Tokens in a step; default: {_by_device(DEFAULT_MAX_TOKENS)}",
            name=f"{_BATCHING}-max-tokens",
        ),
        Flag(
            "max_sequence_length",
            "Longest sequence, prompt and generated tokens together; default: the model's",
            name="--inference-max-seq-length",
        ),
        Flag(
            "max_prefills_per_step",
            "Prompts that prefill in one step at most, 0: no limit; default: on CPU no other one begins where a step "
            f"has {ENOUGH_PREFILL_TOKENS['cpu']} tokens of prefill, on CUDA no limit",
            name=f"{_BATCHING}-max-prefills-per-step",
        ),
        Flag("enable_chunked_prefill", "Prefill a prompt over several steps where it does not fit one"),
        Flag(
            "conv_states_dtype",
            "Type of Mamba convolution states; default: the parameters' type",
            name="--mamba-inference-conv-states-dtype",
            choices=DTYPES,
        ),
        Flag(
            "ssm_states_dtype",
            "Type of Mamba SSM states",
            name="--mamba-inference-ssm-states-dtype",
            choices=DTYPES,
        ),
        Flag(
            "operator_backend",
            "What computes attention, convolutions and scans: auto is Triton on CUDA where it can be imported, C++ on "
            "CPUs where it was compiled, plain torch (reference) elsewhere",
            choices=OPERATOR_BACKENDS,
        ),
        Flag(
            "cuda_graph_impl",
            "local: pad steps to sizes and compute them by programs in fixed places, which are CUDA graphs on CUDA",
            choices=GRAPH_IMPLS,
        ),
        Flag(
            "num_cuda_graphs",
            "With --cuda-graph-impl local: sizes of decode batches, up to the requests that may run; -1: the default",
            name=f"{_BATCHING}-num-cuda-graphs",
        ),
    ),
)

CACHE = FlagGroup(
    "prefix caching",
    CacheConfig,
    (
        Flag(
            "enable_prefix_caching",
            "Skip the part of a prompt whose KV is cached",
            name=f"{_BATCHING}-enable-prefix-caching",
            aliases=(f"{_BATCHING}-prefix-caching",),
        ),
        Flag(
            "eviction_policy",
            "What happens to cached blocks that no request uses: kept until memory is needed (lru; flops: what saves "
            "more compute for its bytes stays longer, blocks and snapshots), or dropped (ref_zero)",
            name=f"{_BATCHING}-prefix-caching-eviction-policy",
            choices=tuple(policy.value for policy in EvictionPolicyName),
        ),
        Flag(
            "snapshot_buffer_gb",
            "GiB for snapshots of recurrent states; 0 is none; default: a quarter of the buffer, on top of it",
            name=f"{_BATCHING}-prefix-caching-mamba-gb",
        ),
        Flag(
            "snapshot_slots",
            "Number of snapshots, instead of GiB",
            name=f"{_BATCHING}-prefix-caching-mamba-slots",
        ),
        Flag(
            "snapshot_mode",
            "Where a prefill leaves snapshots: inside its chunks, or at their ends, then cut to be block boundaries",
            name=f"{_BATCHING}-prefix-caching-mamba-mode",
            choices=tuple(mode.value for mode in SnapshotMode),
        ),
        Flag(
            "provisional_slots",
            "Snapshots that prefills leave where nobody asked for them, at most, in slots that are free anyway; 0 is "
            "none; default: as many as are free",
            name=f"{_BATCHING}-prefix-caching-provisional-slots",
        ),
        Flag(
            "explain_prefix_cache",
            "Say of each request why it skipped no more: where it parted from what is cached, or what was given up",
        ),
    ),
)

RUN = FlagGroup(
    "run",
    RunConfig,
    (
        Flag("prompts", "Prompts. Without --prompts and --prompt-file: the shipped example prompts"),
        Flag("prompt_file", "Prompts as JSON, one object a line; - is standard input", metavar="FILE.jsonl"),
        Flag("prompt_file_num_truncate", "Read so many prompts of the file; default: all"),
        Flag("num_tokens_to_prompt", "Synthetic prompts of so many tokens at least and at most; default: 64 1024"),
        Flag("incoming_requests_duration", "Seconds of --incoming-requests-per-sec synthetic prompts; default: 10"),
        Flag("ignore_unknown_prompt_fields", "Pass over fields of a prompt line that are not known"),
        Flag("num_tokens_from_file", "Tokens to generate: each prompt line's chatgpt_output_token_length"),
        Flag("output_path", "Where to write the results as JSON", metavar="FILE.json"),
        Flag("output_format", "What the JSON has: everything, or Megatron's keys alone", choices=OUTPUT_FORMATS),
        Flag("output_every_n_results", "Write every nth request, and the last one"),
        Flag("record_throughput", "The JSON has the throughput"),
        Flag("throughput_check_only", "The JSON has the throughput alone"),
        Flag("output_request_events", "With --output-path: the events of each request as well"),
        Flag("inference_repeat_n", "How often to run the same prompts, one time after the other"),
        Flag("drain_between_batches", "Submit a batch when all before it have finished; needs --batch-boundaries"),
        Flag("batch_boundaries", "Indices of the prompts that start a batch, from 0"),
        Flag("incoming_requests_per_step", "Prompts to submit before each engine step; default: all at once"),
        Flag("incoming_requests_per_sec", "Prompts to submit a second; default, and zero or less: all at once"),
        Flag("inference_logging_step_interval", "Steps between two log lines; 0 is none"),
        Flag(
            "suspend_resume_interval",
            "Steps between suspending and resuming; 0 is never; more than a prefill takes",
        ),
        Flag("prefix_cache_compare", "Run the prompts with the cache off, then on; exit code 1 if anything differs"),
        Flag("profile", "Write a trace of the first 100 steps, their phases named, into this directory", metavar="DIR"),
    ),
)

GROUPS = (SOURCE, TOKENIZER, MODEL, PARALLEL, SAMPLING, BATCHING, CACHE, SPECULATION, RUN)
SERVER_GROUPS = (SOURCE, TOKENIZER, MODEL, PARALLEL, BATCHING, CACHE, SPECULATION, SERVER, KV_EVENTS, LIMITS, ACCESS)
