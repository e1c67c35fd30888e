"""Settings that cannot work are refused in one line that names what would; every refusal in `config/` has a case."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math

import pytest

from megatron_ext.config import (
    BatchingConfig,
    CacheConfig,
    InferenceSettings,
    ModelConfig,
    ParallelConfig,
    RequestParams,
    RunConfig,
    ServerConfig,
    ServerSettings,
    SourceConfig,
    TokenizerConfig,
    batching,
    model,
    options,
    request,
    run,
    source,
)
from megatron_ext.config.in_flight import check_version
from megatron_ext.config.kv_events import MAX_BLOCK_TOKENS, KvEventsConfig
from megatron_ext.config.request import ResponseFormat, TokenBiases
from megatron_ext.errors import ConfigError

NAN = math.nan
DELTA = {"recurrent_layer": "gated_delta_net"}
MAMBA1 = {"recurrent_layer": "mamba1"}
MOE = {"hybrid_override_pattern": "M*E", "num_experts": 8}
SIGMOID = MOE | {"moe_router_score_function": "sigmoid"}
EXPERTS = {"expert_model_parallel_size": 2, "check_ranks": True}
GROUPS = SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2}

# class, what is given, and what the message must name.
REFUSED = [
    (ModelConfig, {"hybrid_override_pattern": ""}, ["empty", "M-*-"]),
    (
        ModelConfig,
        {"hybrid_override_pattern": "MX-"},
        ["'MX-'", "'X'", "M (recurrent)", "of one kind, --recurrent-layer", "* (attention)", "- (MLP)"],
    ),
    (ModelConfig, MAMBA1 | {"mamba_inner_size": 0}, ["--mamba-inner-size 0", "positive"]),
    (ModelConfig, MAMBA1 | {"mamba_dt_rank": 0}, ["--mamba-dt-rank 0", "positive"]),
    (ModelConfig, SIGMOID | {"moe_router_pre_softmax": True}, ["--moe-router-pre-softmax", "softmax scores"]),
    (ModelConfig, {"hybrid_override_pattern": "M-", "num_layers": 3}, ["--num-layers 3", "'M-'", "2 layers"]),
    (ModelConfig, {"hybrid_override_pattern": "M" * 4097}, ["4097 layers", "at most 4096"]),
    (ModelConfig, {"hidden_size": 10**9}, ["--hidden-size 1000000000 ", "at most 16777216"]),
    (ModelConfig, {"max_position_embeddings": 10**18}, ["--max-position-embeddings of more than 18 digits"]),
    (ModelConfig, DELTA | {"linear_conv_kernel_dim": 2000}, ["--linear-conv-kernel-dim 2000", "at most 1024"]),
    (ModelConfig, MOE | {"num_experts": 2**19}, ["--num-experts 524288 in each of 1 layers", "at most 262144"]),
    (ModelConfig, {"hidden_size": 0}, ["--hidden-size 0", "positive"]),
    (ModelConfig, {"vocab_size": -5}, ["--vocab-size -5", "positive"]),
    (ModelConfig, {"hidden_size": 10, "num_attention_heads": 4}, ["10", "4 attention heads", "--kv-channels"]),
    (ModelConfig, {"num_attention_heads": 4, "num_query_groups": 3}, ["4 attention heads", "3 query groups"]),
    (ModelConfig, {"num_attention_heads": 4, "num_query_groups": 8}, ["4 attention heads", "8 query groups"]),
    (ModelConfig, {"use_rope_scaling": True}, ["--use-rope-scaling", "--position-embedding-type rope, not none"]),
    (ModelConfig, {"position_embedding_type": "rope", "kv_channels": 5}, ["rotates 5 channels", "even"]),
    (ModelConfig, {"mamba_num_groups": 3}, ["8 Mamba heads", "3 Mamba groups", "--mamba-num-heads"]),
    (ModelConfig, {"mamba_head_dim": 1024}, ["0 Mamba heads"]),
    (ModelConfig, {"mamba_multipliers": (1.0,)}, ["mamba_multipliers (1.0,)", "five numbers above zero"]),
    (ModelConfig, DELTA | {"linear_num_key_heads": 5}, ["--linear-num-key-heads 5", "--linear-num-value-heads 32"]),
    (ModelConfig, {"num_experts": 4}, ["--num-experts 4", "'M-M*M-M-'", "E"]),
    (ModelConfig, {"hybrid_override_pattern": "ME"}, ["'ME'", "--num-experts"]),
    (ModelConfig, MOE | {"moe_router_topk": 9}, ["--moe-router-topk 9", "8"]),
    (ModelConfig, MOE | {"moe_router_enable_expert_bias": True}, ["--moe-router-enable-expert-bias", "sigmoid"]),
    (ModelConfig, MOE | {"moe_shared_expert_gate": True}, ["--moe-shared-expert-gate", "-intermediate-size"]),
    (ModelConfig, MOE | {"moe_router_topk": 1}, ["--moe-router-topk 1", "sigmoid"]),
    (ModelConfig, SIGMOID | {"moe_router_num_groups": 4}, ["--moe-router-num-groups 4", "both or neither"]),
    (ModelConfig, GROUPS | {"moe_router_num_groups": 3}, ["3 groups", "8 experts"]),
    (ModelConfig, GROUPS | {"moe_router_group_topk": 5}, ["at most 4 groups"]),
    (ModelConfig, GROUPS | {"moe_router_topk": 5}, ["--moe-router-group-topk 2"]),
    (ModelConfig, {"apply_layernorm_1p": True, "normalization": "LayerNorm"}, ["--apply-layernorm-1p", "RMSNorm"]),
    (ModelConfig, {"squared_relu": True, "swiglu": True}, ["--squared-relu", "--swiglu"]),
    (SourceConfig, {"load": "a", "load_hf": "b"}, ["--load a", "--load-hf b"]),
    (SourceConfig, {"bf16": True, "fp16": True}, ["--bf16", "--fp16"]),
    (SourceConfig, {"dtype": "float32", "bf16": True}, ["--dtype float32", "--bf16"]),
    (SourceConfig, {"dtype": "bfloat16", "fp16": True}, ["--dtype bfloat16", "--fp16"]),
    (SourceConfig, {"use_checkpoint_args": True}, ["--use-checkpoint-args", "--load or --load-hf"]),
    (
        SourceConfig,
        {"tokenizer_type": "TikTokenizer", "vocab_file": "v.json"},
        ["--vocab-file v.json", "GPT2BPETokenizer", "not TikTokenizer"],
    ),
    (
        ParallelConfig,
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
        ["--expert-tensor-parallel-size 4 must divide --tensor-model-parallel-size 2"],
    ),
    (ParallelConfig, {"num_layers_in_first_pipeline_stage": 2}, ["first-pipeline-stage 2", "-parallel-size 2 or more"]),
    (ParallelConfig, {"num_layers_in_last_pipeline_stage": 2}, ["last-pipeline-stage 2", "leave it out"]),
    (ParallelConfig, EXPERTS, ["--check-ranks and --expert-model-parallel-size 2", "leave --check-ranks out"]),
    (BatchingConfig, {"buffer_size_gb": 0.0, "block_count": 4}, ["buffer-size-gb 0.0", "block-count 4"]),
    (BatchingConfig, {"max_tokens": 8, "max_requests": 9}, ["max-tokens 8", "max-requests 9"]),
    (BatchingConfig, {"num_cuda_graphs": 0}, ["-num-cuda-graphs 0", "or -1 for 16"]),
    (CacheConfig, {"snapshot_slots": 2, "snapshot_buffer_gb": 1.0}, ["-mamba-gb 1.0", "-mamba-slots 2"]),
    (CacheConfig, {"prefix_cache_dir": ""}, ["--prefix-cache-dir is empty", "leave it out"]),
    (CacheConfig, {"prefix_cache_dir": "d", "eviction_policy": "ref_zero"}, ["--prefix-cache-dir d", "ref_zero"]),
    (
        ServerSettings,
        {
            "cache": CacheConfig(enable_prefix_caching=False),
            "server": ServerConfig(kv_events=KvEventsConfig("tcp://127.0.0.1:1")),
        },
        ["--no-inference-dynamic-batching-enable-prefix-caching", "--kv-events-endpoint tcp://127.0.0.1:1"],
    ),
    (
        ServerSettings,
        {
            "batching": BatchingConfig(block_size=MAX_BLOCK_TOKENS + 1),
            "server": ServerConfig(kv_events=KvEventsConfig("tcp://127.0.0.1:1")),
        },
        ["--inference-dynamic-batching-block-size 65537", "--kv-events-endpoint tcp://127.0.0.1:1", "at most 65536"],
    ),
    (SourceConfig, {"hf_overrides": "{}"}, ["--hf-overrides {}", "needs --load-hf"]),
    (RequestParams, {"num_tokens_to_generate": -1}, ["num_tokens_to_generate -1", "zero"]),
    (RequestParams, {"min_tokens": -1}, ["min_tokens -1", "between 0"]),
    (RequestParams, {"min_tokens": 5, "num_tokens_to_generate": 4}, ["min_tokens 5", "which is 4"]),
    (RequestParams, {"num_speculative_tokens": -1}, ["num_speculative_tokens -1", "zero"]),
    (RequestParams, {"top_n_logprobs": -1, "return_log_probs": True}, ["top_n_logprobs -1"]),
    (RequestParams, {"top_n_logprobs": 2}, ["top_n_logprobs 2", "return_log_probs"]),
    (RequestParams, {"stop_words": ("a", "")}, ["stop word is empty"]),
    (RequestParams, {"stop_words": "END"}, ["stop_words 'END'", "list"]),
    (RequestParams, {"bad_words": "END"}, ["bad_words 'END'", "list"]),
    (RequestParams, {"bad_words": (" ",)}, ["bad word is empty"]),
    (RequestParams, {"stop_token_ids": (3, -1)}, ["stop_token_ids -1", "zero or more"]),
    (RequestParams, {"cache_checkpoint": (64, 0)}, ["cache_checkpoint 0", "1 or more"]),
    (RequestParams, {"cache_checkpoint": tuple(range(1, 66))}, ["has 65 positions", "at most 64"]),
    (RequestParams, {"min_tokens": 2, "response_format": {"type": "json_object"}}, ["min_tokens 2", "response_format"]),
    (RequestParams, {"response_format": {"type": "grammar"}}, ["response_format", '"json_object"', '"regex"']),
    (RequestParams, {"response_format": {"type": "json_schema", "json_schema": {}}}, ["response_format", "a schema"]),
    (RequestParams, {"response_format": {"type": "regex"}}, ["response_format", "an expression"]),
    (RequestParams, {"logit_bias": {4: 101}}, ["logit_bias", "101 of token 4", "-100 and 100"]),
    (RequestParams, {"logit_bias": {-4: 1}}, ["logit_bias", "token ids and numbers"]),
    (RequestParams, {"logit_bias": [3]}, ["logit_bias", "token ids and numbers"]),
    (RequestParams, {"logit_bias": {4: True}}, ["logit_bias", "token ids and numbers"]),
    (ServerConfig, {"host": ""}, ["--host", "127.0.0.1"]),
    (ServerConfig, {"api_key": ""}, ["--api-key", "ASCII"]),
    (ServerConfig, {"api_key": " a"}, ["--api-key", "ASCII"]),
    (ServerConfig, {"api_key": "é"}, ["--api-key", "ASCII"]),
    (ServerConfig, {"served_model_name": ("",)}, ["--served-model-name", "empty"]),
    (ServerConfig, {"served_model_name": "a"}, ["--served-model-name", "'a'", "list"]),
    (ServerConfig, {"served_model_name": ("a", "b", "a")}, ["--served-model-name", "twice", "a b a"]),
    (RunConfig, {"prompts": ("a",), "prompt_file": "b"}, ["--prompts", "--prompt-file"]),
    (RunConfig, {"num_tokens_to_prompt": (9, 8)}, ["--num-tokens-to-prompt 9 8", "minimum and the maximum"]),
    (RunConfig, {"num_tokens_to_prompt": (1, 2)}, ["--incoming-requests-per-sec None", "0 synthetic prompts"]),
    (RunConfig, {"drain_between_batches": True}, ["--drain-between-batches", "--batch-boundaries"]),
    (RunConfig, {"batch_boundaries": (0, 2)}, ["--batch-boundaries", "--drain-between-batches"]),
    (RunConfig, {"output_path": "a", "run_output_path": "a"}, ["--run-output-path a", "another"]),
    (RunConfig, {"output_request_events": True}, ["--output-request-events", "--output-path"]),
    (RunConfig, {"num_tokens_from_file": True}, ["--num-tokens-from-file", "--prompt-file"]),
    (RunConfig, {"incoming_requests_per_sec": NAN}, ["--incoming-requests-per-sec nan", "zero or less is all at once"]),
    (
        RunConfig,
        {"batch_boundaries": (0, 4, 4), "drain_between_batches": True},
        ["--batch-boundaries 0,4,4", "increasing"],
    ),
    (RunConfig, {"batch_boundaries": (-1, 4), "drain_between_batches": True}, ["--batch-boundaries -1,4"]),
]


@pytest.mark.parametrize(("kind", "settings", "named"), REFUSED, ids=str)
def test_refused_in_one_line(kind: type, settings: dict, named: list[str]):
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.strip() == message != ""
    for part in named:
        assert part in message


def test_every_refusal_has_a_case(monkeypatch: pytest.MonkeyPatch):
    """Each `require` in these classes refuses at least once above."""
    modules = [batching, model, request, run, source]
    configs = [BatchingConfig, CacheConfig, ModelConfig, RequestParams, RunConfig]
    configs += [InferenceSettings, ServerSettings, SourceConfig, TokenizerConfig]
    calls = {(inspect.getsourcefile(config), line) for config in configs for line in lines_of_require(config)}
    refused = set()

    def noting(condition: bool, message: str) -> None:
        caller = inspect.currentframe().f_back
        if not condition and "self" in caller.f_locals:
            lines = [line for file, line in calls if file == caller.f_code.co_filename and line <= caller.f_lineno]
            refused.add((caller.f_code.co_filename, max(lines)))
        options.require(condition, message)

    for module in modules:
        monkeypatch.setattr(module, "require", noting)
    for kind, settings, _ in REFUSED:
        with pytest.raises(ConfigError):
            kind(**settings)
    assert sorted(calls - refused) == [], "these lines refuse in no case of this test"


def lines_of_require(config: type) -> set[int]:
    """Lines on which a class calls `require`."""
    lines, first = inspect.getsourcelines(config)
    return {
        first + node.lineno - 1
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
    }


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ModelConfig, {"hybrid_override_pattern": "-", "mamba_num_groups": 3}),  # no Mamba layer, no Mamba limits
        (ModelConfig, {"hybrid_override_pattern": "*-", "hidden_size": 10, "kv_channels": 8}),
        (ModelConfig, GROUPS),
        (ModelConfig, {"hybrid_override_pattern": "-" * model.MAX_LAYERS, "vocab_size": model.LARGEST_SIZE}),
        (ModelConfig, {"rotary_base": 2**53}),
        (ParallelConfig, EXPERTS | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        (BatchingConfig, {"buffer_size_gb": 0.0}),  # the budget refuses it, and names a larger number
        (BatchingConfig, {"max_tokens": 9, "max_requests": 9}),
        (RequestParams, {}),
        (RequestParams, {"logit_bias": TokenBiases.of({3: 100.0, 4: -100.0})}),
        (RunConfig, {"batch_boundaries": (0, 4), "drain_between_batches": True}),
        (RunConfig, {"incoming_requests_per_step": 1, "incoming_requests_per_sec": 1.0}),  # steps decide
        (RunConfig, {"prompts": ("a",), "num_tokens_to_prompt": (1, 2)}),  # prompts decide
        (InferenceSettings, {"sampling": RequestParams(return_log_probs=True, skip_prompt_log_probs=True)}),
    ],
    ids=str,
)
def test_accepted(kind: type, settings: dict):
    made = kind(**settings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, None)


@pytest.mark.parametrize(
    "settings", [{"hybrid_override_pattern": "M" * 3_000_000}, {"hidden_size": 10**5000}], ids=["layers", "digits"]
)
def test_absurd_sizes_are_a_short_line(settings: dict):
    """SE-1: the message does not repeat the value, and nothing is computed with it."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**settings)
    assert len(str(caught.value)) < 120


