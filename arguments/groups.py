"""All flags of the command line, in the groups of `--help`."""

from __future__ import annotations

from collections.abc import Mapping

from arguments.flags import Flag, FlagGroup, option_flags
from arguments.routing_group import ROUTING
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
    SOFTMAX_TYPES,
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
    LOGPROBS_MODES,
    MAX_DECODE_SHARE,
    OPERATOR_BACKENDS,
    PREFILL_TOKENS_BESIDE_DECODES,
    SUSPEND_LEVELS,
    WEIGHT_QUANTIZATIONS,
)
from megatron_ext.config.layers import YARN
from megatron_ext.config.options import flags_of

_BATCHING = "--inference-dynamic-batching"


def _by_device(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.10g} on {device.upper()}" for device, number in numbers.items())


MODEL = FlagGroup(
    "model (random weights if no checkpoint is given)",
    ModelConfig,
    (
        Flag("spec", "Module and name of a layer spec; default: this package's spec", metavar=("MODULE", "NAME")),
        Flag(
            "hybrid_override_pattern",
            "One letter per layer: " + ", ".join(f"{symbol} {name}" for symbol, name in LAYER_SYMBOLS.items()),
            aliases=("--hybrid-layer-pattern",),
            metavar="PATTERN",
        ),
        Flag("recurrent_layer", "Kind of recurrent layer that M stands for in the pattern", choices=RECURRENT_LAYERS),
        Flag("num_layers", "Number of layers; default: the length of the pattern"),
        Flag("hidden_size", "Hidden size of the model"),
        Flag("ffn_hidden_size", "Intermediate size of an MLP; default: 4 * hidden size"),
        Flag("num_attention_heads", "Number of query heads of an attention layer"),
        Flag("group_query_attention", "Use grouped-query attention; one group unless --num-query-groups is given"),
        Flag("num_query_groups", "Number of key/value heads; default: one for each query head"),
        Flag("kv_channels", "Size of an attention head; default: hidden size / attention heads"),
        *(Flag(name, text) for name, text in flags_of(ModelConfig).items()),
        Flag("qk_layernorm", "Normalize each query and key head before the rotary embedding"),
        Flag("attention_output_gate", "Gate attention outputs with a sigmoid of the layer's input"),
        Flag("add_qkv_bias", "Add biases to queries, keys and values"),
        Flag("num_experts", "Number of experts of each MoE layer (E)"),
        Flag("moe_ffn_hidden_size", "Intermediate size of an expert; default: the size of an MLP"),
        Flag(
            "moe_shared_expert_intermediate_size", "Intermediate size of the shared experts; default: no shared experts"
        ),
        Flag("moe_shared_expert_gate", "Gate the shared experts' output with a sigmoid of the layer's input"),
        Flag("moe_latent_size", "Size that tokens are projected to before the experts; default: no projection"),
        Flag("moe_router_topk", "Number of experts that each token is routed to"),
        Flag(
            "moe_router_score_function",
            "Function that turns router logits into expert weights",
            choices=ROUTER_SCORE_FUNCTIONS,
        ),
        Flag("moe_router_num_groups", "Number of expert groups; needs --moe-router-group-topk"),
        Flag("moe_router_group_topk", "Number of groups that a token's experts are chosen from; default: all"),
        Flag("moe_router_pre_softmax", "Apply the softmax to all experts instead of the chosen ones only"),
        Flag("moe_router_topk_scaling_factor", "Scaling factor of the experts' weights; default: 1"),
        Flag(
            "moe_router_enable_expert_bias",
            "Add a bias to each expert's score for the choice, not for its weight; needs sigmoid",
        ),
        Flag("softmax_type", "learnable: attention with a learned sink for each query head", choices=SOFTMAX_TYPES),
        Flag("attention_window", "Number of tokens that a query of a layer W attends to, its own included"),
        Flag(
            "position_embedding_type",
            "Kind of position embedding; yarn is rope with stretched wavelengths",
            choices=(*POSITION_EMBEDDINGS, YARN),
        ),
        Flag(
            "yarn_rotary_scaling_factor",
            "Factor by which yarn stretches wavelengths; default: 1",
            name="--rotary-scaling-factor",
        ),
        Flag("yarn_original_max_position_embeddings", "Maximum length of the model before yarn stretched it"),
        Flag("yarn_beta_fast", "Turns within that length at and above which yarn keeps a wavelength"),
        Flag("yarn_beta_slow", "Turns up to which yarn stretches a wavelength by the whole factor"),
        Flag("yarn_mscale", "Scale of yarn's factor of queries and keys", name="--mscale"),
        Flag("yarn_mscale_all_dim", "Scale of the divisor of that factor", name="--mscale-all-dim"),
        Flag("yarn_correction_range_round_to_int", "Round yarn's range of wavelengths to pairs of channels"),
        Flag("rotary_base", "Base of the rotary wavelengths, with rope"),
        Flag("rotary_percent", "Fraction of each attention head that is rotated, with rope"),
        Flag("use_rope_scaling", "Stretch the long rotary wavelengths as Llama 3.1 does"),
        Flag("rope_scaling_factor", "Factor by which --use-rope-scaling stretches them"),
        Flag("normalization", "Kind of norm", choices=NORMALIZATIONS),
        Flag("norm_epsilon", "Epsilon that norms add to the variance"),
        Flag("apply_layernorm_1p", "Multiply by one plus the weight in norms"),
        Flag("squared_relu", "Use squared ReLU in MLPs"),
        Flag("swiglu", "Use SwiGLU in MLPs"),
        Flag("quick_geglu", "Use a gate of x * sigmoid(1.702 x) in MLPs"),
        Flag("activation_func_clamp_value", "Bound of the inputs of gated MLPs' activations"),
        Flag("glu_linear_offset", "Number added to what the gate of an MLP multiplies"),
        Flag("disable_bias_linear", "Omit the biases of linear layers"),
        Flag("untie_embeddings_and_output_weights", "Give the output layer weights of its own"),
        Flag("max_position_embeddings", "Maximum sequence length of the model in tokens"),
        Flag("vocab_size", "Size of the vocabulary; default: the tokenizer's"),
    ),
)

