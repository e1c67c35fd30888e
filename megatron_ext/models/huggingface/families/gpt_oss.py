"""gpt-oss checkpoints of Hugging Face, with weights of 16 or 32 bits.

Attention has biases and a sink for each query head, and a sliding window in every second layer, beginning with the
first; rotary embeddings are stretched by YaRN. Every layer has experts, weighted by a softmax over the chosen ones, in
four tensors for all of them: matrices with inputs as rows, whose gate and up projection alternate. The gate's
activation is x * sigmoid(1.702 x); gate and up projection are clamped, and 1 is added to the latter.

OpenAI's own files have experts of 4 bits (MXFP4), which are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.blocks import ROUTED_EXPERT, weights
from megatron_ext.models.huggingface.decoder import (
    ATTENTION_TENSORS,
    DECODER_FIELDS,
    FEED_FORWARD_NORM,
    LETTERS_PER_LAYER,
    decoder_attention,
    decoder_pattern,
    with_attention,
)
from megatron_ext.models.huggingface.expert_routing import local_experts
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields, layer_count, names, positive_number
from megatron_ext.models.huggingface.layer_letters import check_count, listed_letters
from megatron_ext.models.huggingface.tensors import EXPERT, Conversion, Source, TensorTable
from megatron_ext.models.huggingface.windows import WINDOW, window_of

_LETTERS = {"full_attention": "*", "sliding_attention": "W"}
_ROTATION = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_FIELDS = replace(
    DECODER_FIELDS,
    other_names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-5)},
    fixed={**DECODER_FIELDS.fixed, "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    read=DECODER_FIELDS.read | {WINDOW} | names("layer_types num_local_experts num_experts_per_tok swiglu_limit"),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        WINDOW: 128,
        "max_position_embeddings": 131072,
    },
)


def _alternating(rows: Tensor) -> Tensor:
    """Put rows of gate and up projection, which alternate, one after the other: [2 f, ...] -> [2 f, ...]."""
    return torch.cat([rows[::2], rows[1::2]])


def _alternated(rows: Tensor) -> Tensor:
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _conversion(
    rows: Callable[[ModelConfig], int],
    convert: Callable[[Tensor], Tensor],
    revert: Callable[[Tensor], Tensor],
    *,
    is_transposed: bool,
) -> Conversion:
    def converted(parts: Sequence[Tensor], _: ModelConfig) -> Tensor:
        (part,) = parts
        return convert(part.T if is_transposed else part)

    def reverted(ours: Tensor, _: ModelConfig) -> Sequence[Tensor]:
        part = revert(ours)
        return [part.T.contiguous() if is_transposed else part]

    return Conversion(lambda config: [rows(config)], converted, reverted, is_transposed)


def _gated_rows(config: ModelConfig) -> int:
    return 2 * config.expert_ffn_size


_GATE_AND_UP = _conversion(_gated_rows, _alternating, _alternated, is_transposed=True)
_GATE_AND_UP_BIAS = _conversion(_gated_rows, _alternating, _alternated, is_transposed=False)
_DOWN = _conversion(lambda config: config.hidden_size, lambda rows: rows, lambda rows: rows, is_transposed=True)

_EXPERT = f"mlp.experts.{EXPERT}"
_EXPERT_TENSORS = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "mlp.router"}),
    "mlp.router.bias": Source(("mlp.router.bias",)),
    f"{ROUTED_EXPERT}.linear_fc1.weight": Source((f"{_EXPERT}.gate_up_proj",), _GATE_AND_UP),
    f"{ROUTED_EXPERT}.linear_fc1.bias": Source((f"{_EXPERT}.gate_up_proj_bias",), _GATE_AND_UP_BIAS),
    f"{ROUTED_EXPERT}.linear_fc2.weight": Source((f"{_EXPERT}.down_proj",), _DOWN),
    f"{ROUTED_EXPERT}.linear_fc2.bias": Source((f"{_EXPERT}.down_proj_bias",)),
}
_BIASED = ("self_attention.linear_qkv.bias", "self_attention.linear_proj.bias")
_ATTENTION = {
    **{name: replace(one, needs=None) if name in _BIASED else one for name, one in ATTENTION_TENSORS.items()},
    "self_attention.core_attention.softmax_offset": Source(("self_attn.sinks",)),
}


def _mixers(fields: Fields) -> str:
    """Return W for layers with a window, * for others: every second one, unless `layer_types` lists them."""
    count = layer_count(fields)
    if fields.get("layer_types") is None:
        return "".join("*" if index % 2 else "W" for index in range(count))
    letters = listed_letters(fields, "layer_types", _LETTERS)
    check_count(count, letters, "layer_types")
    if "W" in letters and fields.get(WINDOW) is None:
        raise ConfigError(f"config.json: layer_types has 'sliding_attention', and {WINDOW} is null")
    return letters


def _derived(fields: Fields) -> Fields:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = {**fields, "rope_parameters": _ROTATION}
    return {
        **decoder_attention(fields, default_base=150_000),
        **window_of(fields, _mixers(fields)),
        "activation_func_clamp_value": positive_number(fields, "swiglu_limit"),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=_FIELDS,
    pattern=decoder_pattern(_mixers, lambda fields: "E" * layer_count(fields)),
    tensors=TensorTable(
        with_attention(_ATTENTION, {"E": _EXPERT_TENSORS}),
        letters_per_layer=LETTERS_PER_LAYER,
        split={r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)": r"\1.{index}.\2"},
    ),
    constants={
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "disable_bias_linear": False,
    },
    derived=_derived,
    experts=local_experts,
)
