"""Random tiny models of every family, made by transformers: an implementation that we did not write.

Slow decay (A of 0.01 to 0.1, steps of 0.01 to 0.05), so that a lost or misread state is visible hundreds of tokens
later, and weights large enough for logits that are not flat. Only full forwards are compared with: transformers' own
resumption over several tokens loses states of some families.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from megatron_ext.config import SourceConfig
from megatron_ext.models.huggingface.family_registry import FAMILIES
from megatron_ext.models.load import LoadedModel, load_model
from tests.unit_tests.support.driver import Driver

CPU = torch.device("cpu")
NULL = {"tokenizer_type": "NullTokenizer"}
ATOL = RTOL = 1e-4
VOCABULARY = 101


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings.

    Attributes:
        model_type: Family.
        seed: Seed of the weights.
        fields: Fields of the family's configuration, over those of `_SMALL`.
    """

    model_type: str
    seed: int = 1
    fields: dict = field(default_factory=dict)


_BARE = {"vocab_size": VOCABULARY, "hidden_size": 32}
_DECODER = _BARE | {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
_DECODER |= {"num_hidden_layers": 3, "max_position_embeddings": 512, "pad_token_id": None}
_DENSE = _DECODER | {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_MAMBA1 = _BARE | {"state_size": 8, "num_hidden_layers": 3}
_MAMBA2 = _DECODER | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 32}
_DELTA_NET = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2}
_DELTA_NET |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 20}
_QWEN = _DECODER | _DELTA_NET | {"head_dim": 16}
_QWEN_MOE = {name: value for name, value in _QWEN.items() if name != "intermediate_size"} | _EXPERTS | _SHARED
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_SMALL = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _DENSE | _EXPERTS,
    "mistral": _DENSE,
    "mixtral": _DENSE | {"num_local_experts": 6},
    "gpt_oss": _DENSE | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "nemotron_h": _DECODER
    | {"head_dim": 8, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 16}
    | {"num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"moe_shared_expert_intermediate_size": 20},
    "qwen3_next": _QWEN
    | {"num_hidden_layers": 4, "layer_types": None, "moe_intermediate_size": 24}
    | _SHARED
    | {"num_experts": 0, "num_experts_per_tok": 2}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1 | {"tie_word_embeddings": False},
    "jamba": _DECODER
    | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "pad_token_id": 0},
    "mamba2": _BARE
    | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 32}
    | {"num_hidden_layers": 3},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA2
    | {"layer_types": _DELTA_NET["layer_types"], "num_local_experts": 0}
    | {"shared_intermediate_size": 24, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
    | {"attention_multiplier": 0.2, "logits_scaling": 2.5},
    "lfm2": _DECODER
    | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
    | {"block_multiple_of": 8, "tie_word_embeddings": False},
    "lfm2_moe": _DECODER
    | _EXPERTS
    | {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1}
    | {"routed_scaling_factor": 1.5},
    "falcon_h1": _MAMBA2
    | {"mamba_d_ssm": 48, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4}
    | {"mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6, "attention_in_multiplier": 1.2}
    | {"attention_out_multiplier": 0.7, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7]}
    | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75},
    "qwen3_5_text": _QWEN,
    "qwen3_5": {"text_config": _QWEN | {"rms_norm_eps": 1e-2}, "vision_config": _VISION},
    "qwen3_5_moe_text": _QWEN_MOE,
    "qwen3_5_moe": {"text_config": _QWEN_MOE, "vision_config": _VISION},
    "olmo_hybrid": _DECODER | _DELTA_NET | {"rms_norm_eps": 1e-3},
}
_TIED = {"tie_word_embeddings": True}
_OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
# Wavelengths of 6, 75, 888 and 10560 tokens: the last is beyond what scaling begins at, and seen in long prompts.
_SCALED = {"rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED |= {"original_max_position_embeddings": 8192}
# Wavelengths of 6 to 20000 tokens and an original length of 64: the first stay, the last are stretched.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_WIDE_YARN = _YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
_PARTLY_ROTATED = _YARN | {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}

SHAPES = {
    "llama": Shape("llama", fields={"num_key_value_heads": 4, **_OTHER_BASE}),
    "llama, tied": Shape("llama", fields=_TIED | {"num_hidden_layers": 3, "rms_norm_eps": 1e-2}),
    "llama, scaled, wide heads, MQA": Shape(
        "llama", fields={"rope_parameters": _SCALED, "num_key_value_heads": 1, "head_dim": 12}
    ),
    "llama, biases, yarn": Shape(
        "llama", fields={"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN, "head_dim": 16} | _TIED
    ),
    "qwen2": Shape("qwen2", fields={"num_key_value_heads": 4}),
    "qwen2, window, yarn, tied": Shape(
        "qwen2",
        fields={"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1, "head_dim": 16}
        | {"num_hidden_layers": 3, "rope_parameters": _WIDE_YARN}
        | _TIED,
    ),
    "qwen3": Shape("qwen3", fields={"head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-2}),
    "qwen3 moe": Shape("qwen3_moe", fields={"norm_topk_prob": True, "head_dim": 12}),
    "qwen3 moe, sums of weights, MLPs in some layers": Shape(
        "qwen3_moe",
        fields={"norm_topk_prob": False, "num_experts_per_tok": 3, "attention_bias": True, "num_hidden_layers": 4}
        | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3 moe, one expert a token, windows": Shape(
        "qwen3_moe", fields={"num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 100}
    ),
    "mistral, window": Shape("mistral", fields={"sliding_window": 40, "head_dim": 12} | _TIED),
    "mixtral": Shape("mixtral"),
    "gpt-oss": Shape("gpt_oss", fields={"rope_parameters": _WIDE_YARN, "num_hidden_layers": 4, "sliding_window": 40}),
    "gpt-oss, listed windows, low limit": Shape(
        "gpt_oss",
        fields={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 100, "swiglu_limit": 0.6}
        | {"num_key_value_heads": 4, "num_experts_per_tok": 3},
    ),
    "nemotron": Shape("nemotron_h", fields={"hybrid_override_pattern": "M*M-"}),
    "nemotron, groups, wide heads, tied": Shape(
        "nemotron_h",
        fields={"hybrid_override_pattern": "M-M*M-*", "hidden_size": 48, "num_attention_heads": 6, "head_dim": 12}
        | {"num_key_value_heads": 2, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 3, "ssm_state_size": 8}
        | _TIED,
    ),
    "nemotron, MQA, other window, epsilon and chunk": Shape(
        "nemotron_h",
        fields={"hybrid_override_pattern": "*M-MM", "num_key_value_heads": 1, "head_dim": 16, "mamba_num_heads": 8}
        | {"n_groups": 4, "ssm_state_size": 24, "conv_kernel": 3, "layer_norm_epsilon": 1e-2, "chunk_size": 100}
        | {"time_step_min": 0.02},  # above many of the steps: transformers would clamp them, see `unclamp`
    ),
    "nemotron, no attention": Shape("nemotron_h", fields={"hybrid_override_pattern": "M-MM", "n_groups": 2}),
    "nemotron MoE": Shape("nemotron_h", fields={"hybrid_override_pattern": "ME*E-", "routed_scaling_factor": 2.5}),
    "nemotron MoE, groups": Shape(
        "nemotron_h",
        fields={"hybrid_override_pattern": "EM*ME", "n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "nemotron MoE, latent, one expert a token": Shape(
        "nemotron_h",
        fields={"hybrid_override_pattern": "ME*E", "moe_latent_size": 12, "num_experts_per_tok": 1}
        | {"norm_topk_prob": False},
    ),
    "qwen3_next": Shape("qwen3_next"),
    "qwen3_next, other heads, window, base, share and epsilon, tied": Shape(
        "qwen3_next",
        fields={"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_key_value_heads": 1, "head_dim": 12, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
        | {"linear_key_head_dim": 12, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}}
        | _TIED,
    ),
    "qwen3_next moe": Shape("qwen3_next", seed=3, fields={"num_experts": 6}),
    "qwen3_next moe, MLPs in some layers": Shape(
        "qwen3_next",
        fields={"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 5, "decoder_sparse_step": 2}
        | {"mlp_only_layers": [3], "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]},
    ),
    "mamba, tied": Shape("mamba"),
    "mamba, other rank, window, width and epsilon": Shape(
        "mamba",
        fields={"tie_word_embeddings": False, "time_step_rank": 7, "conv_kernel": 3, "expand": 3, "state_size": 5}
        | {"layer_norm_epsilon": 1e-2},
    ),
    "falcon_mamba": Shape("falcon_mamba"),
    "falcon_mamba, tied, other epsilons and width": Shape(
        "falcon_mamba", fields=_TIED | {"mixer_rms_eps": 0.1, "expand": 16, "intermediate_size": 72}
    ),
    "jamba": Shape("jamba"),
    "jamba, MHA, tied, epsilon and rank": Shape(
        "jamba",
        fields={"num_key_value_heads": 4, "rms_norm_eps": 1e-2, "mamba_dt_rank": 3, "mamba_d_conv": 3}
        | {"mamba_expand": 3}
        | _TIED,
    ),
    "jamba moe": Shape("jamba", fields={"num_experts": 6, "expert_layer_period": 2, "expert_layer_offset": 0}),
    "jamba moe, one expert a token": Shape(
        "jamba",
        fields={"num_experts": 4, "num_experts_per_tok": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
    "mamba2": Shape("mamba2"),
    "mamba2, one group, tied, other width, window and epsilon": Shape(
        "mamba2",
        fields={"n_groups": 1, "expand": 3, "num_heads": 6, "head_dim": 16, "conv_kernel": 3}
        | {"layer_norm_epsilon": 1e-2}
        | _TIED,
    ),
    "bamba": Shape("bamba"),
    "bamba, MHA, one group, other base, epsilon and width, tied": Shape(
        "bamba",
        fields={"num_key_value_heads": 4, "mamba_n_groups": 1, "mamba_expand": 3, "mamba_n_heads": 6}
        | {"rms_norm_eps": 1e-2, **_OTHER_BASE}
        | _TIED,
    ),
    "granite": Shape("granitemoehybrid"),
    "granite moe, rotary, tied": Shape(
        "granitemoehybrid",
        fields={"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "rope"} | _TIED,
    ),
    "lfm2, tied": Shape("lfm2", fields=_TIED),
    "lfm2, MHA, other window, base, width and epsilon": Shape(
        "lfm2",
        fields={"num_key_value_heads": 4, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-2}
        | _OTHER_BASE,
    ),
    "lfm2 moe": Shape("lfm2_moe"),
    "falcon_h1": Shape("falcon_h1"),
    "falcon_h1, norm first": Shape("falcon_h1", fields={"mamba_rms_norm": True}),
    "falcon_h1, gate first, MHA, one group, wide heads, tied": Shape(
        "falcon_h1",
        fields={"mamba_rms_norm": True, "mamba_norm_before_gate": False, "num_key_value_heads": 4, "head_dim": 12}
        | {"mamba_n_groups": 1, "mamba_d_ssm": None, "rms_norm_eps": 1e-2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}}
        | _TIED,
    ),
    "qwen3_5, as many heads, other window, base and share, yarn": Shape(
        "qwen3_5_text",
        fields={"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
        | {"rope_parameters": _PARTLY_ROTATED},
    ),
    "qwen3_5, that reads images too": Shape("qwen3_5"),
    "qwen3_5 moe": Shape("qwen3_5_moe_text"),
    "qwen3_5 moe, that reads images too": Shape("qwen3_5_moe"),
    "olmo": Shape("olmo_hybrid"),
    "olmo, no positions, strength to 1, MHA, other heads and window, tied": Shape(
        "olmo_hybrid",
        fields=dict.fromkeys(name for name in _DELTA_NET if name != "layer_types")
        | {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | _TIED,
    ),
}
LAST = {shape.model_type: name for name, shape in SHAPES.items()}
"""Of each family the last shape: what is special is in it."""
WHOLE = [name for name in SHAPES if "images" not in name]
"""Shapes of which we read every tensor."""


def make(name: str, directory: Path) -> PreTrainedModel:
    """A model of a shape, saved to a directory by transformers itself."""
    shape = SHAPES[name]
    torch.manual_seed(shape.seed)
    fields = copy.deepcopy(_SMALL[shape.model_type] | shape.fields)  # which transformers writes into
    config = AutoConfig.for_model(shape.model_type, **fields)
    model = getattr(transformers, FAMILIES[shape.model_type].architecture)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # tied ones once
            parameter.copy_(_value(key, parameter, shape.model_type))
        for key, buffer in model.named_buffers():
            if key.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.uniform_(-0.3, 0.3)  # as large as the scores differ
        if shape.model_type == "nemotron_h" and config.tie_word_embeddings:  # of which it keeps two all the same
            model.lm_head.weight.copy_(model.model.embeddings.weight)
    model.save_pretrained(directory)
    unclamp(model)
    return model


def _value(key: str, parameter: Tensor, model_type: str) -> Tensor:
    """Attention that prefers some positions, routers that choose, and logits that are not flat."""
    kind = key.removesuffix(".weight").rsplit(".", 1)[-1]
    noise = torch.randn_like(parameter)
    if kind == "A_log":
        return noise.uniform_(0.01, 0.1).log()
    if kind == "dt_bias" or key.endswith("dt_proj.bias"):
        return noise.uniform_(0.01, 0.05).expm1().log()
    if kind == "D":
        return 0.3 * noise
    if kind == "sinks":
        return 1 + 2 * noise
    if "norm" in kind:  # Qwen's norms are around zero, except those in a gated delta net
        return 0.2 * noise + (model_type[:7] not in ("qwen3_n", "qwen3_5") or "linear_attn" in key)
    if kind.endswith("bias"):
        return 0.3 * noise
    if kind in ("embeddings", "embed_tokens"):
        return 0.5 * noise
    gain = {"q_proj": 2.0, "k_proj": 2.0, "x_proj": 2.0, "router": 3.0, "lm_head": 1.0, "conv1d": 1.0}
    gain |= {"dt_proj": 0.3, "in_proj_ba": 0.3}
    inputs = parameter.shape[-1] if "experts" in key else parameter[0].numel()
    value = noise * gain.get(kind, 1.2) / math.sqrt(inputs)
    if kind == "in_proj" and model_type == "nemotron_h":
        value[-_SMALL[model_type]["mamba_num_heads"] :] *= 0.3  # the input changes a step by a factor, not by its order
    return value


def unclamp(model: nn.Module) -> None:
    """Undo a clamp of dt that transformers has in its chunk path only; the published models were trained without."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)


@torch.no_grad()
def routing_margin(model: nn.Module, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router prefers its choice; infinite without routers."""
    margins = [math.inf]

    def note(router: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        if hasattr(router, "e_score_correction_bias"):
            scores = (args[0].flatten(0, -2) @ router.weight.T).sigmoid() + router.e_score_correction_bias
            grouped = scores.unflatten(-1, (router.num_group, -1))
            sums = grouped.topk(2).values.sum(-1)  # [T, groups]
            if router.topk_group < router.num_group:
                margins.append(_gap(sums, router.topk_group))
                closed = sums < sums.topk(router.topk_group).values[:, -1:]
                scores = grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)
        else:
            scores = output[0] if len(args) == 1 else output[0].sigmoid() + args[1]  # with a bias for choosing
        margins.append(_gap(scores, router.top_k))

    hooks = [
        module.register_forward_hook(note)
        for key, module in model.named_modules()
        if key.endswith((".router", ".gate")) and hasattr(module, "top_k")
    ]
    their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(margins)


def _gap(scores: Tensor, chosen: int) -> float:
    ranked = scores.sort(descending=True).values
    return (ranked[:, chosen - 1] - ranked[:, chosen]).min().item()


def load_hf(directory: Path, overrides: Mapping[str, object] | None = None, **source: object) -> LoadedModel:
    """Load a folder with overrides, which may differ from its configuration in any way."""
    allowed = tuple(name.replace("_", "-") for name in overrides or ())
    config = SourceConfig(load_hf=str(directory), override_checkpoint_args=allowed, **NULL, **source)
    return load_model(config, overrides or {}, device=CPU)


def prompt(length: int, *, seed: int, vocab_size: int = VOCABULARY) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T, V] of a full forward."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def our_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """[T, V] of a full forward without any engine."""
    return model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0]


def largest_excess(got: Tensor, reference: Tensor) -> float:
    """Largest error of an element in units of its tolerance: at most 1 is equal."""
    return ((got - reference).abs() / (ATOL + RTOL * reference.abs())).max().item()


def excess(ours: nn.Module, theirs: nn.Module, length: int = 129) -> float:
    """Largest error of a prompt's logits in units of the tolerance: at most 1 is equal."""
    tokens = prompt(length, seed=length)
    return largest_excess(our_logits(ours, tokens), their_logits(theirs, tokens))


def engine_excess(driver: Driver, request_id: int, theirs: nn.Module) -> float:
    """Largest error of all generated tokens' logits in units of the tolerance; at most 1 is equal."""
    record = driver.records[request_id]
    tokens, generated = list(record.prompt_tokens), list(record.generated_tokens)
    reference = their_logits(theirs, tokens + generated)[len(tokens) - 1 : -1]
    got = torch.stack([driver.seen[request_id].logits[len(tokens) + i][-1] for i in range(len(generated))])
    return largest_excess(got, reference)


def rounding(directory: Path, theirs: PreTrainedModel) -> tuple[float, float]:
    """Mean errors of logits in bf16, ours and transformers'."""
    tokens = prompt(65, seed=0)
    exact = their_logits(theirs, tokens)
    narrow = load_hf(directory, bf16=True).model
    their_narrow = type(theirs).from_pretrained(directory, dtype=torch.bfloat16).eval()
    ours, others = our_logits(narrow, tokens), their_logits(their_narrow, tokens)
    return tuple((logits.float() - exact).abs().mean().item() for logits in (ours, others))


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields of a saved `config.json`; None takes a field out."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_weights(directory: Path, change) -> None:
    """Rewrite `model.safetensors`; `change` modifies the dictionary of tensors in place."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