PARALLEL = FlagGroup(
    "parallelism",
    ParallelConfig,
    (
        Flag("tensor_model_parallel_size", "Number of ranks that each layer is split over"),
        Flag("pipeline_model_parallel_size", "Number of ranks that the stack of layers is split over"),
        Flag("expert_model_parallel_size", "Number of ranks that the experts are distributed over"),
        Flag(
            "expert_tensor_parallel_size",
            "Number of ranks that each expert is split over; default: --tensor-model-parallel-size",
        ),
        Flag(
            "num_layers_in_first_pipeline_stage",
            "Number of layers in the first stage; default: even; the first stages take the remainder",
        ),
        Flag("num_layers_in_last_pipeline_stage", "Number of layers in the last stage; default: even"),
        Flag(
            "distributed_backend",
            "Communication backend of the ranks; default: nccl on CUDA, gloo elsewhere",
            choices=("nccl", "gloo"),
        ),
        Flag("distributed_timeout_minutes", "Minutes that a rank waits for another one before all ranks end"),
        Flag(
            "check_ranks", "Compare the scheduled step of all ranks before each step, and end all ranks if they differ"
        ),
    ),
)

SAMPLING = FlagGroup(
    "sampling (greedy by default; a line of a prompt file overrides these)",
    RequestParams,
    option_flags(RequestParams),
)

