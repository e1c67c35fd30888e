"""Qwen3.5 checkpoints of Hugging Face whose MLPs are mixtures of experts.

Like Qwen3.5, but with experts and a gated shared one (E) in every layer, weighted by a softmax over the chosen ones.
Files store each expert's gate and up projection separately, or all experts of a layer in one tensor, gate above up.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.models.huggingface.blocks import MLP_NORM, ROUTED_EXPERT, SHARED_EXPERTS, gated_mlp, weights
from megatron_ext.models.huggingface.expert_routing import softmax_experts
from megatron_ext.models.huggingface.families.qwen3_5 import QWEN3_5_TEXT, text_fields
from megatron_ext.models.huggingface.fields import Fields, size
from megatron_ext.models.huggingface.gated_delta_net import delta_net_or_attention
from megatron_ext.models.huggingface.tensors import EXPERT, Joined, Source

_EXPERT_SIZES = {
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
_DENSE = QWEN3_5_TEXT.fields

_FIELDS = replace(
    _DENSE,
    sizes={theirs: ours for theirs, ours in _DENSE.sizes.items() if theirs != "intermediate_size"},
    # No layer is a plain MLP of `intermediate_size`.
    read=_DENSE.read | {"num_experts", "num_experts_per_tok", "intermediate_size", *_EXPERT_SIZES},
    defaults={
        **_DENSE.defaults,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
)

_EXPERTS = {
    **weights({MLP_NORM: "post_attention_layernorm", "mlp.router": "mlp.gate"}),
    **gated_mlp(SHARED_EXPERTS, "mlp.shared_expert"),
    "mlp.shared_experts.gate_weight": Source(("mlp.shared_expert_gate.weight",)),
    **weights(
        {
            f"{ROUTED_EXPERT}.linear_fc1": f"mlp.experts.{EXPERT}.gate_up_proj",
            f"{ROUTED_EXPERT}.linear_fc2": f"mlp.experts.{EXPERT}.down_proj",
        }
    ),
}
_TENSORS = replace(
    QWEN3_5_TEXT.tensors,
    layers={
        **{letter: table for letter, table in QWEN3_5_TEXT.tensors.layers.items() if letter != "-"},
        "E": _EXPERTS,
    },
    split={r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)": r"\1.{index}.\2.weight"},
    joined=(
        Joined(
            r"(.*\.mlp\.experts\.\d+)\.(?:gate|up)_proj\.weight",
            r"\1.gate_up_proj.weight",
            (r"\1.gate_proj.weight", r"\1.up_proj.weight"),
        ),
    ),
)


def _experts(fields: Fields) -> Fields:
    return {
        **softmax_experts(fields, "num_experts", is_normalized=True),
        **{ours: size(fields, theirs) for theirs, ours in _EXPERT_SIZES.items()},
        "moe_shared_expert_gate": True,
    }


QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: "".join(f"{mixer}E" for mixer in delta_net_or_attention(fields)),
    tensors=_TENSORS,
    experts=_experts,
    prediction=lambda _: "*E",
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    text=lambda raw: text_fields(raw, QWEN3_5_MOE_TEXT.model_type),
)
