"""MF-1: Megatron's flags that are synonyms of ours, and flags that have no effect next to others."""

from __future__ import annotations

import pytest

from arguments import parse_arguments, parse_server_arguments
from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError

GPT = "--model-provider gpt"
MOE_GPT = f"{GPT} --num-layers 4 --num-experts 4"


def upstreams_pattern(count: int, attention: float, mlp: float) -> str:
    """Pattern by the function of the installed megatron-core, which has another name since 0.18."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_allocation import pattern_from_ratios
    except ModuleNotFoundError:
        from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

        return "".join(allocate_layers(count, attention, mlp))
    return pattern_from_ratios(count, attention, mlp)


def parse(argv: str):
    return parse_arguments(argv.split())


@pytest.mark.parametrize(
    ("argv", "field", "expected"),
    [
        ("--disable-chunked-prefill", "batching.enable_chunked_prefill", False),
        ("--enable-chunked-prefill", "batching.enable_chunked_prefill", True),
        ("--use-rotary-position-embeddings", "model_overrides", {"position_embedding_type": "rope"}),
        (
            "--use-rotary-position-embeddings --position-embedding-type rope",
            "model_overrides",
            {"position_embedding_type": "rope"},
        ),
        ("--pretrained-checkpoint a --load b", "source.load", "b"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "model_overrides", {}),
        ("--spec my.specs my_stack", "model_overrides", {"spec": ("my.specs", "my_stack")}),
        ("--hybrid-layer-pattern M-*-", "model_overrides", {"hybrid_override_pattern": "M-*-"}),
        ("--hybrid-layer-pattern M-|*-/M*/M*", "model_overrides", {"hybrid_override_pattern": "M-*-"}),
        (
            "--hybrid-layer-pattern G-G-*-",
            "model_overrides",
            {"hybrid_override_pattern": "M-M-*-", "recurrent_layer": "gated_delta_net"},
        ),
        (f"{GPT} --num-layers 2", "model_overrides", {"hybrid_override_pattern": "*-*-"}),
        ("--num-layers 2", "model_overrides", {"hybrid_override_pattern": "*-*-"}),
        ("--model-provider hybrid --num-layers 2 --load x", "model_overrides", {"num_layers": 2}),
        ("--inference-dynamic-batching-max-requests-override 8", "batching.max_requests", 8),
        (
            "--inference-dynamic-batching-max-requests-override 8 --inference-dynamic-batching-max-requests 4",
            "batching.max_requests",
            4,
        ),
        ("--model-provider hybrid --hybrid-layer-pattern M-", "source.model_provider", "hybrid"),
        ("--inference-dynamic-batching-max-tokens 32", "batching.effective_max_requests", 32),
        ("--num-tokens-to-prompt 64 128 --incoming-requests-per-sec 2", "run.num_tokens_to_prompt", (64, 128)),
    ],
)
def test_understood(argv, field, expected):
    value = parse(argv)
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("", "W-W-W-W-"),
        ("--window-attn-skip-freq 2", "W-*-W-*-"),
        ("--window-attn-skip-freq [0,1,1,0]", "*-W-W-*-"),
        ("--window-attn-skip-freq ([1]*3+[0])", "W-W-W-*-"),
    ],
)
def test_layers_of_a_gpt_with_a_window(flags, pattern):
    """MF-1: --window-size is the tokens before a query; every Nth layer has no window."""
    overrides = parse(f"{GPT} --num-layers 4 --window-size 127,0 {flags}").model_overrides
    assert overrides == {"hybrid_override_pattern": pattern, "attention_window": 128}


def test_a_line_of_gpt_oss():
    """MF-1: the settings of gpt-oss, as a launch script has them."""
    overrides = parse(
        f"{GPT} --num-layers 2 --num-experts 4 --moe-router-topk 2 --position-embedding-type yarn --quick-geglu "
        "--rotary-scaling-factor 32.0 --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32.0 "
        "--yarn-beta-slow 1.0 --mscale 1.0 --mscale-all-dim 0.0 --no-yarn-correction-range-round-to-int "
        "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable --window-size 127,0 "
        "--window-attn-skip-freq 2"
    ).model_overrides
    config = ModelConfig(**overrides)
    assert (config.hybrid_override_pattern, config.attention_window) == ("WE*E", 128)
    assert (config.position_embedding_type, config.yarn_rotary_scaling_factor) == ("rope", 32.0)
    assert not config.yarn_correction_range_round_to_int
    assert (config.quick_geglu, config.glu_linear_offset, config.activation_func_clamp_value) == (True, 1.0, 7.0)
    assert config.softmax_type == "learnable"


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [
        (None, "*E*E*E*E"),
        ("2", "*E*-*E*-"),
        ("[0,1,1,0]", "*-*E*E*-"),
        ("([0]*1+[1]*3)", "*-*E*E*E"),
        ("([0]+[1])*2", "*-*E*-*E"),
    ],
)
def test_layers_of_a_gpt_with_experts(freq, pattern):
    """MF-1: --moe-layer-freq says which layers of a GPT have experts; by default all do."""
    argv = MOE_GPT if freq is None else f"{MOE_GPT} --moe-layer-freq {freq}"
    assert parse(argv).model_overrides == {"hybrid_override_pattern": pattern, "num_experts": 4}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--spec a", "argument --spec: expected 2 arguments, got 'a'"),
        ("--num-tokens-to-prompt 1 x", "argument --num-tokens-to-prompt: '1 x' is not a whole number"),
        (
            "--disable-chunked-prefill --enable-chunked-prefill",
            "--disable-chunked-prefill and --enable-chunked-prefill",
        ),
        ("--use-rotary-position-embeddings --position-embedding-type none", "--position-embedding-type contradict"),
        (
            "--hybrid-layer-pattern MD",
            "pattern 'MD' has a layer 'D', sparse attention over latents, which is not",
        ),
        ("--hybrid-layer-pattern M+", "pattern 'M+' has a layer '+', multi-latent attention, which is not there"),
        ("--hybrid-layer-pattern MG", "pattern 'MG' has M and G; all recurrent layers of a model are of one kind"),
        ("--hybrid-layer-pattern G- --recurrent-layer mamba1", "--recurrent-layer mamba1 contradicts the pattern"),
        (GPT, "--model-provider gpt needs --num-layers, or a checkpoint"),
        (f"{MOE_GPT} --moe-layer-freq [0,1,1]", "--moe-layer-freq [0,1,1] does not fit --num-layers 4; give a number"),
        (f"{MOE_GPT} --moe-layer-freq [0]*2+[2]*2", "--moe-layer-freq [0]*2+[2]*2 does not fit --num-layers 4"),
        (f"{MOE_GPT} --moe-layer-freq [0]*99999", "--moe-layer-freq '[0]*99999' is neither a number of layers nor"),
        (f"{MOE_GPT} --moe-layer-freq open('x')", "is neither a number of layers nor a list of 0 and 1"),
        (f"{GPT} --hybrid-layer-pattern M*", "--model-provider gpt and --hybrid-override-pattern 'M*' contradict"),
        ("--hybrid-mlp-ratio 0.5", "are fractions of --num-layers; give that flag too"),
        (
            "--num-layers 4 --hybrid-mlp-ratio 0.5 --hybrid-attention-ratio 0.6",
            "must be fractions from 0 to 1 with a sum of at most 1",
        ),
        ("--num-layers 4 --hybrid-mlp-ratio -0.5", "must be fractions from 0 to 1"),
        ("--num-layers 400000 --hybrid-mlp-ratio 0.5", "--num-layers 400000 must be from 1 to 4096"),
        (
            "--model-provider hybrid --num-layers 24",
            "--num-layers 24 needs the kinds of its layers; give --hybrid",
        ),
        ("--model-provider bert", "invalid choice: 'bert'"),
        (f"{GPT} --num-layers 2 --window-size 127,1", "--window-size '127,1' must be the tokens before a query and 0"),
        (f"{GPT} --num-layers 2 --window-size 9,0 --attention-window 9", "--attention-window 9 contradict each other"),
        (f"{GPT} --num-layers 2 --window-size 9,0 --window-attn-skip-freq [1]", "does not fit 2 layers; give a number"),
        (f"{GPT} --num-layers 2 --window-size 9,0 --window-attn-skip-freq x", "--window-attn-skip-freq 'x' is neither"),
        ("--hybrid-layer-pattern M* --window-size 9,0", "--window-size 9,0 is for layers of a GPT, and the pattern is"),
    ],
)
def test_refused(argv, expected):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("count", "attention", "mlp"), [(56, 0.08, 0.5), (8, 0.25, 0.0), (10, 0.0, 0.5)])
def test_shares_of_layers_are_allocated_as_upstream_does(count, attention, mlp):
    argv = f"--num-layers {count} --hybrid-attention-ratio {attention} --hybrid-mlp-ratio {mlp} --load x"
    expected = upstreams_pattern(count, attention, mlp)
    assert parse(argv).model_overrides == {"hybrid_override_pattern": expected, "num_layers": count}


@pytest.mark.parametrize(
    ("argv", "reasoning", "tools"),
    [
        ("--parsers deepseek-r1-reasoning qwen3-coder-tool", "think", "qwen3_coder"),
        ("--parsers qwen3-coder-tool --tool-call-parser qwen3_coder", "auto", "qwen3_coder"),
        ("--parsers deepseek-r1-reasoning --tool-call-parser hermes", "think", "hermes"),
    ],
)
def test_parsers_of_answers(argv, reasoning, tools):
    server = parse_server_arguments(argv.split()).server
    assert (server.reasoning_parser, server.tool_call_parser) == (reasoning, tools)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--parsers json", "parsers json must be one of deepseek-r1-reasoning, qwen3-coder-tool"),
        ("--parsers qwen3-coder-tool --tool-call-parser hermes", "--parsers and --tool-call-parser hermes contradict"),
    ],
)
def test_parsers_of_answers_that_are_refused(argv, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_server_arguments(argv.split())


def test_an_empty_name_unsets_the_checkpoint_of_a_file(tmp_path):
    """MF-3: the file's layers make a GPT then, as they do in Megatron."""
    path = tmp_path / "flags.yaml"
    path.write_text("load: a\nuse-checkpoint-args: true\nnum-layers: 2\n")
    flags = ["--model-config", str(path)]
    assert parse_arguments(flags).source.load == "a"
    settings = parse_arguments([*flags, "--load", ""])
    assert settings.source.load is None
    assert settings.model_overrides == {"hybrid_override_pattern": "*-*-"}
    assert settings.start_notes == ("accepted, and without effect here: --use-checkpoint-args",)