BATCHING = FlagGroup(
    "batching",
    BatchingConfig,
    (
        Flag(
            "buffer_size_gb",
            f"GiB of memory for KV blocks and running states; default: {_by_device(DEFAULT_BUFFER_GB)}",
            name=f"{_BATCHING}-buffer-size-gb",
        ),
        Flag("block_count", "Exact number of KV blocks, instead of a buffer size", name=f"{_BATCHING}-block-count"),
        Flag(
            "paused_buffer_size_gb",
            "GiB of KV that paused requests may keep; default: no limit",
            name=f"{_BATCHING}-paused-buffer-size-gb",
        ),
        Flag("block_size", "Tokens per KV block", name=f"{_BATCHING}-block-size"),
        Flag(
            "max_requests",
            f"Maximum number of running requests; default: {DEFAULT_MAX_REQUESTS}, or the tokens of a step if fewer",
            name=f"{_BATCHING}-max-requests",
        ),
        Flag(
            "max_tokens",
            f"Maximum number of tokens in a step; default: {_by_device(DEFAULT_MAX_TOKENS)}",
            name=f"{_BATCHING}-max-tokens",
        ),
        Flag(
            "max_sequence_length",
            "Maximum length of a sequence, prompt and generated tokens together; default: the model's",
            name="--inference-max-seq-length",
            aliases=("--max-model-len",),
        ),
        Flag(
            "allow_long_max_model_len",
            "Allow an --inference-max-seq-length above the model's rotary positions, where its output is likely wrong",
        ),
        Flag(
            "max_prefills_per_step",
            "Maximum number of prompts in prefill per step; 0: no limit; default: on CPU a step starts no further "
            f"prompt once it has {ENOUGH_PREFILL_TOKENS['cpu']} prefill tokens, on CUDA no limit",
            name=f"{_BATCHING}-max-prefills-per-step",
        ),
        Flag(
            "decode_share",
            "Share of their own rate, 0 to "
            f"{MAX_DECODE_SHARE}, that requests which decode keep beside prefills; 0: steps are filled with prefill; "
            f"above 0 steps beside decodes have at most {PREFILL_TOKENS_BESIDE_DECODES['cpu']} prefill tokens on CPU; "
            "default: only this bound on a server, 0 elsewhere",
        ),
        Flag("enable_chunked_prefill", "Split the prefill of a prompt that does not fit a step over several steps"),
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
            "Implementation of attention, convolutions and scans: auto is Triton on CUDA if it can be imported, C++ on "
            "CPUs if it could be compiled, else plain torch (reference); mamba-ssm and flashinfer are libraries for "
            "CUDA",
            choices=OPERATOR_BACKENDS,
        ),
        Flag(
            "pack_weights",
            "On CPUs, compute large linear layers with packed weights, which replace the weights; default: yes, but no "
            "for a model that attach_engine shares, whose weights are then held twice",
        ),
        Flag(
            "cpu_weight_quantization",
            "int8: quantize the weights of linear layers, with a scale for each output and 128 inputs, on CPUs: less "
            "memory and faster decodes, and results that differ (docs/operators.md)",
            choices=WEIGHT_QUANTIZATIONS,
        ),
        Flag(
            "cuda_graph_impl",
            "local: pad steps to fixed sizes and compute them in static buffers, by CUDA graphs on CUDA",
            choices=GRAPH_IMPLS,
        ),
        Flag(
            "num_cuda_graphs",
            "With --cuda-graph-impl local: number of decode batch sizes, up to the maximum of requests; -1: default",
            name=f"{_BATCHING}-num-cuda-graphs",
        ),
        Flag(
            "kv_cache_management_mode",
            "What a suspended engine does with its pools: keep them (persist), move them to host memory and back "
            "(offload), or free them and compute again (recompute)",
            name="--rl-kv-cache-management-mode",
            choices=tuple(SUSPEND_LEVELS),
        ),
        Flag(
            "logprobs_mode",
            "Log-probs of generated tokens: of the model's logits (raw_logprobs), or after "
            "penalties, masks, temperature and filters (processed_logprobs)",
            aliases=(f"{_BATCHING}-logprobs-mode",),
            choices=LOGPROBS_MODES,
        ),
        Flag(
            "moe_enable_routing_replay",
            "Record the experts of each token, routing_indices in the JSON; steps are no CUDA graphs then",
        ),
    ),
)

CACHE = FlagGroup(
    "prefix caching",
    CacheConfig,
    (
        Flag(
            "enable_prefix_caching",
            "Skip the cached prefix of a prompt",
            name=f"{_BATCHING}-enable-prefix-caching",
            aliases=(f"{_BATCHING}-prefix-caching",),
        ),
        Flag(
            "eviction_policy",
            "Eviction of cached blocks that no request uses: least recently used first, when memory is needed (lru), "
            "or at once (ref_zero)",
            name=f"{_BATCHING}-prefix-caching-eviction-policy",
            choices=tuple(policy.value for policy in EvictionPolicyName),
        ),
        Flag(
            "snapshot_buffer_gb",
            "GiB of memory for snapshots of recurrent states; 0: no snapshots; default: blocks and snapshots "
            "share the buffer and a quarter more",
            name=f"{_BATCHING}-prefix-caching-mamba-gb",
        ),
        Flag(
            "snapshot_slots",
            "Number of snapshot slots, instead of GiB",
            name=f"{_BATCHING}-prefix-caching-mamba-slots",
        ),
        Flag(
            "snapshot_mode",
            "Position of a prefill's snapshots: inside its chunks (kernel), or at the ends of chunks cut at block "
            "boundaries (align)",
            name=f"{_BATCHING}-prefix-caching-mamba-mode",
            choices=tuple(mode.value for mode in SnapshotMode),
        ),
        Flag(
            "provisional_slots",
            "Maximum number of opportunistic checkpoints: snapshots that no request asked for, in slots that are free "
            "anyway; 0: none; default: all free slots",
            name=f"{_BATCHING}-prefix-caching-provisional-slots",
        ),
        Flag(
            "explain_prefix_cache",
            "Explain for each request why it skipped no more: where it diverged from the cache, or which entry is gone",
        ),
        Flag(
            "prefix_cache_log_probs",
            "Keep the log-probs of prompt tokens with their cached blocks, so that requests for them skip like others",
        ),
        Flag(
            "audit_interval",
            "Compute every N-th hit once more without the cache, when there is time, and compare the cached entries; "
            "0: never",
            name="--prefix-cache-audit",
        ),
        Flag(
            "audit_dir",
            "Directory for a report of each wrong entry that --prefix-cache-audit finds; default: audits/ in "
            "--prefix-cache-dir",
            name="--prefix-cache-audit-dir",
            metavar="DIR",
        ),
        Flag(
            "prefix_cache_dir",
            "Directory, of a local file system, that keeps the cache's contents for the next start",
            metavar="DIR",
        ),
        Flag(
            "prefix_cache_dir_optional",
            "Go on without --prefix-cache-dir, with a warning, if it cannot be used; default: an error",
        ),
        Flag("prefix_cache_disk_gb", "GiB of the files in --prefix-cache-dir, of each process"),
        Flag(
            "prefix_cache_drain_seconds",
            "Seconds at the end to write the most valuable entries; a second signal ends it",
        ),
        Flag(
            "prefix_cache_load_seconds",
            "Maximum seconds that a request waits for evicted entries to be loaded from the directory; 0: never",
        ),
    ),
)

