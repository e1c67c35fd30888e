"""The command line's options are an interface: scripts and golden values rely on them."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from arguments import build_parser, build_server_parser
from arguments.flags import normalize_key
from arguments.groups import (
    ACCESS,
    BATCHING,
    CACHE,
    GROUPS,
    KV_EVENTS,
    LIMITS,
    MODEL,
    PARALLEL,
    ROUTING,
    SERVER,
    SERVER_GROUPS,
    SOURCE,
    SPECULATION,
    TOKENIZER,
)
from arguments.help import TASKS
from arguments.megatron.flag_table import SERVER_TABLE, TABLE, records
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.errors import ConfigError
from tests.unit_tests.support.source import ROOT

OPTIONS = """
-h --help
--load --load-hf --hf-overrides --save --model-config --use-checkpoint-args --no-use-checkpoint-args
--override-checkpoint-args --model-provider
--moe-layer-freq --window-attn-skip-freq --padded-vocab-size --generation-config --transformer-impl
--dtype --bf16 --no-bf16 --fp16 --no-fp16 --seed --inference-sampling-seed
--tokenizer-type --tokenizer-model --vocab-file --merge-file --tiktoken-pattern --tiktoken-num-special-tokens
--use-tokenizer-model-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
--chat-template
--spec --hybrid-override-pattern --hybrid-layer-pattern --recurrent-layer
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads
--group-query-attention --no-group-query-attention --num-query-groups --kv-channels
--mamba-state-dim --mamba-head-dim --mamba-num-heads --mamba-num-groups --mamba-inner-size --mamba-dt-rank
--linear-key-head-dim --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads --linear-conv-kernel-dim
--short-conv-kernel-dim
--mtp-num-layers
--mtp-use-repeated-layer
--no-mtp-use-repeated-layer
--mtp-hybrid-override-pattern
--qk-layernorm --no-qk-layernorm --attention-output-gate --no-attention-output-gate --add-qkv-bias --no-add-qkv-bias
--num-experts --moe-ffn-hidden-size --moe-shared-expert-intermediate-size
--moe-shared-expert-gate --no-moe-shared-expert-gate --moe-latent-size
--moe-router-topk --moe-router-score-function --moe-router-num-groups --moe-router-group-topk
--moe-router-pre-softmax --no-moe-router-pre-softmax
--moe-router-topk-scaling-factor --moe-router-enable-expert-bias --no-moe-router-enable-expert-bias
--softmax-type --attention-window --position-embedding-type --rotary-scaling-factor
--yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow --mscale --mscale-all-dim
--yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
--rotary-base --rotary-percent --use-rope-scaling --no-use-rope-scaling --rope-scaling-factor
--normalization --norm-epsilon
--apply-layernorm-1p --no-apply-layernorm-1p --squared-relu --no-squared-relu --swiglu --no-swiglu
--quick-geglu --no-quick-geglu --activation-func-clamp-value --glu-linear-offset
--disable-bias-linear --no-disable-bias-linear
--untie-embeddings-and-output-weights --no-untie-embeddings-and-output-weights
--max-position-embeddings --vocab-size
--tensor-model-parallel-size --pipeline-model-parallel-size --expert-model-parallel-size
--expert-tensor-parallel-size --num-layers-in-first-pipeline-stage --num-layers-in-last-pipeline-stage
--distributed-backend --distributed-timeout-minutes --check-ranks --no-check-ranks
--num-tokens-to-generate --temperature --top_k --top_p --min_p --presence-penalty --frequency-penalty
--repetition-penalty --logit-bias --bad-words --response-format --return-log-probs --no-return-log-probs
--skip-prompt-log-probs --no-skip-prompt-log-probs --top-n-logprobs --stop-words --stop-token-ids --termination-id
--ignore-eos --no-ignore-eos --skip-special-tokens --no-skip-special-tokens
--inference-dynamic-batching-track-generated-token-events --no-inference-dynamic-batching-track-generated-token-events
--inference-dynamic-batching-buffer-size-gb --inference-dynamic-batching-block-count
--inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-block-size
--inference-dynamic-batching-max-requests --inference-dynamic-batching-max-tokens --inference-max-seq-length
--max-model-len
--allow-long-max-model-len --no-allow-long-max-model-len
--inference-dynamic-batching-max-prefills-per-step --decode-share --schedule-policy
--schedule-overtake-tokens
--enable-chunked-prefill --no-enable-chunked-prefill
--mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
--operator-backend --pack-weights --no-pack-weights --cpu-weight-quantization
--cuda-graph-impl --inference-dynamic-batching-num-cuda-graphs
--rl-kv-cache-management-mode
--logprobs-mode --inference-dynamic-batching-logprobs-mode
--moe-enable-routing-replay --no-moe-enable-routing-replay
--inference-dynamic-batching-enable-prefix-caching --no-inference-dynamic-batching-enable-prefix-caching
--inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
--inference-dynamic-batching-prefix-caching-eviction-policy
--inference-dynamic-batching-prefix-caching-mamba-gb --inference-dynamic-batching-prefix-caching-mamba-slots
--inference-dynamic-batching-prefix-caching-mamba-mode --inference-dynamic-batching-prefix-caching-provisional-slots
--explain-prefix-cache --no-explain-prefix-cache --prefix-cache-log-probs --no-prefix-cache-log-probs
--prefix-cache-audit
--prefix-cache-dir --prefix-cache-dir-optional --no-prefix-cache-dir-optional --prefix-cache-disk-gb
--prefix-cache-drain-seconds --prefix-cache-load-seconds
--inference-dynamic-batching-prefix-caching-coordinator-policy
--inference-dynamic-batching-prefix-caching-routing-alpha
--speculative-method --num-speculative-tokens
--speculative-ngram-longest --speculative-ngram-shortest --speculative-adaptive --no-speculative-adaptive
--speculative-draft-cost
--prompts --prompt-file --prompt-file-num-truncate --num-tokens-to-prompt --incoming-requests-duration
--ignore-unknown-prompt-fields --no-ignore-unknown-prompt-fields --num-tokens-from-file --no-num-tokens-from-file
--output-path --run-output-path --output-format --output-every-n-results --record-throughput --no-record-throughput
--throughput-check-only --no-throughput-check-only --output-request-events --no-output-request-events
--inference-repeat-n
--drain-between-batches --no-drain-between-batches --batch-boundaries
--incoming-requests-per-step --incoming-requests-per-sec --inference-logging-step-interval --suspend-resume-interval
--dry-run --no-dry-run --profile
""".split()
# Flags of Megatron's that say what others say; those that set nothing are in docs/megatron.md.
SYNONYM_OPTIONS = """
--pretrained-checkpoint --disable-chunked-prefill --no-disable-chunked-prefill
--use-rotary-position-embeddings --no-use-rotary-position-embeddings --hybrid-attention-ratio --hybrid-mlp-ratio
--window-size --parsers --rl-inference-parsers
--inference-dynamic-batching-max-requests-override
--fp8-as-16bit --no-fp8-as-16bit
""".split()

# Fields that are settings of a checkpoint, of a prompt line or of the library, and have no flag.
WITHOUT_FLAG = {
    "BatchingConfig": {"is_served"},
    "ModelFields": {
        *("mamba_conv_kernel", "mamba_chunk_size", "mamba_inner_norm", "mamba_inner_norm_epsilon"),
        *MULTIPLIERS,
        *("add_attention_output_bias", "add_mlp_bias"),
        *("qk_layernorm_over_heads", "mamba_gated_norm", "mamba_multipliers"),
        *("linear_norm_epsilon", "linear_allow_neg_eigval"),
    },
    "SourceConfig": {"typed", *(field.name for field in dataclasses.fields(TOKENIZER.config))},  # a group of its own
    "RequestParams": {
        *("seed", "min_tokens", "cache_salt", "enable_prefix_caching", "num_speculative_tokens", "cache_checkpoint"),
        "detokenize_stop_sequence",
    },
    # with flags of groups of their own
    "ServerConfig": {"limits", "kv_events", *(field.name for field in dataclasses.fields(ACCESS.config))},
}


SERVER_OPTIONS = """
--host --port --served-model-name --max-waiting-requests --shutdown-timeout --inference-logging-step-interval
--log-level --access-log --no-access-log --strict-fields --no-strict-fields --dry-run --no-dry-run --profile
--kv-events-endpoint --kv-events-topic --kv-events-replay-endpoint
--kv-events-states-endpoint --kv-events-states-replay-endpoint --kv-events-buffer-steps
--max-body-mb --max-connections --header-timeout --body-timeout --idle-timeout --max-schema-kb --grammar-timeout
--responses-store-mb --answers-memory-mb
--api-key --api-key-file --admin-key-file --allowed-hosts --hide-cache-counts --no-hide-cache-counts
--chat-control-tokens --tool-call-parser --reasoning-parser
--cors-allowed-origins --enable-admin-routes --no-enable-admin-routes --weights-root
""".split()
SHARED = (SOURCE, TOKENIZER, MODEL, PARALLEL, BATCHING, CACHE, ROUTING, SPECULATION)


def own_options(parser, table) -> list[str]:
    """Options of a parser, in order, without Megatron's flags that set nothing."""
    others = {flag.name for flag in records(table)}
    return [option for action in parser._actions for option in action.option_strings if option not in others]