@pytest.mark.parametrize(
    ("argv", "idle"),
    [
        ("--skip-prompt-log-probs", "--skip-prompt-log-probs"),
        ("--num-layers 3 --hybrid-layer-pattern M-", "--num-layers"),
        ("--num-layers 2 --hybrid-layer-pattern M- --hybrid-mlp-ratio 0.5", "--hybrid-mlp-ratio"),
        ("--incoming-requests-per-step 32 --incoming-requests-per-sec 5", "--incoming-requests-per-sec"),
        (
            "--drain-between-batches --batch-boundaries 0 --incoming-requests-per-step 3 --incoming-requests-per-sec 5",
            "--incoming-requests-per-step, --incoming-requests-per-sec",
        ),
        ("--incoming-requests-per-step 2 --incoming-requests-per-sec 5 --num-tokens-to-prompt 1 2", ""),
        ("--prompts a --num-tokens-to-prompt 1 2", "--num-tokens-to-prompt"),
        ("--prompt-file-num-truncate 3", "--prompt-file-num-truncate"),
        ("--throughput-check-only", "--throughput-check-only"),
        ("--load a --pretrained-checkpoint b", "--pretrained-checkpoint"),
        ("--moe-layer-freq 2", "--moe-layer-freq"),
        (f"{GPT} --num-layers 4 --moe-layer-freq 2", "--moe-layer-freq"),
        (f"{MOE_GPT} --moe-layer-freq 2", ""),
        ("--use-checkpoint-args", "--use-checkpoint-args"),
        ("--override-checkpoint-args norm-epsilon", "--override-checkpoint-args"),
        ("--rotary-scaling-factor 32 --mscale 1", "--rotary-scaling-factor, --mscale"),
        ("--position-embedding-type yarn --rotary-scaling-factor 32 --hybrid-layer-pattern *-", ""),
        ("--parsers qwen3-coder-tool", "--parsers"),  # a run has no answers
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq"),
        (f"{GPT} --num-layers 2 --window-size=-1,0", "--window-size"),
        ("--load a --window-size 127,0 --window-attn-skip-freq 2", ""),
    ],
)
def test_flags_without_effect_beside_others_are_noted(argv, idle):
    lines = parse(argv).start_notes
    assert lines == ((f"accepted, and without effect here: {idle}",) if idle else ())
