"""Imported Qwen3-Next checkpoints compute what transformers computes, also with warm prompts; and this can fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ext.config import SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import translate
from megatron_ext.models.load import LoadedModel, load_model, save_model
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface import qwen3_next_oracle
from tests.unit_tests.models.huggingface.test_snapshots import excess as engine_excess
from tests.unit_tests.models.huggingface.test_snapshots import play
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

LENGTHS = (1, 3, 64, 65, 300)
NAMES = [shape.name for shape in qwen3_next_oracle.SHAPES]
CPU = torch.device("cpu")


def load_hf(directory: Path, overrides: Mapping[str, object] | None = None) -> LoadedModel:
    return load_model(SourceConfig(load_hf=str(directory)), overrides or {}, device=CPU)


def excess(ours: nn.Module, theirs: nn.Module, length: int = 129) -> float:
    """Largest error of a prompt's logits in units of the tolerance: at most 1 is equal."""
    tokens = oracle.prompt(length, seed=length)
    return oracle.largest_excess(oracle.our_logits(ours, tokens), oracle.their_logits(theirs, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal(name: str, qwens) -> None:
    """LA-2: full forwards and greedy continuations, fp32."""
    theirs, directory = qwens(name)
    ours = load_hf(directory).model
    for length in LENGTHS:
        tokens = oracle.prompt(length, seed=length)
        assert oracle.their_logits(theirs, tokens).std() > 0.3, "flat logits would make this test blind"
        assert qwen3_next_oracle.routing_margin(theirs, tokens) > 1e-5, "rounding alone may choose other experts"
        assert excess(ours, theirs, length) <= 1, length
    tokens = oracle.prompt(20, seed=20)
    generated = oracle.their_greedy(theirs, tokens, 16)
    assert len(set(generated)) > 4, "a loop would make this test blind"
    assert oracle.greedy(lambda t: oracle.our_logits(ours, t), tokens, 16) == generated


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("name", NAMES)
def test_warm_starts_equal_transformers(name: str, mode: str, qwens) -> None:
    """LA-2, HY-3, HY-4, EX-1: an implementation that we did not write computes the whole prompt."""
    theirs, directory = qwens(name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=16, mode=mode, max_requests=8, max_tokens=400)
    assert play(driver) == [0, 96, 64 if mode == "kernel" else 0, 112, 64]  # 64: an opportunistic checkpoint
    for request_id in range(5):
        assert engine_excess(driver, request_id, theirs) <= 1


@pytest.mark.parametrize("which", ["conv", "ssm"])
def test_the_comparison_sees_a_lost_state(which: str, qwens) -> None:
    """Negative control: one layer of all snapshots is zero."""
    theirs, directory = qwens("dense")
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=16, max_tokens=400)
    driver.sight(0, oracle.prompt(100, seed=1))
    getattr(driver.context.snapshots, which)[1] = 0.0
    assert driver.sight(1, oracle.prompt(100, seed=1)) == 96
    assert engine_excess(driver, 0, theirs) <= 1
    assert engine_excess(driver, 1, theirs) > 10


def test_layers(qwens) -> None:
    """Each layer is two letters; experts where the two fields say so."""
    configs = {name: load_hf(qwens(name)[1]).config for name in NAMES}
    assert [config.hybrid_override_pattern for config in configs.values()] == [
        "M-M-M-*-", "*-M-M-", "MEMEME*E", "M-*EM-*-M-",
    ]  # fmt: skip
    dense = configs["dense"]
    assert (dense.recurrent_layer, dense.num_experts, dense.rotary_percent) == ("gated_delta_net", None, 0.25)


def test_imported_checkpoint_saved_and_loaded(qwens, tmp_path: Path) -> None:
    """--load-hf, --save, --load: the same configuration and the same logits."""
    imported = load_hf(qwens("experts")[1])
    save_model(tmp_path / "own", imported)
    loaded = load_model(SourceConfig(load=str(tmp_path / "own")), {}, device=CPU)
    assert loaded.config == imported.config
    tokens = oracle.prompt(65, seed=0)
    assert torch.equal(oracle.our_logits(loaded.model, tokens), oracle.our_logits(imported.model, tokens))


def test_sixteen_bits(qwens) -> None:
    """bf16 parameters, with no more rounding than theirs have."""
    (theirs, directory), tokens = qwens("dense"), oracle.prompt(65, seed=0)
    narrow = load_model(SourceConfig(load_hf=str(directory), bf16=True), {}, device=CPU)
    their_narrow = type(theirs).from_pretrained(directory, dtype=torch.bfloat16).eval()
    assert narrow.dtype is their_narrow.dtype is torch.bfloat16
    exact = oracle.their_logits(theirs, tokens)
    error = (oracle.our_logits(narrow.model, tokens).float() - exact).abs().mean()
    their_error = (oracle.their_logits(their_narrow, tokens).float() - exact).abs().mean()
    assert error < 1.2 * their_error


# Negative controls


def _swap(model: nn.Module, name: str, rows: slice, other: slice) -> None:
    weight = model.get_parameter(name)
    both = weight[rows].clone(), weight[other].clone()
    weight[other], weight[rows] = both


def _in_proj(rows: slice, other: slice):
    return lambda m: _swap(m, "decoder.layers.0.mixer.in_proj.weight", rows, other)


def _filled(name: str, value: float):
    return lambda m: m.get_parameter(name).fill_(value)


QKV_NAME = "decoder.layers.6.self_attention.linear_qkv.weight"
CONTROLS = {  # of shape "experts": rows q [16], k [16], v [48], gate [48], beta [4], alpha [4]
    "q and k": _in_proj(slice(16), slice(16, 32)),
    "v and gate": _in_proj(slice(32, 80), slice(80, 128)),
    "beta and alpha": _in_proj(slice(128, 132), slice(132, 136)),
    "two value heads": _in_proj(slice(32, 44), slice(56, 68)),
    "norm of the gated delta net": _filled("decoder.layers.0.mixer.out_norm.weight", 0.0),
    "norm before it": _filled("decoder.layers.0.norm.weight", 0.0),
    "query and gate of attention": lambda m: _swap(m, QKV_NAME, slice(32), slice(32, 64)),
    "norm of queries": _filled("decoder.layers.6.self_attention.q_layernorm.weight", 0.0),
    "norm of keys": _filled("decoder.layers.6.self_attention.k_layernorm.weight", 0.0),
    "shared experts' gate": _filled("decoder.layers.1.mlp.shared_experts.gate_weight", 0.0),
    "two experts": lambda m: _swap(m, "decoder.layers.1.mlp.router.weight", slice(1), slice(1, 2)),
    "gate and up of an expert": lambda m: _swap(
        m, "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight", slice(24), slice(24, 48)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(control: str, qwens) -> None:
    """Each error is at least ten times the tolerance."""
    theirs, directory = qwens("experts")
    ours = load_hf(directory).model
    assert excess(ours, theirs) <= 1
    CONTROLS[control](ours)
    assert excess(ours, theirs) > 10


@pytest.mark.parametrize(
    "override", [{"rotary_base": 500}, {"rotary_percent": 0.5}, {"norm_epsilon": 1e-2}, {"apply_layernorm_1p": False}]
)
def test_comparison_sees_one_wrong_setting(override: dict, qwens) -> None:
    """Flags win over the checkpoint; these have no weights that could contradict them."""
    theirs, directory = qwens("dense")
    assert excess(load_hf(directory, override).model, theirs) > 10


# Files and fields

FIELDS = qwen3_next_oracle._SMALL | {"model_type": "qwen3_next", "num_experts": 4, "rms_norm_eps": 1e-6}
FIELDS |= {"linear_conv_kernel_dim": 4}
REFUSED = {
    "attention_bias": (True, "attention_bias = True is not supported; supported is False"),
    "hidden_act": ("gelu", "hidden_act = 'gelu' is not supported"),
    "norm_topk_prob": (1, "norm_topk_prob = 1 is not supported; it must be true or false"),
    "num_experts_per_tok": (1, "num_experts_per_tok = 1 is not supported with num_experts = 4; supported are 2 to 4"),
    "layer_types": (
        ["linear_attention", "mamba"],
        "layer_types = .*'mamba'.* must be a list of linear_attention, full",
    ),
    "num_hidden_layers": (0, "num_hidden_layers = 0 is not supported"),
    "mlp_only_layers": ([7], r"mlp_only_layers = \[7\] is not supported; it must be a list of layers, 0 to 3"),
    "linear_num_value_heads": (3, "linear_num_key_heads = 2 is not supported; it must divide linear_num_value_heads"),
    "rope_scaling": ({"rope_type": "linear", "factor": 4.0}, "rope_scaling.rope_type = 'linear' is not supported"),
    "rope_parameters": ({"partial_rotary_factor": 2.0}, "rotary-percent 2.0"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor 0.5 contradicts rope_parameters.partial_rotary_factor 0.25"),
    "quantization_config": ({"bits": 4}, "quantization_config = .* is not supported"),
    "sliding_window": (128, "sliding_window = 128 is not supported"),
    "surprise": (1, "field surprise = 1 is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_not_supported_are_refused(name: str) -> None:
    """Unsupported fields are refused by name, in one line."""
    value, message = REFUSED[name]
    translate(FIELDS)
    with pytest.raises(ConfigError, match=message) as caught:
        translate(FIELDS | {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", ["", "a quarter", [], {"factor": 2}, True, -1, 0, 10**400, float("nan")], ids=repr)
def test_a_share_of_heads_that_is_none_is_one_line(share: object) -> None:
    """SE-1: outside of the objects as well as within."""
    for said in ({"partial_rotary_factor": share}, {"rope_parameters": {"partial_rotary_factor": share}}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor = .* it must be a positive number"):
            translate(FIELDS | said)


def test_older_files_and_what_they_leave_out() -> None:
    """Published files say how often attention comes, and the share outside of any object."""
    older = {name: value for name, value in FIELDS.items() if name not in ("rope_parameters", "head_dim")}
    config = translate(older | {"full_attention_interval": 2, "rope_theta": 10_000_000, "partial_rotary_factor": 0.5})
    assert (config.hybrid_override_pattern, config.head_channels) == ("ME*EME*E", 256)
    assert (config.rotary_base, config.rotary_percent) == (10_000_000, 0.5)
    assert translate(older).rotary_percent == 0.25
    with pytest.raises(ConfigError, match="field num_experts is missing"):
        translate({name: value for name, value in older.items() if name != "num_experts"})


def test_tensors_for_predicting_ahead_are_passed_over(qwen_copy: Path, qwens) -> None:
    """Tensors for predicting ahead are ignored, as by transformers; any other unknown tensor is refused."""
    oracle.edit_weights(qwen_copy, lambda t: t.update({"mtp.fc.weight": torch.ones(3)}))
    assert excess(load_hf(qwen_copy).model, qwens("experts")[0]) <= 1
    oracle.edit_weights(qwen_copy, lambda t: t.update({"model.layers.0.linear_attn.D": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"has unexpected layers\.0\.linear_attn\.D"):
        load_hf(qwen_copy)


def test_a_tensor_of_another_shape_is_named(qwen_copy: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    oracle.edit_weights(qwen_copy, lambda t: t.update({name: torch.ones(9, 32)}))
    with pytest.raises(CheckpointError, match=r"in_proj_ba.weight has shape \(9, 32\).*asks for \(8, 32\)"):
        load_hf(qwen_copy)