def test_the_server_has_the_flags_of_the_model_and_of_the_cache():
    """The server has the flags of all groups that define the model and its execution, but no flags of prompts."""
    options = own_options(build_server_parser(), SERVER_TABLE)
    shared = [option for option in OPTIONS if option in options and option not in SERVER_OPTIONS]
    assert sorted(options) == sorted([*shared, *SERVER_OPTIONS, *SYNONYM_OPTIONS])
    keys = {normalize_key(option.removeprefix("--no-")) for option in shared} | {
        normalize_key(option) for option in shared
    }
    assert {key for group in SHARED for flag in group.flags for key in flag.keys} <= keys


def test_options_are_frozen():
    """A change here breaks scripts: it belongs into CHANGELOG.md."""
    assert sorted(own_options(build_parser(), TABLE)) == sorted([*OPTIONS, *SYNONYM_OPTIONS])


ALL_GROUPS = (*GROUPS, SERVER, KV_EVENTS, LIMITS, ACCESS)


@pytest.mark.parametrize("config", dict.fromkeys(group.config for group in ALL_GROUPS), ids=lambda one: one.__name__)
def test_each_field_has_one_flag(config):
    fields = [flag.field for group in ALL_GROUPS if group.config is config for flag in group.flags]
    assert len(set(fields)) == len(fields)
    expected = {field.name for field in dataclasses.fields(config)}
    assert set(fields) == expected - WITHOUT_FLAG.get(config.__name__, set())