class TestModelConfig:
    def test_defaults_follow_from_other_fields(self):
        model = ModelConfig(hidden_size=64, num_attention_heads=4, mamba_head_dim=16)
        assert (model.query_groups, model.head_channels, model.ffn_size, model.mamba_heads) == (4, 16, 256, 8)
        assert model.layer_count == 8
        assert model.is_hybrid

    def test_group_query_attention_shares_one_group_unless_told_otherwise(self):
        assert ModelConfig(group_query_attention=True).query_groups == 1
        assert ModelConfig(group_query_attention=True, num_query_groups=2).query_groups == 2

    def test_it_comes_back_from_its_dictionary(self):
        model = ModelConfig(num_experts=None, hidden_size=512, spec=("module", "name"))
        assert ModelConfig(**model.to_dict()) == model


class TestRequestParams:
    @pytest.mark.parametrize(
        ("settings", "greedy"),
        [({}, True), ({"temperature": 1.0}, False), ({"temperature": 1.0, "top_k": 1}, True), ({"top_p": 0.5}, True)],
        ids=str,
    )
    def test_greedy(self, settings: dict, greedy: bool):
        assert RequestParams(**settings).is_greedy is greedy


def test_sizes_of_mamba1_layers():
    """M1-1: heads and groups are Mamba-2's alone; what is not given follows from the hidden size."""
    config = ModelConfig(recurrent_layer="mamba1", hidden_size=100, mamba_num_groups=3)
    assert (config.mamba_channels, config.dt_rank, config.inner_norm_epsilon) == (200, 7, 1e-5)


