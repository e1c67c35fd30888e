"""MF-5: settings of a model given by both a checkpoint and flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from arguments import parse_arguments
from megatron_ext.config import BatchingConfig, ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.training_args import TrainingFacts
from megatron_ext.models.overrides import fitting_overrides, within_positions

CPU = torch.device("cpu")
GPT = ModelConfig(hybrid_override_pattern="*-*-*-", hidden_size=32, vocab_size=64)
HYBRID = ModelConfig(hybrid_override_pattern="M-M*-", hidden_size=32, mamba_num_groups=1, vocab_size=64)
TRAINED = TrainingFacts(is_gpt=True, vocabulary_rows=64)
WHERE = Path("there")


def fitting(saved: ModelConfig, overrides: dict, trained: TrainingFacts | None = None, **fields: object) -> dict:
    return dict(fitting_overrides(SourceConfig(load="there", **fields), saved, overrides, WHERE, trained))


@pytest.mark.parametrize(("saved", "count"), [(GPT, 3), (GPT, 6), (HYBRID, 5)])
def test_layers_are_counted_in_pairs_or_one_by_one(saved, count):
    assert fitting(saved, {"num_layers": count, "hidden_size": 32}) == {"hidden_size": 32}


@pytest.mark.parametrize(
    ("saved", "count", "message"),
    [
        (GPT, 24, "--num-layers 24 contradicts there, which has 6 layers, or 3 layers of a GPT; leave"),
        (HYBRID, 2, "--num-layers 2 contradicts there, which has 5 layers; leave it out"),
    ],
)
def test_another_count_contradicts(saved, count, message):
    with pytest.raises(ConfigError, match=message):
        fitting(saved, {"num_layers": count})


def test_the_checkpoint_decides_if_it_is_asked_to(caplog):
    flags = {
        "num_layers": 24,
        "hidden_size": 1152,
        "ffn_hidden_size": 128,  # as it is anyway
        "max_position_embeddings": 1024,
        "hybrid_override_pattern": "M-",
        "disable_bias_linear": False,
        "vocab_size": 60,
    }
    kept = fitting(GPT, flags, use_checkpoint_args=True)
    assert kept == {"ffn_hidden_size": 128, "vocab_size": 60}
    assert caplog.messages == [
        "--use-checkpoint-args: there decides over --num-layers 24 (not 3), --hidden-size 1152 (not 32), "
        "--hybrid-override-pattern M- (not *-*-*-), --no-disable-bias-linear (not --disable-bias-linear), "
        "--max-position-embeddings 1024 (not 4096)"
    ]
    caplog.clear()
    fitting(GPT, {"num_layers": 3, "hidden_size": 32}, use_checkpoint_args=True)
    assert caplog.messages == []


ROPE = dataclasses.replace(GPT, position_embedding_type="rope")
YARN = dataclasses.replace(ROPE, yarn_rotary_scaling_factor=4.0)
WINDOWED = dataclasses.replace(GPT, hybrid_override_pattern="W-*-W-", attention_window=128)
LEARNED = dataclasses.replace(GPT, position_embedding_type="learned_absolute")
EXPERTS = dataclasses.replace(GPT, hybrid_override_pattern="*E*E*E", num_experts=4)


def fitting_line(saved: ModelConfig, line: str, kind: str = "load") -> dict:
    settings = parse_arguments([f"--{kind}", "there", *line.split()])
    return dict(fitting_overrides(settings.source, saved, settings.model_overrides, WHERE, None))


@pytest.mark.parametrize(
    ("saved", "line", "message"),
    [
        (ROPE, "--rotary-base 500", "--rotary-base 500 (not 10000) contradicts there; leave it out, or allow the "),
        (ROPE, "--rotary-percent 0.5", "--rotary-percent 0.5 (not 1.0)"),
        (HYBRID, "--norm-epsilon 0.1", "--norm-epsilon 0.1 (not 1e-05)"),
        (ROPE, "--position-embedding-type none", "--position-embedding-type none (not rope)"),
        (GPT, "--use-rotary-position-embeddings", "--use-rotary-position-embeddings (not none)"),
        (ROPE, "--position-embedding-type yarn", "--position-embedding-type yarn (not rope) contradicts"),
        (YARN, "--position-embedding-type rope", "--position-embedding-type rope (not yarn) contradicts"),
        (YARN, "--rotary-scaling-factor 8", "--rotary-scaling-factor 8.0 (not 4.0)"),
        (EXPERTS, "--moe-router-topk 3", "--moe-router-topk 3 (not 2)"),
        (EXPERTS, "--moe-router-score-function sigmoid", "--moe-router-score-function sigmoid (not softmax)"),
        (EXPERTS, "--num-experts 8", "--num-experts 8 (not 4) contradicts there; leave it out, or load"),
        (GPT, "--num-experts 8", "--num-experts 8 (not None) contradicts there; leave it out, or load"),
        (GPT, "--swiglu", "--swiglu (not --no-swiglu) contradicts"),
        (GPT, "--window-size 127,0", "--window-size 127,0 (not -1,-1) contradicts there; leave it out, or load"),
        (WINDOWED, "--window-size 63,0", "--window-size 63,0 (not 127,0) contradicts there; leave it out, or allow"),
        (WINDOWED, "--window-size=-1,0", "--window-size -1,0 (not 127,0) contradicts there; leave it out, or load"),
        (WINDOWED, "--attention-window 64", "--attention-window 64 (not 128)"),
        (GPT, "--hybrid-layer-pattern *-", "--hybrid-layer-pattern *- (not *-*-*-)"),
        (LEARNED, "--max-position-embeddings 128", "--max-position-embeddings 128 (not 4096) contradicts there"),
        (ROPE, "--rotary-base 5 --norm-epsilon 1", "--norm-epsilon 1.0 (not 1e-05), --rotary-base 5 (not 10000) con"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_not_contradicted(saved, line, message):
    """MF-5: an error names the flag as it was typed, and both values; the flag may be allowed to differ."""
    with pytest.raises(ConfigError) as caught:
        fitting_line(saved, line)
    assert str(caught.value).startswith(message)
    _, allows, names = str(caught.value).partition("--override-checkpoint-args ")
    if allows:
        settings = parse_arguments(["--load", "there", *line.split()])
        kept = fitting_line(saved, f"{line} --override-checkpoint-args {names}")
        assert kept == settings.model_overrides
        assert kept == fitting_line(saved, f"{line} --use-checkpoint-args --override-checkpoint-args {names}")
    else:
        name = line.partition("=")[0].split()[0]
        with pytest.raises(ConfigError, match="contradicts there; leave it out, or load another checkpoint"):
            fitting_line(saved, f"{line} --override-checkpoint-args {name.removeprefix('--')}")
    with pytest.raises(ConfigError, match=r"or change its config\.json with --hf-overrides"):
        fitting_line(saved, line, "load-hf")


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (ROPE, "--max-position-embeddings 128 --rotary-base 10000 --group-query-attention --num-query-groups 4"),
        (HYBRID, "--rotary-base 500 --moe-router-topk 8 --linear-key-head-dim 8 --max-position-embeddings 8"),
        (WINDOWED, "--window-size 127,0"),
    ],
)
def test_flags_that_change_no_logit_may_differ(saved, line):
    """Rotary models have no table of positions, and a model without experts has no router."""
    overrides = parse_arguments(["--load", "there", *line.split()]).model_overrides
    assert fitting_line(saved, line) == overrides


def test_yarn_s_settings_have_no_effect_on_other_positions(caplog):
    assert fitting_line(ROPE, "--rotary-scaling-factor 8 --mscale 2") == {}
    assert fitting_line(YARN, "--rotary-scaling-factor 4") == {"yarn_rotary_scaling_factor": 4.0}
    assert "without effect, since the checkpoint's positions are not of type yarn" in caplog.text


def test_only_flags_of_a_model_of_ours_may_be_allowed():
    with pytest.raises(ConfigError, match="rotary-bases is not a flag of a model; did you mean rotary-base"):
        parse_arguments("--load x --override-checkpoint-args rotary-bases".split())
    with pytest.raises(ConfigError, match="--override-checkpoint-args rotary-base is for --load; --hf-overrides"):
        parse_arguments("--load-hf x --override-checkpoint-args rotary_base".split())


def test_an_empty_iteration_is_called_that(tmp_path):
    """MF-5: neither its configuration nor a weight is missed."""
    (tmp_path / "iter_0000100").mkdir()
    for load in (tmp_path, tmp_path / "iter_0000100"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
        with pytest.raises(CheckpointError, match="iter_0000100 is empty: the checkpoint was never written there"):
            load_model(SourceConfig(load=str(load)), {}, device=CPU)


@pytest.mark.parametrize(
    ("decides", "allows", "longest"), [(True, False, 4096), (True, True, 9000), (False, False, 9000)]
)
def test_positions_of_the_checkpoint_decide_over_the_longest_sequence(caplog, decides, allows, longest):
    source = SourceConfig(load="there", use_checkpoint_args=decides)
    batching = BatchingConfig(max_sequence_length=9000, allow_long_max_model_len=allows)
    model = dataclasses.replace(GPT, position_embedding_type="rope")
    assert within_positions(batching, source, model).max_sequence_length == longest
    assert ("4096 positions decide over --inference-max-seq-length 9000" in caplog.text) is (longest == 4096)


def test_layers_with_windows_fit_the_checkpoint(caplog):
    """MF-5: --window-attn-skip-freq is compared with the layers of a GPT that has windows."""
    for line in ("--window-attn-skip-freq 2", "--window-size 127,0 --window-attn-skip-freq [1,0,1]"):
        overrides = parse_arguments(["--load", "there", *line.split()])
        assert fitting_line(WINDOWED, line) == overrides.model_overrides
        assert overrides.start_notes == ()
    for model in (GPT, HYBRID):
        caplog.clear()
        assert fitting_line(model, "--window-attn-skip-freq 3 --moe-layer-freq 2") == {}
        assert caplog.messages == [
            "--moe-layer-freq 2 has no effect: there is not a GPT with experts",
            "--window-attn-skip-freq 3 has no effect: there is not a GPT with windows",
        ]
    for freq in ("1", "3", "[1,0,0]", "[1,0]"):
        with pytest.raises(ConfigError) as caught:
            fitting_line(WINDOWED, f"--window-size 127,0 --window-attn-skip-freq {freq}")
        assert str(caught.value).startswith(
            f"--window-attn-skip-freq {freq} contradicts there, whose layers are W-*-W-"
        )
    caplog.clear()
    assert fitting_line(WINDOWED, "--window-attn-skip-freq 3 --use-checkpoint-args") == {}
    assert caplog.messages == ["--use-checkpoint-args: there decides over --window-attn-skip-freq 3"]


def test_layers_with_experts_fit_the_checkpoint(caplog):
    """MF-5: --moe-layer-freq is compared with the layers of a GPT."""
    saved = dataclasses.replace(GPT, hybrid_override_pattern="*-*E*E", num_experts=4)
    assert fitting(saved, {}, moe_layer_freq="[0,1,1]") == fitting(GPT, {}, moe_layer_freq="[0,1,1]") == {}
    assert fitting(HYBRID, {}, moe_layer_freq="[0,1,1]") == {}
    for freq in ("1", "[0,1]"):
        with pytest.raises(ConfigError, match=r"--moe-layer-freq .* contradicts there, whose layers are \*-\*E\*E"):
            fitting(saved, {}, moe_layer_freq=freq)
    caplog.clear()
    assert fitting(saved, {}, moe_layer_freq="1", use_checkpoint_args=True) == {}
    assert caplog.messages == ["--use-checkpoint-args: there decides over --moe-layer-freq 1"]


@pytest.mark.parametrize(
    ("saved", "trained", "provider", "message"),
    [
        (HYBRID, None, "gpt", r"--model-provider gpt contradicts there, whose layers are M-M\*-; give hybrid"),
        (GPT, TRAINED, "hybrid", "--model-provider hybrid contradicts there, which is a GPT's; give gpt"),
        (GPT, TRAINED, "mamba", "--model-provider mamba contradicts there, which is a GPT's"),
        (GPT, TRAINED, "gpt", None),
        (GPT, None, "gpt", None),
        (GPT, None, "hybrid", None),
        (HYBRID, None, "hybrid", None),
    ],
)
def test_the_provider_fits_the_checkpoint(saved, trained, provider, message):
    if message is None:
        assert fitting(saved, {}, trained, model_provider=provider) == {}
    else:
        with pytest.raises(ConfigError, match=message):
            fitting(saved, {}, trained, model_provider=provider)


def test_rows_of_an_embedding_whose_padding_is_not_kept():
    """TE-6: the number of rows is that stored, not that read."""
    kept = dataclasses.replace(GPT, vocab_size=60)
    assert fitting(GPT, {}, TRAINED, padded_vocab_size=64) == fitting(HYBRID, {}, padded_vocab_size=64) == {}
    assert fitting(kept, {}, TRAINED, padded_vocab_size=64) == {}
    with pytest.raises(ConfigError, match="--padded-vocab-size 60 contradicts there, whose embedding has 64 rows"):
        fitting(kept, {}, TRAINED, padded_vocab_size=60)


def test_rows_without_a_checkpoint():
    """The embedding has them, the tokenizer the ids that it has."""
    source = SourceConfig(tokenizer_type="NullTokenizer", padded_vocab_size=128)
    model = {"hybrid_override_pattern": "*-", "hidden_size": 32}
    loaded = load_model(source, model | {"vocab_size": 100}, device=CPU)
    assert loaded.config.vocab_size == 128
    assert loaded.model.embedding.word_embeddings.weight.shape[0] == 128
    assert loaded.tokenizer.vocab_size == 100
    assert load_model(source, model, device=CPU).tokenizer.vocab_size == 128
    with pytest.raises(ConfigError, match="--vocab-size 129 is more than --padded-vocab-size 128"):
        load_model(source, model | {"vocab_size": 129}, device=CPU)