RUN = FlagGroup(
    "run",
    RunConfig,
    (
        Flag("prompts", "Prompts; default without --prompt-file: the shipped example prompts"),
        Flag("prompt_file", "File of prompts, one JSON object per line; - is standard input", metavar="FILE.jsonl"),
        Flag("prompt_file_num_truncate", "Number of prompts to read from the file; default: all"),
        Flag("num_tokens_to_prompt", "Minimum and maximum length of synthetic prompts in tokens; default: 64 1024"),
        Flag("incoming_requests_duration", "Seconds of --incoming-requests-per-sec synthetic prompts; default: 10"),
        Flag("ignore_unknown_prompt_fields", "Ignore unknown fields of a prompt line"),
        Flag(
            "num_tokens_from_file",
            "Take the number of tokens to generate from each prompt line's chatgpt_output_token_length",
        ),
        Flag("output_path", "Output file of the requests' results, as JSON", metavar="FILE.json"),
        Flag(
            "run_output_path",
            "Output file of the run's counts, as JSON; empty for none; default: FILE.run.json",
            metavar="FILE.json",
        ),
        Flag(
            "output_format",
            "Contents of --output-path: the last pass for Megatron's checker, or all passes and the run's counts",
            choices=OUTPUT_FORMATS,
        ),
        Flag("output_every_n_results", "Write every nth request, and the last one"),
        Flag("record_throughput", "Include the throughput in the results"),
        Flag("throughput_check_only", "Write only the throughput to --output-path"),
        Flag("output_request_events", "With --output-path: include the events of each request"),
        Flag("inference_repeat_n", "Number of passes over the prompts, one after the other"),
        Flag("drain_between_batches", "Submit a batch when all earlier ones have finished; needs --batch-boundaries"),
        Flag("batch_boundaries", "Indices, from 0, of the prompts that start a batch"),
        Flag("incoming_requests_per_step", "Number of prompts to submit before each engine step; default: all at once"),
        Flag(
            "incoming_requests_per_sec",
            "Number of prompts to submit per second; zero or less, and the default: all at once",
        ),
        Flag("inference_logging_step_interval", "Number of steps between two log lines; 0: no log lines"),
        Flag(
            "suspend_resume_interval",
            "Number of steps between suspend and resume, more than a prefill takes; 0: never",
        ),
        Flag("prefix_cache_compare", "Run the prompts with the cache off, then on; exit code 1 if the results differ"),
        Flag("dry_run", "Print bytes of weights, blocks and snapshots, and how many requests fit; load nothing"),
        Flag("profile", "Directory for a trace of the first 100 steps with named phases", metavar="DIR"),
    ),
)

GROUPS = (SOURCE, TOKENIZER, MODEL, PARALLEL, SAMPLING, BATCHING, CACHE, ROUTING, SPECULATION, RUN)
SERVER_GROUPS = (
    SOURCE,
    TOKENIZER,
    MODEL,
    PARALLEL,
    BATCHING,
    CACHE,
    ROUTING,
    SPECULATION,
    SERVER,
    KV_EVENTS,
    LIMITS,
    ACCESS,
)