@pytest.mark.parametrize(
    ("params", "is_processed"),
    [
        ({"min_p": 0.5}, False),  # greedy: the best token is never cut
        ({"min_p": 0.5, "temperature": 1.0}, True),
        ({"temperature": 1.0}, False),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": TokenBiases.of({3: 1.0})}, True),
        ({"response_format": ResponseFormat("json_object")}, True),
        ({"response_format": ResponseFormat("text")}, False),
    ],
)
def test_options_that_process_logits(params, is_processed):
    """SA-1: rows that nothing is done to are not gathered, and take no part in what shapes the others."""
    assert RequestParams(**params).processes_logits == is_processed


@pytest.mark.parametrize(
    ("pattern", "fields", "positions"),
    [
        ("*-", {}, 100),
        ("M-P-", {}, 100),
        ("M-M-", {}, None),
        ("*-", {"position_embedding_type": "none"}, None),
        ("M-M-", {"position_embedding_type": "learned_absolute"}, 100),
        ("*-", {"use_rope_scaling": True}, 65536),
        ("*-", {"yarn_rotary_scaling_factor": 1.5, "yarn_original_max_position_embeddings": 60}, 100),
    ],
)
def test_positions_limit_models_whose_layers_depend_on_them(pattern: str, fields: dict, positions: int | None):
    """MF-1."""
    fields = {"position_embedding_type": "rope", "max_position_embeddings": 100} | fields
    assert ModelConfig(hybrid_override_pattern=pattern, **fields).positions == positions


@pytest.mark.parametrize(
    ("share", "block", "beside", "on_server"),
    [(None, 64, None, 224), (0.02, 64, 224, 224), (0.0, 64, None, None), (0.5, 512, 512, 512)],
)
def test_prefill_tokens_beside_decodes(share, block, beside, on_server):
    """SC-4: at least a block; without a share only on a server; on CUDA there is no bound yet."""
    settings = BatchingConfig(decode_share=share, block_size=block)
    served = ServerSettings(batching=settings).batching
    assert (settings.prefill_tokens_beside_on("cpu"), served.prefill_tokens_beside_on("cpu")) == (beside, on_server)
    assert served.prefill_tokens_beside_on("cuda") is None
    assert served.decode_share == share


@pytest.mark.parametrize("version", [-1, 2**53, True, 1.0])
def test_versions_of_weights(version):
    """RL-2: every reader of JSON keeps the largest."""
    for accepted in (None, 0, 2**53 - 1):
        check_version(accepted)
    with pytest.raises(ConfigError, match=r"weights_version .* must be an integer from 0 to 9007199254740991"):
        check_version(version)