def test_help_shows_the_defaults_of_the_dataclasses():
    helps = {action.option_strings[0]: action.help for action in build_parser()._actions}
    for group in GROUPS:
        for flag in group.flags:
            default = flag.default
            if default is not None and default != ():
                assert helps[flag.option].endswith(f"(default: {default})"), flag.option
    assert "default: 1 on CPU, 40 on CUDA" in helps["--inference-dynamic-batching-buffer-size-gb"]
    assert "default: 2048 on CPU, 16384 on CUDA" in helps["--inference-dynamic-batching-max-tokens"]
    build_parser().format_help()  # a stray % in a help text raises


def help_of(capsys, build, word: str = "") -> str:
    with pytest.raises(SystemExit, match="0"):
        build("megatron-ext x").parse_args([f"--help={word}" if word else "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(("build", "groups"), [(build_parser, GROUPS), (build_server_parser, SERVER_GROUPS)])
def test_the_short_help_fits_four_screens(build, groups, monkeypatch, capsys):
    """PY-16: it has the flags of most users by task, and examples that the parser takes."""
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, build)
    assert len(text.splitlines()) <= 120
    shown = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert 20 <= len(shown) <= 30
    assert set(shown) <= {name for group in groups for flag in group.flags for name in flag.names}
    examples = re.findall(r"^  megatron-ext x (.+)", text, re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        build().parse_args(shlex.split(example))


def test_each_task_of_the_short_help_has_flags():
    keys = {flag.key for group in ALL_GROUPS for flag in group.flags}
    assert [key for task in TASKS.values() for key in task if key not in keys] == []


def test_help_about_a_group_a_word_or_everything(capsys):
    group, word = help_of(capsys, build_parser, "prefix-caching"), help_of(capsys, build_parser, "--max-Requests")
    assert set(re.findall(r"^  (--[\w-]+)", group, re.MULTILINE)) == {flag.option for flag in CACHE.flags}
    assert re.findall(r"^  (--[\w-]+)", word, re.MULTILINE) == ["--inference-dynamic-batching-max-requests"]
    everything = help_of(capsys, build_parser, "all")
    assert [name for name in (*OPTIONS, *SYNONYM_OPTIONS, "--sequence-parallel") if name not in everything] == []
    with pytest.raises(ConfigError, match="--help=nowhere: no flag mentions it; give all or one of weights, "):
        build_parser().parse_args(["--help=nowhere"])


def test_each_flag_that_is_promised_is_there():
    parsers = build_parser(), build_server_parser()
    options = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    pages = ("server", "operating", "monitoring", "proxy", "troubleshooting", "bring_a_model")
    for document in ("SECURITY.md", *(f"docs/{page}.md" for page in pages)):
        assert set(re.findall(r"`(--[a-z-]+)", (ROOT / document).read_text("utf-8"))) <= options, document
